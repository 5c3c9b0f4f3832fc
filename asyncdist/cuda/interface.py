"""The parts of CUDA and NCCL that asyncdist uses, as abstract classes without any library behind them.

`CupyRuntime` and `CupyNccl` are the real implementations, `FakeRuntime` and `FakeNccl` of `asyncdist.testing` the ones
for tests. All pass `tests/kits/cuda_conformance.py` and `nccl_conformance.py`.

CUDA:

- A pointer is an `int`. Device memory, pinned and ordinary host memory share one address space.
- Work is queued on a stream and runs in the stream's order. A method returns before its work has run.
- CUDA keeps a current device for each thread. A method that needs a current device sets it and restores the thread's
  own afterwards, so any thread may call any method. Only `set_device` changes the current device for good.
- The caller that queues work keeps the memory alive until an event recorded after the work is done.
- Every failure of the library is a `DistBackendError` with the library's own words. Some failures are asynchronous: the
  next call on that device raises the failure of an earlier kernel.

NCCL: `open`, `destroy`, the end of `group()` and any operation that first connects to a peer may block the calling
thread as long as another rank takes, and for ever if that rank died. NCCL connects when a communicator opens (the
provider sets NCCL_RUNTIME_CONNECT=0, unless the environment says otherwise), except for send and recv: the first of
them connects to its peer, so call that one in a thread as well. Use a daemon thread of your own. The interpreter joins
an executor's threads at its exit, and a thread that waits inside NCCL never ends. Once about 1,000 kernels wait on a
device, the next launch blocks too: bound what is in flight.

NCCL reduces these numpy dtypes:

| dtype | reduced as | SUM | PRODUCT | MIN, MAX | AVG | PREMUL_SUM |
| --- | --- | --- | --- | --- | --- | --- |
| bool | uint8 | or (max) | and (min) | and, or | - | - |
| int8, int32, int64, uint8, uint32, uint64 | itself | wraps | wraps | yes | truncates | - |
| float16, bfloat16, float32, float64 | itself | yes | yes | a number wins over NaN | yes | yes |
| float8_e4m3fn, float8_e5m2 (NCCL 2.24, compute capability 9.0) | itself | yes | yes | as above | yes | yes |
| complex64, complex128 | pairs of reals | yes | - | - | yes | real factor |

NCCL has no 16-bit integers. Data that is only moved travels as bytes, whatever its dtype.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.arrays.reduce_op import PremulSum, ReduceOp

Dtype: TypeAlias = np.dtype[Any]

Op: TypeAlias = ReduceOp | PremulSum
"""What GPUs reduce with."""

MAX_SOURCES: Final = 64
"""Sources of one `Runtime.reduce`, whose pointers are arguments of one kernel. More ranks never share a device."""


FLOAT8_VERSION: Final = 22400
"""The first NCCL with float8."""

FLOAT8_CAPABILITY: Final = 9
"""Major compute capability from which on NCCL reduces float8. On older GPUs NCCL only moves such arrays."""


class Resource(ABC):
    """Something to be closed; `with` closes it too."""

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
        """Have the event done once everything queued on `stream` so far is done. Both must be of one device.

        An event may be recorded again. Then only the last record counts, except for waits that were queued before.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether everything before the event is done, without waiting. True if the event was never recorded."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block this thread, without the GIL and without spinning, until the event is done."""


class Stream(Resource):
    """A queue of work on one device. Closing a stream that another library owns does nothing."""

    handle: int
    """cudaStream_t as an integer; 0 and 1 are the legacy default stream, 2 is the thread's own default stream."""

    device: int

    @abstractmethod
    def wait_event(self, event: Event) -> None:
        """Have work queued here from now on wait for the last record of `event`. The calling thread does not wait.

        The event may be of another device or process.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Block this thread, without the GIL, until everything queued here has happened."""


class Pinned(Resource):
    """Page-locked host memory. Devices copy from and to it at full speed while the CPU does other things."""

    pointer: int
    nbytes: int
    array: Array
    """The memory as uint8[nbytes]; not to be used after `close`."""


