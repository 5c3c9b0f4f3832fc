"""`run_world` says what went wrong, and where: its users read one traceback, not one of each rank."""

from __future__ import annotations

import asyncio
import contextlib
import re

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


def test_a_rank_that_kills_itself_ends_there_and_is_lost_to_the_others() -> None:
    went_on: list[str] = []

    async def main(group: dist.ProcessGroup, world: SimulatedWorld) -> str:
        await group.barrier()
        if group.rank == 1:
            await asyncio.sleep(1)
            try:
                world.kill(1)
                went_on.append("after the call")
            except Exception:
                went_on.append("with an exception")
            finally:
                with contextlib.suppress(dist.DistError):
                    await group.send(np.ones(1), 0)
        with pytest.raises(dist.PeerLostError, match="lost rank 1") as lost:
            await group.barrier()
        assert lost.value.rank == 1
        return "survived"

    for seed in (None, 1, 2):
        assert run_world(3, main, seed=seed, pass_world=True) == ["survived", None, "survived"]
    assert not went_on


def test_a_killed_rank_ends_wherever_it_is_and_says_nothing() -> None:
    """Nor does a part of it: the store tells nothing of it to those who look for it later."""
    went_on: list[str] = []

    async def main(group: dist.ProcessGroup, world: SimulatedWorld) -> None:
        if group.rank == 2:
            inner = asyncio.ensure_future(asyncio.Event().wait())
            try:
                await inner
            except dist.DistError:
                went_on.append("with an error")
            went_on.append("after the wait")
        elif group.rank == 0:
            await asyncio.sleep(1)
            world.kill(2)
            world.kill(2)
        await asyncio.sleep(5)
        with pytest.raises(dist.PeerLostError) as lost:
            await group.recv(np.zeros(1), 2)
        assert lost.value.rank == 2
        assert not lost.value.left
        assert "left with" not in str(lost.value)

    run_world(3, main, pass_world=True)
    assert not went_on


def test_a_part_of_a_rank_may_kill_it() -> None:
    async def main(group: dist.ProcessGroup, world: SimulatedWorld) -> None:
        async def part() -> None:
            await asyncio.sleep(1)
            world.kill(group.rank)
            raise AssertionError("it goes on")

        if group.rank == 1:
            await asyncio.gather(part(), asyncio.Event().wait())
        with pytest.raises(dist.PeerLostError):
            await group.recv(np.zeros(1), 1)

    run_world(2, main, pass_world=True)


def test_a_deadlock_shows_lines_of_the_program_and_what_they_call() -> None:
    async def helper() -> None:
        await asyncio.Event().wait()

    async def main(group: dist.ProcessGroup) -> None:
        if group.rank == 0:
            await helper()
        await group.recv(np.zeros(1), 0)

    with pytest.raises(DeadlockError) as caught:
        run_world(2, main)
    lines = str(caught.value).split("these tasks wait: ")[1].split("; ")
    assert len(lines) == 2
    assert re.fullmatch(r"rank 0: \S*helper at \S+test_world\.py:\d+ in Event\.wait", lines[0])
    assert re.fullmatch(r"rank 1: \S*main at \S+test_world\.py:\d+ for <Work recv 8 B pending>", lines[1])


@pytest.mark.parametrize("pause_s", [1, 0])
def test_a_rank_that_sleeps_in_a_loop_is_named(pause_s: int) -> None:
    async def main(group: dist.ProcessGroup) -> None:
        while group.rank == 1:  # noqa: ASYNC110 - as users do
            await asyncio.sleep(pause_s)
        await group.barrier(timeout=None)

    with pytest.raises(DeadlockError, match=r"no message .* in 1000 turns .*rank 1: \S*main at \S+:\d+ in (__)?sleep"):
        run_world(3, main, max_idle_turns=1000)


def test_turns_without_a_message_are_counted_from_the_last_one() -> None:
    async def main(group: dist.ProcessGroup) -> int:
        for _ in range(20):
            for _ in range(20):
                await asyncio.sleep(1)
            await group.barrier()
        return group.rank

    assert run_world(2, main, max_idle_turns=100) == [0, 1]
    with pytest.raises(DeadlockError, match="no message"):
        run_world(2, main, max_idle_turns=10)


def test_nothing_is_counted_on_demand() -> None:
    async def main(group: dist.ProcessGroup) -> None:
        for _ in range(300):
            await asyncio.sleep(1)

    run_world(2, main, max_idle_turns=None)
    with pytest.raises(DeadlockError, match="no message"):
        run_world(2, main, max_idle_turns=200)
