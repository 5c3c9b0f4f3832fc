"""What the runtime and NCCL share: the current device, failures as ours, and what of the driver cupy does not offer."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from types import TracebackType
from typing import Final

from cupy.cuda import runtime

from asyncdist.cuda.provider import DRIVER_LIBRARY
from asyncdist.errors import DistBackendError

__all__ = ["address_range", "calling", "close_ipc", "device_uuid", "failed"]

UUID_BYTES: Final = 16


class calling:
    """`with calling("cudaMalloc", device):` lets `device`, if not None, be this thread's current one in the block.

    Whatever cupy raises there becomes DistBackendError that says what was being done. What every operation on GPU
    arrays calls several times looks by itself whether its device is the current one, as it is as a rule: that takes
    less time, and microseconds count.
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

    It waits for all work on the device, that of the caller's kernels and of other groups too, and cupy's own call holds
    the GIL meanwhile: nothing of this process would go on, heartbeats among it, nor what that work may wait for.
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
