"""Programs whose tasks begin at once get the same results and the same errors."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from eager_tasks import needs_eager_tasks, use_eager_tasks
from gpu_fake_kit import GpuRank, run_gpu
from group_kit import Group, outcome
from socket_world import run_ranks

import asyncdist as dist
from asyncdist.store import HashStore
from asyncdist.testing import VirtualTimeLoop, run_world

pytestmark = needs_eager_tasks


async def test_collectives_messages_and_groups_of_several_tasks_at_once() -> None:
    use_eager_tasks(asyncio.get_running_loop())

    async def pass_on(group: Group, tag: int) -> int:
        found = np.zeros(2)
        sent = dist.isend(np.full(2, float(group.rank)), (group.rank + 1) % 3, group, tag=tag)
        await dist.recv(found, (group.rank - 1) % 3, group, tag=tag)
        await sent
        return int(found[0])

    async def reduce(group: Group, tag: int, count: int) -> float:
        x = np.ones(count)
        await group.all_reduce(x, tag=tag)
        return float(x.sum())

    async def main(group: Group) -> tuple[list[int], list[float], Any]:
        pair = dist.new_group([0, 2], group=group)
        async with asyncio.TaskGroup() as tasks:
            passed = [tasks.create_task(pass_on(group, tag)) for tag in range(3)]
            reduced = [tasks.create_task(reduce(group, 1 + tag, 1 << (6 * tag))) for tag in range(4)]
            objects = [None, None]
            if group.rank != 1:
                tasks.create_task(outcome(pair.all_gather_object(objects, group.rank)))
        await dist.barrier(group=group)
        return [task.result() for task in passed], [task.result() for task in reduced], objects

    sums = [3.0 * (1 << (6 * tag)) for tag in range(4)]
    for rank, (passed, reduced, objects) in enumerate(await run_ranks(3, main)):
        assert passed == [(rank - 1) % 3] * 3
        assert reduced == sums
        assert objects == ([None, None] if rank == 1 else [0, 2])


async def test_cancelled_and_late_operations_leave_the_group_usable() -> None:
    use_eager_tasks(asyncio.get_running_loop())

    async def main(group: Group) -> float:
        other = 1 - group.rank
        receiving = asyncio.create_task(outcome(dist.recv(np.zeros(3), other, group, tag=9)))
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await dist.recv(np.zeros(3), other, group, tag=9)
        x = np.ones(3)
        await asyncio.create_task(outcome(group.all_reduce(x)))
        return float(x[0])

    assert await run_ranks(2, main) == [2.0, 2.0]


def test_a_rank_that_leaves_at_once_still_tells_what_it_ran() -> None:
    def factory() -> asyncio.AbstractEventLoop:
        loop = VirtualTimeLoop()
        use_eager_tasks(loop)
        return loop

    async def main(group: Group) -> Any:
        if group.rank == 0:  # it waits for nobody, and leaves
            return await outcome(group.broadcast(np.ones(4), 0))
        return await outcome(group.all_reduce(np.ones(4)))

    _, error = run_world(2, main, loop_factory=factory)
    assert isinstance(error, dist.CollectiveMismatchError)
    assert "rank 0 runs broadcast float64[4] root 0" in str(error)


async def test_waiting_in_a_store() -> None:
    use_eager_tasks(asyncio.get_running_loop())
    store = HashStore()
    waiting = [asyncio.create_task(outcome(store.clone().get("k"))) for _ in range(3)]
    popping = asyncio.create_task(outcome(store.queue_pop("q")))
    await asyncio.create_task(outcome(store.set("k", "v")))
    await store.queue_push("q", "item")
    assert await asyncio.gather(*waiting) == [b"v"] * 3
    assert await popping == b"item"
    await store.close()


@pytest.mark.parametrize("nccl", [True, False], ids=["nccl", "staged"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_arrays_on_gpus(nccl: bool, loop: str) -> None:
    async def main(at: GpuRank) -> None:
        use_eager_tasks(asyncio.get_running_loop())
        x, y, other = at.array(np.full(5, 1.0)), at.zeros(5, np.float64), 1 - at.rank
        sent = dist.isend(x, other, at.group)
        assert await dist.recv(y, other, at.group) == other
        await sent
        await at.group.all_reduce(y, tag=1)
        assert y.get().tolist() == [2.0] * 5

    run_gpu(2, main, nccl=nccl, loop=loop)
