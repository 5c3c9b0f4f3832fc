"""CUDA's runtime through cupy, and the few functions of the driver that cupy does not offer.

Streams and events are raw handles, not cupy's objects. `cupy.cuda.Event.done` takes a device's failure for "not yet",
`ExternalStream` is deprecated, and cupy destroys a stream in whichever thread collects garbage.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import lru_cache
from types import TracebackType
from typing import Any, Final

import cupy
import numpy as np
from cupy.cuda import runtime

from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.cuda.interface import MAX_SOURCES, Dtype, Event, Memory, Pinned, Runtime, Stream
from asyncdist.cuda.kernels import OPTIONS, PACK_BYTES, reduce_source, scale_source
from asyncdist.cuda.provider import DRIVER_LIBRARY
from asyncdist.errors import DistBackendError

__all__ = ["CupyRuntime", "calling", "failed"]

NOT_READY: Final = 600
"""cudaErrorNotReady, which cudaEventQuery returns rather than fails with."""

DEVICE_MEMORY: Final = (2, 3)
"""cudaMemoryTypeDevice and cudaMemoryTypeManaged."""

BLOCK_BYTES: Final = 2 << 20
"""What is smaller CUDA cuts from blocks of this size, and opening an IPC handle gives the others the whole block."""

UUID_BYTES: Final = 16

BLOCK_THREADS: Final = 512
BLOCKS_PER_MULTIPROCESSOR: Final = 4
"""Enough to keep the memory of any device busy: 2,048 threads are all that a multiprocessor holds."""


class calling:
    """`with calling("cudaMalloc", device):` makes `device`, if not None, this thread's current device in the block.

    What cupy raises in the block becomes a DistBackendError that says which call failed. Functions that every operation
    calls several times first compare their device with the current device by themselves, which costs less.
    """

    __slots__ = ("_before", "_device", "_what")

    def __init__(self, what: str, device: int | None = None) -> None:
        self._what = what
        self._device = self._before = device

    def __enter__(self) -> None:
        device = self._device
        if device is not None:
            try:
                self._before = runtime.getDevice()
                if self._before != device:
                    runtime.setDevice(device)
            except Exception as error:
                raise failed(self._what, error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before != self._device:
            try:
                runtime.setDevice(self._before)
            except Exception as failure:
                error = error or failure
        # CUDARuntimeError, CUDADriverError, NcclError, KeyError for codes that cupy does not know
        if isinstance(error, Exception) and not isinstance(error, DistBackendError):
            raise failed(self._what, error) from error


def failed(what: str, error: BaseException) -> DistBackendError:
    """What cupy raised while `what` was being done, as ours."""
    return DistBackendError(f"{what} failed: {error if str(error) else type(error).__name__}")


class _Stream(Stream):
    """`ptr` is what cupy's kernels look for in a stream."""

    def __init__(self, handle: int, device: int, *, owned: bool = False) -> None:
        self.handle = self.ptr = handle
        self.device = device
        self._owned = owned

    def wait_event(self, event: Event) -> None:
        try:
            if runtime.getDevice() == self.device:
                runtime.streamWaitEvent(self.handle, event.handle)
                return
        except Exception as error:
            raise failed("cudaStreamWaitEvent", error) from error
        with calling("cudaStreamWaitEvent", self.device):
            runtime.streamWaitEvent(self.handle, event.handle)

    def synchronize(self) -> None:
        with calling("cudaStreamSynchronize", self.device):
            runtime.streamSynchronize(self.handle)

    def close(self) -> None:
        if self._owned:
            self._owned = False
            with calling("cudaStreamDestroy", self.device):
                runtime.streamDestroy(self.handle)


class _Event(Event):
    def __init__(self, handle: int, device: int) -> None:
        self.handle = handle
        self.device = device

    def record(self, stream: Stream) -> None:
        try:
            if runtime.getDevice() == self.device:
                runtime.eventRecord(self.handle, stream.handle)
                return
        except Exception as error:
            raise failed("cudaEventRecord", error) from error
        with calling("cudaEventRecord", self.device):
            runtime.eventRecord(self.handle, stream.handle)

    def done(self) -> bool:
        status = runtime.eventQuery(self.handle)  # for a device's failure it returns, rather than raises
        if status not in (0, NOT_READY):
            with calling("work on the device"):
                raise runtime.CUDARuntimeError(status)
        return bool(status == 0)

    def synchronize(self) -> None:
        with calling("work on the device"):
            runtime.eventSynchronize(self.handle)

    def close(self) -> None:
        handle, self.handle = self.handle, 0
        if handle:
            with calling("cudaEventDestroy", self.device):
                runtime.eventDestroy(handle)


class _Pinned(Pinned):
    def __init__(self, nbytes: int) -> None:
        with calling("cudaHostAlloc"):
            self.pointer = runtime.hostAlloc(max(nbytes, 1), runtime.hostAllocPortable)
        self.nbytes = nbytes
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.pointer))

    def close(self) -> None:
        pointer, self.pointer = self.pointer, 0
        if pointer:
            self.array = np.empty(0, np.uint8)
            with calling("cudaFreeHost"):
                runtime.freeHost(pointer)


