"""What every `Runtime` must do, as checks that run on the fake one in CI and on cupy's where there is a device.

    from cuda_conformance import CUDA_CHECKS

    @pytest.mark.parametrize("check", CUDA_CHECKS, ids=lambda check: check.__name__)
    def test_my_runtime(check):
        check(my_runtime)

A check needs no test framework, uses one device or two, and leaves nothing behind. NCCL's are in `nccl_conformance`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
from cuda_check_tools import download, equal, every_dtype, operands, reduced, upload

from asyncdist.arrays.host import Array
from asyncdist.arrays.reduce_op import PremulSum, ReduceOp, ReduceOpLike
from asyncdist.arrays.reduction import prepare, validate
from asyncdist.cuda.interface import MAX_SOURCES, Runtime
from asyncdist.errors import DistBackendError
from asyncdist.testing.store_conformance import checks_of, expect_refused

__all__ = ["CUDA_CHECKS", "CudaCheck"]

CudaCheck: TypeAlias = Callable[[Runtime], None]

FLOAT: Final = np.dtype(np.float32)
COUNT: Final = 1000 + 3
"""Whole 16-byte packs and a rest, for every size of element."""

HANDLE_BYTES: Final = 64


def check_devices(runtime: Runtime) -> None:
    """Devices are counted and told apart, and the current one belongs to the thread."""
    count = runtime.device_count()
    assert count >= 1
    ids = [runtime.device_id(device) for device in range(count)]
    assert all(ids)
    assert len(set(ids)) == count
    assert runtime.device_id(0) == ids[0]
    last = count - 1
    seen = []

    def elsewhere() -> None:
        seen.append(runtime.current_device())
        runtime.set_device(last)
        runtime.new_event(0).close()
        runtime.new_stream(0).close()
        runtime.allocate(64, 0).close()
        seen.append(runtime.current_device())

    before = runtime.current_device()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [0, last]
    assert runtime.current_device() == before


def check_copies(runtime: Runtime) -> None:
    """Bytes arrive, at any offset, between devices as well; no bytes are no copy."""
    last = runtime.device_count() - 1
    values = np.arange(COUNT, dtype=np.float32)
    with (
        upload(runtime, values, 0) as source,
        runtime.allocate(values.nbytes + 7, last) as target,
        runtime.new_stream(0) as stream,
    ):
        runtime.fill(target.pointer, target.nbytes, 0xAB, stream)
        runtime.copy(target.pointer + 7, source.pointer, values.nbytes, stream)
        runtime.copy(0, 0, 0, stream)
        runtime.fill(target.pointer + 7, 0, 1, stream)
        octets = download(runtime, target.pointer, target.nbytes, np.dtype(np.uint8), stream)
        assert set(octets[:7]) == {0xAB}
        assert equal(octets[7:].copy().view(np.float32), values)


def check_pinned_memory(runtime: Runtime) -> None:
    """Pinned memory is an array of bytes; closing twice does nothing."""
    pinned = runtime.pinned(100)
    assert pinned.array.dtype == np.uint8
    assert pinned.array.shape == (100,)
    assert pinned.nbytes == 100
    assert pinned.array.ctypes.data == pinned.pointer
    assert runtime.pointer_device(pinned.pointer) is None
    pinned.close()
    pinned.close()


def check_memory_size(runtime: Runtime) -> None:
    """A device's memory is all that it has, not what is free of it; a thread's current device stays."""
    before = runtime.current_device()
    for device in range(runtime.device_count()):
        total = runtime.memory_size(device)
        with runtime.allocate(1 << 24, device) as memory:
            assert total == runtime.memory_size(device) > memory.nbytes
    assert runtime.current_device() == before


def check_pointers(runtime: Runtime) -> None:
    """A pointer's device and allocation are known; host memory has none."""
    for device in range(runtime.device_count()):
        with runtime.allocate(4096, device) as memory:
            assert runtime.pointer_device(memory.pointer + 5) == device == memory.device
            base, nbytes = runtime.memory_range(memory.pointer + 5)
            assert base == memory.pointer
            assert nbytes >= 4096
            assert len(runtime.ipc_handle(memory.pointer + 5)) == HANDLE_BYTES
            assert runtime.ipc_handle(memory.pointer) == runtime.ipc_handle(memory.pointer + 5)
        memory.close()
    host = np.zeros(16)
    assert runtime.pointer_device(host.ctypes.data) is None
    for call in (runtime.memory_range, runtime.ipc_handle):
        expect_refused(DistBackendError, lambda call=call: call(host.ctypes.data))  # type: ignore[misc]
    expect_refused(ValueError, lambda: runtime.allocate(0, 0))


