"""Stage: one version in memory beside the one that is served, which the processes of a host share."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import sys
import threading
import time
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from asyncdist.arrays.host import Array, Flat
from asyncdist.concurrency import trace as events
from asyncdist.concurrency.tasks import ended, uninterrupted
from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.fork import SocketSet
from asyncdist.transport.shared_memory.process_memory import madvise
from asyncdist.transport.shared_memory.segment import AttachedSegment, Segment
from asyncdist.weights.manifest import Manifest, WeightsError, digest

THREADS: Final = 4
"""That compare, copy and sum at once, if there are twice as many cores: a few reach what memory can do."""
NICENESS: Final = 10
"""With 19, a host whose cores are all busy stages versions 70 times later, with 10 some 10 times. Nor are the loops of
servers earlier with 19: a thread that lost its core while it has the GIL keeps its process waiting for longer."""
PIECE_BYTES: Final = 1 << 20
PAUSE_S: Final = 1e-6
"""After each piece a thread sleeps, which takes some 60 us, so that others run on its core. Linux lets what wakes up
there wait otherwise for the end of a time slice, whatever the niceness. A version takes a third longer for that."""
UNMAPPED_BYTES: Final = 4 << 20
"""Of which the pages are given back at once. To unmap 1 GiB takes Linux 30 ms, in which no other thread of the process,
as that of the loop, can map memory: every large array that it makes would wait."""
UNKNOWN: Final = -1
"""In place of a checksum: they are taken of what is sent, and what is mapped is not sent."""
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
    """A version in memory. `sums` are CRC-32 of its blocks, or UNKNOWN.

    `segment` is None where this system shares no memory. `source`: the rank that lent the segment, and the segment's
    number there. `lent`: the ranks that still borrow it, with its numbers there. `sending`: how many answers send its
    bytes now; `given`: how many have. A publisher sends it again after `spared_until_s`. `spoiled`: a process may read
    it without our knowledge, so its memory is not written again. `dropped`: this process does not serve it any more;
    `unused`: nor has it a view of it.
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
        self.sums: Array = np.full(len(manifest.born), UNKNOWN)
        self.lent: set[tuple[int, int]] = set()
        self.sending = 0
        self.spoiled = False
        self.unused = self.dropped = False
        self.given = 0
        self.spared_until_s = 0.0

    def sealed(self, id: int) -> Ref:
        """Its bytes are complete: it has the number `id` from now on, and others can ask for it."""
        self.id = id
        self.packed = self.manifest.pack()
        return Ref(id, 0, digest(self.packed), 0, "")

    def sum_up(self, blocks: range) -> None:
        """Know the checksums of `blocks`."""
        for block in blocks:
            if self.sums[block] == UNKNOWN:
                self.sums[block] = zlib.crc32(self.flat[self.manifest.bytes_of(block)].data)

    def check(self, blocks: range, sums: Array, source: str) -> None:
        """Keep `sums` as the checksums of `blocks`. Raises WeightsError if the bytes are others."""
        self.sum_up(blocks)
        if not np.array_equal(self.sums[blocks.start : blocks.stop], sums):
            raise WeightsError(
                f"blocks {blocks.start} to {blocks.stop - 1} that {source} sent are not what was committed"
            )

    def arrays(self) -> dict[str, Array]:
        """The arrays by name, read-only."""
        flat = self.flat.view()
        flat.flags.writeable = False
        return self.manifest.views(flat)

    def close(self) -> None:
        """Close its descriptor: it cannot be lent any more. What maps the memory, here or elsewhere, keeps it."""
        if self.segment is not None:
            self.segment.close()

    def when_unused(self, tell: Callable[[], object]) -> None:
        """Drop the bytes here, and call `tell`, in any thread, once no view of them is left in this process."""
        weakref.finalize(_memory_of(self.flat), tell).atexit = False
        self.dropped = True
        self.flat = self.flat[:0].copy()


def _memory_of(flat: Array) -> Array:
    """The array that all views of `flat` keep alive."""
    while isinstance(flat.base, np.ndarray):
        flat = flat.base
    return flat