class Memory(Resource):
    """A block of device memory outside of any pool, so that an IPC handle stands for exactly this block.

    `close` waits for the whole device, as cudaFree does: keep blocks and reuse them. Other processes must close the
    handles that they opened before the owner closes the block.
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
    def pointer_device(self, pointer: int) -> int | None:
        """The device whose memory `pointer` points into; None for host memory, pinned or not."""

    @abstractmethod
    def new_stream(self, device: int) -> Stream:
        """Make a stream. It and the default stream do not wait for each other."""

    @abstractmethod
    def current_stream(self, device: int) -> Stream:
        """The stream on which libraries queue this thread's work for `device` by default."""

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
        """Bytes of memory of the device, in use or not; on a partitioned device those of the instance."""

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
        self, op: ReduceOp, dtype: Dtype, target: int, sources: Sequence[int], count: int, stream: Stream
    ) -> None:
        """Queue target[i] = sources[0][i] op sources[1][i] op ..., in this order, for `count` elements of `dtype`.

        One pass over memory. `target` may be one of the sources; other overlap is not allowed. Every step is rounded
        to `dtype`, as on the CPU; AVG divides the sum by `len(sources)`. PREMUL_SUM is `scale` followed by SUM, since
        factors may differ between ranks. With one source it is a copy. Raises TypeError for an op and dtype that
        `arrays.reduction.validate` refuses, ValueError for more than `MAX_SOURCES` sources or none.
        """

    def prepare_reduce(self, op: ReduceOp, dtype: Dtype, sources: int, device: int) -> None:  # noqa: B027
        """Compile the kernel of `reduce` with so many sources. This takes part of a second: not on an event loop.

        Compiled kernels are kept, on disk as well. Raises TypeError and ValueError as `reduce`.
        """

    def prepare_scale(self, dtype: Dtype, device: int) -> None:  # noqa: B027
        """Compile the kernel of `scale`, as `prepare_reduce`. Raises TypeError as `scale`."""

    @abstractmethod
    def scale(
        self, dtype: Dtype, target: int, source: int, factor: float | complex, count: int, stream: Stream
    ) -> None:
        """Queue target[i] = source[i] * factor, rounded once, as PREMUL_SUM on the CPU; `target` may be `source`."""


class Communicator(ABC):
    """One rank of one communicator, on one device.

    Counts are elements of `dtype`. Operations are queued on `stream`. All ranks must issue the same operations in the
    same order; otherwise all ranks wait for ever, as with NCCL, and nothing here notices. Data movement (`broadcast`,
    `all_gather`, `send`, `recv`) takes any dtype, a reduction the dtypes that `Nccl.refusal` does not refuse. After
    `abort` or `destroy` every operation raises DistBackendError.
    """

    rank: int
    size: int
    device: int

    @abstractmethod
    def all_reduce(self, source: int, target: int, count: int, dtype: Dtype, op: Op, stream: Stream) -> None:
        """`count` elements each; `target` may be `source`."""

    @abstractmethod
    def reduce(self, source: int, target: int, count: int, dtype: Dtype, op: Op, root: int, stream: Stream) -> None:
        """As all_reduce, but only root's `target` is written; it may be 0 elsewhere."""

    @abstractmethod
    def broadcast(self, source: int, target: int, count: int, dtype: Dtype, root: int, stream: Stream) -> None:
        """Root's `source` to every rank's `target`, root's included; `source` may be 0 elsewhere."""

    @abstractmethod
    def all_gather(self, source: int, target: int, count: int, dtype: Dtype, stream: Stream) -> None:
        """`count` elements of each rank to `target` of `size * count`. `source` may be this rank's place in
        `target`."""

    @abstractmethod
    def reduce_scatter(self, source: int, target: int, count: int, dtype: Dtype, op: Op, stream: Stream) -> None:
        """Reduce `size * count` elements; rank r gets the r-th `count`. `target` may be that place in `source`."""

    @abstractmethod
    def send(self, source: int, count: int, dtype: Dtype, peer: int, stream: Stream) -> None:
        """Send to `peer`. The send completes on the device once `peer` receives. To oneself only inside a group."""

    @abstractmethod
    def recv(self, target: int, count: int, dtype: Dtype, peer: int, stream: Stream) -> None:
        """Receive from `peer`, in the order in which it sent; counts must be equal."""

    @abstractmethod
    def async_error(self) -> str:
        """What has gone wrong on the device or the network, in NCCL's words. Empty if nothing has, or after the end."""

    @abstractmethod
    def abort(self) -> None:
        """End all queued operations without results, and give the communicator up. From any thread.

        Peers are not told. An abort may take seconds. A second abort, or an abort after destroy, does nothing.
        """

    @abstractmethod
    def destroy(self) -> None:
        """Give the communicator up in order: every rank calls this once its work is complete. Blocks, see the module.

        Raises DistBackendError when called twice or after abort.
        """


