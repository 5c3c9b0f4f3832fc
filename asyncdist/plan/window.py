"""Windows: how much of what a pipeline receives may be under way at a time.

Without one, all receives of an operation are posted at the start and the sender serves them in turn: the first chunk
is then complete hardly before the last, and a pipeline is none. And each receive that is reduced holds a temporary
buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

__all__ = ["WINDOW", "Window", "first_that_fits"]

WINDOW: Final = 4
"""Chunks a rank is ready to receive at a time, of one pipeline, where little is on its way at any time. It bounds
temporary memory at four chunks whatever the vector; two would do if the loop never paused, four hide a reduction and a
wake-up. Between hosts a round trip is to be hidden as well (`plan.selection`)."""


class Window:
    """Lets each step wait for the one `size` before it: `window.add(builder.recv(..., after=window.after))`."""

    __slots__ = ("_steps",)

    def __init__(self, size: int) -> None:
        self._steps: deque[int | None] = deque([None] * size, size)

    @property
    def after(self) -> tuple[int | None]:
        """What the next step has to wait for."""
        return (self._steps[0],)

    def add(self, step: int | None) -> None:
        """Note the next step; None, a step without elements, takes no room."""
        if step is not None:
            self._steps.append(step)

    def follow(self, step: int) -> int | None:
        """Note the next step; return what it has to wait for."""
        earlier = self._steps[0]
        self._steps.append(step)
        return earlier


def first_that_fits(lengths: Sequence[int], room: int) -> int:
    """Index from which on all `lengths` together are at most `room`.

    The last rounds of an algorithm that halves are small, and latency is all they cost: what is received there has
    SCRATCH of its own, ready from the start, while the rounds before go through a window.
    """
    first = len(lengths)
    for length in reversed(lengths):
        room -= length
        if room < 0:
            break
        first -= 1
    return first
