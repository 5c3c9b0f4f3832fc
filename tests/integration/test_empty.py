"""Arrays in shared memory between real processes: lent, freed, outlived, and lost in the middle of it."""

from __future__ import annotations

import signal
import sys

import pytest
from jobs import finish, run_ranks, start_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")

MIXED = """
import random
SIZES = (1, 1000, 40_000, 150_000, 600_000)

async def main():
    async with dist.init_process_group() as group:
        world, rank = group.size, group.rank
        plan = random.Random(int(os.environ["SEED"]))  # the same on all ranks
        own = random.Random(rank * 1000 + int(os.environ["SEED"]))

        def new(count, dtype=np.int64):
            whole = (dist.empty if own.random() < 0.7 else np.empty)(count + 3, dtype)
            start = own.randrange(3)
            return whole[start:start + count]

        def data(count, number, who):
            return np.arange(count) % 977 + number * 31 + who * 7

        def filled(count, number, who):
            array = new(count)
            array[:] = data(count, number, who)
            return array

        async def one(number, kind, n, root, tag):
            mine = filled(n, number, rank)
            total = sum(data(n, number, who) for who in range(world))
            if kind == "all_reduce":
                await dist.all_reduce(mine, tag=tag)
                assert (mine == total).all()
            elif kind == "reduce":
                await dist.reduce(mine, root, tag=tag)
                assert (mine == (total if rank == root else data(n, number, rank))).all()
            elif kind == "broadcast":
                await dist.broadcast(mine, root, tag=tag)
                assert (mine == data(n, number, root)).all()
            elif kind == "scan":
                await dist.scan(mine, tag=tag)
                assert (mine == sum(data(n, number, who) for who in range(rank + 1))).all()
            elif kind == "all_gather":
                into = new(n * world)
                await dist.all_gather_into_tensor(into, mine, tag=tag)
                assert (into == np.concatenate([data(n, number, who) for who in range(world)])).all()
            elif kind == "reduce_scatter":
                into, whole = new(n), filled(n * world, number, rank)
                await dist.reduce_scatter_tensor(into, whole, tag=tag)
                all_of_it = sum(data(n * world, number, who) for who in range(world))
                assert (into == all_of_it[rank * n:(rank + 1) * n]).all()
            elif kind == "all_to_all":
                into, whole = new(n * world), filled(n * world, number, rank)
                await dist.all_to_all_single(into, whole, tag=tag)
                parts = [data(n * world, number, who)[rank * n:(rank + 1) * n] for who in range(world)]
                assert (into == np.concatenate(parts)).all()
            elif kind == "gather":
                into = [new(n) for _ in range(world)] if rank == root else None
                await dist.gather(mine, into, root, tag=tag)
                assert rank != root or all((into[who] == data(n, number, who)).all() for who in range(world))
            elif kind == "scatter":
                parts = [filled(n, number, who) for who in range(world)] if rank == root else None
                into = new(n)
                await dist.scatter(into, parts, root, tag=tag)
                assert (into == data(n, number, rank)).all()
            else:
                into = new(n)
                sent = dist.isend(mine, (rank + 1) % world, tag=1000 + number)
                await dist.recv(into, (rank - 1) % world, tag=1000 + number)
                await sent
                assert (into == data(n, number, (rank - 1) % world)).all()

        kinds = ("all_reduce", "reduce", "broadcast", "scan", "all_gather", "reduce_scatter", "all_to_all", "gather",
                 "scatter", "ring", "ring")
        number = 0
        for _ in range(10):
            batch = []
            for tag in range(plan.randrange(1, 4)):
                batch.append((number, plan.choice(kinds), plan.choice(SIZES), plan.randrange(world), tag))
                number += 1
            await asyncio.gather(*(one(*entry) for entry in batch))
        memory = group.world.mesh.memory
        print("shared" if len(memory.arrays) else "ordinary")
        assert len(memory.arrays) < 10
dist.run(main())
"""


@pytest.mark.parametrize("seed", range(2))
def test_all_kinds_of_arrays_in_all_operations(seed: int) -> None:
    for rank in run_ranks(MIXED, 3, {"SEED": str(seed)}, 120.0):
        assert rank.stdout == "shared\n"


@pytest.mark.parametrize("environ", [{"ASYNCDIST_TRANSPORT": "unix"}, {"ASYNCDIST_EMPTY_BYTES": "0"}])
def test_without_shared_memory_they_are_ordinary_arrays(environ: dict[str, str]) -> None:
    for rank in run_ranks(MIXED, 2, {"SEED": "9", **environ}, 120.0):
        assert rank.stdout == "ordinary\n"


