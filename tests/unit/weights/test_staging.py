"""Stages: filled by threads, whole or where something has changed."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from asyncdist.transport.fork import SocketSet
from asyncdist.transport.shared_memory.process_memory import madvise
from asyncdist.transport.shared_memory.segment import PAGE_BYTES, AttachedSegment, Segment
from asyncdist.weights import staging
from asyncdist.weights.manifest import MIN_BLOCK_BYTES, Manifest, WeightsError, layout_of
from asyncdist.weights.staging import PIECE_BYTES, UNKNOWN, Stage, Threads, fill, new_memory

COUNT = 6


@pytest.fixture
def fds():
    return SocketSet(lambda: None)


def arrays_of(seed):
    random = np.random.default_rng(seed)
    return {
        "a": random.integers(0, 255, 3 * MIN_BLOCK_BYTES + 100, np.uint8),
        "empty": np.zeros(0, np.float32),
        "turned": random.random((300, 70)).T,
        "small": random.random(1),
    }


def staged(arrays, fds, base=None, before=None, id=1):
    manifest = Manifest.for_layout(layout_of(arrays))
    if before is None:
        view, segment = new_memory(manifest.nbytes, fds)
        stage = Stage(manifest, view, segment)
    else:
        stage = Stage(manifest, before.memory, before.segment)
    for job in fill(stage, arrays, base, before and before.manifest, id):
        job()
    stage.sealed(id)
    return stage


def same(stage, arrays):
    return all(np.array_equal(view, arrays[name]) for name, view in stage.arrays().items())


def test_a_stage_holds_the_arrays(fds):
    arrays = arrays_of(1)
    stage = staged(arrays, fds)
    assert same(stage, arrays)
    assert (stage.manifest.born == 1).all()
    assert not any(view.flags.writeable for view in stage.arrays().values())


def test_blocks_that_are_alike_keep_their_commit_and_their_sum(fds):
    arrays = arrays_of(1)
    first = staged(arrays, fds)
    first.sum_up(range(len(first.manifest.born)))
    arrays["a"][MIN_BLOCK_BYTES] += 1
    arrays["small"] += 1
    second = staged(arrays, fds, base=first, id=2)
    last = len(second.manifest.born) - 1
    assert same(second, arrays)
    assert np.flatnonzero(second.manifest.born == 2).tolist() == [1, last]
    assert np.flatnonzero(second.sums == UNKNOWN).tolist() == [1, last]


def test_memory_of_an_earlier_version_is_used_again(fds):
    arrays = [arrays_of(1)]
    for block in range(3):
        arrays.append({name: array.copy() for name, array in arrays[-1].items()})
        arrays[-1]["a"][block * MIN_BLOCK_BYTES + 5000] += 1  # behind what is looked at first
    stages = [staged(arrays[0], fds), None]
    stages[1] = staged(arrays[1], fds, stages[0], id=2)
    for number in (2, 3):
        stages.append(staged(arrays[number], fds, stages[-1], stages[-2], id=number + 1))
        assert same(stages[-1], arrays[number])
        assert stages[-1].manifest.born[number - 1] == number + 1
    assert stages[3].manifest.born[:3].tolist() == [2, 3, 4]


def test_another_layout_is_new(fds):
    first = staged(arrays_of(1), fds)
    arrays = {"a": arrays_of(1)["a"], "more": np.zeros(1)}
    second = staged(arrays, fds, first, id=2)
    assert same(second, arrays)
    assert (second.manifest.born == 2).all()


def test_other_bytes_than_were_committed_are_found(fds):
    stage = staged(arrays_of(1), fds)
    sums = staged(arrays_of(2), fds)
    blocks = range(1, 3)
    sums.sum_up(blocks)
    with pytest.raises(WeightsError, match="blocks 1 to 2 that rank 7 sent are not what was committed"):
        stage.check(blocks, sums.sums[1:3], "rank 7")


def test_the_last_view_tells(fds):
    stage = staged(arrays_of(1), fds)
    kept = stage.arrays()["a"][10:20]
    told = []
    stage.when_unused(lambda: told.append(1))
    gc.collect()
    assert not told
    assert stage.dropped
    del kept
    gc.collect()
    assert told


def test_memory_is_unmapped_by_pieces(fds, monkeypatch):
    """In one go, other threads of the process could map no memory meanwhile."""
    monkeypatch.setattr(staging, "UNMAPPED_BYTES", 2 * PAGE_BYTES)
    own = Segment(5 * PAGE_BYTES, fds)
    own.view[:] = bytes(range(1, 6)) * PAGE_BYTES
    mapped = AttachedSegment(os.dup(own.fd), own.size)
    calls = []

    def counted(address, nbytes, advice):
        assert not madvise(address, nbytes, advice)
        calls.append((address - start, nbytes, advice))

    start = np.frombuffer(mapped.view, np.uint8).ctypes.data
    monkeypatch.setattr(staging, "madvise", counted)
    staging.unmap(mapped)
    pieces = [(0, 2 * PAGE_BYTES), (2 * PAGE_BYTES, 2 * PAGE_BYTES), (4 * PAGE_BYTES, PAGE_BYTES)]
    assert calls == [(*piece, mmap.MADV_DONTNEED) for piece in pieces]
    assert mapped._map.closed
    staging.unmap(own)
    assert own._map.closed


async def test_threads_end_before_the_cancelled_call_does():
    threads = Threads()
    running, go = threading.Event(), threading.Event()
    done = []

    def job():
        running.set()
        go.wait(10)
        done.append(1)

    task = asyncio.create_task(threads.do([job] * 50))
    await asyncio.to_thread(running.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(done) < 50
    threads.close()


def test_a_stage_is_filled_by_small_pieces(fds):
    """Between two a thread sleeps, and what has been woken on its core runs."""
    arrays = {"a": np.ones(5 * PIECE_BYTES + 1, np.uint8)}
    manifest = Manifest.for_layout(layout_of(arrays))
    view, segment = new_memory(manifest.nbytes, fds)
    stage = Stage(manifest, view, segment)
    filled = []
    for job in fill(stage, arrays, None, None, 1):
        job()
        filled.append(int(np.count_nonzero(stage.flat)))
    assert [end - start for start, end in pairwise([0, *filled])] == [PIECE_BYTES] * 5 + [1]


async def test_threads_sleep_between_two_jobs(monkeypatch):
    done = []
    monkeypatch.setattr(time, "sleep", lambda _seconds: done.append("pause"))
    threads = Threads()
    threads._count = 1
    await threads.do([lambda: done.append("job")] * 2)
    threads.close()
    assert done == ["job", "pause"] * 2


async def test_what_a_job_raises_is_raised():
    threads = Threads()
    with pytest.raises(ZeroDivisionError):
        await threads.do([lambda: None, lambda: 1 / 0, lambda: None])
    threads.close()
