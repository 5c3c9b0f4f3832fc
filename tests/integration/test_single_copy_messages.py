"""Long messages read where they lie in another process: however they are posted, and wherever ranks live."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os

import numpy as np
import pytest
from jobs import free_port, run_ranks
from single_copy_kit import PRELUDE
from socket_world import socket_world

import asyncdist as dist
from asyncdist.transport.shared_memory.process_memory import ProcessMemory

MESSAGES = """
SIZES = (1000, (4 << 20) - 8, 4 << 20, (4 << 20) + 8, 5_000_000, 8 << 20, 16 << 20)

async def main():
    async with dist.init_process_group(**({"progress": "thread"} if THREAD else {})) as group:
        plan = random.Random(7)  # the same on all ranks
        rank, size = group.rank, group.size

        def data(number, count, who):
            return np.arange(count) % 1009 + number * 31 + who * 7

        for round in range(3):
            works, awaited = [], []
            for number in range(12):
                a, b = plan.sample(range(size), 2)
                count, late, both = plan.choice(SIZES) // 8, plan.random() < 0.4, plan.random() < 0.5
                any_source, tag = not both and plan.random() < 0.5, round * 100 + number
                for source, target in ((a, b), (b, a)) if both else ((a, b),):
                    if rank == source:
                        works.append(group.isend(data(number, count, source), target, tag))
                    if rank == target:
                        if late:
                            await asyncio.sleep(0.002)
                        got = np.zeros(count, np.int64)
                        withdrawn = group.irecv(np.zeros(count, np.int64), source, 10_000)
                        works.append(group.irecv(got, None if any_source else source, tag))
                        assert withdrawn.cancel()
                        awaited.append((got, number, source))
            waiting = [asyncio.ensure_future(wait(work)) for work in works]
            await asyncio.sleep(0)
            for task in waiting:
                task.cancel()  # who stops waiting ends nothing
            for work in works:
                await work
            for got, number, source in awaited:
                assert (got == data(number, len(got), source)).all(), (number, source)
        assert reads
        await group.barrier()

async def wait(work):
    await work

dist.run(main())
"""


@pytest.mark.parametrize("thread", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_messages_both_ways_late_withdrawn_and_from_anybody(thread: bool) -> None:
    run_ranks(PRELUDE + f"THREAD = {thread}" + MESSAGES, 3)


LATE = """
async def main():
    async with dist.init_process_group() as group:
        await works_with_all(group)
        x, ends = np.empty(1_500_000, np.int64), {"well": 0, "late": 0}
        for number in range(30):
            await group.barrier()
            x[:] = number
            in_time, late = number % 3 == 0, number % 3 == 1
            if group.rank == 0:
                limit_s = 30 if in_time else 0.0005 if late else random.random() * 0.01
                try:
                    await group.send(x, 1, number, timeout=limit_s)
                    ends["well"] += 1
                except dist.DistError:
                    ends["late"] += 1
                x[:] = -1
            else:
                await asyncio.sleep(0.005 if late else random.random() * 0.005)
                try:
                    await group.recv(x, 0, number, timeout=30 if in_time else 0.05)
                    assert (x == number).all()
                    ends["well"] += 1
                except dist.DistError:
                    ends["late"] += 1
        print(json.dumps(ends))
        await group.barrier()
