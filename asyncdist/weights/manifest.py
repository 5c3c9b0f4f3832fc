"""Manifest: which arrays a version has, and the commit that each of its blocks comes from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Self

import msgpack
import numpy as np

from asyncdist.arrays.host import Array, describe, dtype_named
from asyncdist.errors import DistError, RemoteProtocolError

__all__ = ["MAX_MANIFEST_BYTES", "Entry", "Manifest", "WeightsError", "layout_of"]

ALIGNMENT: Final = 64
"""Of an array in its version: a cache line, and the widest vector register."""
MIN_BLOCK_BYTES: Final = 64 << 10
BLOCK_BYTES: Final = 1 << 20
"""What is compared, summed and sent as one. Each costs some 10 us, a tenth of the time that it takes to copy it."""
MANY_BLOCKS: Final = 2048
"""Small versions have smaller blocks, down to MIN_BLOCK_BYTES, as long as there are not more than this."""
MAX_BLOCKS: Final = 1 << 16
"""Of more than 64 GiB blocks are larger: the list of the blocks that somebody wants is to fit a control frame."""
MAX_MANIFEST_BYTES: Final = 64 << 20
"""Eight bytes a block, and some hundred an array: 0.5 MiB and a list of half a million arrays at the most."""
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
    """`born` is the commit in which each block got its bytes, u64.

    Two versions with the same commit at the same place have the same bytes there: commits have numbers of their own,
    and who publishes compares the bytes themselves. So no hash decides what need not be sent.
    """

    entries: tuple[Entry, ...]
    nbytes: int
    block_bytes: int
    born: Array

    @classmethod
    def for_layout(cls, entries: tuple[Entry, ...]) -> Self:
        """One without blocks' commits, which are to be filled in."""
        nbytes = max((entry.offset + entry.nbytes for entry in entries), default=0)
        block_bytes = MIN_BLOCK_BYTES
        while nbytes > block_bytes * (MANY_BLOCKS if block_bytes < BLOCK_BYTES else MAX_BLOCKS):
            block_bytes *= 2
        return cls(entries, nbytes, block_bytes, np.zeros(-(-nbytes // block_bytes), "<u8"))

    def bytes_of(self, block: int) -> slice:
        """Where a block lies."""
        return slice(block * self.block_bytes, min((block + 1) * self.block_bytes, self.nbytes))

    def pack(self) -> bytes:
        """Encode."""
        entries = [(entry.name, entry.dtype.name, entry.shape, entry.offset) for entry in self.entries]
        packed: bytes = msgpack.packb([_FORMAT, entries, self.born.tobytes()])
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Decode what came from a peer. Raises RemoteProtocolError for what is none."""
        try:
            form, rows, born = msgpack.unpackb(packed)
            if form != _FORMAT:
                raise ValueError(f"format {form}")
            entries = tuple(_checked_entry(*row) for row in rows)
            made = cls.for_layout(entries)
            end = 0
            for entry in entries:
                if entry.offset < end:
                    raise ValueError(f"{entry.name} lies in another array")
                end = entry.offset + entry.nbytes
            if end > MAX_BYTES or len(born) != made.born.nbytes:
                raise ValueError("its parts do not fit each other")
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RemoteProtocolError(f"what a peer sent as a manifest is none: {error}") from None
        made.born[:] = np.frombuffer(born, "<u8")
        return made

    def again(self, packed: bytes, like: bytes) -> Self | None:
        """Decode `packed` quickly if it has the arrays of this one, which was packed as `like`; else None."""
        start = len(like) - self.born.nbytes
        if len(packed) != len(like) or packed[:start] != like[:start]:
            return None
        return replace(self, born=np.frombuffer(packed, "<u8", offset=start))

    def differs_from(self, other: Manifest | None) -> Array:
        """Which blocks have other bytes than those of `other`, as bools."""
        if other is None or other.nbytes != self.nbytes:
            return np.ones(len(self.born), np.bool_)
        different: Array = self.born != other.born
        return different

    def runs(self, blocks: Array) -> list[tuple[range, slice]]:
        """Those of `blocks` that are true, neighbors together up to RUN_BYTES, and where they lie."""
        most = max(1, RUN_BYTES // self.block_bytes)
        edges = np.flatnonzero(np.diff(blocks, prepend=False, append=False)).reshape(-1, 2)
        runs = [range(at, min(at + most, end)) for first, end in edges.tolist() for at in range(first, end, most)]
        return [(run, slice(run.start * self.block_bytes, self.bytes_of(run[-1]).stop)) for run in runs]

    def views(self, flat: Array) -> dict[str, Array]:
        """The arrays by name, in `flat`, the bytes of the version."""
        return {
            entry.name: flat[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).reshape(entry.shape)
            for entry in self.entries
        }

    def why_unlike(self, theirs: Mapping[str, str]) -> str:
        """How these arrays differ from others, given by name as `describe` does; empty if they do not."""
        own = {entry.name: describe(entry.dtype, entry.shape) for entry in self.entries}
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
