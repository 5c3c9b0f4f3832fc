"""The fake CUDA and NCCL pass the checks that the real ones pass, and catch what those would punish."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from cuda_conformance import CUDA_CHECKS, CudaCheck
from nccl_conformance import NCCL_CHECKS, NcclCheck

from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.errors import DistBackendError
from asyncdist.testing import fake_cuda
from asyncdist.testing.fake_queues import Mode

FLOAT = np.dtype(np.float32)


@pytest.mark.parametrize("mode", ["inline", "threads"])
@pytest.mark.parametrize("check", CUDA_CHECKS, ids=lambda check: check.__name__)
def test_runtime(check: CudaCheck, mode: Mode) -> None:
    with fake_cuda(2, mode=mode) as cuda:
        check(cuda.runtime)
        assert not cuda.runtime.failure


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("mode", ["inline", "threads"])
@pytest.mark.parametrize("check", NCCL_CHECKS, ids=lambda check: check.__name__)
def test_nccl(check: NcclCheck, mode: Mode, devices: int) -> None:
    with fake_cuda(devices, mode=mode) as cuda:
        assert cuda.nccl is not None
        check(cuda.runtime, cuda.nccl)
        assert not cuda.runtime.failure
        assert not cuda.nccl.violations


@pytest.mark.parametrize("check", NCCL_CHECKS, ids=lambda check: check.__name__)
def test_nccl_over_sockets(check: NcclCheck, tmp_path: Path) -> None:
    with fake_cuda(2, folder=tmp_path) as cuda:
        assert cuda.nccl is not None
        check(cuda.runtime, cuda.nccl)
        assert not cuda.runtime.failure


def test_work_waits_for_the_test_in_manual_mode() -> None:
    with fake_cuda(1, mode="manual") as cuda:
        runtime = cuda.runtime
        array = runtime.array(np.zeros(4, np.float32))
        stream, event = runtime.new_stream(0), runtime.new_event(0)
        runtime.fill(array.data.ptr, 16, 255, stream)
        event.record(stream)
        assert not event.done()
        assert runtime.step()
        assert not event.done()
        assert runtime.run_all() == 1
        assert event.done()


def test_freed_memory_in_use_is_a_failure() -> None:
    with fake_cuda(1, mode="manual") as cuda:
        runtime = cuda.runtime
        array = runtime.array(np.zeros(4, np.float32))
        stream = runtime.new_stream(0)
        runtime.fill(array.data.ptr, 16, 1, stream)
        del array
        gc.collect()
        runtime.run_all()
        assert "freed while work that uses it was queued" in runtime.failure
        with pytest.raises(DistBackendError, match="freed"):
            runtime.new_event(0).done()


def test_closing_memory_in_use_is_refused() -> None:
    with fake_cuda(1, mode="manual") as cuda:
        memory, stream = cuda.runtime.allocate(64, 0), cuda.runtime.new_stream(0)
        cuda.runtime.fill(memory.pointer, 64, 1, stream)
        with pytest.raises(DistBackendError, match="while work that uses it is queued"):
            memory.close()
        cuda.runtime.run_all()
        memory.close()


def test_two_ranks_on_one_device_are_refused() -> None:
    with fake_cuda(2) as cuda:
        assert cuda.nccl is not None
        unique_id = cuda.nccl.unique_id()
        cuda.nccl.open(2, unique_id, 0, 0)
        with pytest.raises(DistBackendError, match="Duplicate GPU detected"):
            cuda.nccl.open(2, unique_id, 1, 0)
    with fake_cuda(2, multi_rank_gpu=True) as cuda:
        assert cuda.nccl is not None
        unique_id = cuda.nccl.unique_id()
        for rank in range(2):
            cuda.nccl.open(2, unique_id, rank, 0)


@pytest.mark.parametrize("strict", [False, True])
def test_different_counts_hang_until_the_abort(strict: bool) -> None:
    with fake_cuda(2, strict=strict) as cuda:
        assert cuda.nccl is not None
        runtime, unique_id = cuda.runtime, cuda.nccl.unique_id()
        ranks = [cuda.nccl.open(2, unique_id, rank, rank) for rank in range(2)]
        arrays = [runtime.array(np.ones(4, np.float32), rank) for rank in range(2)]
        streams, events = [runtime.new_stream(r) for r in range(2)], [runtime.new_event(r) for r in range(2)]
        for rank, communicator in enumerate(ranks):
            pointer = arrays[rank].data.ptr
            communicator.all_reduce(pointer, pointer, 4 - rank, FLOAT, ReduceOp.SUM, streams[rank])
            events[rank].record(streams[rank])
        assert not any(event.done() for event in events)
        assert "rank 0: all_reduce 4 float32" in cuda.nccl.violations[0]
        assert bool(ranks[0].async_error()) is strict
        with pytest.raises(DistBackendError, match="in flight"):
            ranks[0].destroy()
        for communicator in ranks:
            communicator.abort()
        assert all(event.done() for event in events)
        assert list(arrays[0].get()) == [1, 1, 1, 1]


def test_an_event_knows_its_device() -> None:
    with fake_cuda(2) as cuda, pytest.raises(DistBackendError, match="an event of device 0, a stream of device 1"):
        cuda.runtime.new_event(0).record(cuda.runtime.new_stream(1))


def test_what_others_hold_back_comes_later() -> None:
    with fake_cuda(1) as cuda:
        runtime = cuda.runtime
        one, two, event = runtime.new_stream(0), runtime.new_stream(0), runtime.new_event(0)
        array = runtime.array(np.zeros(4, np.uint8))
        gate = runtime.hold(one)
        runtime.fill(array.data.ptr, 4, 1, one)
        event.record(one)
        two.wait_event(event)
        runtime.fill(array.data.ptr, 4, 2, two)
        assert not event.done()
        assert list(array.get()) == [0, 0, 0, 0]
        gate.open()
        assert list(array.get()) == [2, 2, 2, 2]


def test_waiting_is_for_what_was_recorded_before() -> None:
    """CUDA takes down what an event stands for when a stream is told to wait; recording it again changes nothing."""
    with fake_cuda(1) as cuda:
        runtime = cuda.runtime
        one, two, three, event = *(runtime.new_stream(0) for _ in range(3)), runtime.new_event(0)
        array = runtime.array(np.zeros(4, np.uint8))
        gate = runtime.hold(one)
        runtime.fill(array.data.ptr, 4, 1, one)
        event.record(one)
        two.wait_event(event)
        runtime.fill(array.data.ptr, 4, 2, two)
        event.record(three)
        assert event.done()
        assert list(array.get()) == [0, 0, 0, 0]
        gate.open()
        assert list(array.get()) == [2, 2, 2, 2]


def test_arrays_say_where_they_are() -> None:
    with fake_cuda(2) as cuda:
        runtime = cuda.runtime
        array = runtime.array(np.arange(6, dtype=np.float32).reshape(2, 3), device=1)
        said = array.__cuda_array_interface__
        assert said["shape"] == (2, 3)
        assert said["data"] == (array.data.ptr, False)
        assert said["strides"] is None
        assert said["stream"] == 1
        assert runtime.pointer_device(array.data.ptr) == 1 == array.device.id
        stream = runtime.new_stream(1)
        with runtime.use(stream):
            assert array.__cuda_array_interface__["stream"] == stream.handle
        column = array[:, 1]
        assert column.__cuda_array_interface__["strides"] == (12,)
        assert not column.flags.c_contiguous
        array.set(7)
        assert list(column.get()) == [7, 7]


def test_handles_of_freed_memory_are_refused() -> None:
    with fake_cuda(1) as cuda:
        memory = cuda.runtime.allocate(64, 0)
        handle = cuda.runtime.ipc_handle(memory.pointer)
        assert cuda.runtime.ipc_open(handle, 0) == memory.pointer
        memory.close()
        with pytest.raises(DistBackendError, match="freed"):
            cuda.runtime.ipc_open(handle, 0)