def check_events(runtime: Runtime) -> None:
    """An event that was never recorded is done; one that was is done when its stream has come there."""
    with runtime.new_stream(0) as stream, runtime.new_event(0) as event, runtime.allocate(1 << 24, 0) as memory:
        assert event.done()
        event.synchronize()
        for _ in range(3):  # recorded again and again
            for byte in range(20):
                runtime.fill(memory.pointer, memory.nbytes, byte, stream)
            event.record(stream)
            event.synchronize()
            assert event.done()
        assert set(download(runtime, memory.pointer, 16, np.dtype(np.uint8), stream)) == {19}
    event.close()
    stream.close()


def check_waiting_streams(runtime: Runtime) -> None:
    """Work queued after `wait_event` sees what was queued before the event, on other devices too.

    It does so where the event is recorded again meanwhile, elsewhere.
    """
    last = runtime.device_count() - 1
    nbytes = 1 << 24
    with (
        runtime.new_stream(0) as one,
        runtime.new_stream(last) as two,
        runtime.new_stream(0) as three,
        runtime.new_event(0) as event,
        runtime.allocate(nbytes, 0) as source,
        runtime.allocate(nbytes, last) as target,
    ):
        for round_ in range(3):
            for byte in range(round_, round_ + 30):
                runtime.fill(source.pointer, nbytes, byte, one)
            event.record(one)
            two.wait_event(event)
            event.record(three)
            runtime.copy(target.pointer, source.pointer, nbytes, two)
            last_bytes = download(runtime, target.pointer + nbytes - 64, 64, np.dtype(np.uint8), two)
            assert set(last_bytes) == {round_ + 29}


def check_streams_of_others(runtime: Runtime) -> None:
    """The caller's current stream and streams by handle can be used, and closing them leaves them alone."""
    values = np.arange(COUNT, dtype=np.float32)
    with upload(runtime, values, 0) as memory, runtime.new_stream(0) as own:
        for stream in (runtime.current_stream(0), runtime.external_stream(own.handle, 0)):
            assert stream.device == 0
            runtime.fill(memory.pointer, 4, 0, stream)
            result = download(runtime, memory.pointer, COUNT, FLOAT, stream)
            assert equal(result[1:], values[1:])
            assert result[0] == 0
            stream.close()
        runtime.fill(memory.pointer, 4, 0, own)
        own.synchronize()


def check_threads(runtime: Runtime) -> None:
    """Any thread may use what another made."""
    problems: list[BaseException] = []
    with runtime.new_stream(0) as stream, runtime.new_event(0) as event, runtime.allocate(4096, 0) as memory:

        def use() -> None:
            try:
                runtime.fill(memory.pointer, 4096, 5, stream)
                event.record(stream)
                event.synchronize()
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems, problems
        assert set(download(runtime, memory.pointer, 4096, np.dtype(np.uint8), stream)) == {5}


def check_reduce(runtime: Runtime) -> None:
    """Every operation on every dtype gives the CPU's bits."""
    for dtype in every_dtype():
        for op in ReduceOp:
            if op is not ReduceOp.PREMUL_SUM and _defined(op, dtype):
                arrays = operands(dtype, COUNT, 3)
                assert equal(_reduced(runtime, op, arrays), reduced(op, arrays)), f"{op} of {dtype}"
            else:
                expect_refused(TypeError, lambda op=op, dtype=dtype: _reduced(runtime, op, operands(dtype, 4, 2)))  # type: ignore[misc]


