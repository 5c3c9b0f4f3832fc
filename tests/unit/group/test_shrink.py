"""`group.shrink()`: those that are left agree on who they are, and go on; `group.membership()`: who is gone."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import numpy as np
import pytest

import asyncdist as dist
from asyncdist.errors import ClosedError, CollectiveTimeoutError, DistError, GroupAbortedError
from asyncdist.group.survivors import RankLost
from asyncdist.testing import run_world
from asyncdist.world.control import Shrink, decode

Group = dist.ProcessGroup
PATIENCE_S = 50.0


async def total(group: Group) -> int:
    """The sum of the members' ranks in the world."""
    x = np.array([group.world.rank])
    await dist.all_reduce(x, group=group)
    return int(x[0])


async def until_lost(group: Group) -> None:
    with contextlib.suppress(dist.PeerLostError, GroupAbortedError):
        while True:
            await total(group)


@pytest.mark.parametrize("deaths", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_those_that_are_left_go_on(size: int, deaths: int) -> None:
    dead = sorted(random.Random(size * deaths).sample(range(size), min(deaths, size - 1)))
    left = [rank for rank in range(size) if rank not in dead]

    async def main(group: Group, world: Any) -> tuple[Any, ...]:
        if group.rank in dead:
            world.kill(group.rank)
        await until_lost(group)
        smaller = await group.shrink()
        return smaller.ranks, smaller.rank, await total(smaller)

    results = run_world(size, main, seed=size, latency_s=0.001, pass_world=True)
    assert [results[rank] for rank in left] == [(tuple(left), i, sum(left)) for i in range(len(left))]


@pytest.mark.parametrize("seed", range(36))
def test_ranks_may_die_while_the_others_shrink(seed: int) -> None:
    """At any time, the leader too: those that are left end up in one group, however often they have to shrink."""
    chance = random.Random(seed)
    size = chance.choice([3, 5, 8])
    dead = chance.sample(range(size), chance.randrange(1, size))
    at_s = {rank: chance.uniform(0, 0.03) for rank in dead[1:]}
    left = [rank for rank in range(size) if rank not in dead]

    def die(world: Any, rank: int) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            world.kill(rank)

    async def main(group: Group, world: Any) -> tuple[int, ...]:
        if group.rank == dead[0]:
            world.kill(group.rank)
        if group.rank in at_s:
            asyncio.get_running_loop().call_later(at_s[group.rank], die, world, group.rank)
        await until_lost(group)
        while True:
            group = await group.shrink(timeout=PATIENCE_S)
            try:
                for _ in range(20):
                    await asyncio.sleep(0.01)
                    await total(group)
            except (dist.PeerLostError, GroupAbortedError):
                continue
            return group.ranks

    results = run_world(size, main, seed=seed, latency_s=0.001, pass_world=True)
    assert [results[rank] for rank in left] == [tuple(left)] * len(left)


def test_nobody_has_to_have_died() -> None:
    """After a time-out, say: all go on in a new group; one that is in the middle of something hears of it there."""

    async def main(group: Group) -> tuple[int, ...]:
        if group.rank == 2:
            with pytest.raises(GroupAbortedError, match=r"shrink\(\) was called"):
                await dist.barrier()
        smaller = await group.shrink()
        assert await total(smaller) == 3
        with pytest.raises(GroupAbortedError):
            await total(group)
        again = await smaller.shrink()
        return again.ranks

    assert run_world(3, main) == [(0, 1, 2)] * 3


def test_a_rank_that_left_is_not_waited_for() -> None:
    async def main(group: Group) -> tuple[int, ...] | None:
        if group.rank == 0:
            await group.close()
            return None
        await asyncio.sleep(1)
        return (await group.shrink()).ranks

    assert run_world(3, main) == [None, (1, 2), (1, 2)]


def test_a_group_of_some_ranks_shrinks_alone() -> None:
    async def main(group: Group, world: Any) -> tuple[int, ...] | None:
        some = await dist.new_group([3, 1, 2])
        if group.rank == 1:
            world.kill(1)
        if not isinstance(some, Group):
            return None
        await until_lost(some)
        return (await some.shrink()).ranks

    assert run_world(4, main, pass_world=True) == [None, None, (2, 3), (2, 3)]


def test_ranks_that_do_not_call_are_named() -> None:
    async def main(group: Group, world: Any) -> None:
        if group.rank == 3:
            world.kill(3)
        await until_lost(group)
        if group.rank == 1:
            await asyncio.sleep(20)
            return
        missing = [1] if group.rank == 0 else [0]
        text = f"rank {group.rank}, shrink: .*have not agreed within 5 s; no answer from rank {missing[0]}: "
        with pytest.raises(CollectiveTimeoutError, match=text) as caught:
            await group.shrink(timeout=5)
        assert list(caught.value.missing) == missing

    run_world(4, main, pass_world=True)


def test_a_rank_that_one_other_has_lost_is_told() -> None:
    """Their connection broke, and both are alive: who does not stay hears why, from those that do."""

    async def main(group: Group, world: Any) -> Any:
        await total(group)
        await dist.barrier()
        if group.rank == 0:
            world.network._meshes[world.world_id, 0]._peers[2].link.cut()
        await until_lost(group)
        try:
            return (await group.shrink(timeout=PATIENCE_S)).ranks
        except GroupAbortedError as error:
            return str(error)

    results = run_world(4, main, latency_s=0.001, pass_world=True)
    told = [result for result in results if isinstance(result, str)]
    (ranks,) = {result for result in results if isinstance(result, tuple)}
    assert {1, 3} <= set(ranks)
    assert len(told) == 4 - len(ranks)
    assert all("go on without rank" in text for text in told)


def test_cancelling_stops_only_the_waiting() -> None:
    async def main(group: Group) -> tuple[int, ...]:
        if group.rank == 1:
            await asyncio.sleep(5)
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await group.shrink()
            await asyncio.sleep(1)
        return (await group.shrink()).ranks

    assert run_world(2, main) == [(0, 1)] * 2


def test_a_closed_group_cannot_shrink() -> None:
    async def main(group: Group) -> None:
        some = await dist.new_group([0, 1])
        await some.close()
        with pytest.raises(ClosedError, match="shrink: the group is closed"):
            await some.shrink()
        with pytest.raises(ClosedError, match="membership: the group is closed"):
            some.membership()

    run_world(2, main)


def test_membership_tells_who_is_gone_from_the_first_on() -> None:
    async def main(group: Group, world: Any) -> list[RankLost] | None:
        if group.rank == 1:
            world.kill(1)
        if group.rank == 2:
            await asyncio.sleep(1)
            await left(group)
            return None
        early = asyncio.ensure_future(collected(group))
        await until_lost(group)
        await asyncio.sleep(2)
        late = asyncio.ensure_future(collected(group))
        await asyncio.sleep(0)
        await left(group)
        assert await early == await late
        return await late

    async def left(group: Group) -> None:
        with contextlib.suppress(DistError):  # the group is aborted since rank 1 died
            await group.close()

    async def collected(group: Group) -> list[RankLost]:
        return [change async for change in group.membership()]

    changes, _, _, others = run_world(4, main, pass_world=True)
    for found in (changes, others):
        assert [(change.rank, change.left, len(change.ranks)) for change in found[:2]] == [(1, False, 3), (2, True, 2)]
        assert isinstance(found[0].error, dist.PeerLostError)
        assert found[1].error is None


@pytest.mark.parametrize(
    "fields", [(1, 0, "report", 0, [], [4]), (1, 0, "report", -1, [], []), (1, 0, "report", 0, ["x"], [])]
)
def test_malformed_steps_are_refused(fields: tuple[Any, ...]) -> None:
    with pytest.raises(dist.RemoteProtocolError, match="malformed"):
        decode(1, Shrink(*fields).encode(), 4)
