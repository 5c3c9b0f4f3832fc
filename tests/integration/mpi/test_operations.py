"""Every operation of the mpi backend against numpy, between processes that mpirun has started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import free_port
from mpi_kit import mpirun, need_mpi

need_mpi()
pytestmark = [pytest.mark.peers, pytest.mark.slow("starts interpreters by mpirun")]

PAGE = Path(__file__).parents[3] / "docs" / "mpi.md"

COLLECTIVES = """
import random
from differential import RUNS, Tagged, random_case

async def runs(group, tag, names, generator):
    for name in names:
        await RUNS[name](Tagged(group, tag), random_case(generator, group.size))

async def collectives(group):
    generator = random.Random(group.size)
    for _ in range(2):
        for name in RUNS:
            await RUNS[name](group, random_case(generator, group.size))
    # Several tasks at a time: of one group by tags, and of groups that overlap, whose communicators are made meanwhile.
    last = group.size - 1
    groups = [group, group, dist.new_group([last, 0], sort_ranks=False), dist.new_group([0, 1]), dist.new_group()]
    async with asyncio.TaskGroup() as tasks:
        for number, one in enumerate(groups):
            names = generator.sample(sorted(RUNS), 5)
            if not isinstance(one, dist.NonMember):
                tasks.create_task(runs(one, int(number == 1), names, random.Random(number)))
"""

OTHERS = """
async def reductions(group):
    ranks = range(group.size)
    x = np.full(3, group.rank + 1.0)
    await group.all_reduce(x, dist.ReduceOp.PREMUL_SUM(2.0))
    assert (x == 2 * sum(rank + 1 for rank in ranks)).all(), x
    x = np.array([group.rank, np.nan if group.rank == 0 else 1.0])
    await group.all_reduce(x, dist.ReduceOp.MAX)
    assert x[0] == group.size - 1 and np.isnan(x[1]), x
    x = np.array([group.rank + 3.0])
    await group.all_reduce(x, dist.ReduceOp.custom(np.hypot))
    assert np.allclose(x, np.sqrt(sum((rank + 3.0) ** 2 for rank in ranks))), x
    x = np.full((300, 500), group.rank, np.float32)[:, ::2]  # not contiguous, in pieces larger than a message of MPI
    await group.all_reduce(x)
    assert (x == sum(ranks)).all()
    works = [group.all_reduce(np.full(2, float(number))) for number in range(20)]
    for number, work in enumerate(works):
        assert (await work == number * group.size).all()
    several = [np.ones(2), np.ones(5)]
    await dist.all_reduce_coalesced(several)
    assert all((one == group.size).all() for one in several)

async def messages(group):
    rank, size = group.rank, group.size
    right, left = (rank + 1) % size, (rank - 1) % size
    large = np.full(1 << 19, float(rank))
    found = np.empty_like(large)
    sent = group.isend(large, right, tag=1)
    small = group.isend(np.array([rank]), right, tag=2)
    one = np.empty(1, int)
    assert await group.recv(one, left, tag=2) == left and one[0] == left  # the later one first
    assert await group.recv(found, left, tag=1) == left and (found == left).all()
    await asyncio.gather(sent, small)
    if rank:
        await group.send(np.array([rank]), 0, tag=3)
    else:
        assert {await group.recv(one, tag=3) for _ in range(size - 1)} == set(range(1, size))
    array = group.recv_array(left)
    await group.send(np.arange(rank + 2, dtype=np.int16), right)
    assert (await array).tolist() == list(range(left + 2))
    mine = [np.array([rank * 10]), np.empty(1, int)]
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine[0], right), dist.P2POp(dist.irecv, mine[1], left)]):
        await work
    assert mine[1] == left * 10
    own = group.isend(np.array([7]), rank, tag=9)
    assert await group.recv(one, rank, tag=9) == rank and one == 7
    await own
    places = [None] * 2
    objects = group.send_object_list([{"from": rank}, np.arange(3)], right)
    await group.recv_object_list(places, left)
    await objects
    assert places[0] == {"from": left} and places[1].tolist() == [0, 1, 2]

async def items(group):
    rank, size = group.rank, group.size
    places = [None] * size
    await dist.all_gather_object(places, ("rank", rank))
    assert [tuple(place) for place in places] == [("rank", one) for one in range(size)], places
    values = ["a", {"b": 1}] if rank == 0 else [None, None]
    await dist.broadcast_object_list(values, 0)
    assert values == ["a", {"b": 1}]
    gathered = [None] * size if rank == size - 1 else None
    await dist.gather_object(rank, gathered, size - 1)
    assert gathered is None or gathered == list(range(size))
    out = [None]
    await dist.scatter_object_list(out, [f"for {one}" for one in range(size)] if rank == 0 else None, 0)
    assert out == [f"for {rank}"]
    arrays = await group.all_gather_array(np.arange(rank))
    assert [one.size for one in arrays] == list(range(size))
    stream = np.full(10_000, float(rank))
    async for _ in group.broadcast_stream(stream, 0, chunk_bytes=8_000):
        pass
    assert (stream == 0).all()
    await dist.monitored_barrier(timeout=20)