def check_reduce_shapes(runtime: Runtime) -> None:
    """One source is a copy; many sources, no elements, odd addresses, and the target as a source."""
    for number in (1, 2, 7, MAX_SOURCES):
        arrays = operands(FLOAT, COUNT, number, special=False)
        assert equal(_reduced(runtime, ReduceOp.SUM, arrays), reduced(ReduceOp.SUM, arrays))
    for count in (0, 1, 3, 4, 5):
        arrays = operands(FLOAT, count, 2, special=False)
        assert equal(_reduced(runtime, ReduceOp.AVG, arrays), reduced(ReduceOp.AVG, arrays))
    arrays = operands(FLOAT, COUNT, 2)
    assert equal(_reduced(runtime, ReduceOp.MAX, arrays, pad=4), reduced(ReduceOp.MAX, arrays))
    assert equal(_reduced(runtime, ReduceOp.MIN, arrays, in_place=True), reduced(ReduceOp.MIN, arrays))
    expect_refused(ValueError, lambda: _reduced(runtime, ReduceOp.SUM, []))
    expect_refused(ValueError, lambda: _reduced(runtime, ReduceOp.SUM, operands(FLOAT, 2, MAX_SOURCES + 1)))


def check_scale(runtime: Runtime) -> None:
    """PREMUL_SUM's factor multiplies as on the CPU."""
    for dtype in every_dtype():
        factor = 0.3 - 2j if dtype.kind == "c" else 0.3
        if not _defined(PremulSum(factor), dtype):
            expect_refused(TypeError, lambda dtype=dtype: _scaled(runtime, operands(dtype, 4, 1)[0], 2.0))  # type: ignore[misc]
            continue
        [array] = operands(dtype, COUNT, 1)
        expected = array.copy()
        prepare(PremulSum(factor), expected)
        assert equal(_scaled(runtime, array, factor), expected), f"{dtype}"


def check_subnormals(runtime: Runtime) -> None:
    """What is below the smallest normal number is summed and multiplied, not taken for zero; in complex numbers too."""
    for real, bits in (("float32", np.uint32), ("float64", np.uint64)):
        random = np.random.default_rng(COUNT)
        most = int(np.finfo(real).smallest_normal.view(bits))
        parts = [random.integers(1, most, 2 * COUNT, dtype=bits).view(real) for _ in range(3)]
        for dtype in (np.dtype(real), np.result_type(real, np.complex64)):
            arrays = [part.view(dtype) for part in parts]
            summed, scaled = reduced(ReduceOp.SUM, arrays), arrays[0].copy()
            prepare(PremulSum(2.0), scaled)
            assert summed.view(real).all()
            assert equal(_reduced(runtime, ReduceOp.SUM, arrays).view(real), summed.view(real)), f"SUM of {dtype}"
            assert equal(_scaled(runtime, arrays[0], 2.0).view(real), scaled.view(real)), f"a product of {dtype}"


def _reduced(runtime: Runtime, op: ReduceOp, arrays: list[Array], *, pad: int = 0, in_place: bool = False) -> Array:
    count, dtype = (len(arrays[0]), arrays[0].dtype) if arrays else (1, FLOAT)
    blocks = [upload(runtime, array, 0, pad=pad) for array in arrays]
    with runtime.allocate(max(count * dtype.itemsize, 1), 0) as separate, runtime.new_stream(0) as stream:
        pointers = [block.pointer + pad for block in blocks]
        target = pointers[0] if in_place else separate.pointer
        try:
            runtime.reduce(op, dtype, target, pointers, count, stream)
            return download(runtime, target, count, dtype, stream)
        finally:
            for block in blocks:
                block.close()


def _scaled(runtime: Runtime, array: Array, factor: float | complex) -> Array:
    with upload(runtime, array, 0) as block, runtime.new_stream(0) as stream:
        runtime.scale(array.dtype, block.pointer, block.pointer, factor, len(array), stream)
        return download(runtime, block.pointer, len(array), array.dtype, stream)


def _defined(op: ReduceOpLike, dtype: np.dtype[np.generic]) -> bool:
    try:
        validate(op, dtype)
    except TypeError:
        return False
    return True


CUDA_CHECKS: Final[tuple[CudaCheck, ...]] = checks_of(__name__, "runtime")
