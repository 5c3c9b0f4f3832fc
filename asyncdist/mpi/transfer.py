"""Transfer: one collective as MPI's own nonblocking operations.

| here | MPI |
| --- | --- |
| all_reduce, reduce, reduce_scatter | Iallreduce, Ireduce, Ireduce_scatter; AVG is SUM, divided afterwards |
| scan, exscan | Iscan, Iexscan |
| broadcast, barrier | Ibcast, Ibarrier |
| all_gather, gather, scatter, all_to_all | Iallgather(v), Igather, Iscatter, Ialltoall |
| all_to_all, gather and scatter of lengths that only their owners know | Isend, Irecv between the arrays themselves |

What has no equal in MPI goes by the plans of `aio`, as messages (`has_equal`): reductions of float16, bfloat16 and
other types that MPI has not, MIN and MAX of floats (MPI does not say what becomes of NaN), `ReduceOp.custom`, arrays
from 2 GiB on (MPI counts in C ints), objects, and streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from asyncdist.arrays import reduction
from asyncdist.arrays.host import Array
from asyncdist.arrays.reduce_op import PremulSum, ReduceOp, ReduceOpLike
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.executor.runner import another_length
from asyncdist.collectives.host.operation import overlap
from asyncdist.errors import DistError

MAX_BYTES: Final = 2**31 - 1
"""MPI's counts and places are C ints."""
PIECE_BYTES: Final = 1 << 30
"""Largest part of an array in one message; longer ones go in several."""
TAGS: Final = 1 << 14
"""Tags of the messages of an exchange, in turn: MPI promises twice as many."""

_TYPES: Final = {
    "b1": "UINT8_T",
    **{f"i{size}": f"INT{8 * size}_T" for size in (1, 2, 4, 8)},
    **{f"u{size}": f"UINT{8 * size}_T" for size in (1, 2, 4, 8)},
    "f4": "FLOAT",
    "f8": "DOUBLE",
    "c8": "C_FLOAT_COMPLEX",
    "c16": "C_DOUBLE_COMPLEX",
}
_OF_BLOCKS: Final = frozenset({"all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"})
"""Whose count is that of one rank's block."""
_OPS: Final = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}
_OPS_ON_BOOL: Final = {"SUM": "BOR", "PRODUCT": "BAND", "MIN": "BAND", "MAX": "BOR"}
_EXTREMES: Final = {"MIN": "MIN", "MAX": "MAX"}


@lru_cache(maxsize=256)
def _names(op: ReduceOpLike, dtype: np.dtype[Any]) -> tuple[str, str] | None:
    """MPI's names of a reduction and of a type; None where it has no equal of them."""
    kind = f"{dtype.kind}{dtype.itemsize}"
    if kind not in _TYPES or not isinstance(op, ReduceOp | PremulSum):
        return None
    name = "SUM" if isinstance(op, PremulSum) else op.name
    table = _OPS if dtype.kind in "fc" else {**_OPS, **_EXTREMES}
    if dtype.kind == "b":
        table = {**table, **_OPS_ON_BOOL}
    return (table[name], _TYPES[kind]) if name in table else None


def has_equal(call: Call, size: int) -> bool:
    """Whether MPI has an operation for `call`: the same on all ranks that call the same."""
    if type(call) is not Call or call.algorithm is not None:
        return False
    if call.op is not None and _names(call.op, call.dtype) is None:
        return False
    if call.pieces is not None:
        return True
    counts = call.counts
    whole = sum(counts) if not isinstance(counts, int) else counts * size if call.collective in _OF_BLOCKS else counts
    return whole * call.dtype.itemsize <= MAX_BYTES