class Nccl(ABC):
    """The library."""

    name: str
    """For messages: `"NCCL 2.30.4 through cupy 14.2.0"`."""

    native_premul_sum: bool
    """Whether reductions take PremulSum. Otherwise multiply a copy first (`Runtime.scale`) and use SUM."""

    @abstractmethod
    def version(self) -> int:
        """As ncclGetVersion: 23004 is 2.30.4."""

    @abstractmethod
    def unique_id(self) -> bytes:
        """The id (128 bytes) of a new communicator: an address and a secret. Only its ranks may see the id.

        Also starts the thread in this process through which the ranks meet: call this on one of those ranks.
        """

    @abstractmethod
    def open(self, size: int, unique_id: bytes, rank: int, device: int) -> Communicator:
        """Join a new communicator; blocks until all `size` ranks have, and cannot be interrupted.

        Raises DistBackendError, among other things when two ranks use one device (unless NCCL_MULTI_RANK_GPU_ENABLE=1
        and NCCL is 2.30 or newer).
        """

    @abstractmethod
    def group(self) -> AbstractContextManager[None]:
        """Launch the operations of this thread inside `with` together at its end, so that none waits for another.

        Needed for sends and receives that depend on each other, and for several communicators driven by one thread.
        After an exception the operations issued before are launched all the same: NCCL cannot take them back.
        """

    @abstractmethod
    def refusal(self, dtype: Dtype, op: Op, device: int) -> str:
        """Why reductions of `dtype` with `op` on `device` are refused, as the end of a sentence. Empty if they are not.

        bool is reduced as uint8 (SUM: or, PRODUCT: and), complex as pairs of reals (SUM, AVG and PREMUL_SUM with a real
        factor). Bitwise operations and `ReduceOp.custom` are always refused.
        """


NcclType = enum.IntEnum(
    "NcclType",
    "INT8 UINT8 INT32 UINT32 INT64 UINT64 FLOAT16 FLOAT32 FLOAT64 BFLOAT16 FLOAT8_E4M3 FLOAT8_E5M2",
    start=0,
)
"""ncclDataType_t, from ncclInt8 = 0 on."""

NcclOp = enum.IntEnum("NcclOp", "SUM PROD MAX MIN AVG", start=0)
"""ncclRedOp_t, from ncclSum = 0 on."""

_TYPES: Final = {one.name.lower().replace("e4m3", "e4m3fn"): one for one in NcclType}
"""By numpy's name; NCCL's float8_e4m3 has no infinity, as ml_dtypes' float8_e4m3fn."""
_REALS: Final = {"complex64": NcclType.FLOAT32, "complex128": NcclType.FLOAT64}
_EXTREMES: Final = {ReduceOp.MIN: NcclOp.MIN, ReduceOp.MAX: NcclOp.MAX}
_OPS: Final = {ReduceOp.SUM: NcclOp.SUM, ReduceOp.PRODUCT: NcclOp.PROD, ReduceOp.AVG: NcclOp.AVG, **_EXTREMES}
_BOOL_OPS: Final = {ReduceOp.SUM: NcclOp.MAX, ReduceOp.PRODUCT: NcclOp.MIN, **_EXTREMES}


@lru_cache(maxsize=256)  # every operation times every dtype
def refusal(dtype: Dtype, op: Op, version: int, capability: int = FLOAT8_CAPABILITY) -> str:
    """As `Nccl.refusal`, for NCCL `version` and a GPU of that major compute capability."""
    if isinstance(op, PremulSum):
        if dtype.kind in "biu":
            return f"{op} is not defined for arrays of dtype {dtype}"
        if isinstance(op.factor, complex):
            return f"NCCL cannot multiply by the complex factor of {op}"
        op = ReduceOp.SUM
    if op not in _OPS:
        return f"NCCL has no {op!r}"
    if dtype == np.bool_:
        return "" if op in _BOOL_OPS else f"{op} is not defined for bool arrays"
    if dtype.name in _REALS:
        return "" if op in (ReduceOp.SUM, ReduceOp.AVG) else f"NCCL cannot reduce complex arrays with {op}"
    kind = _TYPES.get(dtype.name)
    if kind is None:
        return f"NCCL cannot reduce arrays of dtype {dtype}"
    if kind >= NcclType.FLOAT8_E4M3 and version < FLOAT8_VERSION:
        return f"NCCL {version} cannot reduce arrays of dtype {dtype} (2.24 can)"
    if kind >= NcclType.FLOAT8_E4M3 and capability < FLOAT8_CAPABILITY:
        return (
            f"NCCL cannot reduce arrays of dtype {dtype} on this GPU, whose compute capability is below "
            f"{FLOAT8_CAPABILITY}.0"
        )
    return ""


@lru_cache(maxsize=256)
def reduction(dtype: Dtype, op: ReduceOp) -> tuple[NcclType, NcclOp, int]:
    """NCCL's type, its operation, and how many of its elements make one of `dtype`, where `refusal` is empty."""
    if dtype == np.bool_:
        return NcclType.UINT8, _BOOL_OPS[op], 1
    if dtype.name in _REALS:
        return _REALS[dtype.name], _OPS[op], 2
    return _TYPES[dtype.name], _OPS[op], 1