REUSED = """
async def main():
    async with dist.init_process_group() as group:
        memory = group.world.mesh.memory
        zero_copy = lambda: memory.connections[1 - group.rank].zero_copy
        await dist.barrier()
        before = len(os.listdir("/proc/self/fd"))
        for number in range(10):
            size = (70 << 20) + 4096 * number  # an arena of its own each, more of them than may be left
            x = dist.empty(size, np.uint8)
            x[:: 1 << 20] = number
            x[-1] = number
            if group.rank == 0:
                await dist.send(x, 1)
            else:
                await dist.recv(x, 0)
                assert (x[:: 1 << 20] == number).all() and x[-1] == number
            del x
        for number in range(1500):
            x = dist.empty(600_000, np.uint8)
            x[0] = number % 251
            if group.rank == 0:
                await dist.send(x, 1)
            else:
                await dist.recv(x, 0)
                assert x[0] == number % 251
        del x
        await dist.barrier()
        await dist.barrier()
        deadline = time.monotonic() + 10
        while len(memory.arrays) > 1 or len(zero_copy()._attached) > 2:
            assert time.monotonic() < deadline, (len(memory.arrays), zero_copy()._attached)
            await asyncio.sleep(0)
        maps = sum("asyncdist-arrays" in line for line in open("/proc/self/maps"))
        assert maps <= 4, maps
        assert len(os.listdir("/proc/self/fd")) <= before + 4
        await dist.barrier()
dist.run(main())
"""


@pytest.mark.slow("makes thousands of arrays")
def test_segments_of_thousands_of_arrays_are_given_back_on_both_sides() -> None:
    run_ranks(REUSED, 2, timeout_s=120.0)


DYING = """
async def main():
    async with dist.init_process_group() as group:
        x = dist.empty(256 << 20, np.uint8)
        x[:] = group.rank + 1
        for _ in range(2):  # the second time it is mapped
            if group.rank == 0:
                await dist.send(x[: 1 << 20], 1)
            else:
                await dist.recv(x[: 1 << 20], 0)
        victim = int(os.environ["VICTIM"])
        zero_copy = group.world.mesh.memory.connections[1 - group.rank].zero_copy
        work = dist.isend(x, 1) if group.rank == 0 else dist.irecv(x, 0)
        if group.rank == victim:
            core = group.world.mesh.cores[1 - group.rank]
            while not (zero_copy.copies or core._sender.queue.exposing):
                await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            await work
            print("done")
        except dist.PeerLostError as error:
            print("lost", error.rank)
        assert x[-1] in (1, 2)
        x[:] = 7
        assert (x == 7).all()
        group.abort("enough")
try:
    dist.run(main())
except dist.DistError:
    pass
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_in_the_middle_is_lost_and_nothing_else(victim: int) -> None:
    ended = finish(start_ranks(DYING, 2, {"VICTIM": str(victim)}))
    assert ended[victim].returncode == -signal.SIGKILL
    other = ended[1 - victim]
    assert other.returncode == 0, other.stderr
    assert other.stdout in (f"lost {victim}\n", "done\n")


OUTLIVING = """
async def main():
    async with dist.init_process_group() as group:
        x, y = dist.zeros((1000, 1000)), dist.empty(2_000_000, dtype="int32")
        y[:] = group.rank
        for _ in range(3):
            await dist.all_reduce(x)
            await dist.broadcast(y, 0)
        assert x.dtype == np.float32 and x.shape == (1000, 1000) and not x.any() and not y.any()
        other = dist.zeros(3_000_000)
        pending = dist.broadcast(other, 0) if group.rank == 0 else None  # lent
        await asyncio.sleep(0)
        child = os.fork()
        if not child:
            y[5] = 99  # one memory, as the manual says
            try:
                group.abort("this is not the parent's business")
            except dist.DistError:
                pass
            try:
                dist.all_reduce(x)
            except dist.ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        await (pending or dist.broadcast(other, 0))
        assert y[5] == 99
        y[5] = 0
        await dist.all_reduce(y)
        assert not y.any()
    x += 1
    y += 1
    assert x.all() and y.all()
    try:
        dist.empty(5)
    except (dist.ClosedError, ValueError, RuntimeError):
        print("closed")
    return x
assert dist.run(main()).all()
"""


def test_arrays_outlive_their_group_and_a_fork_shares_them() -> None:
    for rank in run_ranks(OUTLIVING, 2):
        assert rank.stdout == "closed\n"


ABORTED = """
async def main():
    group = await dist.init_process_group()
    x = dist.zeros(8_000_000)
    for _ in range(2):
        await dist.broadcast(x, 0)
    if group.rank == 0:
        work = dist.broadcast(x, 0)  # lent: rank 1 never asks
        await dist.recv(np.empty(1), 1)
        assert not work.done()
        group.abort("changed my mind")
        x[:] = 5
    else:
        await dist.send(np.empty(1), 0)
        y = dist.zeros(8_000_000)
    try:
        await dist.broadcast(x if group.rank == 0 else y, 0)
        print("done")
    except dist.DistError as error:
        print(type(error).__name__)
    if group.rank:
        assert not y.any()
    try:
        await dist.destroy_process_group()
    except dist.DistError:
        pass
dist.run(main())
"""


def test_what_was_lent_is_taken_back_by_an_abort() -> None:
    for rank in run_ranks(ABORTED, 2):
        assert rank.stdout == "GroupAbortedError\n"
