"""Packed: several arrays as one run of elements, so that many small ones travel as one message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from asyncdist.arrays.host import Array, Flat

__all__ = ["Packed", "adjacent", "packed", "room_for"]


class Packed(Flat):
    """One run of elements that is copied to its places once results are in it."""

    __slots__ = ("_owners", "_places")

    def __init__(self, elements: Array, places: Sequence[Sequence[Array]] = (), owners: Iterable[Flat] = ()) -> None:
        """`elements` is one-dimensional. Each of `places` is a list of arrays that divide it, in order.

        `owners` are what the places are part of; they are written back at the end.
        """
        self._octets = None
        self.is_copy = True
        self._places = places
        self._owners = tuple(owners)
        self.elements = elements

    def write_back(self) -> None:
        """Copy the run to all its places."""
        for places in self._places:
            start = 0
            for place in places:
                stop = start + place.size
                if place is not self.elements:
                    place[...] = self.elements[start:stop]
                start = stop
        for owner in self._owners:
            owner.write_back()


def packed(parts: Sequence[Array]) -> Array:
    """The one-dimensional arrays `parts` in a row; a single one is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def room_for(parts: Sequence[Array]) -> Array:
    """Where results for the one-dimensional arrays `parts` go; a single one is its own room."""
    return parts[0] if len(parts) == 1 else np.empty(sum(part.size for part in parts), parts[0].dtype)


def adjacent(parts: Sequence[Array]) -> Array | None:
    """The memory of the one-dimensional arrays `parts`, if they lie in a row in one array; None otherwise."""
    first, whole = parts[0], parts[0].base
    if len(parts) == 1:
        return first
    if not isinstance(whole, np.ndarray) or whole.dtype != first.dtype or not whole.flags.c_contiguous:
        return None
    if whole.flags.writeable != first.flags.writeable:
        return None
    start = end = first.__array_interface__["data"][0]
    for part in parts:
        if part.base is not whole or part.__array_interface__["data"][0] != end:
            return None
        end += part.nbytes
    skipped, remainder = divmod(start - whole.__array_interface__["data"][0], whole.itemsize)
    if remainder:  # views of bytes, which lie between the elements of the whole
        return None
    return np.asarray(whole).reshape(-1)[skipped : skipped + sum(part.size for part in parts)]
