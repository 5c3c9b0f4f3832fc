"""Integers: checks of arguments, and the ids of groups.

An argument may be an int or an integer of numpy, such as a rank taken from an array. A group's id has 64 bits. All
ranks derive the same id without a message, from the order in which groups are made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from operator import index

import numpy as np


def as_int(value: object, must: str) -> int:
    """Return `value` as an int. Raises TypeError, which begins with `must`, for what is none, and for a bool."""
    if type(value) is int:
        return value
    if not isinstance(value, bool | np.bool_):
        try:
            return index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise TypeError(f"{must}, not {type(value).__name__}")


def as_ints(values: object, must: str) -> list[int]:
    """Return a list of `values` as ints. Raises TypeError, which begins with `must`, for what is no list of ints."""
    if not isinstance(values, Iterable):
        raise TypeError(f"{must}, in a list, not {type(values).__name__}")
    return [as_int(value, must) for value in values]


def derive_group_id(*parts: object) -> int:
    """Return a 64-bit group id that all ranks derive alike from `parts`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def spell_ranks(ranks: Sequence[int]) -> str:
    """`0, 1, 2`, or the first, the last and how many."""
    if len(ranks) > 8:
        return f"{', '.join(map(str, ranks[:6]))}, ..., {ranks[-1]} ({len(ranks)} ranks)"
    return ", ".join(map(str, ranks))


class SubgroupNames:
    """Numbers the groups made of one group.

    Groups that all ranks make together have one counter. Groups that only their members make have a counter for each
    list of ranks. So the members agree, whatever other groups each of them has made.
    """

    __slots__ = ("_counts", "_id", "_name")

    def __init__(self, parent_id: int, parent_name: str) -> None:
        self._id = parent_id
        self._name = parent_name
        self._counts: dict[tuple[int, ...], int] = {}

    def next(self, ranks: Sequence[int], *, members_only: bool) -> tuple[int, str, int]:
        """Id, name and number of the next group of `ranks`; called on members and, unless `members_only`, others."""
        members = tuple(ranks)
        key = members if members_only else ()
        number = self._counts[key] = self._counts.get(key, 0) + 1
        if members_only:
            return (
                derive_group_id(self._id, number, members, "members"),
                self._name + f"/{len(members)} ranks/{number}",
                number,
            )
        return derive_group_id(self._id, number, members), f"{self._name}/{number}", number
