"""Ranks that have closed what the others still use, or never made it, are named at once; who is late is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from group_kit import Group, outcome
from socket_world import run_ranks

import asyncdist as dist
from asyncdist.group.deadlines import ASK_S
from asyncdist.testing import DeadlockError, run_world
from asyncdist.world.control import ControlMessage, Probe
from asyncdist.world.world import World

NAMED_S = 1.0
"""Within which a rank that never will run what the others wait for is named."""

Call = Callable[[Group], Any]
CALLS: dict[str, Call] = {
    "all_reduce": lambda group: group.all_reduce(np.ones(4)),
    "barrier": lambda group: group.barrier(tag=3, timeout=None),
    "monitored_barrier": lambda group: group.monitored_barrier(timeout=60),
    "broadcast": lambda group: group.broadcast(np.ones(4), 2),
    "all_gather_array": lambda group: group.all_gather_array(np.ones(group.rank)),
    "all_gather_object": lambda group: group.all_gather_object([None] * group.size, "x"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("after_s", [0.0, 5.0])
def test_who_has_closed_the_group_is_named(call: Call, after_s: float) -> None:
    """Be it before or while the others wait."""

    async def main(group: Group) -> None:
        made = dist.new_group()
        assert isinstance(made, Group)
        await made.barrier()
        loop = asyncio.get_running_loop()
        if group.rank == 2:
            await asyncio.sleep(after_s)
            await made.close()
            await asyncio.sleep(10)
            return
        since_s = loop.time()
        error = await outcome(call(made))
        assert isinstance(error, dist.CollectiveMismatchError)
        assert "rank 2 has closed the group without running " in str(error)
        assert error.peer == 2
        assert loop.time() - since_s < after_s + NAMED_S

    run_world(3, main)


def test_who_closes_it_with_others_behind_the_oldest_is_named() -> None:
    """Ranks 0 and 2 wait for each other nowhere; what is behind the oldest operation is not asked about."""

    async def main(group: Group) -> None:
        made = dist.new_group()
        assert isinstance(made, Group)
        if group.rank == 2:
            await made.broadcast(np.ones(1), 0)
            await made.close()
            await asyncio.sleep(10)
            return
        works = [made.broadcast(np.ones(1), 0), made.all_reduce(np.ones(1)), made.all_reduce(np.ones(1), tag=1)]
        found = [await outcome(work) for work in works[1:]]
        assert all("rank 2 has closed the group" in str(error) for error in found)
        assert asyncio.get_running_loop().time() < NAMED_S

    run_world(3, main)


def test_who_leaves_the_world_has_left_and_closed_nothing() -> None:
    async def main(group: Group) -> None:
        made = dist.new_group()
        assert isinstance(made, Group)
        if group.rank == 2:
            await asyncio.sleep(3)
            return
        error = await outcome(made.all_reduce(np.ones(1)))
        assert isinstance(error, dist.PeerLostError)
        assert (error.rank, error.left) == (2, True)
        assert asyncio.get_running_loop().time() < 3 + NAMED_S

    run_world(3, main)


@pytest.mark.parametrize("after_s", [0.0, 5.0])
def test_who_has_closed_the_parent_without_making_the_group_is_named(after_s: float) -> None:
    async def main(group: Group) -> None:
        parent = dist.new_group(group_desc="parent")
        assert isinstance(parent, Group)
        if group.rank == 2:
            await asyncio.sleep(after_s)
            await parent.close()
            await asyncio.sleep(10)
            return
        made = dist.new_group(group=parent)
        assert isinstance(made, Group)
        error = await outcome(made.all_reduce(np.ones(1)))
        assert isinstance(error, dist.CollectiveMismatchError)
        assert "rank 2 has closed group parent without making this one of it" in str(error)
        assert error.peer == 2
        assert asyncio.get_running_loop().time() < after_s + NAMED_S

    run_world(3, main)


@pytest.mark.parametrize("ends", ["leaves", "goes on"])
def test_who_never_makes_a_group_of_members_only_is_named(ends: str) -> None:
    """Once it has left; else it is only late, and the time-out names it."""

    async def main(group: Group) -> None:
        if group.rank == 2:
            await asyncio.sleep(5 if ends == "leaves" else 60)
            return
        made = dist.new_group(use_local_synchronization=True)
        assert isinstance(made, Group)
        error: Any = await outcome(made.all_reduce(np.ones(1), timeout=30))
        if ends == "leaves":
            assert isinstance(error, dist.PeerLostError)
            assert (error.rank, error.left) == (2, True)
            assert asyncio.get_running_loop().time() < 5 + NAMED_S
        else:
            assert isinstance(error, dist.CollectiveTimeoutError)
            assert "missing: rank 2 (group not made there)" in str(error)
            assert error.missing == (2,)

    run_world(3, main)


def test_who_made_another_group_is_found_also_when_it_is_needed_late() -> None:
    """What is first waited for there is another rank."""

    async def main(group: Group) -> None:
        made = dist.new_group([0, 1, 2] if group.rank < 2 else [2, 1])
        assert isinstance(made, Group)
        if group.rank == 2:
            await asyncio.sleep(20)
            return
        peer = 1 - group.rank
        sent = made.isend(np.ones(1), peer)
        await made.recv(np.ones(1), peer)
        await sent
        await asyncio.sleep(5)
        error = await outcome(made.all_reduce(np.ones(1)))
        assert isinstance(error, dist.CollectiveMismatchError)
        assert "rank 2 of [1, 2]" in str(error)
        assert asyncio.get_running_loop().time() < 5 + NAMED_S

    run_world(3, main)


def test_who_is_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And asked less and less often."""
    probes: list[float] = []
    tell = World.tell

    def noted(world: World, ranks: tuple[int, ...], message: ControlMessage, *, dial: bool) -> list[int]:
        if isinstance(message, Probe):
            probes.append(world.loop.time())
        return tell(world, ranks, message, dial=dial)

    monkeypatch.setattr(World, "tell", noted)

    async def main(group: Group) -> None:
        made = dist.new_group() if group.rank else None
        if group.rank == 0:
            await asyncio.sleep(40)
            made = dist.new_group()
        assert isinstance(made, Group)
        for _ in range(3):
            x = np.ones(2)
            await made.all_reduce(x)
            assert x[0] == 2

    run_world(2, main)
    assert probes == [ASK_S * 2**number for number in range(7)]


def test_a_loop_that_only_asks_ends() -> None:
    async def main(group: Group) -> None:
        if group.rank:
            await asyncio.Event().wait()
        await group.barrier(timeout=None)

    with pytest.raises(DeadlockError, match="barrier #0"):
        run_world(2, main)


@pytest.mark.parametrize("progress", ["loop", "thread"])
@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
async def test_on_sockets_and_the_communication_thread(
    progress: Any, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCDIST_TRANSPORT", transport)

    async def main(group: Any) -> None:
        used, parent = dist.new_group(group=group), dist.new_group(group=group, group_desc="parent")
        assert isinstance(used, Group)
        assert isinstance(parent, Group)
        await used.barrier()
        if group.rank == 1:
            await used.close()
            await parent.close()
        else:
            assert "rank 1 has closed the group" in str(await outcome(used.all_reduce(np.ones(1))))
            made = dist.new_group(group=parent)
            assert "rank 1 has closed group parent without" in str(await outcome(made.all_reduce(np.ones(1))))
        await group.barrier()

    await run_ranks(3, main, progress=progress)
