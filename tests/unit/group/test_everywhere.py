"""Every function that communicates, in groups out of order, in groups of groups and in a second world."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from group_kit import Group
from thread_worlds import nothing_left, run_ranks

import asyncdist as dist
from asyncdist.testing import SimulatedWorld, run_world

SIZE = 3
"""Ranks of the group that is tested."""


def own(group: Group, length: int = 2) -> np.ndarray:
    """What a rank contributes, by its rank in the group."""
    return np.full(length, 10 ** dist.get_rank(group))


async def barriers(group: Group) -> None:
    await dist.barrier(group)
    await dist.monitored_barrier(group, timeout=30.0)


async def vectors(group: Group) -> None:
    ranks = dist.get_process_group_ranks(group)
    x = own(group)
    assert await dist.all_reduce(x, group=group) is x
    assert x.tolist() == [111, 111]
    x = own(group)
    await dist.broadcast(x, ranks[1], group)
    assert x[0] == 10
    await dist.broadcast(x := own(group), group=group, group_src=2)
    assert x[0] == 100
    await dist.reduce(x := own(group), ranks[2], group=group)
    assert x[0] == (111 if group.rank == 2 else 10**group.rank)
    await dist.scan(x := own(group), group=group)
    assert x[0] == (1, 11, 111)[group.rank]
    await dist.exscan(x := own(group), group=group)
    assert x[0] == (1, 1, 11)[group.rank]


async def blocks(group: Group) -> None:
    ranks = dist.get_process_group_ranks(group)
    places = [np.zeros(2, int) for _ in range(SIZE)]
    await dist.all_gather(places, own(group), group)
    assert [place[0] for place in places] == [1, 10, 100]
    whole = np.zeros((SIZE, 2), int)
    for function in (dist.all_gather_into_tensor, dist.all_gather_single):
        whole[...] = 0
        await function(whole, own(group), group)
        assert whole[:, 1].tolist() == [1, 10, 100]
    whole[...] = 0
    await group.all_gather_single(whole, own(group))
    assert whole[:, 1].tolist() == [1, 10, 100]
    places = [np.zeros(2, int) for _ in range(SIZE)]
    await dist.gather(own(group), places if group.rank == 1 else None, ranks[1], group)
    assert [place[0] for place in places] == ([1, 10, 100] if group.rank == 1 else [0, 0, 0])
    await dist.scatter(x := own(group), list(whole * 2) if group.rank == 2 else None, ranks[2], group)
    assert x[0] == 2 * 10**group.rank
    await dist.reduce_scatter(x := own(group), list(whole), group=group)
    assert x[0] == 3 * 10**group.rank
    for function in (dist.reduce_scatter_tensor, dist.reduce_scatter_single):
        await function(x := own(group), whole, group=group)
        assert x[0] == 3 * 10**group.rank
    await group.reduce_scatter_single(x := own(group), whole)
    assert x[0] == 3 * 10**group.rank
    await dist.all_to_all(places, [own(group) + index for index in range(SIZE)], group)
    assert [place[0] for place in places] == [1 + group.rank, 10 + group.rank, 100 + group.rank]
    out = np.zeros(SIZE, int)
    await dist.all_to_all_single(out, own(group, SIZE) + np.arange(SIZE), group=group)
    assert out.tolist() == [1 + group.rank, 10 + group.rank, 100 + group.rank]


async def lists(group: Group) -> None:
    ranks = dist.get_process_group_ranks(group)
    pair = [own(group), own(group, 3)]
    await dist.all_reduce_coalesced(pair, group=group)
    assert (pair[0][0], pair[1][2]) == (111, 111)
    pair = [own(group), own(group, 3)]
    await dist.broadcast_coalesced(pair, ranks[1], group)
    assert (pair[0][0], pair[1][2]) == (10, 10)
    rows = [[np.zeros(2, int), np.zeros(3, int)] for _ in range(SIZE)]
    await dist.all_gather_coalesced(rows, [own(group), own(group, 3)], group)
    assert [row[1][2] for row in rows] == [1, 10, 100]
    wholes = [np.zeros((SIZE, 2), int)]
    await dist.all_gather_into_tensor_coalesced(wholes, [own(group)], group)
    assert wholes[0][:, 0].tolist() == [1, 10, 100]
    parts = [np.zeros(2, int)]
    await dist.reduce_scatter_tensor_coalesced(parts, wholes, group=group)
    assert parts[0][0] == 3 * 10**group.rank
    two = [own(group), own(group) * 2]
    await dist.all_reduce_multigpu(two, group=group)
    assert two[0][0] == two[1][0] == 333
    await dist.broadcast_multigpu(two := [own(group), own(group) * 2], ranks[2], group, src_tensor=1)
    assert two[0][0] == two[1][0] == 200
    await dist.reduce_multigpu(two := [own(group), own(group) * 2], ranks[1], group=group, dst_tensor=1)
    assert two[1][0] == (333 if group.rank == 1 else 2 * 10**group.rank)
    rows = [[np.zeros(2, int) for _ in range(SIZE)]]
    await dist.all_gather_multigpu(rows, [own(group)], group)
    assert [place[0] for place in rows[0]] == [1, 10, 100]
    await dist.reduce_scatter_multigpu(parts, rows, group=group)
    assert parts[0][0] == 3 * 10**group.rank


async def messages(group: Group) -> None:
    ranks = dist.get_process_group_ranks(group)
    after, before = ranks[(group.rank + 1) % SIZE], ranks[(group.rank - 1) % SIZE]
    expected = 10 ** dist.get_group_rank(group, before)
    x = np.zeros(2, int)
    for send, receive in ((dist.isend, dist.irecv), (dist.send, dist.recv)):
        x[...] = 0
        work = send(own(group), after, group, tag=5)
        assert await receive(x, before, group, tag=5) == before
        await work
        assert x[0] == expected
    work = dist.isend(own(group), after, group)
    assert await dist.recv(x, group=group) == before
    assert x[0] == expected
    await work
    work = dist.isend(own(group), group=group, group_dst=(group.rank + 1) % SIZE)
    receiving = dist.recv_array(group=group)
    assert (await receiving)[0] == expected
    assert receiving.source_rank() == before
    await work
    batch = [dist.P2POp(dist.isend, own(group), after, group), dist.P2POp(dist.irecv, x, before, group)]
    assert [(operation.peer, operation.group_peer) for operation in batch] == [
        (peer, dist.get_group_rank(group, peer)) for peer in (after, before)
    ]
    for work in dist.batch_isend_irecv(batch):
        await work
    work = dist.send_object_list([group.rank, "text"], after, group)
    objects: list[Any] = [None, None]
    assert await dist.recv_object_list(objects, before, group) == before
    assert objects == [dist.get_group_rank(group, before), "text"]
    await work


async def unknown_sizes(group: Group) -> None:
    ranks = dist.get_process_group_ranks(group)
    found = await dist.all_gather_array(own(group, group.rank + 1), group)
    assert [array.tolist() for array in found] == [[1], [10] * 2, [100] * 3]
    gathered = await dist.gather_array(own(group, group.rank), ranks[1], group)
    assert (gathered is not None) == (group.rank == 1)
    assert gathered is None or [array.size for array in gathered] == [0, 1, 2]
    array = await dist.broadcast_array(own(group, 5) if group.rank == 2 else None, ranks[2], group)
    assert array.tolist() == [100] * 5
    arrays = [np.arange(count) for count in range(SIZE)] if group.rank == 1 else None
    assert (await dist.scatter_array(arrays, ranks[1], group)).size == group.rank


async def objects(group: Group) -> None:
    ranks = dist.get_process_group_ranks(group)
    places: list[Any] = [None] * SIZE
    assert await dist.all_gather_object(places, {"rank": group.rank}, group) is places
    assert [place["rank"] for place in places] == [0, 1, 2]
    places = [None] * SIZE
    await dist.gather_object(group.rank, places if group.rank == 2 else None, ranks[2], group)
    assert places == ([0, 1, 2] if group.rank == 2 else [None] * SIZE)
    one = [group.rank]
    await dist.broadcast_object_list(one, ranks[1], group)
    assert one == [1]
    await dist.scatter_object_list(one, ["a", "b", "c"] if group.rank == 1 else None, ranks[1], group)
    assert one == ["abc"[group.rank]]


async def streams(group: Group) -> None:
    ranks = dist.get_process_group_ranks(group)
    x = own(group, 1000)
    async for _ in dist.broadcast_stream(x, ranks[1], group, chunk_bytes=1024):
        pass
    assert (x == 10).all()
    whole = np.zeros((SIZE, 1000), int)
    async for _ in dist.all_gather_stream(whole, own(group, 1000), group, chunk_bytes=1024):
        pass
    assert whole[:, 999].tolist() == [1, 10, 100]


async def training(group: Group) -> None:
    ranks = dist.get_process_group_ranks(group)
    x, y = own(group).astype(float), own(group, 3)
    await dist.average_gradients([x, y], group)
    assert (x[0], y[2]) == (37, 37)
    await dist.broadcast_parameters([x := own(group), y := own(group, 3)], ranks[1], group)
    assert (x[0], y[2]) == (10, 10)


CALLS: list[Callable[[Group], Awaitable[None]]] = [
    barriers,
    vectors,
    blocks,
    lists,
    messages,
    unknown_sizes,
    objects,
    streams,
    training,
]


def members(made: Group | dist.NonMember) -> list[Group]:
    return [made] if isinstance(made, Group) else []


def in_the_world(group: Group) -> list[Group]:
    return members(dist.new_group([0, 1, 2]))


def out_of_order(group: Group) -> list[Group]:
    return members(dist.new_group([4, 0, 2], sort_ranks=False))


def of_a_group(group: Group) -> list[Group]:
    outer = dist.new_group([3, 1, 4, 0], sort_ranks=False)
    return members(dist.new_group([0, 3, 4], group=outer, sort_ranks=False)) if isinstance(outer, Group) else []


def several_at_once(group: Group) -> list[Group]:
    """Overlapping groups whose operations run at the same time."""
    made = [dist.new_group(ranks, sort_ranks=False) for ranks in ([0, 3, 1], [1, 4, 3], [2, 1, 0], [4, 3, 2])]
    return [one for one in made if isinstance(one, Group)]


@pytest.mark.parametrize(
    ("place", "seed"),
    [(in_the_world, 7), (out_of_order, None), (of_a_group, 8), (several_at_once, 9)],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_in_groups(place: Callable[[Group], list[Group]], seed: int | None) -> None:
    async def main(group: Group) -> None:
        async def run(one: Group) -> None:
            for call in CALLS:
                await call(one)

        async with asyncio.TaskGroup() as tasks:
            for one in place(group):
                tasks.create_task(run(one))
        await group.barrier()

    run_world(5, main, seed=seed)


def test_in_two_worlds_at_once() -> None:
    others: list[SimulatedWorld] = []

    async def main(group: Group) -> None:
        if not others:
            others.append(SimulatedWorld(SIZE, asyncio.get_running_loop(), None, 0.0))

        async def in_the_other() -> None:
            async with await others[0].join((group.rank + 1) % SIZE) as second:
                assert second.rank == (group.rank + 1) % SIZE
                for call in CALLS:
                    await call(second)

        task = asyncio.create_task(in_the_other())  # a context of its own: the default group here stays the first
        for call in CALLS:
            await call(group)
        await task
        assert dist.get_default_group() is group
        await dist.barrier()

    run_world(SIZE, main)


async def test_in_the_communication_thread() -> None:
    async def main(group: Group) -> None:
        made = dist.new_group([2, 0, 1], sort_ranks=False)
        assert isinstance(made, Group)
        for one in (group, made):
            for call in CALLS:
                await call(one)

    with nothing_left():
        await run_ranks(SIZE, main)


def test_every_function_that_communicates_is_called_here() -> None:
    communicating = {
        name
        for name in dist.__all__
        if inspect.isfunction(thing := getattr(dist, name))
        and str(inspect.signature(thing).return_annotation).partition("[")[0] in ("Work", "ChunkStream", "list")
        and name not in ("get_process_group_ranks",)
    }
    called = {name for call in CALLS for name in call.__code__.co_names}
    assert communicating - called == set()
    assert len(communicating) > 40
