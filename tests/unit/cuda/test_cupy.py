"""What is made of cupy's bindings, with bindings that answer as cupy 13's and 14's were read to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cupy_kit import Bindings, install, uninstall

from asyncdist.arrays.reduce_op import PremulSum, ReduceOp
from asyncdist.errors import DistBackendError

FLOAT = np.dtype(np.float32)
NOT_READY, ILLEGAL_ADDRESS = 600, 700


@pytest.fixture
def bindings() -> Bindings:
    return Bindings()


@pytest.fixture
def cuda(bindings: Bindings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield install(bindings, monkeypatch)
    uninstall()


def test_names_and_versions(cuda: Any) -> None:
    assert cuda.runtime.name == "cupy 14.2.0 (CUDA 12.9)"
    assert cuda.nccl.name == "NCCL 2.32.3 through cupy 14.2.0"


def test_calls_are_made_on_the_streams_device_and_leave_the_callers(bindings: Bindings, cuda: Any) -> None:
    stream, event = cuda.runtime.new_stream(1), cuda.runtime.new_event(1)
    event.record(stream)
    cuda.runtime.copy(1, 2, 3, stream)
    cuda.runtime.copy(1, 2, 0, stream)
    cuda.runtime.fill(1, 3, 255, stream)
    stream.wait_event(event)
    event.close()
    event.close()
    stream.close()
    stream.close()
    assert bindings.calls == [
        ("streamCreateWithFlags", 1, 1),
        ("eventCreateWithFlags", 1, 3),
        ("eventRecord", 1, 77, 77),
        ("memcpyAsync", 1, 1, 2, 3, 4, 77),
        ("memsetAsync", 1, 1, 255, 3, 77),
        ("streamWaitEvent", 1, 77, 77),
        ("eventDestroy", 1, 77),
        ("streamDestroy", 1, 77),
    ]
    assert cuda.runtime.current_device() == 0


def test_failures_say_what_was_done_and_leave_the_callers_device(bindings: Bindings, cuda: Any) -> None:
    driver = sys.modules["asyncdist.cuda.cupy_runtime"]
    with pytest.raises(DistBackendError, match=r"^cudaThis failed: out of luck$"), driver.calling("cudaThis", 1):
        raise RuntimeError("out of luck")
    assert bindings.getDevice() == 0
    with pytest.raises(DistBackendError, match=r"^cudaThis failed: KeyError$"), driver.calling("cudaThis"):
        raise KeyError
    with pytest.raises(DistBackendError, match=r"^as it is$"), driver.calling("cudaThis", 1):
        raise DistBackendError("as it is")
    with pytest.raises(KeyboardInterrupt), driver.calling("cudaThis", 1):
        raise KeyboardInterrupt
    assert bindings.getDevice() == 0
    gone = driver.calling("cudaThis", 1)
    for when in ("before", "after"):
        with pytest.MonkeyPatch.context() as broken:
            if when == "after":
                gone.__enter__()
            broken.setattr(driver.runtime, "setDevice", lambda device: 1 / 0)
            with pytest.raises(DistBackendError, match="cudaThis failed: division by zero"):
                gone.__enter__() if when == "before" else gone.__exit__(None, None, None)


def test_a_failed_kernel_is_no_event_that_is_not_done(bindings: Bindings, cuda: Any) -> None:
    event = cuda.runtime.new_event(0)
    assert event.done()
    bindings.event_status = NOT_READY
    assert not event.done()
    bindings.event_status = ILLEGAL_ADDRESS
    with pytest.raises(DistBackendError, match="work on the device failed: CUDA error 700"):
        event.done()


def test_streams_of_others_are_left_alone(bindings: Bindings, cuda: Any) -> None:
    bindings.streams = {0: 5, 1: 6}
    assert [cuda.runtime.current_stream(device).handle for device in (0, 1)] == [5, 6]
    assert [cuda.runtime.current_stream(device).device for device in (0, 1)] == [0, 1]
    cuda.runtime.current_stream(0).close()
    cuda.runtime.external_stream(9, 1).close()
    assert "streamDestroy" not in bindings.names()
    with pytest.raises(DistBackendError, match=r"^cupy.cuda.get_current_stream failed: 2$"):
        cuda.runtime.current_stream(2)


def test_pointers(cuda: Any) -> None:
    assert cuda.runtime.pointer_device(0x1000) == 1
    assert cuda.runtime.pointer_device(0x2000) is None
    with pytest.raises(DistBackendError, match="no device memory"):
        cuda.runtime.memory_range(0x2000)


def test_memory_comes_in_whole_blocks(bindings: Bindings, cuda: Any) -> None:
    memory = cuda.runtime.allocate((2 << 20) + 1, 1)
    assert memory.nbytes == (2 << 20) + 1
    memory.close()
    memory.close()
    assert bindings.calls == [("malloc", 1, 4 << 20), ("free", 1, 77)]


def test_memory_is_counted_whole(bindings: Bindings, cuda: Any) -> None:
    assert cuda.runtime.memory_size(1) == 16 << 30
    assert bindings.calls == [("memGetInfo", 1)]


def test_handles_are_opened_once_and_closed_with_the_last(bindings: Bindings, cuda: Any) -> None:
    pointers = [cuda.runtime.ipc_open(b"h" * 64, 1) for _ in range(2)]
    assert pointers == [0x5000, 0x5000]
    cuda.runtime.ipc_close(0x5000)
    assert bindings.names() == ["ipcOpenMemHandle"]
    cuda.runtime.ipc_close(0x5000)
    assert bindings.names() == ["ipcOpenMemHandle", "memGetInfo", "cuIpcCloseMemHandle"]
    assert bindings.calls[-1] == ("cuIpcCloseMemHandle", 1, 0x5000)
    with pytest.raises(DistBackendError, match="cuIpcCloseMemHandle failed with CUDA error 1"):
        sys.modules["asyncdist.cuda.cupy_runtime"].close_ipc(0x6000)
    with pytest.raises(DistBackendError, match="not opened"):
        cuda.runtime.ipc_close(0x5000)


def test_what_cannot_be_reduced_or_scaled(cuda: Any) -> None:
    stream = cuda.runtime.external_stream(0, 0)
    with pytest.raises(TypeError, match="not defined"):
        cuda.runtime.prepare_reduce(ReduceOp.BAND, FLOAT, 2, 0)
    with pytest.raises(TypeError, match="cannot be scaled"):
        cuda.runtime.prepare_scale(np.dtype(np.int32), 0)
    with pytest.raises(TypeError, match="complex"):
        cuda.runtime.scale(FLOAT, 1, 2, 0.5j, 4, stream)
    with pytest.raises(ValueError, match="sources"):
        cuda.runtime.reduce(ReduceOp.SUM, FLOAT, 1, [2] * 65, 4, stream)
    with pytest.raises(TypeError, match="cannot be scaled"):
        cuda.runtime.scale(np.dtype(np.int32), 1, 2, 0.5, 4, stream)


@pytest.mark.parametrize("version", ["13.6.0", "14.2.0"])
def test_unique_ids_are_bytes_with_every_cupy(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = Bindings(version)
    nccl = install(bindings, monkeypatch).nccl
    unique_id = nccl.unique_id()
    assert isinstance(unique_id, bytes)
    assert len(unique_id) == 128
    nccl.open(2, unique_id, 1, 1).abort()
    passed = bindings.calls[0][3]
    assert bindings.calls[0] == ("init", 1, 2, passed, 1)
    assert passed == (tuple(range(-64, 64)) if version < "14" else unique_id)
    assert os.environ["NCCL_RUNTIME_CONNECT"] == "0"


def test_one_rank_is_its_own_average(bindings: Bindings, cuda: Any) -> None:
    """NCCL refuses that of float8: it would multiply by 1, for which it has no kernel there."""
    stream = cuda.runtime.external_stream(9, 1)
    communicator = cuda.nccl.open(1, bytes(128), 0, 1)
    bindings.calls.clear()
    communicator.all_reduce(1, 2, 10, FLOAT, ReduceOp.AVG, stream)
    assert bindings.calls == [("allReduce", 1, 1, 2, 10, 7, 0, 9)]
    communicator.abort()


def test_collectives_are_translated(bindings: Bindings, cuda: Any) -> None:
    communicator = cuda.nccl.open(2, bytes(128), 0, 1)
    stream = cuda.runtime.external_stream(9, 1)
    complex64, int16 = np.dtype(np.complex64), np.dtype(np.int16)
    bindings.calls.clear()
    communicator.all_reduce(1, 2, 10, FLOAT, ReduceOp.AVG, stream)
    communicator.all_reduce(1, 2, 10, complex64, ReduceOp.SUM, stream)
    communicator.reduce(1, 0, 10, np.dtype(np.bool_), ReduceOp.SUM, 1, stream)
    communicator.reduce_scatter(1, 2, 10, FLOAT, ReduceOp.MIN, stream)
    communicator.broadcast(0, 2, 10, int16, 1, stream)
    communicator.all_gather(1, 2, 10, int16, stream)
    with cuda.nccl.group():
        communicator.send(1, 10, int16, 1, stream)
        communicator.recv(2, 10, int16, 1, stream)
    assert bindings.calls == [
        ("allReduce", 1, 1, 2, 10, 7, 4, 9),
        ("allReduce", 1, 1, 2, 20, 7, 0, 9),
        ("reduce", 1, 1, 0, 10, 1, 2, 1, 9),
        ("reduceScatter", 1, 1, 2, 10, 7, 3, 9),
        ("broadcast", 1, 2, 2, 20, 1, 1, 9),
        ("allGather", 1, 1, 2, 20, 1, 9),
        ("groupStart", 0),
        ("send", 1, 1, 20, 1, 1, 9),
        ("recv", 1, 2, 20, 1, 1, 9),
        ("groupEnd", 0),
    ]
    communicator.abort()


def test_what_fails_in_a_group_is_what_is_raised(
    bindings: Bindings, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL says it again at the group's end, which must come all the same."""

    def refusing() -> None:
        bindings.calls.append(("groupEnd",))
        raise RuntimeError("NCCL_ERROR_INVALID_USAGE")

    monkeypatch.setattr(sys.modules["cupy.cuda.nccl"], "groupEnd", refusing)
    with pytest.raises(ValueError, match="wrong"), cuda.nccl.group():
        raise ValueError("wrong")
    with pytest.raises(DistBackendError, match="ncclGroupEnd failed: NCCL_ERROR_INVALID_USAGE"), cuda.nccl.group():
        pass
    assert bindings.names() == ["groupStart", "groupEnd"] * 2


