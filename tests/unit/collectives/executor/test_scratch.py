"""ScratchPool: alignment, reuse by size class, the bound on idle memory."""

from __future__ import annotations

import numpy as np
import pytest

from asyncdist.collectives.executor.buffers import ALIGNMENT, KEEP_BYTES, ScratchPool

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [0, 1, 64, 256, 257, 385, 4096, 4097, 100_000, 3 * MIB])
def test_buffers_are_bytes_aligned_and_as_long_as_asked(nbytes):
    pool = ScratchPool()
    buffer = pool.take(nbytes)
    assert buffer.dtype == np.uint8
    assert buffer.shape == (nbytes,)
    assert buffer.ctypes.data % ALIGNMENT == 0
    assert buffer.flags.writeable
    buffer[:] = 255
    assert memoryview(buffer).contiguous
    pool.give(buffer)
    assert nbytes <= pool.idle_bytes <= max(256, nbytes * 3 // 2 + 1)


def test_what_is_given_back_is_lent_again_within_its_class():
    pool = ScratchPool()
    first = pool.take(1000)
    address = first.ctypes.data
    pool.give(first)
    again = pool.take(900)
    assert again.ctypes.data == address
    assert pool.idle_bytes == 0
    other = pool.take(900)
    assert other.ctypes.data != address
    assert pool.lent == 2


def test_lent_buffers_do_not_overlap():
    pool = ScratchPool()
    buffers = [pool.take(size) for size in (10, 10, 500, 500, 70_000)]
    for number, buffer in enumerate(buffers):
        buffer[:] = number
    assert [set(buffer.tolist()) for buffer in buffers] == [{0}, {1}, {2}, {3}, {4}]
    for buffer in buffers:
        pool.give(buffer)
    assert pool.lent == 0


def test_only_what_was_lent_comes_back_and_only_once():
    pool = ScratchPool()
    buffer = pool.take(100)
    pool.give(buffer)
    with pytest.raises(ValueError, match="given back already"):
        pool.give(buffer)
    with pytest.raises(ValueError, match="not taken from this pool"):
        pool.give(np.empty(100, np.uint8))
    with pytest.raises(ValueError, match="not taken from this pool"):
        pool.give(ScratchPool().take(100))
    with pytest.raises(ValueError, match="at least 0"):
        pool.take(-1)


def test_idle_memory_is_kept_up_to_the_bound_and_not_past_it():
    pool = ScratchPool(keep_bytes=4 * MIB)
    buffers = [pool.take(MIB) for _ in range(5)]
    for buffer in buffers[:4]:
        pool.give(buffer)
    assert pool.idle_bytes == 4 * MIB
    pool.give(buffers[4])
    assert pool.idle_bytes == 4 * MIB


def test_the_class_unused_for_longest_makes_room():
    pool = ScratchPool(keep_bytes=4 * MIB)
    old, recent, new = pool.take(MIB), pool.take(2 * MIB), pool.take(2 * MIB)
    kept = recent.ctypes.data
    pool.give(old)
    pool.give(recent)
    pool.give(new)
    assert pool.idle_bytes == 4 * MIB
    assert kept in {pool.take(2 * MIB).ctypes.data, pool.take(2 * MIB).ctypes.data}


def test_a_buffer_larger_than_the_bound_is_not_kept():
    pool = ScratchPool()
    assert KEEP_BYTES == 64 * MIB
    for nbytes, idle in ((KEEP_BYTES, KEEP_BYTES), (KEEP_BYTES + 1, KEEP_BYTES)):
        pool.give(pool.take(nbytes))
        assert pool.idle_bytes == idle
