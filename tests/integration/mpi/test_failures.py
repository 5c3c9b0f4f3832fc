"""What goes wrong between ranks of MPI raises as elsewhere, and no end hangs."""

from __future__ import annotations

import pytest
from mpi_kit import mpirun, need_mpi

need_mpi()
pytestmark = [pytest.mark.peers, pytest.mark.slow("starts interpreters by mpirun")]

ERRORS = """
import contextlib

async def error_of(work):
    try:
        await work
    except Exception as error:
        return error
    raise AssertionError(f"{work} did not fail")

async def refused(group):
    if group.rank == 0:
        with contextlib.suppress(TypeError):
            group.all_reduce("no array")
    else:
        error = await error_of(group.all_reduce(np.ones(1)))
        assert isinstance(error, dist.CollectiveMismatchError) and "rank 0 refused" in str(error), error
    assert (await group.all_reduce(np.ones(1))) == 2  # it stays usable

async def different(group):
    call = group.all_reduce(np.ones(2, np.float32)) if group.rank == 0 else group.broadcast(np.ones(3), 0)
    error = await error_of(call)
    assert isinstance(error, dist.CollectiveMismatchError), error
    assert "all_reduce" in str(error) and "broadcast" in str(error), error
    with contextlib.suppress(dist.GroupAbortedError):
        group.barrier()
        raise AssertionError("it is usable")

async def other_lengths(group):
    sent, room = ([2, 3], [2, 1]) if group.rank == 0 else ([1, 1], [2, 1])  # rank 1 has room for 2 of the 3
    out = np.empty(sum(room))
    work = group.all_to_all_single(out, np.ones(sum(sent)), room, sent)
    if group.rank == 0:  # what comes here is right
        with contextlib.suppress(dist.DistError):
            await work
    else:
        error = await error_of(work)
        assert isinstance(error, dist.CollectiveMismatchError) and "rank 0 sent" in str(error), error

async def late(group):
    await group.barrier()  # its communicators are there
    if group.rank == 0:
        error = await error_of(group.all_reduce(np.ones(1), timeout=0.3))
        assert isinstance(error, dist.CollectiveTimeoutError) and error.missing == (1,), error
    else:
        await asyncio.sleep(0.6)
        with contextlib.suppress(dist.GroupAbortedError):
            group.barrier()
            raise AssertionError("it is usable")

async def receives(group):
    x = np.zeros(1)
    if group.rank == 0:
        error = await error_of(group.recv(x, 1, tag=5, timeout=0.2))
        assert isinstance(error, dist.CollectiveTimeoutError) and "rank 1 has sent no message of tag 5" in str(error)
        waiting = asyncio.ensure_future(asyncio.wait_for(group.recv(x, 1, tag=5), 0.1))
        assert isinstance(await error_of(waiting), TimeoutError)
        await group.send(x, 1)
        assert await group.recv(x, 1, tag=5) == 1 and x == 4  # neither has swallowed it
    else:
        await group.recv(x, 0)
        await group.send(np.array([4.0]), 0, tag=5)

async def cancelled(group):
    x = np.ones(1)
    if group.rank == 0:
        work = group.all_reduce(x)
        waiting = asyncio.ensure_future(asyncio.wait_for(work.wait(), 0.1))
        assert isinstance(await error_of(waiting), TimeoutError)
        await group.send(x, 1)
        await work  # only a waiter has gone
    else:
        await group.recv(np.empty(1), 0)
        await group.all_reduce(x)
    assert x == 2

async def main():
    async with dist.init_process_group("mpi", timeout=60) as group:
        for part in refused, receives, cancelled, different, other_lengths, late:
            await part(dist.new_group())
            await group.barrier()
        assert (await group.all_reduce(np.ones(1))) == 2
    print("done")
dist.run(main())
"""


def test_errors_are_ours_and_the_end_does_not_hang() -> None:
    job = mpirun(ERRORS, 2)
    assert (job.returncode, job.stdout) == (0, "done\n" * 2), job.said
    assert "of MPI leaves operations that never ended (agreements on collectives)" in job.stderr, job.said


KILLED = """
async def main():
    async with dist.init_process_group("mpi") as group:
        await group.barrier()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        await group.all_reduce(np.ones(1))
dist.run(main())
"""


def test_a_killed_rank_ends_the_job() -> None:
    job = mpirun(KILLED, 3)
    assert job.returncode != 0, job.said
    assert "signal 9" in job.said


RAISES = """
async def main():
    try:
        async with dist.init_process_group("mpi") as group:
            await group.barrier()
            if group.rank == 1:
                raise KeyError("mine")
            await group.all_reduce(np.ones(1))
    except dist.GroupAbortedError as error:
        assert "rank 1 left with KeyError" in str(error), error
        print("told")
try:
    dist.run(main())
except KeyError:
    print("raised")
"""


def test_who_raises_tells_the_others() -> None:
    job = mpirun(RAISES, 3)
    assert job.returncode == 0, job.said
    assert sorted(job.stdout.split()) == ["raised", "told", "told"]


NEVER_CLOSED = """
async def main():
    group = await dist.init_process_group("mpi")
    await group.barrier()
    if group.rank == 0:
        try:
            await group.recv(np.ones(1), 1)
        except dist.DistError as error:
            print("told", type(error).__name__)
        await group.close()
asyncio.run(main())
"""


def test_a_loop_that_ends_with_an_open_group_is_noticed() -> None:
    job = mpirun(NEVER_CLOSED, 2)
    assert job.stdout == "told PeerLostError\n", job.said


NOT_ALL = """
from asyncdist.mpi import library
from mpi4py import MPI
library.FINALIZE_LIMIT_S = 3
async def main():
    try:
        await dist.init_process_group("mpi", timeout=0.2)
    except dist.ConnectTimeoutError as error:
        print(error, flush=True)
if MPI.COMM_WORLD.Get_rank() == 0:
    dist.run(main())
else:
    time.sleep(1)
"""


def test_joining_that_not_all_do_times_out() -> None:
    job = mpirun(NOT_ALL, 2)
    assert "rank 0: not all ranks of MPI_COMM_WORLD have joined within 0.2 s" in job.stdout, job.said
    assert "rank 0 of MPI leaves operations that never ended (joining a world)" in job.stderr, job.said


STAYS = """
from asyncdist.mpi import library
library.FINALIZE_LIMIT_S = 1
async def main():
    async with dist.init_process_group("mpi") as group:
        other = dist.new_group()
        await other.barrier()
        if group.rank == 0:
            try:
                await other.all_reduce(np.ones(1), timeout=0.2)
            except dist.CollectiveTimeoutError:
                print("late", flush=True)
        else:
            await asyncio.sleep(0.5)
dist.run(main())
if dist.is_initialized() or os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(60)
"""


def test_an_exit_waits_for_others_within_bounds_where_operations_never_ended() -> None:
    job = mpirun(STAYS, 2)
    assert job.returncode != 0, job.said
    assert job.stdout == "late\n"
    assert "if MPI_Finalize takes longer than 1 s, SIGALRM ends this process" in job.stderr, job.said
    assert job.took_s < 50