class Transfer:
    """One collective under way. `requests` are MPI's, which fills `statuses` if there are any."""

    def __init__(self, mpi: Any, comm: Any, call: Call, ranks: Sequence[int], rank: int, number: int) -> None:
        """Begin `call` as group rank `rank`. `ranks` are global; `number` is the place in the group's order."""
        self.call = call
        self.statuses: list[Any] | None = None
        self._mpi = mpi
        self._comm = comm
        self._ranks = ranks
        self._rank = rank
        self._tag = 1 + number % TAGS
        self._split: Array | None = None
        self._expected: list[tuple[int, int]] = []
        self._kept: list[Array] = []
        """What MPI reads and nobody else refers to."""
        begin: Callable[[], Any] = getattr(self, f"_{call.collective}")
        begun = begin()
        self.requests: list[Any] = begun if isinstance(begun, list) else [begun]

    def finish(self) -> None:
        """MPI is through: bring results to their places. Raises what came of it otherwise."""
        for status, (source, expected) in zip(self.statuses or (), self._expected, strict=False):
            nbytes = status.Get_count(self._mpi.BYTE)
            if nbytes != expected:
                raise another_length(self._ranks[source], nbytes, expected)
        if self._split is not None:
            start = 0
            for flat in self.call.outputs:
                flat.elements[...] = self._split[start : start + flat.elements.size]
                start += flat.elements.size

    def failure(self, error: Exception) -> DistError | None:
        """What MPI's error says, if it is about a length that does not suit; None otherwise."""
        for status, (source, expected) in zip(self.statuses or (), self._expected, strict=False):
            if self._mpi.Get_error_class(status.Get_error()) == self._mpi.ERR_TRUNCATE:  # MPICH's codes hold more
                return another_length(self._ranks[source], status.Get_count(self._mpi.BYTE), expected)
        return None

    # -- buffers

    def _bytes(self, array: Array) -> list[Any]:
        return [array.view(np.uint8), self._mpi.BYTE]

    def _numbers(self, array: Array) -> list[Any]:
        assert self.call.op is not None
        names = _names(self.call.op, self.call.dtype)
        assert names is not None
        return [array.view(np.uint8), array.size, getattr(self._mpi, names[1])]

    @property
    def _op(self) -> Any:
        assert self.call.op is not None
        names = _names(self.call.op, self.call.dtype)
        assert names is not None
        return getattr(self._mpi, names[0])

    def _inputs(self) -> list[Array]:
        """What this rank contributes, multiplied where it is to be, apart from where results go."""
        call = self.call
        arrays = [flat.elements for flat in call.inputs] if call.pieces is None else list(call.pieces[0])
        if type(call.op) is PremulSum or overlap(call):
            arrays = [array.copy() for array in arrays]
            for array in arrays if call.op is not None else ():
                reduction.prepare(call.op, array)  # type: ignore[arg-type]
        return arrays

    def _input(self) -> Array:
        arrays = self._inputs()
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        self._kept.append(whole)
        return whole

    def _output(self) -> Array:
        outputs = self.call.outputs
        if len(outputs) == 1:
            return outputs[0].elements
        self._split = np.empty(sum(flat.elements.size for flat in outputs), self.call.dtype)
        return self._split

    def _own(self) -> Array:
        """The array that is reduced in place."""
        own = self.call.outputs[0].elements
        if self.call.op is not None:
            reduction.prepare(self.call.op, own)
        return own

    # -- MPI's operations, by the name of the collective

    def _barrier(self) -> Any:
        return self._comm.Ibarrier()

    def _broadcast(self) -> Any:
        return self._comm.Ibcast(self._bytes(self.call.outputs[0].elements), self.call.root)

    def _all_reduce(self) -> Any:
        return self._comm.Iallreduce(self._mpi.IN_PLACE, self._numbers(self._own()), self._op)

    def _reduce(self) -> Any:
        target = self._numbers(self._output()) if self.call.outputs else None
        return self._comm.Ireduce(self._numbers(self._input()), target, self._op, self.call.root)

    def _reduce_scatter(self) -> Any:
        counts = self.call.counts
        lengths = [counts] * len(self._ranks) if isinstance(counts, int) else list(counts)
        return self._comm.Ireduce_scatter(
            self._numbers(self._input()), self._numbers(self._output()), lengths, self._op
        )

    def _scan(self) -> Any:
        return self._comm.Iscan(self._mpi.IN_PLACE, self._numbers(self._own()), self._op)

    def _exscan(self) -> Any:
        if self._rank:
            own = self._own()
        else:  # MPI leaves open what becomes of the array of rank 0
            own = self.call.outputs[0].elements.copy()
            self._kept.append(own)
            reduction.prepare(self.call.op, own)  # type: ignore[arg-type]
        return self._comm.Iexscan(self._mpi.IN_PLACE, self._numbers(own), self._op)

    def _all_gather(self) -> Any:
        source, target, counts = self._bytes(self._input()), self._output(), self.call.counts
        if isinstance(counts, int):
            return self._comm.Iallgather(source, self._bytes(target))
        sizes = [count * self.call.dtype.itemsize for count in counts]
        return self._comm.Iallgatherv(source, [target.view(np.uint8), sizes, self._mpi.BYTE])

    def _gather(self) -> Any:
        target = self._bytes(self._output()) if self.call.outputs else None
        return self._comm.Igather(self._bytes(self._input()), target, self.call.root)

    def _scatter(self) -> Any:
        source = self._bytes(self._input()) if self.call.inputs else None
        return self._comm.Iscatter(source, self._bytes(self.call.outputs[0].elements), self.call.root)

    def _all_to_all(self) -> Any:
        return self._comm.Ialltoall(self._bytes(self._input()), self._bytes(self._output()))

    def _all_to_all_uneven(self) -> list[Any]:
        everyone = range(len(self._ranks))
        return self._exchange(everyone, everyone)

    def _gather_uneven(self) -> list[Any]:
        root = self.call.root
        return self._exchange([root], range(len(self._ranks)) if self._rank == root else ())

    def _scatter_uneven(self) -> list[Any]:
        root = self.call.root
        return self._exchange(range(len(self._ranks)) if self._rank == root else (), [root])

    def _exchange(self, targets: Sequence[int], sources: Sequence[int]) -> list[Any]:
        """Send one piece to each target, and receive one from each source; an empty one too, for its length."""
        assert self.call.pieces is not None
        requests = []
        for source, piece in zip(sources, self.call.pieces[1], strict=False):
            for part in _parts(piece):
                requests.append(self._comm.Irecv([part, self._mpi.BYTE], source, self._tag))
                self._expected.append((source, part.size))
        for target, piece in zip(targets, self._inputs(), strict=False):
            self._kept.append(piece)
            requests += [self._comm.Isend([part, self._mpi.BYTE], target, self._tag) for part in _parts(piece)]
        self.statuses = [self._mpi.Status() for _ in requests]
        return requests


def _parts(piece: Array) -> list[Array]:
    octets = piece.view(np.uint8)
    return [octets[start : start + PIECE_BYTES] for start in range(0, max(octets.size, 1), PIECE_BYTES)]
