"""The neighbors in message passing: torch.distributed with gloo, and Open MPI through mpi4py.

gloo: one torch thread, interface ``lo``, file rendezvous. Open MPI: as mpirun starts it, so it spins (shared memory,
no event loop): it marks what one host can do, not what an asyncio program could get. Both are optional.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import time
from typing import Any

from bench.cases import Case, RankContext, Record
from bench.runner import Candidate
from bench.verify import MessagePattern, SumPattern

MESSAGE_OPERATIONS = frozenset({"ping_pong", "one_way"})
ALL_REDUCE_OPERATIONS = frozenset({"all_reduce"})


def missing_module(*names: str) -> str | None:
    """Return "not installed" with the first missing module's name, None when all are there."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            return f"not installed: {name}"
    return None


def missing_torch() -> str | None:
    """Why torch cannot be measured, or None."""
    return missing_module("torch")


def missing_mpi() -> str | None:
    """Why Open MPI cannot be measured, or None."""
    if shutil.which("mpirun") is None:
        return "not installed: mpirun"
    return missing_module("mpi4py")


class GlooRank:
    """One rank of torch.distributed with the gloo backend."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._rank = context.rank
        self._torch: Any = None
        self._dist: Any = None

    async def open(self) -> None:
        """Join the group through a file."""
        self._torch = importlib.import_module("torch")
        self._dist = importlib.import_module("torch.distributed")
        self._torch.set_num_threads(1)
        self._dist.init_process_group(
            "gloo",
            init_method=f"file://{self._context.directory}/gloo",
            rank=self._rank,
            world_size=self._context.world_size,
        )
        self._dist.barrier()

    async def close(self) -> None:
        """Leave the group."""
        self._dist.destroy_process_group()

    async def measure(self, case: Case) -> Record:
        """Run one case."""
        self._dist.barrier()
        if case.operation == "ping_pong":
            return self._ping_pong(case)
        if case.operation == "one_way":
            return self._one_way(case)
        return self._all_reduce(case)

    def _tensor(self, array: Any) -> Any:
        return self._torch.from_numpy(array)

    def _ping_pong(self, case: Case) -> Record:
        """Each side posts its next receive before it sends; half of rank 0's round trip is the sample."""
        dist, record, pattern = self._dist, Record(), MessagePattern(case.nbytes)
        total = case.warmup + case.samples
        if self._rank == 0:
            ping, pong = pattern.empty(), pattern.empty()
            out, back = self._tensor(ping), self._tensor(pong)
            for number in range(total):
                pattern.fill(ping, number)
                arrived = dist.irecv(back, 1)
                start_ns = time.perf_counter_ns()
                sent = dist.isend(out, 1)
                arrived.wait()
                end_ns = time.perf_counter_ns()
                sent.wait()
                record.wrong += not pattern.is_right(pong, number)
                if number >= case.warmup:
                    record.add(start_ns, end_ns)
            return record
        tensors = [self._tensor(pattern.empty()) for _ in range(2)]
        arrived = dist.irecv(tensors[0], 0)
        for number in range(total):
            arrived.wait()
            if number + 1 < total:
                arrived = dist.irecv(tensors[(number + 1) % 2], 0)
            dist.isend(tensors[number % 2], 0).wait()
        return record

    def _one_way(self, case: Case) -> Record:
        """Rank 1 posts, barrier, rank 0 sends: from before isend to the receiver's Work done."""
        dist, record, pattern = self._dist, Record(), MessagePattern(case.nbytes)
        array = pattern.empty()
        tensor = self._tensor(array)
        for number in range(case.warmup + case.samples):
            if self._rank == 0:
                pattern.fill(array, number)
                dist.barrier()
                start_ns = time.perf_counter_ns()
                dist.isend(tensor, 1).wait()
            else:
                arrived = dist.irecv(tensor, 0)
                dist.barrier()
                start_ns = time.perf_counter_ns()
                arrived.wait()
            end_ns = time.perf_counter_ns()
            if self._rank == 1:
                record.wrong += not pattern.is_right(array, number)
            if number >= case.warmup:
                record.add(start_ns, end_ns)
        return record

    def _all_reduce(self, case: Case) -> Record:
        dist, record = self._dist, Record()
        pattern = SumPattern(case.nbytes, self._rank, self._context.world_size)
        array = pattern.empty()
        tensor = self._tensor(array)
        for number in range(case.warmup + case.samples):
            pattern.fill(array, number)
            dist.barrier()
            start_ns = time.perf_counter_ns()
            dist.all_reduce(tensor)
            end_ns = time.perf_counter_ns()
            record.wrong += not pattern.is_right(array, number)
            if number >= case.warmup:
                record.add(start_ns, end_ns)
        return record


