"""NCCL through cupy's binding.

What cupy's binding does, as read in versions 13 and 14, and what is made of it here:

- `check_async_error` raises, NcclError or, for codes that it does not know, KeyError. `async_error` returns the words.
- `abort` frees the communicator first and forgets it afterwards, so another thread must not ask it anything meanwhile:
  a lock and our own state keep `async_error` away. Operations in flight in other threads are what an abort is for.
- Collecting a communicator as garbage destroys it, which waits for the other ranks. Those that were neither destroyed
  nor aborted are never collected, not when the interpreter ends either: they keep a reference that nobody holds.
- Unique ids are bytes since 14.0, a tuple of signed characters before.
- All calls release the GIL. None takes a time-out, and none of NCCL's non-blocking mode, PREMUL_SUM, shrink or grow is
  there.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, Final

import cupy
from cupy.cuda import runtime

from asyncdist.arrays.reduce_op import PremulSum, ReduceOp
from asyncdist.cuda.cupy_runtime import calling, failed
from asyncdist.cuda.interface import Communicator, Dtype, Nccl, NcclType, Op, Stream, reduction, refusal
from asyncdist.errors import DistBackendError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # where NCCL is missing cupy warns, and we say so once it is asked for
    from cupy.cuda import nccl as binding

_BYTES: Final = int(NcclType.UINT8)

CAPABILITY_MAJOR: Final = 75
"""cudaDevAttrComputeCapabilityMajor, for which cupy has no name."""

EAGER_CONNECT: Final = "NCCL_RUNTIME_CONNECT"
"""0 lets a communicator connect when it is opened rather than in the first collective, which would block its caller."""


def _keep(raw: Any) -> None:
    """Never collect a communicator, until `_release`."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(raw))


def _release(raw: Any) -> None:
    """Let a communicator be collected, which was given up: that does nothing any more."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(raw))


def _words(unique_id: bytes) -> Any:
    """A unique id as this cupy wants it."""
    if int(cupy.__version__.split(".")[0]) >= 14:
        return unique_id
    return tuple(octet - 256 if octet > 127 else octet for octet in unique_id)


class _Communicator(Communicator):
    def __init__(self, raw: Any, rank: int, size: int, device: int, version: int) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._raw = raw
        self._version = version
        self._state = "open"
        self._lock = threading.Lock()
        _keep(raw)

    def all_reduce(self, source: int, target: int, count: int, dtype: Dtype, op: Op, stream: Stream) -> None:
        kind, operation, factor = _native(dtype, op, self._version, self.size)
        self._issue(
            "ncclAllReduce", self._raw.allReduce, source, target, count * factor, kind, operation, stream.handle
        )

    def reduce(self, source: int, target: int, count: int, dtype: Dtype, op: Op, root: int, stream: Stream) -> None:
        kind, operation, factor = _native(dtype, op, self._version, self.size)
        self._issue(
            "ncclReduce", self._raw.reduce, source, target, count * factor, kind, operation, root, stream.handle
        )

    def broadcast(self, source: int, target: int, count: int, dtype: Dtype, root: int, stream: Stream) -> None:
        nbytes = count * dtype.itemsize
        self._issue("ncclBroadcast", self._raw.broadcast, source or target, target, nbytes, _BYTES, root, stream.handle)

    def all_gather(self, source: int, target: int, count: int, dtype: Dtype, stream: Stream) -> None:
        self._issue("ncclAllGather", self._raw.allGather, source, target, count * dtype.itemsize, _BYTES, stream.handle)

    def reduce_scatter(self, source: int, target: int, count: int, dtype: Dtype, op: Op, stream: Stream) -> None:
        kind, operation, factor = _native(dtype, op, self._version, self.size)
        self._issue(
            "ncclReduceScatter", self._raw.reduceScatter, source, target, count * factor, kind, operation, stream.handle
        )

    def send(self, source: int, count: int, dtype: Dtype, peer: int, stream: Stream) -> None:
        self._issue("ncclSend", self._raw.send, source, count * dtype.itemsize, _BYTES, peer, stream.handle)

    def recv(self, target: int, count: int, dtype: Dtype, peer: int, stream: Stream) -> None:
        self._issue("ncclRecv", self._raw.recv, target, count * dtype.itemsize, _BYTES, peer, stream.handle)

    def async_error(self) -> str:
        with self._lock:
            if self._state != "open":
                return ""
            try:
                self._raw.check_async_error()
            except Exception as error:  # see above
                return str(error)
            return ""

    def abort(self) -> None:
        with self._lock:
            if self._state != "open":
                return
            self._state = "aborted"
        with calling("ncclCommAbort", self.device):
            self._raw.abort()
        _release(self._raw)

    def destroy(self) -> None:
        with self._lock:
            self._check()
            self._state = "destroyed"
        with calling("ncclCommDestroy", self.device):
            self._raw.destroy()
        _release(self._raw)

    def _issue(self, what: str, function: Callable[..., object], *arguments: Any) -> None:
        """NCCL launches on the thread's current device, which must be the communicator's."""
        if self._state != "open":
            self._check()
        try:
            if runtime.getDevice() == self.device:
                function(*arguments)
                return
        except Exception as error:
            raise failed(what, error) from error
        with calling(what, self.device):
            function(*arguments)

    def _check(self) -> None:
        if self._state != "open":
            raise DistBackendError(f"the NCCL communicator of rank {self.rank} was {self._state}")


@lru_cache(maxsize=256)
def _native(dtype: Dtype, op: Op, version: int, size: int) -> tuple[int, int, int]:
    """NCCL's type, its operation, and how many of its elements make one of `dtype`; DistBackendError if it has none."""
    reason = refusal(dtype, op, version)
    if reason:
        raise DistBackendError(reason)
    if isinstance(op, PremulSum):
        raise DistBackendError("cupy's NCCL has no PREMUL_SUM: scale first")
    if op is ReduceOp.AVG and size == 1:  # NCCL multiplies by 1, and refuses float8 there
        op = ReduceOp.SUM
    kind, operation, factor = reduction(dtype, op)
    return int(kind), int(operation), factor


