"""What every `Nccl` must do, as checks that run on the fake one in CI and on the real one where there is a device.

As `cuda_conformance`, with `check(runtime, nccl)`. Ranks are threads, two where there are two devices, else one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
from cuda_check_tools import download, every_dtype, on_ranks, operands, reduced, same, upload

from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.cuda.interface import Communicator, Nccl, Runtime, Stream
from asyncdist.errors import DistBackendError
from asyncdist.testing.store_conformance import checks_of, expect_refused

__all__ = ["NCCL_CHECKS", "NcclCheck"]

NcclCheck: TypeAlias = Callable[[Runtime, Nccl], None]

COUNT: Final = 1003
FLOAT: Final = np.dtype(np.float32)
UNIQUE_ID_BYTES: Final = 128
OLDEST_VERSION: Final = 20700


def check_identity(runtime: Runtime, nccl: Nccl) -> None:
    """Versions are numbers, ids are secrets, and every rank knows its own number."""
    assert nccl.version() >= OLDEST_VERSION
    assert nccl.name
    ids = {nccl.unique_id() for _ in range(3)}
    assert len(ids) == 3
    assert {len(unique_id) for unique_id in ids} == {UNIQUE_ID_BYTES}

    def main(communicator: Communicator, stream: Stream) -> tuple[int, int, int, str]:
        return communicator.rank, communicator.size, communicator.device, communicator.async_error()

    results = on_ranks(runtime, nccl, main)
    assert results == [(rank, len(results), rank, "") for rank in range(len(results))]


def check_reductions(runtime: Runtime, nccl: Nccl) -> None:
    """all_reduce of every dtype and operation that is not refused; the others raise."""

    def main(communicator: Communicator, stream: Stream) -> None:
        for dtype in every_dtype():
            for op in ReduceOp:
                if op is not ReduceOp.PREMUL_SUM:
                    _check_reduction(runtime, nccl, communicator, stream, dtype, op)

    on_ranks(runtime, nccl, main)


def check_collectives(runtime: Runtime, nccl: Nccl) -> None:
    """reduce, broadcast, all_gather, reduce_scatter; in place and not."""

    def main(communicator: Communicator, stream: Stream) -> None:
        size, rank, device = communicator.size, communicator.rank, communicator.device
        arrays = operands(FLOAT, size * COUNT, size, special=False)
        total, nbytes = reduced(ReduceOp.SUM, arrays), COUNT * FLOAT.itemsize
        with (
            upload(runtime, arrays[rank], device) as source,
            runtime.allocate(size * nbytes, device) as target,
        ):
            runtime.fill(target.pointer, target.nbytes, 0, stream)
            for root in range(size):
                where = target.pointer if rank == root else 0
                communicator.reduce(source.pointer, where, size * COUNT, FLOAT, ReduceOp.SUM, root, stream)
            same([download(runtime, target.pointer, size * COUNT, FLOAT, stream)], total)
            for root in range(size):
                origin = source.pointer if rank == root else 0
                communicator.broadcast(origin, target.pointer, COUNT, FLOAT, root, stream)
                same([download(runtime, target.pointer, COUNT, FLOAT, stream)], arrays[root][:COUNT])
            communicator.all_gather(source.pointer, target.pointer, COUNT, FLOAT, stream)
            gathered = np.concatenate([array[:COUNT] for array in arrays])
            same([download(runtime, target.pointer, size * COUNT, FLOAT, stream)], gathered)
            communicator.reduce_scatter(source.pointer, target.pointer, COUNT, FLOAT, ReduceOp.SUM, stream)
            part = total[rank * COUNT : (rank + 1) * COUNT]
            same([download(runtime, target.pointer, COUNT, FLOAT, stream)], part)
            communicator.all_reduce(source.pointer, source.pointer, size * COUNT, FLOAT, ReduceOp.SUM, stream)
            same([download(runtime, source.pointer, size * COUNT, FLOAT, stream)], total)
        communicator.destroy()

    on_ranks(runtime, nccl, main)


def check_moves_any_dtype(runtime: Runtime, nccl: Nccl) -> None:
    """What NCCL cannot add it can still move."""

    def main(communicator: Communicator, stream: Stream) -> None:
        for dtype in every_dtype():
            arrays = operands(dtype, COUNT, communicator.size)
            with upload(runtime, arrays[communicator.rank], communicator.device) as memory:
                communicator.broadcast(memory.pointer, memory.pointer, COUNT, dtype, 0, stream)
                same([download(runtime, memory.pointer, COUNT, dtype, stream)], arrays[0])

    on_ranks(runtime, nccl, main)


def check_groups(runtime: Runtime, nccl: Nccl) -> None:
    """In a group every rank sends to every rank, itself included, whatever the order of the calls."""

    def main(communicator: Communicator, stream: Stream) -> None:
        size, rank, device = communicator.size, communicator.rank, communicator.device
        arrays = operands(FLOAT, size * COUNT, size, special=False)
        nbytes = COUNT * FLOAT.itemsize
        with (
            upload(runtime, arrays[rank], device) as source,
            runtime.allocate(size * nbytes, device) as target,
        ):
            for _ in range(2):
                with nccl.group():
                    for peer in range(size):
                        communicator.send(source.pointer + peer * nbytes, COUNT, FLOAT, peer, stream)
                    for peer in reversed(range(size)):
                        communicator.recv(target.pointer + peer * nbytes, COUNT, FLOAT, peer, stream)
            expected = np.concatenate([array[rank * COUNT : (rank + 1) * COUNT] for array in arrays])
            same([download(runtime, target.pointer, size * COUNT, FLOAT, stream)], expected)

    on_ranks(runtime, nccl, main)


def check_ends(runtime: Runtime, nccl: Nccl) -> None:
    """After abort or destroy nothing works; abort may be repeated, destroy may not."""

    def main(communicator: Communicator, stream: Stream) -> None:
        with upload(runtime, np.ones(4, np.float32), communicator.device) as memory:
            pointer = memory.pointer

            def use() -> None:
                communicator.all_reduce(pointer, pointer, 4, FLOAT, ReduceOp.SUM, stream)

            use()
            stream.synchronize()
            if communicator.rank % 2:
                communicator.destroy()
            else:
                communicator.abort()
            communicator.abort()
            assert communicator.async_error() == ""
            expect_refused(DistBackendError, use, communicator.destroy)

    on_ranks(runtime, nccl, main)


def check_abort_frees_the_stream(runtime: Runtime, nccl: Nccl) -> None:
    """An operation whose peers never come ends when it is aborted; with one rank there are none."""

    def main(communicator: Communicator, stream: Stream) -> None:
        with upload(runtime, np.ones(4, np.float32), communicator.device) as memory:
            if communicator.rank == 0:
                communicator.all_reduce(memory.pointer, memory.pointer, 4, FLOAT, ReduceOp.SUM, stream)
            communicator.abort()
            with runtime.new_event(communicator.device) as event:
                event.record(stream)
                event.synchronize()

    on_ranks(runtime, nccl, main)


def _check_reduction(
    runtime: Runtime, nccl: Nccl, communicator: Communicator, stream: Stream, dtype: np.dtype[Any], op: ReduceOp
) -> None:
    arrays = operands(dtype, COUNT, communicator.size, special=False)
    with upload(runtime, arrays[communicator.rank], communicator.device) as memory:
        pointer = memory.pointer

        def reduce() -> None:
            communicator.all_reduce(pointer, pointer, COUNT, dtype, op, stream)

        if nccl.refusal(dtype, op, communicator.device):
            expect_refused(DistBackendError, reduce)
            return
        reduce()
        result = download(runtime, pointer, COUNT, dtype, stream)
        assert np.allclose(result.astype(np.complex128), reduced(op, arrays).astype(np.complex128)), f"{op} of {dtype}"


NCCL_CHECKS: Final[tuple[NcclCheck, ...]] = checks_of(__name__, "runtime", "nccl")
