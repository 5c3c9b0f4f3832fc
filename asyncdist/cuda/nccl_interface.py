"""The part of NCCL that asyncdist uses, as abstract classes, and NCCL's data types and operations.

What may block the calling thread, for as long as another rank takes and forever if it died: `open`, `split`, `destroy`,
leaving `group()` and, outside a group, any operation that has to connect to a peer first. NCCL connects when a
communicator opens (the provider sets NCCL_RUNTIME_CONNECT=0, unless the environment says otherwise), except for send
and recv, whose peers are connected by the first of them: call that one in a thread as well. Use a daemon thread of
your own: an executor's threads are joined when the interpreter exits, and one that waits inside of NCCL never ends.

Once about 1,000 kernels wait on a device, launching one more blocks too: bound what is in flight.

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
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, Final

import numpy as np

from asyncdist.arrays.reduce_op import PremulSum, ReduceOp
from asyncdist.cuda.interface import Stream

__all__ = ["FLOAT8_CAPABILITY", "FLOAT8_VERSION", "Communicator", "Nccl", "NcclOp", "NcclType", "reduction", "refusal"]


FLOAT8_VERSION: Final = 22400
"""The first NCCL with float8."""

FLOAT8_CAPABILITY: Final = 9
"""Major compute capability of the first GPUs on which it reduces float8; on others it moves such arrays only."""


class Communicator(ABC):
    """One rank of one communicator, on one device.

    Counts are elements of `dtype`. Operations are queued on `stream` and must be issued in the same order by all ranks;
    otherwise all ranks wait forever, which is NCCL's way and not noticed here. Data movement (`broadcast`,
    `all_gather`, `send`, `recv`) takes any dtype; reductions those that `Nccl.refusal` has nothing against. After
    `abort` or `destroy` every operation raises DistBackendError.
    """

    rank: int
    size: int
    device: int

    @abstractmethod
    def all_reduce(
        self,
        source: int,
        target: int,
        count: int,
        dtype: np.dtype[Any],
        op: ReduceOp | PremulSum,
        stream: Stream,
    ) -> None:
        """`count` elements each; `target` may be `source`."""

    @abstractmethod
    def reduce(
        self,
        source: int,
        target: int,
        count: int,
        dtype: np.dtype[Any],
        op: ReduceOp | PremulSum,
        root: int,
        stream: Stream,
    ) -> None:
        """As all_reduce, but only root's `target` is written; it may be 0 elsewhere."""

    @abstractmethod
    def broadcast(self, source: int, target: int, count: int, dtype: np.dtype[Any], root: int, stream: Stream) -> None:
        """Root's `source` to every rank's `target`, root's included; `source` may be 0 elsewhere."""

    @abstractmethod
    def all_gather(self, source: int, target: int, count: int, dtype: np.dtype[Any], stream: Stream) -> None:
        """`count` elements of each rank to `target` of `size * count`; `source` may be its own place in there."""

    @abstractmethod
    def reduce_scatter(
        self,
        source: int,
        target: int,
        count: int,
        dtype: np.dtype[Any],
        op: ReduceOp | PremulSum,
        stream: Stream,
    ) -> None:
        """`size * count` elements each, of which rank r gets the reduced r-th `count`; may be its place in `source`."""

    @abstractmethod
    def send(self, source: int, count: int, dtype: np.dtype[Any], peer: int, stream: Stream) -> None:
        """Send to `peer`; completes on the device only once it receives. To oneself only inside a group."""

    @abstractmethod
    def recv(self, target: int, count: int, dtype: np.dtype[Any], peer: int, stream: Stream) -> None:
        """Receive from `peer`, in the order in which it sent; counts must be equal."""

    @abstractmethod
    def async_error(self) -> str:
        """What went wrong on the device or the network since, in NCCL's words; empty if nothing, or once it ended."""

    @abstractmethod
    def abort(self) -> None:
        """End everything that is queued, without its results, and give the communicator up; from any thread.

        Peers are not told. May take seconds. A second abort, or one after destroy, does nothing.
        """

    @abstractmethod
    def destroy(self) -> None:
        """Give the communicator up in order: every rank calls it once its work is complete. Blocks, see above.

        Raises DistBackendError when called twice or after abort.
        """

    @abstractmethod
    def split(self, color: int, key: int) -> Communicator | None:
        """Make communicators of the ranks with equal `color`, ordered by `key`, then rank; None for color -1.

        Collective and blocking; nothing may be in flight. Raises DistBackendError where NCCL or cupy is too old.
        """