class MpiRank:
    """One rank of Open MPI through mpi4py's buffer functions."""

    def __init__(self, context: RankContext) -> None:
        self._rank = context.rank
        self._mpi: Any = None
        self._comm: Any = None

    async def open(self) -> None:
        """Initialize MPI (importing does)."""
        self._mpi = importlib.import_module("mpi4py.MPI")
        self._comm = self._mpi.COMM_WORLD
        self._comm.Barrier()

    async def close(self) -> None:
        """Finalize."""
        self._mpi.Finalize()

    async def measure(self, case: Case) -> Record:
        """Run one case."""
        self._comm.Barrier()
        if case.operation == "ping_pong":
            return self._ping_pong(case)
        if case.operation == "one_way":
            return self._one_way(case)
        return self._all_reduce(case)

    def _ping_pong(self, case: Case) -> Record:
        comm, record, pattern = self._comm, Record(), MessagePattern(case.nbytes)
        total = case.warmup + case.samples
        if self._rank == 0:
            ping, pong = pattern.empty(), pattern.empty()
            for number in range(total):
                pattern.fill(ping, number)
                arrived = comm.Irecv(pong, 1)
                start_ns = time.perf_counter_ns()
                comm.Send(ping, 1)
                arrived.Wait()
                end_ns = time.perf_counter_ns()
                record.wrong += not pattern.is_right(pong, number)
                if number >= case.warmup:
                    record.add(start_ns, end_ns)
            return record
        buffers = [pattern.empty() for _ in range(2)]
        arrived = comm.Irecv(buffers[0], 0)
        for number in range(total):
            arrived.Wait()
            if number + 1 < total:
                arrived = comm.Irecv(buffers[(number + 1) % 2], 0)
            comm.Send(buffers[number % 2], 0)
        return record

    def _one_way(self, case: Case) -> Record:
        comm, record, pattern = self._comm, Record(), MessagePattern(case.nbytes)
        array = pattern.empty()
        for number in range(case.warmup + case.samples):
            if self._rank == 0:
                pattern.fill(array, number)
                comm.Barrier()
                start_ns = time.perf_counter_ns()
                comm.Isend(array, 1).Wait()
            else:
                arrived = comm.Irecv(array, 0)
                comm.Barrier()
                start_ns = time.perf_counter_ns()
                arrived.Wait()
            end_ns = time.perf_counter_ns()
            if self._rank == 1:
                record.wrong += not pattern.is_right(array, number)
            if number >= case.warmup:
                record.add(start_ns, end_ns)
        return record

    def _all_reduce(self, case: Case) -> Record:
        comm, record, in_place = self._comm, Record(), self._mpi.IN_PLACE
        pattern = SumPattern(case.nbytes, self._rank, comm.Get_size())
        array = pattern.empty()
        for number in range(case.warmup + case.samples):
            pattern.fill(array, number)
            comm.Barrier()
            start_ns = time.perf_counter_ns()
            comm.Allreduce(in_place, array)
            end_ns = time.perf_counter_ns()
            record.wrong += not pattern.is_right(array, number)
            if number >= case.warmup:
                record.add(start_ns, end_ns)
        return record


GLOO = Candidate(
    "gloo",
    "bench.baselines:GlooRank",
    MESSAGE_OPERATIONS | ALL_REDUCE_OPERATIONS,
    missing=missing_torch,
    environment={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
)
MPI = Candidate(
    "mpi",
    "bench.baselines:MpiRank",
    MESSAGE_OPERATIONS | ALL_REDUCE_OPERATIONS,
    missing=missing_mpi,
    launcher="mpirun",
)
FLOOR_TCP = Candidate(
    "floor",
    "bench.floors:FloorRank",
    MESSAGE_OPERATIONS | ALL_REDUCE_OPERATIONS,
    missing=lambda: missing_module("uvloop"),
    floor=True,
)
FLOOR_UNIX = Candidate(
    "floor unix",
    "bench.floors:FloorRank",
    MESSAGE_OPERATIONS | ALL_REDUCE_OPERATIONS,
    missing=lambda: missing_module("uvloop"),
    options={"family": "unix"},
)