async def main():
    async with dist.init_process_group("mpi", timeout=60) as group:
        assert dist.get_backend() == "mpi" and str(group).endswith("backend mpi open>"), group
        await collectives(group)
        await reductions(group)
        await messages(group)
        await items(group)
    print("done")
dist.run(main())
"""


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.thorough) for size in (2, 4))])
def test_every_operation(size: int) -> None:
    job = mpirun(COLLECTIVES + OTHERS, size)
    assert (job.is_clean, job.stdout) == (True, "done\n" * size), job.said


@pytest.mark.thorough
def test_the_page() -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    job = mpirun(script, 2)
    assert (job.is_clean, job.stdout) == (True, "[1 1 1 1]\n" * 2), job.said


WITH_A_STORE = """
async def main():
    by = "OMPI_COMM_WORLD" if "OMPI_COMM_WORLD_RANK" in os.environ else "PMI"
    place, size = int(os.environ[f"{by}_RANK"]), int(os.environ[f"{by}_SIZE"])
    rank = size - 1 - place  # the store numbers ranks in another way than MPI
    async with dist.init_process_group("cpu:mpi", rank=rank, world_size=size, timeout=60) as group:
        assert group.rank == rank
        x = np.array([float(rank)])
        assert await group.broadcast(x, 0) == 0
        places = [np.empty(1) for _ in range(size)]
        await group.all_gather(places, np.array([float(rank)]))
        assert [float(one[0]) for one in places] == list(range(size))
        if rank:
            await group.send(np.array([rank]), 0)
        else:
            assert {await group.recv(np.empty(1, int)) for _ in range(size - 1)} == set(range(1, size))
    print("done")
dist.run(main())
"""


def test_beside_a_store() -> None:
    job = mpirun(WITH_A_STORE, 2, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0"})
    assert (job.is_clean, job.stdout) == (True, "done\n" * 2), job.said


BESIDE_GPUS = """
import contextlib
from asyncdist.testing.fake_cuda import fake_cuda

async def main(cuda):
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    async with dist.init_process_group(BACKEND, rank=rank, world_size=2, timeout=60) as group:
        x, on_gpu = np.ones(1), cuda.runtime.array(np.ones(5, np.float32), 0)
        work = group.all_reduce(on_gpu)
        await group.all_reduce(x)
        await work
        try:
            await group.all_reduce(on_gpu, "no operation" if rank else dist.ReduceOp.SUM)
            raise AssertionError("nobody refused")
        except (dist.CollectiveMismatchError, TypeError, ValueError):
            pass
        await group.all_reduce(x)
        assert x == 4 and (on_gpu.get() == 2).all(), (x, on_gpu.get())
        for _ in range(300):  # nothing is left behind
            await group.all_reduce(on_gpu, dist.ReduceOp.MAX)
        parts = [cuda.runtime.array(np.zeros(2, np.float32), 0) for _ in range(2)]
        await group.all_gather(parts, cuda.runtime.array(np.full(2, rank, np.float32), 0))
        assert [part.get().tolist() for part in parts] == [[0, 0], [1, 1]]
        if rank:
            await group.send(parts[1], 0)
        else:
            await group.recv(parts[0], 1)
            assert parts[0].get().tolist() == [1, 1]
        assert "path staged" in repr(group), group
        other = dist.new_group()
        with contextlib.suppress(dist.CollectiveError):
            await other.all_reduce(x if rank else on_gpu, timeout=30)
            raise AssertionError("nobody noticed")
    print("done")

with fake_cuda(1, mode="threads") as cuda:
    dist.run(main(cuda))
"""


@pytest.mark.parametrize("backend", ["cpu:mpi,cuda:aio", "mpi"])
def test_host_arrays_beside_arrays_on_gpus(backend: str) -> None:
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0"}
    job = mpirun(BESIDE_GPUS.replace("BACKEND", repr(backend)), 2, {} if backend == "mpi" else store)
    assert (job.is_clean, job.stdout) == (True, "done\n" * 2), job.said


BLOCKING = """
from asyncdist import blocking
blocking.init_process_group("mpi", timeout=60)
rank = blocking.get_rank()
x = np.array([rank + 1.0])
blocking.all_reduce(x)
assert x == 3
work = blocking.all_reduce(x, async_op=True)
work.wait()
assert x == 6
if rank:
    blocking.send(x, 0)
else:
    assert blocking.recv(x, 1) == 1
blocking.destroy_process_group()
async def again():  # another world of the same process, in its own event loop
    async with dist.init_process_group("mpi", progress="thread") as group:
        await group.all_reduce(x)
        assert x == 12
dist.run(again())
print("done")
"""


def test_functions_that_wait_and_the_communication_thread() -> None:
    job = mpirun(BLOCKING, 2)
    assert (job.is_clean, job.stdout) == (True, "done\n" * 2), job.said
