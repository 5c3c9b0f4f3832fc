"""Manifest: which arrays a version has, and of each of its blocks the commit it comes from and a checksum."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import msgpack
import numpy as np

from asyncdist.arrays.host import Array, describe, dtype_named
from asyncdist.errors import DistError, RemoteProtocolError

__all__ = ["MAX_MANIFEST_BYTES", "Entry", "Manifest", "WeightsError", "layout_of"]

ALIGNMENT: Final = 64
"""Of an array in its version: a cache line, and the widest vector register."""
BLOCK_BYTES: Final = 256 << 10
"""What is compared, summed and sent as one: it fits the caches, and a message of it needs no offer."""
MAX_BLOCKS: Final = 1 << 16
"""Of more than 16 GiB blocks are larger: the list of the blocks that somebody wants is to fit a control frame."""
MAX_MANIFEST_BYTES: Final = 64 << 20
"""Twelve bytes a block, and some hundred an array: 1 MiB and a list of half a million arrays at the most."""
RUN_BYTES: Final = 16 << 20
"""Most blocks that are sent as one message: what came is checked while the next ones come."""
MAX_BYTES: Final = 1 << 50
_FORMAT: Final = 1


class WeightsError(DistError):
    """A version cannot be committed, or not be served: the message says why, and by whom."""


class Entry(NamedTuple):
    """One array: where it lies among the bytes of the version."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Its length."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False, slots=True)
class Manifest:
    """`born` is the commit in which each block got its bytes, u64, `sums` their CRC-32, u32.

    Two versions with the same commit at the same place have the same bytes there: commits have numbers of their own,
    and who publishes compares the bytes themselves. So no hash decides what need not be sent.
    """

    entries: tuple[Entry, ...]
    nbytes: int
    block_bytes: int
    born: Array
    sums: Array

    @classmethod
    def for_layout(cls, entries: tuple[Entry, ...]) -> Self:
        """One without blocks' commits and sums, which are to be filled in."""
        nbytes = max((entry.offset + entry.nbytes for entry in entries), default=0)
        block_bytes = BLOCK_BYTES
        while nbytes > block_bytes * MAX_BLOCKS:
            block_bytes *= 2
        count = -(-nbytes // block_bytes)
        return cls(entries, nbytes, block_bytes, np.zeros(count, "<u8"), np.zeros(count, "<u4"))

    def pack(self) -> bytes:
        """Encode."""
        entries = [(entry.name, entry.dtype.name, entry.shape, entry.offset) for entry in self.entries]
        packed: bytes = msgpack.packb([_FORMAT, entries, self.born.tobytes(), self.sums.tobytes()])
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Decode what came from a peer. Raises RemoteProtocolError for what is none."""
        try:
            form, rows, born, sums = msgpack.unpackb(packed)
            if form != _FORMAT:
                raise ValueError(f"format {form}")
            entries = tuple(_checked_entry(*row) for row in rows)
            made = cls.for_layout(entries)
            end = 0
            for entry in entries:
                if entry.offset < end:
                    raise ValueError(f"{entry.name} lies in another array")
                end = entry.offset + entry.nbytes
            if end > MAX_BYTES or (len(born), len(sums)) != (made.born.nbytes, made.sums.nbytes):
                raise ValueError("its parts do not fit each other")
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RemoteProtocolError(f"what a peer sent as a manifest is none: {error}") from None
        made.born[:] = np.frombuffer(born, "<u8")
        made.sums[:] = np.frombuffer(sums, "<u4")
        return made

    def differs_from(self, other: Manifest | None) -> Array:
        """Which blocks have other bytes than those of `other`, as bools."""
        if other is None or other.nbytes != self.nbytes:
            return np.ones(len(self.born), np.bool_)
        different: Array = self.born != other.born
        return different

    def runs(self, blocks: Array) -> list[tuple[int, int]]:
        """Where in the version those of `blocks` that are true lie, neighbours together up to RUN_BYTES."""
        most = max(1, RUN_BYTES // self.block_bytes)
        edges = np.flatnonzero(np.diff(blocks, prepend=False, append=False)).reshape(-1, 2)
        return [
            (block * self.block_bytes, min(min(block + most, end) * self.block_bytes, self.nbytes))
            for first, end in edges.tolist()
            for block in range(first, end, most)
        ]

    def views(self, flat: Array) -> dict[str, Array]:
        """The arrays by name, in `flat`, the bytes of the version."""
        return {
            entry.name: flat[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).reshape(entry.shape)
            for entry in self.entries
        }

    def why_unlike(self, arrays: Mapping[str, Array]) -> str:
        """How these arrays differ in name, dtype or shape from `arrays`; empty if they do not."""
        own = {entry.name: describe(entry.dtype, entry.shape) for entry in self.entries}
        theirs = {name: describe(array.dtype, array.shape) for name, array in arrays.items()}
        for name in own.keys() | theirs.keys():
            if own.get(name) != theirs.get(name):
                return f"{name!r} is {own.get(name, 'not there')}, where {theirs.get(name, 'none')} is served"
        return ""


def digest(packed: bytes) -> bytes:
    """What the store says of a manifest."""
    return hashlib.blake2b(packed, digest_size=16).digest()


def layout_of(arrays: Mapping[str, Array]) -> tuple[Entry, ...]:
    """Where each of `arrays` is to lie."""
    entries, offset = [], 0
    for name, array in arrays.items():
        entries.append(Entry(name, array.dtype, array.shape, offset))
        offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(entries)


def _checked_entry(name: object, dtype_name: object, shape: object, offset: object) -> Entry:
    dtype = dtype_named(dtype_name) if isinstance(dtype_name, str) else None
    if not isinstance(name, str) or dtype is None or not isinstance(shape, list):
        raise ValueError(f"{name!r} is no array")
    for number in (offset, *shape):
        if type(number) is not int or not 0 <= number <= MAX_BYTES:
            raise ValueError(f"{name!r} lies at {offset!r} with shape {shape!r}")
    assert isinstance(offset, int)
    return Entry(name, dtype, tuple(shape), offset)
