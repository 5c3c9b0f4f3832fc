"""A rank that others have lost, and that never connected to us."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from group_kit import Group, outcome

import asyncdist as dist
from asyncdist.testing import SimulatedWorld, run_world


async def meet(group: Group, one: int, other: int) -> None:
    """Have two ranks connect."""
    if group.rank in (one, other):
        peer = one + other - group.rank
        await asyncio.gather(group.isend(np.zeros(1), peer, 7), group.recv(np.zeros(1), peer, 7))


@pytest.mark.parametrize("acquainted", [False, True])
def test_receives_from_any_source_raise_once(acquainted: bool) -> None:
    async def main(group: Group, world: SimulatedWorld) -> None:
        await meet(group, 0, 1)
        await meet(group, 0, 2)
        if acquainted:
            await meet(group, 1, 2)
        if group.rank == 0:
            works = [group.irecv(np.zeros(1), None, 3), group.irecv(np.zeros(1), 1, 3)]
            await asyncio.sleep(1)
            world.kill(1)
            assert [getattr(await outcome(work), "rank", None) for work in works] == [1, 1]
            await asyncio.sleep(1)
            await group.isend(np.zeros(1), 2, 3)
        elif group.rank == 1:
            await asyncio.sleep(100)
        else:
            works = [group.irecv(np.zeros(1), None, 3) for _ in range(2)]
            for work in works:
                async with asyncio.timeout(2):
                    error = await outcome(work)
                assert isinstance(error, dist.PeerLostError)
                assert error.rank == 1
            assert await group.recv(np.zeros(1), None, 3) == 0
            await asyncio.sleep(1)

    run_world(3, main, pass_world=True)


def test_a_loss_that_was_heard_of_is_none_again_where_it_is_met() -> None:
    async def main(group: Group, world: SimulatedWorld) -> None:
        await meet(group, 0, 1)
        await meet(group, 0, 2)
        if group.rank == 2:
            waits = group.irecv(np.zeros(1), None, 3)
            assert getattr(await outcome(waits), "rank", None) == 1
            waits = group.irecv(np.zeros(1), None, 3)
            assert getattr(await outcome(group.isend(np.zeros(1), 1)), "rank", None) == 1
            assert not waits.done()
            await asyncio.sleep(2)
            assert getattr(await outcome(waits), "rank", None) == 0
            with pytest.raises(dist.PeerLostError, match="nobody"):
                await group.irecv(np.zeros(1), None, 3)
            return
        await asyncio.sleep(1)
        world.kill(1)
        await asyncio.sleep(2)
        world.kill(0)

    run_world(3, main, pass_world=True)


def test_who_connects_after_a_survivor_gave_up_hears_who_was_lost_before() -> None:
    async def main(group: Group, world: SimulatedWorld) -> None:
        await meet(group, 0, 2)
        if group.rank == 2:
            await asyncio.sleep(100)
        elif group.rank == 0:
            world.kill(2)
            assert getattr(await outcome(group.recv(np.zeros(1), 2)), "rank", None) == 2
            group.abort("given up")
            await asyncio.sleep(10)
        else:
            await asyncio.sleep(1)
            error = await outcome(group.broadcast(np.zeros(1), 0))
            assert isinstance(error, dist.PeerLostError)
            assert error.rank == 2
            with pytest.raises(dist.GroupAbortedError, match="rank 0 aborted the group: given up"):
                await group.recv(np.zeros(1), 0, 3)

    run_world(3, main, pass_world=True)


def test_ranks_whose_connection_broke_are_lost_to_all_collectives() -> None:
    async def main(group: Group) -> None:
        groups = [dist.new_group([rank, 2]) for rank in range(2)]
        others = dist.new_group([2, 3])
        for one in range(4):
            for other in range(one):
                await meet(group, one, other)
        if group.rank == 0:
            group.world.mesh.break_pair(1, ConnectionResetError("the cable was pulled"))
        await asyncio.sleep(1)
        for number, pair in enumerate(groups):
            if isinstance(pair, dist.ProcessGroup):
                with pytest.raises(dist.GroupAbortedError) as caught:
                    await pair.barrier()
                assert isinstance(caught.value.__cause__, dist.PeerLostError)
                assert caught.value.__cause__.rank == number
        if isinstance(others, dist.ProcessGroup):
            await others.barrier()
        for rank in range(2):
            await meet(group, rank, 2)
        await asyncio.sleep(1)

    run_world(4, main)
