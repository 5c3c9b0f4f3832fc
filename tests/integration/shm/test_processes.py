"""Ranks that share memory as real processes: killed, stopped, told different things, forked. Nothing stays behind."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import finish, free_port, run_ranks, start_rank, start_ranks
from punctual import assert_within, punctual
from soak import soak

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")

UNTIL_KILLED = """
async def main():
    group = await dist.init_process_group(timeout=60)
    data = np.ones({count})
    await group.all_reduce(data)
    print("ready", group.world.mesh.address.unix.decode()[1:], flush=True)
    died = None
    try:
        while True:
            {operation}
    except (dist.PeerLostError, dist.GroupAbortedError) as error:  # the latter where it was noticed between two calls
        died = error
    print(time.time(), died.rank, flush=True)
    try:
        await group.close()
    except dist.DistError:
        pass
dist.run(main())
"""
SHORT = "await group.all_reduce(data)"
P2P = """
            for peer in [1] if group.rank != 1 else [0, 2]:
                sent = group.isend(data, peer)
                await group.recv(data, peer)
                await sent
"""
MANY = "await asyncio.gather(*(group.all_reduce(data.copy(), tag=tag) for tag in range(3)))"


def until_ready(ranks: list[subprocess.Popen[str]]) -> list[str]:
    """Wait until they share memory; the names of their sockets."""
    names = []
    for rank in ranks:
        assert rank.stdout is not None
        said, name = rank.stdout.readline().split()
        assert said == "ready"
        names.append(name)
    return names


def left_of(names: list[str]) -> list[str]:
    """What such ranks could leave in the system, of that which is there."""
    sockets = Path("/proc/net/unix").read_text()
    shm, temporary = Path("/dev/shm"), Path("/tmp")
    files = [str(path) for folder in (shm, temporary) for path in folder.glob("*asyncdist*")]
    return [name for name in names if name in sockets] + [path for path in files if any(name in path for name in names)]


@punctual
@pytest.mark.parametrize(
    ("operation", "count"),
    [(SHORT, 8), (SHORT, 20_000), (SHORT, 4_000_000), (MANY, 100_000), (P2P, 8), (P2P, 1_000_000)],
)
def test_whoever_is_killed_is_named_within_a_second(operation: str, count: int) -> None:
    ranks = start_ranks(UNTIL_KILLED.format(count=count, operation=operation), 3)
    try:
        names = until_ready(ranks)
        killed_s = time.time()
        ranks[1].send_signal(signal.SIGKILL)
        ended = finish(ranks)
    finally:
        finish(ranks)
    took_s = []
    for rank in (ended[0], ended[2]):
        assert rank.returncode == 0, rank.stderr
        told_s, who = rank.stdout.split()
        assert who == "1"
        took_s.append(float(told_s) - killed_s)
    assert not left_of(names)
    assert_within(1, max(took_s))


def test_nothing_is_left_of_ranks_that_are_all_killed() -> None:
    ranks = start_ranks(UNTIL_KILLED.format(count=100_000, operation=SHORT), 3)
    try:
        names = until_ready(ranks)
        assert left_of(names) == names, "what this test looks for is there while they live"
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
    finally:
        finish(ranks)
    assert not left_of(names)


def test_a_rank_that_is_stopped_for_a_while_is_not_lost() -> None:
    code = """
    async def main():
        async with dist.init_process_group(timeout=60) as group:
            for number in range(60):
                data = np.full(10_000, number)
                await group.all_reduce(data)
                assert (data == 3 * number).all()
                if number == 5 and group.rank == 2:
                    os.kill(os.getpid(), signal.SIGSTOP)
    dist.run(main())
    """
    ranks = start_ranks(code, 3)
    try:
        assert os.WIFSTOPPED(os.waitpid(ranks[2].pid, os.WUNTRACED)[1])
        with pytest.raises(TimeoutError):
            wait_for_end(ranks[0].pid, 0.6)
        ranks[2].send_signal(signal.SIGCONT)
        ended = finish(ranks)
    finally:
        finish(ranks)
    assert [rank.returncode for rank in ended] == [0, 0, 0], ended


def wait_for_end(pid: int, limit_s: float) -> None:
    """Until the process has ended. Raises TimeoutError."""
    fd = os.pidfd_open(pid)
    try:
        if not select.select([fd], [], [], limit_s)[0]:
            raise TimeoutError
    finally:
        os.close(fd)


SUMS = """
async def main():
    async with dist.init_process_group(timeout=60) as group:
        for count in (1, 1000, 500_000):
            for _ in range(3):
                data = np.ones(count)
                await group.all_reduce(data)
                assert (data == group.size).all()
        data = np.zeros(1000)
        sent = group.isend(np.full(1000, 1.0 * group.rank), (group.rank + 1) % group.size)
        await group.recv(data, (group.rank - 1) % group.size)
        await sent
        assert (data == (group.rank - 1) % group.size).all()
        print(group.world.mesh.describe((group.rank + 1) % group.size))