def test_refusals(cuda: Any) -> None:
    communicator = cuda.nccl.open(1, bytes(128), 0, 0)
    stream = cuda.runtime.external_stream(0, 0)
    for dtype, op in ((np.dtype(np.int16), ReduceOp.SUM), (FLOAT, PremulSum(2.0))):
        with pytest.raises(DistBackendError):
            communicator.all_reduce(1, 2, 4, dtype, op, stream)
    communicator.destroy()


def test_what_a_gpu_can_reduce_is_asked_of_that_gpu(bindings: Bindings, cuda: Any) -> None:
    float8 = np.dtype(ml_dtypes.float8_e5m2)
    assert "9.0" in cuda.nccl.refusal(float8, ReduceOp.SUM, 0)
    assert not cuda.nccl.refusal(float8, ReduceOp.SUM, 1)
    assert not cuda.nccl.refusal(FLOAT, ReduceOp.SUM, 0)


@pytest.mark.parametrize("error", [RuntimeError("NCCL_ERROR_REMOTE_ERROR: remote process exited"), KeyError(7)])
def test_asynchronous_errors_are_words(bindings: Bindings, cuda: Any, error: Exception) -> None:
    communicator = cuda.nccl.open(1, bytes(128), 0, 0)
    assert communicator.async_error() == ""
    bindings.async_error = error
    assert communicator.async_error() == str(error)
    communicator.abort()
    assert communicator.async_error() == ""


def test_communicators_end_once_and_are_not_collected_before(bindings: Bindings, cuda: Any) -> None:
    aborted, destroyed = (cuda.nccl.open(1, bytes(128), 0, 1) for _ in range(2))
    kept = sys.getrefcount(aborted._raw)
    aborted.abort()
    aborted.abort()
    left = sys.getrefcount(aborted._raw)
    assert left == kept - 1
    destroyed.destroy()
    with pytest.raises(DistBackendError, match="was destroyed"):
        destroyed.destroy()
    with pytest.raises(DistBackendError, match="was aborted"):
        aborted.destroy()
    assert [call for call in bindings.calls if call[0] in ("abort", "destroy")] == [("abort", 1), ("destroy", 1)]