class _Memory(Memory):
    def __init__(self, nbytes: int, device: int) -> None:
        with calling(f"allocating {nbytes} bytes on device {device}", device):
            self.pointer = runtime.malloc(-(-nbytes // BLOCK_BYTES) * BLOCK_BYTES)
        self.nbytes = nbytes
        self.device = device

    def close(self) -> None:
        pointer, self.pointer = self.pointer, 0
        if pointer:
            with calling("cudaFree", self.device):
                runtime.free(pointer)


class CupyRuntime(Runtime):
    """See Runtime."""

    def __init__(self) -> None:
        cuda, minor = divmod(runtime.runtimeGetVersion() // 10, 100)
        self.name = f"cupy {cupy.__version__} (CUDA {cuda}.{minor})"
        self._lock = threading.Lock()
        self._opened: dict[tuple[bytes, int], list[int]] = {}

    def device_count(self) -> int:
        """See Runtime."""
        with calling("cudaGetDeviceCount"):
            return int(runtime.getDeviceCount())

    def current_device(self) -> int:
        """See Runtime."""
        with calling("cudaGetDevice"):
            return int(runtime.getDevice())

    def set_device(self, device: int) -> None:
        """See Runtime."""
        with calling("cudaSetDevice"):
            runtime.setDevice(device)

    def device_id(self, device: int) -> str:
        """See Runtime."""
        return device_uuid(device)

    def pointer_device(self, pointer: int) -> int | None:
        """See Runtime."""
        with calling("cudaPointerGetAttributes"):
            attributes = runtime.pointerGetAttributes(pointer)
        return int(attributes.device) if attributes.type in DEVICE_MEMORY else None

    def new_stream(self, device: int) -> Stream:
        """See Runtime."""
        with calling("cudaStreamCreate", device):
            return _Stream(runtime.streamCreateWithFlags(runtime.streamNonBlocking), device, owned=True)

    def current_stream(self, device: int) -> Stream:
        """See Runtime. cupy remembers it by thread and device, so the current device does not matter."""
        try:
            handle = cupy.cuda.get_current_stream(device).ptr
        except Exception as error:
            raise failed("cupy.cuda.get_current_stream", error) from error
        return _others_stream(handle, device)

    def external_stream(self, handle: int, device: int) -> Stream:
        """See Runtime."""
        return _others_stream(handle, device)

    def new_event(self, device: int) -> Event:
        """See Runtime."""
        flags = runtime.eventBlockingSync | runtime.eventDisableTiming
        with calling("cudaEventCreate", device):
            return _Event(runtime.eventCreateWithFlags(flags), device)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """See Runtime."""
        if nbytes:
            with calling("cudaMemcpyAsync", stream.device):
                runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, stream.handle)

    def fill(self, pointer: int, nbytes: int, byte: int, stream: Stream) -> None:
        """See Runtime."""
        if nbytes:
            with calling("cudaMemsetAsync", stream.device):
                runtime.memsetAsync(pointer, byte, nbytes, stream.handle)

    def pinned(self, nbytes: int) -> Pinned:
        """See Runtime."""
        return _Pinned(nbytes)

    def allocate(self, nbytes: int, device: int) -> Memory:
        """See Runtime."""
        if nbytes <= 0:
            raise ValueError(f"nbytes must be positive, not {nbytes}")
        return _Memory(nbytes, device)

    def memory_size(self, device: int) -> int:
        """See Runtime."""
        with calling("cudaMemGetInfo", device):
            return int(runtime.memGetInfo()[1])

    def memory_range(self, pointer: int) -> tuple[int, int]:
        """See Runtime."""
        device = self.pointer_device(pointer)
        if device is None:
            raise DistBackendError(f"{pointer:#x} is no device memory")
        with calling("cuMemGetAddressRange", device):
            runtime.memGetInfo()  # binds the device's context to this thread, which the driver's functions need
            return address_range(pointer)

    def ipc_handle(self, pointer: int) -> bytes:
        """See Runtime."""
        base, _ = self.memory_range(pointer)
        with calling("cudaIpcGetMemHandle", self.pointer_device(pointer) or 0):
            return bytes(runtime.ipcGetMemHandle(base))

    def ipc_open(self, handle: bytes, device: int) -> int:
        """See Runtime. CUDA counts openings of one handle only since 11; counted here, closing is plain."""
        with self._lock:
            opened = self._opened.get((handle, device))
            if opened is None:
                with calling("cudaIpcOpenMemHandle", device):
                    opened = [int(runtime.ipcOpenMemHandle(handle)), 0]
                self._opened[handle, device] = opened
            opened[1] += 1
            return opened[0]

    def ipc_close(self, pointer: int) -> None:
        """See Runtime."""
        with self._lock:
            key = next((key for key, (base, _) in self._opened.items() if base == pointer), None)
            if key is None:
                raise DistBackendError(f"{pointer:#x} was not opened by ipc_open")
            self._opened[key][1] -= 1
            if self._opened[key][1]:
                return
            del self._opened[key]
        with calling("cudaIpcCloseMemHandle", key[1]):
            runtime.memGetInfo()  # as above
            close_ipc(pointer)

    def reduce(
        self, op: ReduceOp, dtype: Dtype, target: int, sources: Sequence[int], count: int, stream: Stream
    ) -> None:
        """See Runtime."""
        kernel = _reduce_kernel(op, dtype, len(sources))
        if not count:
            return
        aligned = all(pointer % PACK_BYTES == 0 for pointer in (target, *sources))
        packs = count * dtype.itemsize // PACK_BYTES if aligned else 0
        numbers = (target, *sources, count, packs)
        self._launch(kernel, max(packs, count - packs * PACK_BYTES // dtype.itemsize), _words(numbers), stream)

    def scale(
        self, dtype: Dtype, target: int, source: int, factor: float | complex, count: int, stream: Stream
    ) -> None:
        """See Runtime."""
        kernel = _scale_kernel(dtype)
        if isinstance(factor, complex) and dtype.kind != "c":
            raise TypeError(f"the factor {factor!r} is complex, arrays of dtype {dtype} are not")
        if count:
            parts = np.float64(complex(factor).real), np.float64(complex(factor).imag)
            self._launch(kernel, count, (*_words((target, source, count)), *parts), stream)

    def prepare_reduce(self, op: ReduceOp, dtype: Dtype, sources: int, device: int) -> None:
        """See Runtime."""
        _compile(_reduce_kernel(op, dtype, sources), device)

    def prepare_scale(self, dtype: Dtype, device: int) -> None:
        """See Runtime."""
        _compile(_scale_kernel(dtype), device)

    def _launch(self, kernel: Any, threads: int, arguments: tuple[Any, ...], stream: Stream) -> None:
        """One thread for each of `threads`, or as many as the device runs at a time."""
        device = stream.device
        blocks = min(-(-threads // BLOCK_THREADS), _multiprocessors(device) * BLOCKS_PER_MULTIPROCESSOR)
        with calling("launching a kernel", device):
            kernel((max(blocks, 1),), (BLOCK_THREADS,), arguments, stream=stream)


def _words(numbers: Sequence[int]) -> tuple[np.uint64, ...]:
    """Pointers and counts as cupy passes 64-bit arguments."""
    return tuple(np.uint64(number) for number in numbers)


@lru_cache(maxsize=64)
def _others_stream(handle: int, device: int) -> _Stream:
    """Another library's stream. It may be cached: it holds only these two numbers, whatever owns them by now."""
    return _Stream(handle, device)


@lru_cache(maxsize=256)
def _reduce_kernel(op: ReduceOp, dtype: Dtype, sources: int) -> Any:
    if not 1 <= sources <= MAX_SOURCES:
        raise ValueError(f"1 to {MAX_SOURCES} sources, not {sources}")
    try:
        return cupy.RawKernel(reduce_source(op, dtype, sources), "reduce", OPTIONS)
    except KeyError:
        raise TypeError(f"{op!r} is not defined for arrays of dtype {dtype} on a device") from None


@lru_cache(maxsize=32)
def _scale_kernel(dtype: Dtype) -> Any:
    if dtype.kind in "biu":
        raise TypeError(f"arrays of dtype {dtype} cannot be scaled")
    return cupy.RawKernel(scale_source(dtype), "scale", OPTIONS)


def _compile(kernel: Any, device: int) -> None:
    with calling("compiling a kernel", device):
        _ = kernel.kernel


@lru_cache(maxsize=64)
def _multiprocessors(device: int) -> int:
    return int(runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device))


@lru_cache(maxsize=64)  # every message says it
def device_uuid(device: int) -> str:
    """UUID of a device, in hexadecimal; that of the instance on a partitioned device (MIG).

    cupy's `getDeviceProperties(...)["uuid"]` ends before the first zero byte, so it cannot be used.
    """
    library = _driver()
    ordinal = ctypes.c_int()
    uuid = ctypes.create_string_buffer(UUID_BYTES)
    _check(library.cuDeviceGet(ctypes.byref(ordinal), device), "cuDeviceGet")
    _check(library.cuDeviceGetUuid_v2(uuid, ordinal), "cuDeviceGetUuid")
    return uuid.raw.hex()


def address_range(pointer: int) -> tuple[int, int]:
    """Base and length of the allocation that `pointer` is in; this thread must have a context."""
    base = ctypes.c_uint64()
    nbytes = ctypes.c_size_t()
    status = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(pointer))
    _check(status, "cuMemGetAddressRange")
    return base.value, nbytes.value


def close_ipc(pointer: int) -> None:
    """As cudaIpcCloseMemHandle, without the GIL; this thread must have a context.

    The call waits for all work on the device, also of the caller and of other groups. cupy's own call holds the GIL
    meanwhile, so that the whole process would stop: heartbeats, and whatever that work waits for.
    """
    _check(_driver().cuIpcCloseMemHandle(ctypes.c_uint64(pointer)), "cuIpcCloseMemHandle")


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL(DRIVER_LIBRARY)
    _check(library.cuInit(0), "cuInit")
    return library


def _check(status: int, function: str) -> None:
    if status:
        raise DistBackendError(f"{function} failed with CUDA error {status}")
