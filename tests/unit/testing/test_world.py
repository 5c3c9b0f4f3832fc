"""`run_world` says what went wrong, and where: its users read one traceback, not one of each rank."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import asyncdist as dist
from asyncdist.testing import DeadlockError, SimulatedWorld, run_world


def test_the_failure_that_brought_down_the_others_is_raised() -> None:
    async def main(group: dist.ProcessGroup) -> None:
        await group.barrier()
        assert group.rank != 2, "the cause"
        await group.barrier()

    with pytest.raises(AssertionError, match="the cause") as caught:
        run_world(4, main)
    assert caught.value.__notes__ == ["raised on rank 2"]


def test_who_names_another_rank_is_believed_before_who_was_told_only() -> None:
    async def main(group: dist.ProcessGroup) -> None:
        if group.rank == 0:
            await asyncio.sleep(100)
        await group.barrier(timeout=5)

    with pytest.raises(dist.CollectiveTimeoutError, match="missing: rank 0") as caught:
        run_world(3, main)
    assert caught.value.missing == (0,)


def test_who_says_that_a_rank_has_left_is_less_than_what_it_left_with() -> None:
    async def main(group: dist.ProcessGroup) -> None:
        if group.rank == 3:
            return
        if group.rank == 2:
            await group.recv(np.zeros(1), 3)
        await group.recv(np.zeros(1), group.rank + 1)

    with pytest.raises(dist.PeerLostError, match="rank 3 has left") as caught:
        run_world(4, main)
    assert caught.value.__notes__ == ["raised on rank 2"]


def test_a_rank_that_was_killed_is_no_cause() -> None:
    async def main(group: dist.ProcessGroup, world: SimulatedWorld) -> None:
        await group.barrier()
        if group.rank == 1:
            world.kill(0)
        await group.barrier()

    with pytest.raises(dist.PeerLostError, match="lost rank 0"):
        run_world(3, main, pass_world=True)


def test_waiting_for_any_source_is_a_deadlock_too() -> None:
    async def main(group: dist.ProcessGroup) -> None:
        await group.recv(np.zeros(1), None if group.rank == 0 else 0)

    with pytest.raises(DeadlockError, match=r"rank 0: .*rank 1: .*rank 2: "):
        run_world(3, main)


def test_a_deadlock_says_where_each_rank_waits_and_for_what() -> None:
    async def main(group: dist.ProcessGroup) -> None:
        await group.recv(np.zeros(1), 1 - group.rank)

    with pytest.raises(DeadlockError, match=r"rank 1: .*main at \S+test_world\.py:\d+ for <Work recv 8 B pending>"):
        run_world(2, main)


def test_wrong_calls_say_what_is_wrong() -> None:
    async def main(group: dist.ProcessGroup) -> None: ...

    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        run_world(0, main)
    with pytest.raises(TypeError, match="main must be an async function: it returned 3"):
        run_world(1, lambda group: 3)  # type: ignore[arg-type, return-value]


async def test_within_a_running_loop_it_is_refused() -> None:
    async def main(group: dist.ProcessGroup) -> None: ...

    with pytest.raises(RuntimeError, match="call it from a plain function"):
        run_world(1, main)
