"""The part of CUDA that asyncdist uses, as abstract classes without any library behind them.

`cupy_runtime.CupyRuntime` is the real thing and `asyncdist.testing.FakeRuntime` the one for tests; both pass the checks
of `tests/kits/cuda_conformance.py`. NCCL's part is in `nccl_interface`. Common rules:

- A pointer is an `int`. Device memory, pinned and ordinary host memory share one address space.
- Work is queued on a stream and runs in its order; what a method queues has not happened when it returns.
- The CUDA runtime keeps a current device per thread. A method that needs one sets it and puts the thread's own back, so
  that any thread may call anything and no current device changes; only `set_device` changes it for good.
- The caller that queues work keeps the memory alive until an event recorded after it is done.
- Every failure of the library is `DistBackendError` with the library's own words. Some are asynchronous: an earlier
  kernel's failure is raised by whichever call comes next on that device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.arrays.reduce_op import ReduceOp

__all__ = ["MAX_SOURCES", "Event", "Memory", "Pinned", "Resource", "Runtime", "Stream"]

MAX_SOURCES: Final = 64
"""Of one `Runtime.reduce`: more ranks never share a device, and their pointers are arguments of one kernel."""


class Resource(ABC):
    """Something to be closed; `with` closes it too. Closing twice does nothing."""

    @abstractmethod
    def close(self) -> None:
        """Give it back. Closing twice does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Event(Resource):
    """A point in a stream; made by `Runtime.new_event` (timing disabled, blocking synchronization)."""

    device: int
    handle: int
    """cudaEvent_t as an integer."""

    @abstractmethod
    def record(self, stream: Stream) -> None:
        """Let the event be done once everything queued on `stream` so far is; the stream must be of its device.

        An event may be recorded again; then only the last time counts, except for waits that were queued before.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether everything before the event has happened, without waiting; True if it was never recorded."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block this thread, without the GIL and without spinning, until the event is done."""


class Stream(Resource):
    """A queue of work on one device. Streams that `external_stream` or `current_stream` gave are not ours to end."""

    handle: int
    """cudaStream_t as an integer; 0 and 1 are the legacy default stream, 2 is the thread's own default stream."""

    device: int

    @abstractmethod
    def wait_event(self, event: Event) -> None:
        """Let work queued here from now on wait for `event` as recorded now; the caller does not wait.

        The event may be of another device or process.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Block this thread, without the GIL, until everything queued here has happened."""


class Pinned(Resource):
    """Page-locked host memory, which devices copy from and to at full speed while the CPU does other things."""

    pointer: int
    nbytes: int
    array: Array
    """The memory as uint8[nbytes]; not to be used after `close`."""


class Memory(Resource):
    """A block of device memory of its own, outside of any pool, so that an IPC handle stands for exactly this block.

    `close` waits for the whole device (cudaFree does), so blocks are kept and reused rather than made per operation.
    Processes that opened its handle must close theirs first.
    """

    pointer: int
    nbytes: int
    device: int


