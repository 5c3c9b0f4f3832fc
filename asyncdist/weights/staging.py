"""Stage: one version in memory beside the one that is served, which the processes of a host share."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from asyncdist.arrays.host import Array, Flat
from asyncdist.concurrency.tasks import uninterrupted
from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.fork import SocketSet
from asyncdist.transport.shared_memory.segment import AttachedSegment, Segment
from asyncdist.weights.manifest import Manifest, WeightsError, digest

__all__ = ["Ref", "Stage", "check_blocks", "fill", "in_threads", "new_memory"]

THREADS: Final = 4
"""That compare, copy and sum at once: a few reach what memory can do."""
LOOK_BYTES: Final = 4096
"""Compared first: where everything changes, nothing more is."""


class Ref(NamedTuple):
    """What the store says of a version: `id` is its commit's number, `rank` and `host` are the publisher's."""

    id: int
    version: int
    digest: bytes
    rank: int
    host: str

    @classmethod
    def of(cls, row: Any) -> Ref | None:
        """Decode. Raises RemoteProtocolError."""
        if row is None:
            return None
        kinds = (int, int, bytes, int, str)
        if not isinstance(row, list) or tuple(map(type, row)) != kinds:
            raise RemoteProtocolError(f"the store has {row!r} in place of a version")
        return cls(*row)


class Stage:
    """A version in memory. `segment` is None where this system shares none.

    `source` is the rank that lent the segment, and its number there. `lent` are those it was lent to and did not
    give it back, with the numbers they know it by. `spoiled`: somebody may read it unknown to us.
    """

    def __init__(
        self, manifest: Manifest, memory: memoryview, segment: Segment | AttachedSegment | None, id: int = 0
    ) -> None:
        self.manifest = manifest
        self.packed = b""
        self.memory = memory
        self.segment = segment
        self.id = id
        self.flat: Array = np.frombuffer(memory, np.uint8)[: manifest.nbytes]
        """The bytes of the version. Views of it are what keeps the memory in use."""
        self.source: tuple[int, int] | None = None
        self.lent: set[tuple[int, int]] = set()
        self.spoiled = False
        self.unused = self.dropped = False

    def sealed(self, id: int) -> Ref:
        """Its bytes are complete: it has the number `id` from now on, and others can ask for it."""
        self.id = id
        self.packed = self.manifest.pack()
        return Ref(id, 0, digest(self.packed), 0, "")

    def arrays(self) -> dict[str, Array]:
        """The arrays by name, read-only."""
        flat = self.flat.view()
        flat.flags.writeable = False
        return self.manifest.views(flat)

    def when_unused(self, tell: Callable[[], object]) -> None:
        """Drop the bytes here, and call `tell`, in any thread, once nobody in this process uses them."""
        weakref.finalize(_memory_of(self.flat), tell).atexit = False
        self.dropped = True
        self.flat = self.flat[:0].copy()


def _memory_of(flat: Array) -> Array:
    """The array that all views of `flat` keep alive."""
    while isinstance(flat.base, np.ndarray):
        flat = flat.base
    return flat


def new_memory(nbytes: int, fds: SocketSet) -> tuple[memoryview, Segment | None]:
    """Room for a version, which others of the host can map where the system lets them. Raises MemoryError, OSError."""
    if hasattr(os, "memfd_create"):
        segment = Segment(max(nbytes, 1), fds, "asyncdist-weights")
        return segment.view, segment
    return memoryview(bytearray(nbytes)), None


class _Filling(NamedTuple):
    """What the threads that fill a stage know. `keeps`: the blocks that are in `target` already."""

    target: Array
    manifest: Manifest
    sources: list[Array]
    starts: list[int]
    base: Stage | None
    keeps: Array | None
    id: int


def fill(
    stage: Stage, arrays: Mapping[str, Array], base: Stage | None, before: Manifest | None, id: int
) -> Iterable[Callable[[], None]]:
    """What is to be done, in any order and by any threads, for `stage` to hold `arrays` as commit `id`.

    Blocks that are as in `base` get its commits and sums, and are not copied if `stage` held them before.
    """
    manifest = stage.manifest
    sources = [Flat(array, writable=False).elements.view(np.uint8) for array in arrays.values()]
    if base is not None and base.manifest.entries != manifest.entries:
        base = None
    keeps = None
    if base is not None and before is not None and before.entries == manifest.entries:
        keeps = before.born == base.manifest.born
    starts = [entry.offset for entry in manifest.entries]
    filling = _Filling(stage.flat, manifest, sources, starts, base, keeps, id)
    share = max(1, -(-len(manifest.born) // (4 * THREADS)))
    for first in range(0, len(manifest.born), share):
        yield _filler(filling, range(first, min(first + share, len(manifest.born))))


def _filler(filling: _Filling, blocks: range) -> Callable[[], None]:
    def work() -> None:
        for block in blocks:
            _fill_block(filling, block)

    return work


def _fill_block(filling: _Filling, block: int) -> None:
    manifest, base = filling.manifest, filling.base
    begin = block * manifest.block_bytes
    end = min(begin + manifest.block_bytes, manifest.nbytes)
    pieces = []
    index = bisect_right(filling.starts, begin) - 1
    while index < len(filling.starts) and filling.starts[index] < end:
        start = filling.starts[index]
        data = filling.sources[index][max(begin - start, 0) : end - start]
        if data.nbytes:
            pieces.append((max(begin, start), data))
        index += 1
    if base is not None and all(_alike(base.flat[at : at + data.nbytes], data) for at, data in pieces):
        manifest.born[block], manifest.sums[block] = base.manifest.born[block], base.manifest.sums[block]
        if filling.keeps is not None and filling.keeps[block]:
            return
    else:
        manifest.born[block] = filling.id
    for at, data in pieces:
        filling.target[at : at + data.nbytes] = data
    if manifest.born[block] == filling.id:
        manifest.sums[block] = zlib.crc32(filling.target[begin:end].data)


def _alike(one: Array, other: Array) -> bool:
    return bool((one[:LOOK_BYTES] == other[:LOOK_BYTES]).all()) and bool((one == other).all())


def check_blocks(stage: Stage, begin: int, end: int, source: str) -> None:
    """Raise WeightsError unless the blocks of `stage` from `begin` to `end` are what their checksums say."""
    manifest = stage.manifest
    for start in range(begin, end, manifest.block_bytes):
        block = start // manifest.block_bytes
        if zlib.crc32(stage.flat[start : start + manifest.block_bytes].data) != manifest.sums[block]:
            raise WeightsError(f"bytes from {start} on that {source} sent are not what was committed")


async def in_threads(jobs: Iterable[Callable[[], None]]) -> None:
    """Run `jobs` in a few threads; raises what one of them raised. Returns, cancelled or not, when none runs."""
    remaining = iter(jobs)
    lock = threading.Lock()
    failed = False

    def work() -> None:
        nonlocal failed
        while not failed:
            with lock:
                job = next(remaining, None)
            if job is None:
                return
            try:
                job()
            except BaseException:
                failed = True
                raise

    count = min(THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    running = [asyncio.get_running_loop().run_in_executor(None, work) for _ in range(count)]
    ended = asyncio.gather(*running, return_exceptions=True)
    try:
        await asyncio.shield(ended)
    except asyncio.CancelledError:
        failed = True
        await uninterrupted(_end_of(ended))
        raise
    for error in ended.result():
        if error is not None:
            raise error


async def _end_of(future: asyncio.Future[Any]) -> None:
    await future
