"""Waiting: which steps of a plan wait for which, told from the step that others wait for."""

from __future__ import annotations

from collections.abc import Sequence

from asyncdist.plan.repeated import RepeatedSteps
from asyncdist.plan.steps import Step

__all__ = ["Waiting"]


class Waiting:
    """Successors of each step. Those of repeated steps follow from one round, so they are not kept."""

    __slots__ = ("_ahead", "_gap", "_steps", "_written")

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._written: dict[int, list[int]] = {}
        """By step, those that are written and wait for it."""
        self._ahead: list[list[int]] = []
        """By place in a round, how many steps further on it is waited for in the gap."""
        written, first, end = steps, len(steps), len(steps)
        if isinstance(steps, RepeatedSteps):
            written, (first, length, _), end = steps.written, steps.gap, steps.gap.end
            self._ahead = [[] for _ in range(length)]
            for place, step in enumerate(written[first - length : first]):
                for earlier in step.after:
                    distance = first - length + place - earlier
                    self._ahead[(place - distance) % length].append(distance)
        self._gap = range(first, end)
        waiting = self._written
        for index, step in enumerate(written):
            if step.after:
                number = index if index < first else index + end - first
                for earlier in step.after:
                    waiting.setdefault(earlier, []).append(number)

    def for_step(self, index: int) -> tuple[int, ...]:
        """Return the steps that wait for it, in order."""
        written = self._written.get(index, ())
        if not self._ahead:
            return tuple(written)
        gap = self._gap
        ahead = [index + distance for distance in self._ahead[(index - gap.start) % len(self._ahead)]]
        return tuple(sorted([*written, *(later for later in ahead if later in gap)]))

    def counts(self) -> list[int]:
        """By step, how many it waits for."""
        if not isinstance(self._steps, RepeatedSteps):
            return [len(step.after) for step in self._steps]
        written, (first, length, rounds) = [len(step.after) for step in self._steps.written], self._steps.gap
        return written[:first] + written[first - length : first] * rounds + written[first:]