dist.run(main())
"""


def test_a_message_whose_sender_waits_no_longer_is_whole_or_never_comes() -> None:
    """Arrays of a send that timed out are altered at once."""
    sender, receiver = (json.loads(rank.stdout) for rank in run_ranks(PRELUDE + LATE, 2))
    for rank in (sender, receiver):
        assert rank["well"] >= 10
        assert rank["late"] >= 10
        assert rank["well"] + rank["late"] == 30


WAITING = """
import asyncdist.blocking as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
for number in range(3):
    x = np.full(1_000_000, rank + number)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert (x == size * number + size * (size - 1) // 2).all()
    got = np.empty_like(x)
    sent = dist.isend(np.full(1_000_000, rank), (rank + 1) % size)
    dist.recv(got, (rank - 1) % size)
    sent.wait()
    assert (got == (rank - 1) % size).all()
assert reads
dist.destroy_process_group()
"""


def test_functions_that_wait() -> None:
    run_ranks(PRELUDE + WAITING, 3)


async def test_ranks_of_one_process_and_of_several_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads the process that it is part of."""
    pids = []
    read = ProcessMemory.read

    def counted(self: ProcessMemory, address: int, target: int, nbytes: int) -> None:
        pids.append(self._pid)
        read(self, address, target, nbytes)

    monkeypatch.setattr(ProcessMemory, "read", counted)
    async with socket_world(2) as one, socket_world(3) as other:
        for groups in (one, other, one):
            before = len(pids)
            works, got = [], [np.zeros(1_000_000) for _ in groups]
            for group, into in zip(groups, got, strict=True):
                works.append(group.isend(np.full(1_000_000, group.rank + 1.0), (group.rank + 1) % group.size))
                works.append(group.irecv(into, (group.rank - 1) % group.size))
            await asyncio.gather(*works)
            assert [into.min() for into in got] == [into.max() for into in got] == [len(groups), *range(1, len(groups))]
            for _ in range(2):
                arrays = [np.full(4_000_000, group.rank + 1.0) for group in groups]
                await asyncio.gather(*(group.all_reduce(array) for group, array in zip(groups, arrays, strict=True)))
                assert all((array == len(groups) * (len(groups) + 1) / 2).all() for array in arrays)
            assert len(pids) > before
    assert set(pids) == {os.getpid()}


FORKED = """
async def forks():
    global child
    async with dist.init_process_group(timeout=30) as group:
        await works_with_all(group)
        x = np.full(3_000_000, group.rank + 1)
        works = [group.all_reduce(x), group.isend(y := np.full(3_000_000, group.rank), 1 - group.rank),
                 group.irecv(got := np.zeros(3_000_000, int), 1 - group.rank)]
        for _ in range(random.randrange(10)):
            await asyncio.sleep(0)
        child = os.fork()
        if not child:  # its memory is its own from now on
            x[:] = y[:] = got[:] = -1
            return
        await asyncio.gather(*works)
        assert (x == 3).all() and (got == 1 - group.rank).all() and (y == group.rank).all()
        await works_with_all(group)

async def again():
    async with dist.init_process_group(timeout=30) as group:
        await works_with_all(group)

def worlds():
    dist.run(forks())
    os.environ["MASTER_PORT"] = os.environ["CHILDS_PORT" if not child else "PARENTS_PORT"]
    global reads
    reads = 0
    dist.run(again())  # parents among themselves, and children
    assert reads
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

child = 1
worlds()
"""


def test_forked_while_others_read() -> None:
    run_ranks(PRELUDE + FORKED, 2, {"PARENTS_PORT": str(free_port()), "CHILDS_PORT": str(free_port())})


def _spawned(rank: int, port: int) -> None:
    async def main() -> None:
        where = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": 2}
        async with dist.init_process_group(**where) as group:
            x = np.full(1_000_000, float(rank))
            sent = group.isend(x, 1 - rank)
            got = np.zeros_like(x)
            await group.recv(got, 1 - rank)
            await sent
            assert (got == 1 - rank).all()
            assert group.world.mesh.memory.connections[1 - rank].zero_copy.reads
            await group.barrier()

    dist.run(main())


def test_spawned_by_multiprocessing() -> None:
    spawn, port = multiprocessing.get_context("spawn"), free_port()
    processes = [spawn.Process(target=_spawned, args=(rank, port)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]


REDUCED = """
async def main():
    async with dist.init_process_group() as group:
        await works_with_all(group)
        folds, fold = [], Execution._fold
        Execution._fold = lambda *them: (folds.append(them), fold(*them))
        for dtype in (np.float32, np.float64, np.complex128):
            every = [(np.arange(3 << 18) % 1000 + rank).astype(dtype) for rank in range(group.size)]
            own = dist.ReduceOp.custom(lambda one, other: one + other)
            for op, times in ((dist.ReduceOp.SUM, 1), (own, 1), (dist.ReduceOp.PREMUL_SUM(2), 2)):
                x = every[group.rank].copy()
                await group.all_reduce(x, op)
                assert (x == times * sum(every)).all(), (op, dtype)
        assert reads
        assert folds
        await group.barrier()

dist.run(main())
"""


def test_messages_that_are_reduced_where_they_lie() -> None:
    code = "from asyncdist.collectives.executor.runner import Execution\n" + PRELUDE + REDUCED
    run_ranks(code, 3, {"ASYNCDIST_ALGO": "all_reduce:ring"})
