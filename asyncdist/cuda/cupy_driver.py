"""What the runtime and NCCL share: the current device, failures as ours, and what of the driver cupy does not offer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Final

from cupy.cuda import runtime

from asyncdist.cuda.provider import DRIVER_LIBRARY
from asyncdist.errors import DistBackendError

__all__ = ["address_range", "device_uuid", "on_device", "translated"]

UUID_BYTES: Final = 16


@contextmanager
def on_device(device: int) -> Iterator[None]:
    """Let `device` be this thread's current one in the block."""
    before = runtime.getDevice()
    if before != device:
        runtime.setDevice(device)
    try:
        yield
    finally:
        if before != device:
            runtime.setDevice(before)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise whatever cupy raises as DistBackendError that says what was being done."""
    try:
        yield
    except DistBackendError:
        raise
    except Exception as error:  # CUDARuntimeError, CUDADriverError, NcclError, KeyError for codes it does not know
        raise DistBackendError(f"{what} failed: {error if str(error) else type(error).__name__}") from error


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


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL(DRIVER_LIBRARY)
    _check(library.cuInit(0), "cuInit")
    return library


def _check(status: int, function: str) -> None:
    if status:
        raise DistBackendError(f"{function} failed with CUDA error {status}")
