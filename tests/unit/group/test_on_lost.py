"""`on_lost="continue"`: the same result on all that are left, and who took part in it, whoever dies or leaves when."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest

import asyncdist as dist
from asyncdist.errors import ClosedError, CollectiveMismatchError, CollectiveTimeoutError, DistError, GroupAbortedError
from asyncdist.testing import run_world

OPERATIONS = 12
PATIENCE_S = 50.0

Group = dist.ProcessGroup
Result = tuple[tuple[int, ...], int]
left_reduce = functools.partial(dist.all_reduce, on_lost="continue")


def die(world: Any, rank: int) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        world.kill(rank)


async def reduced(number: int, rank: int, tag: int = 0, **options: Any) -> Result:
    """The ranks of an all_reduce, checked against the sum, to which each rank gives a digit of its own."""
    x = np.full(2, 100**rank * number)
    array, ranks = await left_reduce(x, tag=tag, **options)
    assert array is x
    assert x.tolist() == [number * sum(100**one for one in ranks)] * 2
    return ranks, int(x[0])


def same_on_all_that_are_left(results: list[Any], dead: Any) -> list[Any]:
    left = [results[rank] for rank in range(len(results)) if rank not in dead]
    assert all(result == left[0] for result in left)
    return left[0]


@pytest.mark.parametrize("seed", range(60))
def test_ranks_that_die(seed: int) -> None:
    """At any time: in an operation, between two, while the others agree, several at once, rank 0 too."""
    chance = random.Random(seed)
    size = chance.choice([2, 3, 5, 8])
    dead = {rank: chance.uniform(0, 0.2) for rank in chance.sample(range(size), chance.randrange(size))}

    async def main(group: Group, world: Any) -> list[Result]:
        if group.rank in dead:
            asyncio.get_running_loop().call_later(dead[group.rank], die, world, group.rank)
        return [await reduced(number, group.rank) for number in range(1, OPERATIONS)]

    results = run_world(size, main, seed=seed, latency_s=0.001, pass_world=True)
    lengths = [len(ranks) for ranks, _ in same_on_all_that_are_left(results, dead)]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("seed", range(36))
def test_several_operations_at_a_time(seed: int) -> None:
    """Those of a tag end in order, those of two tags in any order; the callers may wait, or be cancelled, or not."""
    chance = random.Random(seed)
    size = chance.choice([2, 3, 5])
    dead = {rank: chance.uniform(0, 0.05) for rank in chance.sample(range(size), chance.randrange(size))}

    async def main(group: Group, world: Any) -> dict[int, list[Result]]:
        own = random.Random(seed * 100 + group.rank)
        loop, found = asyncio.get_running_loop(), defaultdict(list)
        if group.rank in dead:
            loop.call_later(dead[group.rank], die, world, group.rank)

        async def program(tag: int) -> None:
            works = []
            for number in range(1, OPERATIONS):
                await asyncio.sleep(own.choice([0, 0, 0.001, 0.01]))
                works.append((np.full(2, 100**group.rank * number), number))
                works[-1] = (left_reduce(works[-1][0], tag=tag), number)
                if own.random() < 0.3:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(works[-1][0], 0.001)
            for work, number in works:
                array, ranks = await work
                assert array.tolist() == [number * sum(100**one for one in ranks)] * 2
                found[tag].append((ranks, int(array[0])))

        await asyncio.gather(*(program(tag) for tag in range(own.choice([3, 3]))))
        return dict(found)

    results = run_world(size, main, seed=seed, latency_s=0.001, pass_world=True)
    same_on_all_that_are_left([result and sorted(result.items()) for result in results], dead)


@pytest.mark.parametrize("seed", range(36))
def test_ranks_that_leave_raise_or_give_up(seed: int) -> None:
    """Each rank calls as many operations as it likes, and goes in some way: the others go on without it."""
    chance = random.Random(seed)
    size = chance.choice([2, 3, 5])
    counts = [chance.randrange(8) for _ in range(size)]
    counts[chance.randrange(size)] = 10
    ways = [chance.choice(["close", "return", "raise", "abort", "die"]) for _ in range(size)]

    async def main(group: Group, world: Any) -> list[Result]:
        found = []
        for number in range(1, counts[group.rank]):
            found.append(await reduced(number, group.rank, timeout=PATIENCE_S))
            await asyncio.sleep(0.003 * (group.rank % 3))
        if counts[group.rank] < 10:
            way = ways[group.rank]
            if way == "close":
                with contextlib.suppress(DistError):
                    await group.close()
                await asyncio.sleep(1)
            elif way == "abort":
                group.abort("no more of it")
                await asyncio.sleep(1)
            elif way == "die":
                world.kill(group.rank)
            elif way == "raise":
                with contextlib.suppress(ValueError):
                    async with group:
                        raise ValueError("a mistake")
        return found

    results = run_world(size, main, seed=seed, latency_s=0.001, pass_world=True)
    for number in range(9):
        there = Counter(result[number] for result in results if result is not None and len(result) > number)
        assert len(there) == 1


def test_other_operations_raise_and_theirs_go_on() -> None:
    async def main(group: Group, world: Any) -> tuple[int, ...]:
        some = await dist.new_group(list(range(4)))
        await reduced(1, group.rank)
        if group.rank == 1:
            world.kill(1)
        await reduced(2, group.rank)
        with pytest.raises(GroupAbortedError):
            await dist.barrier()
        with pytest.raises(GroupAbortedError):
            dist.all_reduce(np.ones(1))
        smaller = await group.shrink()
        await dist.barrier(group=smaller)
        (_, ranks), (_, again) = await left_reduce(np.ones(1), group=some), await left_reduce(np.ones(1), group=smaller)
        assert ranks == again == smaller.ranks
        return (await reduced(3, group.rank))[0]

    assert run_world(4, main, pass_world=True) == [(0, 2, 3), None, (0, 2, 3), (0, 2, 3)]


@pytest.mark.parametrize("then", ["compute", "close"])
def test_a_rank_that_is_through_answers_those_that_are_not(then: str) -> None:
    """Rank 2 dies about when its barrier ends, which rank 0 may have left, and rank 1 not."""

    async def main(group: Group, world: Any) -> None:
        some = await dist.new_group([0, 1, 2])
        await dist.barrier()
        if group.rank == 2:
            asyncio.get_running_loop().call_later(0.003 + seed / 4000, die, world, 2)
        work = left_reduce(np.full(1, 100**group.rank), group=some)
        async with asyncio.timeout(1):
            ranks.add((await work).ranks)
        if group.rank == 0 and then == "close":
            await some.close()
        if group.rank < 2:
            await asyncio.sleep(5)
        with contextlib.suppress(DistError):  # it is aborted
            await group.close()

    for seed in range(24):
        ranks: set[tuple[int, ...]] = set()
        run_world(3, main, seed=seed, latency_s=0.001, pass_world=True)
        assert len(ranks) == 1


def test_a_rank_that_another_one_has_lost_is_told() -> None:
    async def main(group: Group, world: Any) -> Any:
        await reduced(1, group.rank)
        if group.rank == 0:
            world.network._meshes[world.world_id, 0]._peers[2].link.cut()
        try:
            return [(await reduced(number, group.rank, timeout=PATIENCE_S))[0] for number in range(2, 5)][-1]
        except GroupAbortedError as error:
            with pytest.raises(GroupAbortedError, match=r"all_reduce: the group was aborted: .*go on without rank"):
                await left_reduce(np.ones(1))
            return str(error)

    results = run_world(4, main, latency_s=0.001, pass_world=True)
    told = [result for result in results if isinstance(result, str)]
    (ranks,) = {result for result in results if isinstance(result, tuple)}
    assert len(told) == 4 - len(ranks)
    assert all("all_reduce" in text and "go on without rank" in text for text in told)


@pytest.mark.parametrize("lost", [False, True])
def test_a_rank_that_does_not_come_is_named(lost: bool) -> None:
    async def main(group: Group, world: Any) -> None:
        await reduced(1, group.rank)
        if group.rank == 2 and lost:
            world.kill(2)
        if group.rank == 1:
            await asyncio.sleep(5)
            return
        if group.rank == 2:
            await asyncio.sleep(1)
        with pytest.raises(CollectiveTimeoutError, match=r"all_reduce.*rank 1") as caught:
            await left_reduce(np.ones(1), timeout=2)
        assert list(caught.value.missing) == [1]
        with pytest.raises(GroupAbortedError):
            await left_reduce(np.ones(1), timeout=2)

    run_world(3, main, pass_world=True)


def test_a_rank_whose_call_has_another_on_lost_is_named() -> None:
    async def main(group: Group) -> None:
        on_lost = "continue" if group.rank else "raise"
        text = rf"rank {1 - group.rank}.*of the survivors \(on_lost='continue'\)"
        with pytest.raises(CollectiveMismatchError, match=text):
            await dist.all_reduce(np.ones(1), on_lost=on_lost)
        with pytest.raises(GroupAbortedError):
            await dist.all_reduce(np.ones(1), on_lost=on_lost)

    run_world(2, main)


@pytest.mark.parametrize("lost", [False, True])
def test_a_wrong_argument_is_refused_at_the_call_and_told_to_all(lost: bool) -> None:
    async def main(group: Group, world: Any) -> None:
        await reduced(1, group.rank)
        if group.rank == 2 and lost:
            world.kill(2)
        if lost:
            await reduced(2, group.rank)
        for wrong in ({"op": "no"}, {"timeout": -1}):
            if group.rank == 1:
                with pytest.raises((TypeError, ValueError)):
                    left_reduce(np.ones(1), **wrong)
            else:
                with pytest.raises(CollectiveMismatchError, match="rank 1 refused"):
                    await left_reduce(np.ones(1))
        assert len((await reduced(3, group.rank))[0]) == 3 - lost

    run_world(3, main, pass_world=True)


def test_what_on_lost_may_be() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(ValueError, match="on_lost='go on' is neither 'raise' nor 'continue'"):
                dist.all_reduce(np.ones(1), on_lost="go on")
        else:
            with pytest.raises(CollectiveMismatchError, match="rank 0 refused"):
                await dist.all_reduce(np.ones(1))
        await dist.barrier()

    run_world(2, main)


def test_strided_arrays_and_averages() -> None:
    async def main(group: Group, world: Any) -> None:
        x = np.arange(8.0)[::2] * (group.rank + 1)
        y = np.zeros((4, 2))
        y[:, 1] = x
        if group.rank == 0:
            asyncio.get_running_loop().call_later(0.0015, die, world, 0)
        array, ranks = await left_reduce(y[:, 1], dist.ReduceOp.AVG)
        assert array.tolist() == [np.mean([rank + 1 for rank in ranks]) * one for one in (0, 2, 4, 6)]
        assert y[:, 0].tolist() == [0] * 4

    run_world(3, main, latency_s=0.001, seed=1, pass_world=True)


def test_a_closed_group_has_no_team() -> None:
    async def main(group: Group) -> None:
        some = await dist.new_group([0, 1])
        work = left_reduce(np.ones(1), group=some)
        await some.close()
        assert work.result().ranks == (0, 1)
        with pytest.raises(ClosedError, match=r"all_reduce: the group is closed"):
            left_reduce(np.ones(1), group=some)
        group.abort("enough")
        with pytest.raises(GroupAbortedError, match="enough"):
            left_reduce(np.ones(1))

    run_world(2, main)