@lru_cache(maxsize=64)
def _capability(device: int) -> int:
    """Major compute capability."""
    with calling("cudaDeviceGetAttribute"):
        return int(runtime.deviceGetAttribute(CAPABILITY_MAJOR, device))


class CupyNccl(Nccl):
    """See Nccl."""

    native_premul_sum = False

    def __init__(self) -> None:
        if not binding.available:
            raise DistBackendError("NCCL is not installed (pip install nvidia-nccl-cu12 or nvidia-nccl-cu13)")
        self._version = int(binding.get_version())
        major, minor, patch = self._version // 10000, self._version // 100 % 100, self._version % 100
        self.name = f"NCCL {major}.{minor}.{patch} through cupy {cupy.__version__}"

    def version(self) -> int:
        """See Nccl."""
        return self._version

    def unique_id(self) -> bytes:
        """See Nccl."""
        with calling("ncclGetUniqueId"):
            made = binding.get_unique_id()
        return bytes(made) if isinstance(made, bytes) else bytes(octet & 0xFF for octet in made)

    def open(self, size: int, unique_id: bytes, rank: int, device: int) -> Communicator:
        """See Nccl."""
        os.environ.setdefault(EAGER_CONNECT, "0")
        with calling(f"ncclCommInitRank of rank {rank} of {size} on device {device}", device):
            raw = binding.NcclCommunicator(size, _words(unique_id), rank)
        return _Communicator(raw, rank, size, device, self._version)

    @contextmanager
    def group(self) -> Iterator[None]:
        """See Nccl."""
        with calling("ncclGroupStart"):
            binding.groupStart()
        try:
            yield
        except BaseException:
            with suppress(DistBackendError), calling("ncclGroupEnd"):  # it says again what has failed
                binding.groupEnd()
            raise
        with calling("ncclGroupEnd"):
            binding.groupEnd()

    def refusal(self, dtype: Dtype, op: Op, device: int) -> str:
        """See Nccl."""
        return refusal(dtype, op, self._version, _capability(device))
