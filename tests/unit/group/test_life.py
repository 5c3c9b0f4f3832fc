"""From joining to closing: who raises what, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from typing import Any

import numpy as np
import pytest
from group_kit import Group, outcome

import asyncdist as dist
from asyncdist.testing import run_world


def test_a_failed_work_nobody_asked_about_is_raised_at_the_end() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            await group.isend(np.zeros(2), 1)
        else:
            work = group.irecv(np.zeros(1), 0)
            work.add_done_callback(lambda _: None)
            await asyncio.sleep(1)

    with pytest.raises(dist.CollectiveMismatchError, match="receive buffer"):
        run_world(2, main)


@pytest.mark.parametrize("operation", ["irecv", "all_reduce"])
@pytest.mark.parametrize("how", ["await", "wait"])
@pytest.mark.parametrize("first", ["failed", "cancelled"])
def test_a_failure_whose_waiters_were_cancelled_in_that_turn_is_raised_at_the_end(
    operation: str, how: str, first: str
) -> None:
    async def main(group: Group) -> None:
        work: Any = group.irecv(np.zeros(1), 0) if operation == "irecv" else group.all_reduce(np.zeros(1))

        async def wait() -> None:
            await (work if how == "await" else work.wait(timeout=60))

        def fail() -> None:
            if operation == "irecv":
                work._expire(1.0)
            else:
                group.abort("enough")

        waiting = [asyncio.ensure_future(wait()) for _ in range(2)]
        await asyncio.sleep(0.1)
        if first == "failed":
            fail()
        for task in waiting:
            task.cancel()
        if first == "cancelled":
            fail()
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*waiting, return_exceptions=True)
        )
        with pytest.raises(dist.DistError, match=operation):
            await group.close()
        await group.close()

    async def rank(group: Group) -> None:
        if group.rank:
            await main(group)
        else:
            await asyncio.sleep(1)

    run_world(2, rank)


def test_a_failure_that_one_of_its_waiters_is_told_is_not_raised_at_the_end() -> None:
    async def main(group: Group) -> None:
        work: Any = group.irecv(np.zeros(1), group.rank)

        async def wait() -> None:
            await work

        waiting = [asyncio.ensure_future(wait()) for _ in range(2)]
        await asyncio.sleep(0.1)
        work._expire(1.0)
        waiting[group.rank].cancel()
        cancelled, told = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(cancelled), type(told)} == {asyncio.CancelledError, dist.CollectiveTimeoutError}
        await group.close()

    run_world(2, main)


def test_a_failure_raised_at_the_end_keeps_no_arrays() -> None:
    """Those of who closed the group are free once it has dealt with the exception, without the garbage collector."""

    async def main(group: Group) -> None:
        sub = dist.new_group()
        assert isinstance(sub, Group)
        if group.rank == 0:
            await sub.isend(np.zeros(2), 1)
            return
        work = sub.irecv(np.zeros(1), 0)
        await asyncio.sleep(1)

        async def closing() -> weakref.ref[np.ndarray[Any, Any]]:
            array = np.zeros(10)
            with contextlib.suppress(dist.CollectiveMismatchError):
                await sub.close()
                raise AssertionError("it says nothing")
            return weakref.ref(array)

        gc.disable()
        try:
            array = await closing()
            await asyncio.sleep(0)
            assert array() is None
        finally:
            gc.enable()
        assert work.done()

    run_world(2, main)


def test_a_failure_while_closing_is_raised_once() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            await asyncio.sleep(1)
            await group.isend(np.zeros(2), 1)
            await group.isend(np.zeros(200_000), 1)
            return
        group.irecv(np.zeros(1), 0)
        sub = dist.new_group([1])
        await asyncio.sleep(1)
        large = np.zeros(200_000)
        group.irecv(large, 0)
        while not group.world.mesh.cores[0].statistics()["streams_in"]:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.0001)
        closers = [asyncio.create_task(group.close()) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(dist.ClosedError, match="is being closed"):
            group.barrier()
        results = await asyncio.gather(*closers, return_exceptions=True)
        assert [type(result) for result in results] == [dist.CollectiveMismatchError, type(None), type(None)]
        assert sub.closed
        await group.close()

    run_world(2, main, seed=3, latency_s=0.01)


def test_closing_waits_for_a_forgotten_collective_and_raises_what_became_of_it() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            group.barrier()
            with pytest.raises(dist.CollectiveMismatchError, match="rank 1 refused"):
                await group.close()
        else:
            await asyncio.sleep(1)
            with pytest.raises(TypeError):
                group.all_reduce("not an array")

    run_world(2, main)


def test_a_failure_somebody_is_about_to_hear_of_is_not_raised_by_close() -> None:
    async def main(group: Group) -> None:
        sub = dist.new_group()
        assert isinstance(sub, Group)
        if group.rank == 1:
            return
        waiter = asyncio.create_task(outcome(sub.barrier(tag=1)))
        await asyncio.sleep(0)
        closer = asyncio.create_task(sub.close())
        sub.abort("now")  # the closer runs before the waiter does
        await closer
        assert isinstance(await waiter, dist.GroupAbortedError)

    run_world(2, main)


def test_the_world_closes_its_groups_well_and_tells_nobody() -> None:
    """Rank 0 is done with its part long before the others are with theirs."""

    async def main(group: Group) -> None:
        sub = dist.new_group()
        assert isinstance(sub, Group)
        x = np.full(30_000, group.rank)
        if group.rank == 0:
            sub.broadcast(x, 0)
            sub.isend(x, 2, 5)
            return
        await asyncio.sleep(group.rank)
        await sub.broadcast(x, 0)
        assert not x.any()
        if group.rank == 2:
            await sub.recv(x, 0, 5)

    run_world(3, main)


def test_an_exception_ends_the_groups_within_too() -> None:
    async def main(group: Group) -> None:
        sub = dist.new_group([0, 1])
        if group.rank == 0:
            assert isinstance(sub, Group)
            sub.irecv(np.zeros(1), 1)
            sub.barrier(tag=1)
            await asyncio.sleep(0.1)
            raise KeyError("mine")
        if group.rank == 1:
            assert isinstance(sub, Group)
            with pytest.raises(dist.GroupAbortedError, match="rank 0 left with KeyError"):
                await sub.barrier(tag=2)
            assert asyncio.get_running_loop().time() < 1

    with pytest.raises(KeyError, match="mine"):
        run_world(3, main)


def test_a_task_group_tells_what_happened_in_it() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            await group.barrier()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
        await group.barrier()
        with pytest.raises(dist.GroupAbortedError, match="rank 0 left with KeyError: 'mine'"):
            await group.barrier()

    with pytest.raises(ExceptionGroup):
        run_world(2, main)


def test_an_error_of_another_group_is_told_to_those_who_have_not_heard_of_it() -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        sub = dist.new_group([0, 1])
        if group.rank == 0:
            assert isinstance(sub, Group)
            sub.abort("enough of it")
        if group.rank == 1:
            assert isinstance(sub, Group)
            await sub.barrier()
        with pytest.raises(dist.GroupAbortedError, match=r"rank 1 left with GroupAbortedError: .*enough of it"):
            await group.barrier()

    with pytest.raises(dist.GroupAbortedError, match=r"rank 1, barrier.*: rank 0 aborted the group: enough") as caught:
        run_world(3, main)
    assert caught.value.__notes__ == ["raised on rank 1"]


def test_a_message_that_timed_out_is_told_to_the_others() -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        sub = dist.new_group()
        assert isinstance(sub, Group)
        if group.rank == 0:
            with pytest.raises(dist.CollectiveTimeoutError):
                async with sub:
                    await group.recv(np.zeros(1), 1, timeout=0.1)
        else:
            with pytest.raises(dist.GroupAbortedError, match="rank 0 left with CollectiveTimeoutError"):
                await sub.barrier()
            assert asyncio.get_running_loop().time() < 1
        await group.barrier()

    run_world(3, main)


def test_a_group_is_told_of_a_departure_that_only_its_world_notices() -> None:
    async def main(group: Group) -> None:
        sub = dist.new_group([1, 2])
        if group.rank == 1:
            assert isinstance(sub, Group)
            with pytest.raises(dist.PeerLostError, match="rank 0 has left"):
                async with sub:
                    await group.recv(np.zeros(1), 0)
        elif group.rank == 2:
            assert isinstance(sub, Group)
            with pytest.raises(dist.GroupAbortedError, match=r"rank 1 left with PeerLostError: .*rank 0 has left"):
                await sub.barrier()
            assert asyncio.get_running_loop().time() < 1

    run_world(3, main)


def test_leaving_because_another_left_in_order_disturbs_no_messages() -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        if group.rank == 1:
            await group.recv(np.zeros(1), 0)
        elif group.rank > 1:
            x = np.full(1, group.rank)
            work = group.irecv(x, 5 - group.rank)
            await asyncio.sleep(1)
            await group.send(x, 5 - group.rank)
            assert await work == 5 - group.rank

    with pytest.raises(dist.PeerLostError, match="rank 0 has left") as caught:
        run_world(4, main)
    assert caught.value.__notes__ == ["raised on rank 1"]


async def fail() -> None:
    """Raise an error of one's own."""
    raise KeyError("mine")


