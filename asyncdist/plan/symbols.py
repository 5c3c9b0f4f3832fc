"""Symbols a plan is proven on: which ranks' elements a piece of memory holds, combined how."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Expressions", "Memory", "PlanError", "Values", "bits"]


class PlanError(AssertionError):
    """A set of plans does not do what its problem asks."""


class Values(NamedTuple):
    """`length` elements: `expression` applied to elements base, base + 1, ... of the ranks' vectors."""

    length: int
    expression: int
    base: int


class Expressions:
    """Expressions as numbers: below `world` a rank's own element, above it an interned (left, right)."""

    def __init__(self, world: int) -> None:
        self.ranks = [1 << rank for rank in range(world)]
        self.everyone = (1 << world) - 1
        self.ordered = [True] * world
        """Whether an expression has its ranks in order from left to right."""
        self._pairs: dict[tuple[int, int], int] = {}

    def combine(self, left: Sequence[Values], right: Sequence[Values]) -> list[Values]:
        """Reduce two runs of elements, which must be of the same elements of the vector."""
        result = []
        right_runs = iter(right)
        rest = Values(0, 0, 0)
        for run in left:
            length, expression, base = run
            while length:
                if not rest.length:
                    rest = next(right_runs)
                if base != rest.base:
                    raise PlanError(f"element {base} is reduced with element {rest.base}")
                part = min(length, rest.length)
                result.append(Values(part, self._pair(expression, rest.expression), base))
                length, base = length - part, base + part
                rest = Values(rest.length - part, rest.expression, rest.base + part)
        return result

    def _pair(self, left: int, right: int) -> int:
        number = self._pairs.get((left, right))
        if number is None:
            twice = self.ranks[left] & self.ranks[right]
            if twice:
                raise PlanError(f"contribution of ranks {bits(twice)} is reduced twice")
            number = len(self.ranks)
            self._pairs[left, right] = number
            self.ranks.append(self.ranks[left] | self.ranks[right])
            below = self.ranks[left] < self.ranks[right] & -self.ranks[right]
            self.ordered.append(below and self.ordered[left] and self.ordered[right])
        return number


class Memory:
    """One rank's buffer: sorted disjoint runs of known elements."""

    __slots__ = ("_bases", "_ends", "_expressions", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._expressions: list[int] = []
        self._bases: list[int] = []

    def read(self, offset: int, length: int) -> list[Values]:
        """Return what is at [offset, offset + length)."""
        end = offset + length
        index = bisect_right(self._ends, offset)
        runs = []
        while offset < end:
            if index == len(self._starts) or self._starts[index] > offset:
                raise PlanError(f"element {offset} is read before it is written")
            start = self._starts[index]
            part = min(self._ends[index], end) - offset
            runs.append(Values(part, self._expressions[index], self._bases[index] + offset - start))
            offset += part
            index += 1
        return runs

    def write(self, offset: int, runs: Sequence[Values]) -> None:
        """Replace what is at [offset, offset + the runs' length)."""
        starts, ends, expressions, bases = [], [], [], []
        position = offset
        for length, expression, base in runs:
            starts.append(position)
            position += length
            ends.append(position)
            expressions.append(expression)
            bases.append(base)
        first = bisect_right(self._ends, offset)
        last = bisect_left(self._starts, position)
        if first < last and self._starts[first] < offset:
            starts.insert(0, self._starts[first])
            ends.insert(0, offset)
            expressions.insert(0, self._expressions[first])
            bases.insert(0, self._bases[first])
        if first < last and self._ends[last - 1] > position:
            starts.append(position)
            ends.append(self._ends[last - 1])
            expressions.append(self._expressions[last - 1])
            bases.append(self._bases[last - 1] + position - self._starts[last - 1])
        self._starts[first:last] = starts
        self._ends[first:last] = ends
        self._expressions[first:last] = expressions
        self._bases[first:last] = bases


def bits(mask: int) -> list[int]:
    """Numbers of the bits that are set, for messages."""
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