def new_memory(nbytes: int, fds: SocketSet) -> tuple[memoryview, Segment | None]:
    """Room for a version, which others of the host can map if the system lets them. Raises MemoryError."""
    try:
        segment = Segment(max(nbytes, 1), fds, "asyncdist-weights")
    except (OSError, AttributeError) as error:
        events.info("weights: no shared memory of %d bytes: %s", nbytes, error)
        return np.empty(nbytes, np.uint8).data, None
    return segment.view, segment


def unmap(segment: Segment | AttachedSegment) -> None:
    """Unmap it by pieces; all views must have been released. What it holds stays for other maps of it."""
    address = np.frombuffer(segment.view, np.uint8).ctypes.data
    for offset in range(0, segment.size, UNMAPPED_BYTES):
        madvise(address + offset, min(UNMAPPED_BYTES, segment.size - offset), mmap.MADV_DONTNEED)
    segment.release()


class _Filling(NamedTuple):
    """What the threads that fill a stage know. `keeps`: the blocks that are in `stage` already."""

    stage: Stage
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
    filling = _Filling(stage, sources, starts, base, keeps, id)
    share = max(1, PIECE_BYTES // manifest.block_bytes)
    for first in range(0, len(manifest.born), share):
        yield partial(_fill_blocks, filling, range(first, min(first + share, len(manifest.born))))


def _fill_blocks(filling: _Filling, blocks: range) -> None:
    stage, sources, starts, base, keeps, id = filling
    manifest = stage.manifest
    for block in blocks:
        begin, end, _ = manifest.bytes_of(block).indices(manifest.nbytes)
        pieces = []
        index = bisect_right(starts, begin) - 1
        while index < len(starts) and starts[index] < end:
            data = sources[index][max(begin - starts[index], 0) : end - starts[index]]
            pieces.append((slice(max(begin, starts[index]), max(begin, starts[index]) + data.nbytes), data))
            index += 1
        if base is not None and all(_alike(base.flat[at], data) for at, data in pieces):
            manifest.born[block], stage.sums[block] = base.manifest.born[block], base.sums[block]
            if keeps is not None and keeps[block]:
                continue
        else:
            manifest.born[block], stage.sums[block] = id, UNKNOWN
        for at, data in pieces:
            stage.flat[at] = data


def _alike(one: Array, other: Array) -> bool:
    return bool((one[:LOOK_BYTES] == other[:LOOK_BYTES]).all()) and bool((one == other).all())


class Threads:
    """A few threads that leave the processor to others: servers of this host answer while they copy."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._count = max(1, min(THREADS, cores // 2))
        self._pool = ThreadPoolExecutor(self._count, "asyncdist-weights", _be_nice)

    async def do(self, jobs: Iterable[Callable[[], None]]) -> None:
        """Do `jobs`; raises what one of them raised. Returns, cancelled or not, when none is under way."""
        remaining = iter(jobs)
        lock = threading.Lock()
        failed = False

        def work() -> None:
            nonlocal failed
            try:
                while not failed:
                    with lock:
                        job = next(remaining, None)
                    if job is None:
                        return
                    job()
                    time.sleep(PAUSE_S)
            except BaseException:
                failed = True
                raise

        loop = asyncio.get_running_loop()
        running = [loop.run_in_executor(self._pool, work) for _ in range(self._count)]
        all_of_them = asyncio.gather(*running, return_exceptions=True)
        try:
            await asyncio.shield(all_of_them)
        except asyncio.CancelledError:
            failed = True
            await uninterrupted(ended(all_of_them))
            raise
        for error in all_of_them.result():
            if error is not None:
                raise error

    def later(self, job: Callable[[], None]) -> None:
        """Do `job` some time; its errors are ignored."""
        with contextlib.suppress(RuntimeError):  # closed
            self._pool.submit(job)

    def close(self) -> None:
        """End the threads, once what is under way is done."""
        self._pool.shutdown(wait=False)


def _be_nice() -> None:
    if sys.platform == "linux":  # where a thread has a priority of its own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