def test_what_is_closed_says_so() -> None:
    async def main(group: Group) -> None:
        sub = dist.new_group()
        assert isinstance(sub, Group)
        await dist.destroy_process_group(sub)
        with pytest.raises(dist.ClosedError, match="is closed"):
            sub.barrier()
        assert dist.is_initialized()
        await dist.destroy_process_group()
        assert not dist.is_initialized()
        with pytest.raises(ValueError, match="not been initialized"):
            dist.barrier()
        with pytest.raises(dist.ClosedError):
            group.barrier()
        await group.close()

    run_world(2, main)


def test_status_lines() -> None:
    async def main(group: Group) -> None:
        assert repr(group) == f"<ProcessGroup default rank {group.rank} of 2 backend aio open>"
        assert dist.get_backend() == "aio"
        assert dist.get_backend() == dist.Backend("GLOO")
        assert dist.get_default_group() is group
        await group.close()
        assert "closed" in repr(group)

    run_world(2, main)


def test_the_same_seed_gives_the_same_run() -> None:
    async def main(group: Group) -> float:
        for size in (3, 100_000):
            await group.all_reduce(np.zeros(size))
        return asyncio.get_running_loop().time()

    assert run_world(4, main, seed=11) == run_world(4, main, seed=11)
    assert run_world(4, main, seed=11) != run_world(4, main, seed=12)
