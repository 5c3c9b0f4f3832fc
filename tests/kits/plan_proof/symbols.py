"""Symbols a plan is proven on: which ranks' elements a piece of memory holds, combined how.

A value is a run of elements (length, expression, base): element i of the run is the expression applied to element
base + i of the ranks' vectors. Expressions are numbers, equal if and only if the expressions are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TypeAlias

Values: TypeAlias = tuple[int, int, int]
"""(length, expression, base); a bare tuple, since a proof makes some for every step."""


class PlanError(AssertionError):
    """A set of plans does not do what its problem asks."""


class Expressions:
    """Expressions as numbers: below `world` a rank's own element, above it an interned (left, right)."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.everyone = (1 << world) - 1
        self._ranks = [1 << rank for rank in range(world)]
        self._ordered = [True] * world
        self._pairs: dict[tuple[int, int], int] = {}

    def ranks(self, expression: int) -> int:
        """Return the ranks that contribute, as bits."""
        return self._ranks[expression]

    def ordered(self, expression: int) -> bool:
        """Whether the ranks stand in their order, from left to right."""
        return self._ordered[expression]

    def pair(self, left: int, right: int) -> int:
        """Return left op right. Raises PlanError where a rank would contribute twice."""
        number = self._pairs.get((left, right))
        if number is None:
            number = self._pairs[left, right] = self._new(left, right)
        return number

    def combine(self, left: Sequence[Values], right: Sequence[Values]) -> Sequence[Values]:
        """Reduce two runs of elements, which must be of the same elements of the vector."""
        if len(left) == len(right) == 1 and left[0][0] == right[0][0] and left[0][2] == right[0][2]:
            ((length, expression, base),) = left
            return ((length, self.pair(expression, right[0][1]), base),)
        result = []
        right_runs = iter(right)
        rest_length = rest = rest_base = 0
        for length, expression, base in left:
            while length:
                if not rest_length:
                    rest_length, rest, rest_base = next(right_runs)
                if base != rest_base:
                    raise PlanError(f"element {base} is reduced with element {rest_base}")
                part = min(length, rest_length)
                result.append((part, self.pair(expression, rest), base))
                length, base = length - part, base + part
                rest_length, rest_base = rest_length - part, rest_base + part
        return result

    def _new(self, left: int, right: int) -> int:
        left_ranks, right_ranks = self._ranks[left], self._ranks[right]
        if left_ranks & right_ranks:
            raise PlanError(f"contribution of ranks {bits(left_ranks & right_ranks)} is reduced twice")
        self._ranks.append(left_ranks | right_ranks)
        below = left_ranks < right_ranks & -right_ranks
        self._ordered.append(below and self._ordered[left] and self._ordered[right])
        return len(self._ranks) - 1


class RotatedExpressions(Expressions):
    """Expressions that can be renamed: form * world + shift is the form with every rank k renamed to k + shift.

    The leftmost rank of a form is 0, so that each expression has one form and one shift. Form 0 is an element itself:
    as in `Expressions`, numbers below `world` are the ranks' own elements.
    """

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self._ranks, self._ordered = [1], [True]  # by form

    def ranks(self, expression: int) -> int:
        form, shift = divmod(expression, self.world)
        return self._turned(self._ranks[form], shift)

    def ordered(self, expression: int) -> bool:
        """Whether the ranks stand in their order, from left to right: not known here, plans that say so are not."""
        return expression < self.world

    def rotated(self, expression: int, shift: int) -> int:
        """Return the expression with every rank k renamed to k + shift."""
        own = expression % self.world
        return expression - own + (own + shift) % self.world

    def _new(self, left: int, right: int) -> int:
        (left_form, shift), (right_form, right_shift) = divmod(left, self.world), divmod(right, self.world)
        if shift:
            return self.rotated(self.pair(left - shift, self.rotated(right, -shift)), shift)
        ranks = self._turned(self._ranks[right_form], right_shift)
        if self._ranks[left_form] & ranks:
            raise PlanError(f"contribution of ranks {bits(self._ranks[left_form] & ranks)} is reduced twice")
        self._ranks.append(self._ranks[left_form] | ranks)
        return (len(self._ranks) - 1) * self.world

    def _turned(self, ranks: int, shift: int) -> int:
        return (ranks << shift | ranks >> self.world - shift) & self.everyone


class Memory:
    """One rank's buffer: sorted disjoint runs of known elements."""

    __slots__ = ("_bases", "_ends", "_expressions", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._expressions: list[int] = []
        self._bases: list[int] = []

    def read(self, offset: int, length: int) -> Sequence[Values]:
        """Return what is at [offset, offset + length). Raises PlanError where something was never written."""
        end = offset + length
        index = bisect_right(self._ends, offset)
        if index < len(self._starts) and self._starts[index] <= offset and end <= self._ends[index]:
            return ((length, self._expressions[index], self._bases[index] + offset - self._starts[index]),)
        runs = []
        while offset < end:
            if index == len(self._starts) or self._starts[index] > offset:
                raise PlanError(f"element {offset} is read before it is written")
            start = self._starts[index]
            part = min(self._ends[index], end) - offset
            runs.append((part, self._expressions[index], self._bases[index] + offset - start))
            offset += part
            index += 1
        return runs

    def write(self, offset: int, runs: Sequence[Values]) -> None:
        """Replace what is at [offset, offset + the runs' length)."""
        if len(runs) == 1:
            length, expression, base = runs[0]
            index = bisect_left(self._starts, offset)
            if index < len(self._starts) and self._starts[index] == offset and self._ends[index] == offset + length:
                self._expressions[index], self._bases[index] = expression, base
                return
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


def merged(runs: Sequence[Values]) -> list[Values]:
    """Join neighbors that continue each other, drop empty runs."""
    result: list[Values] = []
    for run in runs:
        length, expression, base = run
        if result and result[-1][1] == expression and result[-1][2] + result[-1][0] == base:
            result[-1] = (result[-1][0] + length, expression, result[-1][2])
        elif length:
            result.append(run)
    return result


def part_of(runs: Sequence[Values], offset: int, length: int) -> Sequence[Values]:
    """Return `length` elements from `offset` on of runs that have as many."""
    result: list[Values] = []
    for run_length, expression, base in runs:
        part = min(run_length - offset, length)
        if part > 0:
            result.append((part, expression, base + offset))
            length, offset = length - part, 0
        else:
            offset = max(0, offset - run_length)
    return result


def bits(mask: int) -> list[int]:
    """Numbers of the bits that are set, for messages."""
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
