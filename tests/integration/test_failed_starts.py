"""A start that failed, then the right one at once, on a standing daemon and under one job id: it comes up."""

from __future__ import annotations

import signal
import subprocess

import pytest
from jobs import daemon, finish, start_rank, start_ranks

SUM = """
async def main():
    async with dist.init_process_group(timeout=float(os.environ.get("JOIN_S", 30))) as group:
        x = np.ones(1)
        await group.all_reduce(x)
        assert x[0] == group.size
        print("up", flush=True)
        if os.environ.get("STAY"):
            await asyncio.Event().wait()
dist.run(main())
"""
ROUNDS = 2
"""Of each way to fail; as many as are wanted come up, as tests/unit/world/test_attempts.py shows in virtual time."""


def rank_missing(where: dict[str, str]) -> None:
    """Its time is over."""
    (alone,) = finish([start_rank(SUM, 0, 2, {**where, "JOIN_S": "0.3"})])
    assert "1 of 2 ranks joined in time; missing: rank 1" in alone.stderr


def rank_started_twice(where: dict[str, str]) -> None:
    """Two processes are rank 1, and rank 0 comes too late to hear of it."""
    twice = finish([start_rank(SUM, 1, 2, where) for _ in range(2)])
    assert all("claims a rank that rank 1" in rank.stderr for rank in twice)


def other_world_size(where: dict[str, str]) -> None:
    """Both are told, at once."""
    for rank in finish([start_rank(SUM, 0, 2, where), start_rank(SUM, 1, 3, where)], timeout_s=20):
        assert rank.returncode == 1
        assert "world_size" in rank.stderr
        assert "rank 0 (" in rank.stderr
        assert "rank 1 (" in rank.stderr


def killed_while_it_waits(where: dict[str, str]) -> None:
    """By kill -9, as it has come."""
    waits = start_rank(
        "import logging\nlogging.basicConfig(level=0)\n" + SUM, 1, 2, {**where, "ASYNCDIST_DEBUG": "INFO"}
    )
    assert waits.stderr is not None
    for line in waits.stderr:
        if "listening on" in line:
            break
    kill([waits])


def killed_in_a_world(where: dict[str, str]) -> None:
    """Both, in the middle."""
    ranks = start_ranks(SUM, 2, {**where, "STAY": "1"})
    assert [rank.stdout.readline() for rank in ranks if rank.stdout is not None] == ["up\n"] * 2
    kill(ranks)


def kill(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    for rank in ranks:
        rank.communicate()


@pytest.mark.parametrize(
    "fail", [rank_missing, rank_started_twice, other_world_size, killed_while_it_waits, killed_in_a_world]
)
def test_the_right_start_comes_up_after_one_that_failed(fail: object) -> None:
    assert callable(fail)
    with daemon() as store:
        where = {"ASYNCDIST_STORE": store}
        for _ in range(ROUNDS):
            fail(where)
            for rank in finish(start_ranks(SUM, 2, where), timeout_s=20):
                assert (rank.returncode, rank.stdout) == (0, "up\n"), rank.stderr


def test_a_rerun_beside_the_ranks_of_a_running_world_is_refused() -> None:
    with daemon() as store:
        where = {"ASYNCDIST_STORE": store}
        running = start_ranks(SUM, 2, {**where, "STAY": "1"})
        assert [rank.stdout.readline() for rank in running if rank.stdout is not None] == ["up\n"] * 2
        for rank in finish(start_ranks(SUM, 2, where)):
            assert rank.returncode == 1
            assert "holds already, and is alive" in rank.stderr
        assert [rank.poll() for rank in running] == [None, None]
        kill(running)