class Nccl(ABC):
    """The library."""

    name: str
    """For messages: `"NCCL 2.30.4 through cupy 14.2.0"`."""

    can_split: bool
    """Whether `Communicator.split` works; otherwise open another one with a new unique id."""

    native_premul_sum: bool
    """Whether reductions take PremulSum; otherwise premultiply a copy (`Runtime.scale`) and use SUM."""

    @abstractmethod
    def version(self) -> int:
        """As ncclGetVersion: 23004 is 2.30.4."""

    @abstractmethod
    def unique_id(self) -> bytes:
        """A new communicator's id (128 bytes): an address and a secret, to be shown to its ranks only.

        Also starts the thread in this process through which they meet: call it on one of those ranks.
        """

    @abstractmethod
    def open(self, size: int, unique_id: bytes, rank: int, device: int) -> Communicator:
        """Join a new communicator; blocks until all `size` ranks have, and cannot be interrupted.

        Raises DistBackendError, among other things when two ranks use one device (unless NCCL_MULTI_RANK_GPU_ENABLE=1
        and NCCL is 2.30 or newer).
        """

    @abstractmethod
    def group(self) -> AbstractContextManager[None]:
        """Operations of this thread inside `with` are launched together at its end, none waiting for another.

        Needed for sends and receives that depend on each other, and for several communicators driven by one thread.
        Left by an exception, what was issued before it is launched all the same: NCCL cannot take it back.
        """

    @abstractmethod
    def refusal(self, dtype: np.dtype[Any], op: ReduceOp | PremulSum, device: int) -> str:
        """Why reductions of `dtype` with `op` on `device` are refused, ending a sentence; empty if they are not.

        bool is reduced as uint8 (SUM: or, PRODUCT: and), complex as pairs of reals (SUM, AVG and PREMUL_SUM with a real
        factor). Bitwise operations and `ReduceOp.custom` are always refused.
        """


class NcclType(enum.IntEnum):
    """ncclDataType_t."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8_E4M3 = 10
    FLOAT8_E5M2 = 11


class NcclOp(enum.IntEnum):
    """ncclRedOp_t."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


_TYPES: Final = {
    "int8": NcclType.INT8,
    "uint8": NcclType.UINT8,
    "int32": NcclType.INT32,
    "uint32": NcclType.UINT32,
    "int64": NcclType.INT64,
    "uint64": NcclType.UINT64,
    "float16": NcclType.FLOAT16,
    "float32": NcclType.FLOAT32,
    "float64": NcclType.FLOAT64,
    "bfloat16": NcclType.BFLOAT16,
    "float8_e4m3fn": NcclType.FLOAT8_E4M3,
    "float8_e5m2": NcclType.FLOAT8_E5M2,
}
_REALS: Final = {"complex64": NcclType.FLOAT32, "complex128": NcclType.FLOAT64}
_OPS: Final = {
    ReduceOp.SUM: NcclOp.SUM,
    ReduceOp.PRODUCT: NcclOp.PROD,
    ReduceOp.MIN: NcclOp.MIN,
    ReduceOp.MAX: NcclOp.MAX,
    ReduceOp.AVG: NcclOp.AVG,
}
_BOOL_OPS: Final = {
    ReduceOp.SUM: NcclOp.MAX,
    ReduceOp.PRODUCT: NcclOp.MIN,
    ReduceOp.MIN: NcclOp.MIN,
    ReduceOp.MAX: NcclOp.MAX,
}


@lru_cache(maxsize=256)  # every operation times every dtype
def refusal(dtype: np.dtype[Any], op: ReduceOp | PremulSum, version: int, capability: int = FLOAT8_CAPABILITY) -> str:
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
def reduction(dtype: np.dtype[Any], op: ReduceOp) -> tuple[NcclType, NcclOp, int]:
    """NCCL's type, its operation, and how many of its elements make one of `dtype`, where `refusal` is empty."""
    if dtype == np.bool_:
        return NcclType.UINT8, _BOOL_OPS[op], 1
    if dtype.name in _REALS:
        return _REALS[dtype.name], _OPS[op], 2
    return _TYPES[dtype.name], _OPS[op], 1