dist.run(main())
"""


@pytest.mark.parametrize("odd", [0, *(pytest.param(odd, marks=pytest.mark.thorough) for odd in (1, 2))])
@pytest.mark.parametrize(
    ("setting", "over"),
    [
        ({"ASYNCDIST_TRANSPORT": "tcp"}, "tcp"),
        ({"ASYNCDIST_TRANSPORT": "unix"}, "unix"),
        ({"ASYNCDIST_SHM_BYTES": "0"}, "unix"),
    ],
)
def test_one_rank_that_shares_nothing(odd: int, setting: dict[str, str], over: str) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ASYNCDIST_DEBUG": "INFO"}
    ranks = [start_rank(SUMS, rank, 3, {**where, **(setting if rank == odd else {})}) for rank in range(3)]
    for rank in finish(ranks):
        assert rank.returncode == 0, rank.stderr
        neighbor = (rank.rank + 1) % 3
        assert f": {over if odd in (rank.rank, neighbor) else 'shm'}" in rank.stdout, rank
        if over != "tcp" and rank.rank != odd:
            lines = [line for line in rank.stderr.splitlines() if "no shared memory with" in line]
            assert len(lines) <= 1, rank.stderr  # where the odd one dialed, sharing memory was not even asked for
        assert len(re.findall("no shared memory; (only|no) rank", rank.stderr)) <= 1


def test_a_forked_child_touches_nothing() -> None:
    """It inherits the memory, not the right to use it; its parent goes on, and it cannot hold anything up."""
    code = """
    async def main():
        group = await dist.init_process_group(timeout=60)
        data = np.ones(1000)
        await group.all_reduce(data)
        work = group.all_reduce(np.ones(5), tag=3) if group.rank else None
        child = os.fork()
        if not child:
            memory = group.world.mesh.memory
            assert not memory.doorbell.poll() and not memory.ranks_here
            assert memory.doorbell.eventfd >= 0 and not os.path.exists(f"/proc/self/fd/{memory.doorbell.eventfd}")
            try:
                group.barrier()
            except dist.ClosedError:
                os._exit(0)
            os._exit(1)
        for _ in range(100):
            await group.all_reduce(data)
        if work is None:
            work = group.all_reduce(np.ones(5), tag=3)
        await work
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        await group.close()
    dist.run(main())
    """
    run_ranks(code, 3)


@pytest.mark.slow("a short soak")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_random_operations_on_ranks_that_are_stopped_at_random(seed: int) -> None:
    """`make soak` runs a million."""
    soaked = soak(800, 4, seed)
    assert not soaked.problem, str(soaked)
    assert soaked.pauses > 5


def test_a_blocking_script_and_a_communication_thread() -> None:
    code = """
    import asyncdist.blocking as dist
    dist.init_process_group(timeout=60)
    for count in (1, 1000, 500_000):
        for _ in range(10):
            data = np.ones(count)
            dist.all_reduce(data)
            assert (data == 3).all()
    dist.destroy_process_group()
    """
    run_ranks(code, 3)