class Runtime(ABC):
    """Devices, memory, streams and events."""

    name: str
    """For messages: `"cupy 14.2.0 (CUDA 12.9)"`, `"fake"`."""

    @abstractmethod
    def device_count(self) -> int:
        """How many devices this process sees."""

    @abstractmethod
    def current_device(self) -> int:
        """This thread's current device."""

    @abstractmethod
    def set_device(self, device: int) -> None:
        """Make `device` this thread's current one."""

    @abstractmethod
    def device_id(self, device: int) -> str:
        """The device's UUID: equal in all processes that see it, whatever index they see it under."""

    @abstractmethod
    def peer_access(self, device: int, other_id: str) -> bool:
        """Whether kernels of `device` can address the memory of the device with UUID `other_id`.

        True for the device itself; False where this process does not see the other one.
        """

    @abstractmethod
    def pointer_device(self, pointer: int) -> int | None:
        """The device whose memory `pointer` points into; None for host memory, pinned or not."""

    @abstractmethod
    def new_stream(self, device: int) -> Stream:
        """Make a stream that does not wait for the default stream, nor the default stream for it."""

    @abstractmethod
    def current_stream(self, device: int) -> Stream:
        """The stream on which this thread queues its work for `device` unless it says otherwise."""

    @abstractmethod
    def external_stream(self, handle: int, device: int) -> Stream:
        """A stream of another library, e.g. `torch.cuda.Stream.cuda_stream`; `close` leaves it as it is."""

    @abstractmethod
    def new_event(self, device: int) -> Event:
        """Make an event."""

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Queue a copy between any two places, device or host; zero bytes do nothing.

        The ranges must not overlap. Ordinary (not pinned) host memory may make the call wait for the copy.
        """

    @abstractmethod
    def fill(self, pointer: int, nbytes: int, byte: int, stream: Stream) -> None:
        """Queue setting `nbytes` bytes of device memory to `byte`, 0 to 255."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Pinned:
        """Allocate page-locked host memory, usable by every device; slow, so keep it."""

    @abstractmethod
    def allocate(self, nbytes: int, device: int) -> Memory:
        """Allocate device memory of its own; slow, so keep it. `nbytes` must be positive."""

    @abstractmethod
    def memory_size(self, device: int) -> int:
        """How many bytes of memory the device has in all, in use or not; those of the instance on a partitioned one."""

    @abstractmethod
    def memory_range(self, pointer: int) -> tuple[int, int]:
        """Base and length in bytes of the allocation that device pointer `pointer` points into."""

    @abstractmethod
    def ipc_handle(self, pointer: int) -> bytes:
        """The handle (64 bytes) by which other processes open the whole allocation that `pointer` points into.

        Raises DistBackendError for memory that has none: from cudaMallocAsync or mapped by cuMem* (torch's expandable
        segments).
        """

    @abstractmethod
    def ipc_open(self, handle: bytes, device: int) -> int:
        """Map another process's allocation and return its base here; `device` is the one that will use it.

        Slow, so keep it: once per allocation, not per operation. A process cannot open a handle of its own, and opening
        the same handle twice on one device gives the same pointer, to be closed as often.
        """

    @abstractmethod
    def ipc_close(self, pointer: int) -> None:
        """Unmap what `ipc_open` mapped; work that uses it must have ended."""

    @abstractmethod
    def reduce(
        self, op: ReduceOp, dtype: np.dtype[Any], target: int, sources: Sequence[int], count: int, stream: Stream
    ) -> None:
        """Queue target[i] = sources[0][i] op sources[1][i] op ..., in this order, for `count` elements of `dtype`.

        One pass over memory. `target` may be one of the sources; other overlap is not allowed. Every step is rounded
        to `dtype`, as on the CPU; AVG divides the sum by `len(sources)`. PREMUL_SUM is `scale` followed by SUM, since
        factors may differ between ranks. With one source it is a copy. Raises TypeError for an op and dtype that
        `arrays.reduction.validate` refuses, ValueError for more than `MAX_SOURCES` sources or none.
        """

    def prepare_reduce(self, op: ReduceOp, dtype: np.dtype[Any], sources: int, device: int) -> None:  # noqa: B027
        """Compile what `reduce` with so many sources will launch, which takes part of a second: not on an event loop.

        Compiled kernels are kept, on disk as well. Raises TypeError and ValueError as `reduce`.
        """

    def prepare_scale(self, dtype: np.dtype[Any], device: int) -> None:  # noqa: B027
        """Compile what `scale` will launch, as `prepare_reduce`. Raises TypeError as `scale`."""

    @abstractmethod
    def scale(
        self, dtype: np.dtype[Any], target: int, source: int, factor: float | complex, count: int, stream: Stream
    ) -> None:
        """Queue target[i] = source[i] * factor, rounded once, as PREMUL_SUM on the CPU; `target` may be `source`."""
