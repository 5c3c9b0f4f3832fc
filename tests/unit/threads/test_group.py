"""progress="thread": to the caller a group is what it always is, and its loop need not run for messages to move."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
from cancel_sweep import at_every_await
from jobs import free_port
from socket_world import LIMIT_S, turns
from thread_worlds import another_rank, nothing_left, run_ranks, wait_without_loop

import asyncdist as dist
from asyncdist.group.methods import Operations
from asyncdist.group.methods.issuer import Core
from asyncdist.group.process_group import ProcessGroup
from asyncdist.testing import run_world
from asyncdist.threads.core import ThreadCore, ThreadPairs


async def test_operations_and_groups_as_ever() -> None:
    async def main(group: Any) -> None:
        assert isinstance(group, ProcessGroup)
        assert dist.get_default_group() is group
        assert "communication thread" in repr(group)
        assert (group.rank, dist.get_world_size(), dist.get_backend()) == (group.rank, 3, "aio")
        x = np.full(100_000, group.rank + 1.0)
        work = dist.all_reduce(x)
        assert work.operation == "all_reduce"
        assert await work is x
        assert (x == 6).all()
        assert work.sequence == 0
        sub = dist.new_group([2, 0])
        if group.rank == 1:
            assert isinstance(sub, dist.NonMember)
            return
        assert isinstance(sub._core, ThreadCore)
        right = 2 - group.rank
        sent = dist.isend(np.arange(3), right, sub, 7)
        received = dist.recv_array(None, sub, 7)
        assert (await received).tolist() == [0, 1, 2]
        assert received.source_rank() == right
        await sent
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, np.zeros_like(x), right)]
        )
        assert [await work for work in works] == [None, right]
        await sub.close()
        assert sub.closed
        with pytest.raises(dist.ClosedError, match="is closed"):
            sub.barrier()

    with nothing_left():
        await run_ranks(3, main)


class Unmapped:
    """Whose memory cannot be had, for a reason of its own."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        raise OSError("unmapped")


async def test_wrong_arguments_raise_at_the_call_and_the_others_hear() -> None:
    async def main(group: Any) -> None:
        if group.rank == 0:
            for wrong in (True, 1.5, [0]):
                with pytest.raises(TypeError, match="tag must be an int"):
                    group.all_reduce(np.ones(1), tag=wrong)
            with pytest.raises(ValueError, match="tag must be between"):
                group.all_reduce(np.ones(1), tag=-1)
            with pytest.raises(TypeError, match="numpy array"):
                dist.all_reduce("text")
            with pytest.raises(OSError, match="unmapped"):
                dist.all_reduce(Unmapped())
            with pytest.raises(ValueError, match="root=5"):
                group.broadcast(np.zeros(2), 5)
            with pytest.raises(ValueError, match="negative"):
                group.barrier(timeout=-1)
            with pytest.raises(ValueError, match="dst=9"):
                group.isend(np.zeros(1), 9)
            with pytest.raises(TypeError, match="numpy array"):
                group.irecv(None, 1)
        else:
            reduce = partial(dist.all_reduce, np.zeros(1))
            for issue in (reduce, reduce, lambda: group.broadcast(np.zeros(2), 0), group.barrier):
                with pytest.raises(dist.CollectiveMismatchError, match="rank 0 refused"):
                    await issue()
        await group.barrier()

    with nothing_left():
        await run_ranks(2, main)


async def test_messages_move_while_the_callers_loop_stands_still() -> None:
    async def main(group: Any) -> None:
        if group.rank == 0:
            works = [group.broadcast(np.full(300_000, number), 0, tag=number) for number in range(3)]
            wait_without_loop(lambda: all(work._inner is not None and work._inner._done for work in works))
            assert not any(work.done() for work in works)  # ends are news of the loop
            for work in works:
                await work
        else:
            for number in range(3):
                x = np.zeros(300_000, int)
                await group.broadcast(x, 0, tag=number)
                assert (x == number).all()

    with nothing_left(), another_rank(1, main) as address:
        async with dist.init_process_group(init_method=address, rank=0, world_size=2, progress="thread") as group:
            await main(group)


async def test_ends_come_in_batches() -> None:
    async def main(group: Any) -> None:
        wakes = []
        loop = asyncio.get_running_loop()
        plain = loop.call_soon_threadsafe
        courier = group._core.bridge.courier

        class Counting:
            def call_soon_threadsafe(self, callback: Any, *arguments: Any) -> Any:
                wakes.append(callback)
                return plain(callback, *arguments)

        works = [group.barrier(tag=tag) for tag in range(50)]
        courier.loop = Counting()
        wait_without_loop(lambda: all(work._inner is not None and work._inner._done for work in works))
        for work in works:
            await work
        courier.loop = loop
        assert len(wakes) <= 1

    with nothing_left():
        await run_ranks(1, main)


@pytest.mark.parametrize("delivered", [False, True])
@pytest.mark.parametrize("source", [0, None])
async def test_a_message_that_came_too_late_for_a_cancelled_recv_goes_to_the_next(
    source: int | None, delivered: bool
) -> None:
    async def main(group: Any) -> None:
        if group.rank == 0:
            await group.barrier()
            for value in (1, 2, 3):
                await group.isend(np.full(4, value), 1, 3)
            await group.barrier(tag=1)
            return
        works = []
        x = np.zeros(4, int)

        async def receive() -> None:
            works.append(group.recv(x, source, 3))
            await works[-1]

        task = asyncio.create_task(receive())
        await asyncio.sleep(0)
        started = group.barrier()
        wait_without_loop(lambda: works[0]._inner._done)
        if delivered:
            works[0].deliver()
        task.cancel()  # before the loop, or at least the task, hears of the end
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(dist.ClosedError, match="withdrawn"):
            await works[0]
        await started
        assert await group.recv(x, None, 3) == 0
        assert x.tolist() == [1] * 4
        assert (await group.recv_array(0, 3)).tolist() == [2] * 4
        await group.recv(x, 0, 3)
        assert x.tolist() == [3] * 4
        await group.barrier(tag=1)

    with nothing_left(), another_rank(0, main) as address:
        async with dist.init_process_group(init_method=address, rank=1, world_size=2, progress="thread") as group:
            await main(group)


async def test_what_has_ended_is_in_time_though_the_loop_has_not_heard_of_it() -> None:
    async def main(group: Any) -> None:
        work = group.barrier()
        waiting = asyncio.create_task(work.wait(0.001))
        await asyncio.sleep(0)
        wait_without_loop(lambda: work._inner is not None and work._inner._done)
        work._courier._ended.clear()  # as if the news came later still
        assert await waiting

    with nothing_left():
        await run_ranks(1, main)


async def test_cancelled_expired_and_withdrawn_receives_lose_nothing() -> None:
    async def main(group: Any) -> None:
        x = np.zeros(2, int)
        if group.rank == 0:
            await group.recv(x, 1, 1)
            await group.isend(np.array([1, 2]), 1)
            return
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await group.recv(x, 0)
        with pytest.raises(dist.CollectiveTimeoutError, match="did not end within"):
            await group.recv(x, 0, timeout=0.01)
        work = group.irecv(x, 0)
        with pytest.raises(TimeoutError, match="the operation goes on"):
            await work.wait(0.01)
        assert work.cancel()
        assert not work.cancel()
        with pytest.raises(dist.ClosedError, match="withdrawn"):
            await work
        await group.isend(x, 0, 1)
        assert await group.recv(x, 0) == 0
        assert x.tolist() == [1, 2]

    with nothing_left():
        await run_ranks(2, main)


async def test_aborts_and_timeouts_name_who_is_missing() -> None:
    async def main(group: Any) -> None:
        if group.rank == 0:
            with pytest.raises(dist.CollectiveTimeoutError) as caught:
                await group.all_reduce(np.zeros(3), timeout=0.05)
            assert caught.value.missing == (1,)
            with pytest.raises(dist.GroupAbortedError):
                group.barrier()
        else:
            pending = group.irecv(np.zeros(1), 1)
            while group._core.inner_core._aborted is None:  # noqa: ASYNC110 - it changes in the thread
                await asyncio.sleep(0.001)
            with pytest.raises(dist.GroupAbortedError, match="timed out"):
                group.barrier()
            group.abort("for good")
            with pytest.raises(dist.GroupAbortedError, match="for good"):
                await pending

    with nothing_left():
        await run_ranks(2, main)


async def test_a_failure_nobody_asked_about_is_raised_at_the_end_once() -> None:
    async def main(group: Any) -> None:
        if group.rank == 0:
            await group.isend(np.zeros(2), 1)
        else:
            work = group.irecv(np.zeros(1), 0)
            while not work.done():  # noqa: ASYNC110 - it changes in the thread
                await asyncio.sleep(0.001)
            with pytest.raises(dist.CollectiveMismatchError, match="receive buffer"):
                await group.close()
            await group.close()

    with nothing_left():
        await run_ranks(2, main)


@pytest.mark.parametrize("first", ["failed", "cancelled"])
@pytest.mark.parametrize("heard", [False, True])
async def test_a_failure_whose_waiters_were_cancelled_in_that_turn_is_raised_at_the_end(
    first: str, heard: bool
) -> None:
    """`heard`: whether one of them is left."""

    over = asyncio.Event()

    async def main(group: Any) -> None:
        if group.rank == 1:
            await over.wait()
            return
        work = group.irecv(np.zeros(1), 1, timeout=0.05)

        async def wait() -> None:
            await work

        waiting = [asyncio.ensure_future(wait()) for _ in range(2)]
        await turns(3)
        wait_without_loop(lambda: work._inner.done())
        if first == "failed":
            assert work._has_ended()
        for task in waiting[heard:]:
            task.cancel()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(ends[1], asyncio.CancelledError)
        if heard:
            assert isinstance(ends[0], dist.CollectiveTimeoutError)
        else:
            with pytest.raises(dist.CollectiveTimeoutError, match="irecv"):
                await group.close()
        over.set()
        await group.close()

    with nothing_left():
        await run_ranks(2, main)


@pytest.mark.parametrize("how", ["send", "isend"])
async def test_a_send_whose_waiter_is_cancelled(how: str) -> None:
    """It is withdrawn, and an isend goes on."""

    async def main(group: Any) -> None:
        work = getattr(group, how)(np.zeros(1 << 20), group.rank)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work, 0.02)
        got = np.zeros(1 << 20)
        assert work.done() is (how == "send")
        if how == "isend":
            await group.recv(got, group.rank)
            await work
        else:
            assert isinstance(work.exception(), dist.ClosedError)
        await group.send(np.ones(2), group.rank)
        await group.recv(got, group.rank)
        assert got[:3].tolist() == [1, 1, 0]
        await group.close()

    with nothing_left():
        await run_ranks(1, main)


async def test_an_exception_in_the_block_is_the_one_raised_and_ends_the_others() -> None:
    async def main(group: Any) -> None:
        if group.rank == 0:
            raise KeyError("mine")
        with pytest.raises(dist.GroupAbortedError, match="rank 0 left with KeyError"):
            await group.barrier()
        raise KeyError("yours")

    with nothing_left(), pytest.raises(KeyError, match=r"mine|yours"):
        await run_ranks(2, main)


async def test_what_the_others_have_not_heard_of_is_told_to_them() -> None:
    async def main(group: Any) -> None:
        if group.rank == 0:
            await group.recv_array(1, timeout=0.01)
        with pytest.raises(dist.GroupAbortedError, match="rank 0 left with CollectiveTimeoutError"):
            await group.barrier()

    with nothing_left(), pytest.raises(dist.CollectiveTimeoutError, match="recv_array"):
        await run_ranks(2, main)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
async def test_a_reduction_that_exits_fails_its_operation_and_ends_no_thread(kind: type[BaseException]) -> None:
    def exit_here(left: Any, right: Any) -> Any:
        raise kind("enough")

    async def main(group: Any) -> None:
        other = dist.new_group()
        for elements in (3, 1_000_000):  # in the call, and in slices
            group = dist.new_group()
            with pytest.raises(dist.DistError, match=f"exit_here.* raised {kind.__name__}: enough"):
                await group.all_reduce(np.zeros(elements), dist.ReduceOp.custom(exit_here))
        await other.barrier()

    with nothing_left():
        await asyncio.wait_for(run_ranks(2, main), LIMIT_S)


async def test_calls_from_another_loop_or_thread_are_refused() -> None:
    async def main(group: Any) -> None:
        def elsewhere() -> None:
            for issue in (group.barrier, lambda: group.isend(np.zeros(1), 0)):
                with pytest.raises(RuntimeError, match="another event loop"):
                    issue()

        await asyncio.to_thread(elsewhere)

    with nothing_left():
        await run_ranks(1, main)


async def test_overlapping_collectives_of_two_tasks_warn() -> None:
    async def main(group: Any) -> None:
        release = asyncio.Event()

        async def issue() -> None:
            work = group.barrier()
            await release.wait()
            await work

        group._core.bridge.thread.submit(threading.Event().wait, 0.05)  # nothing ends meanwhile
        first = asyncio.create_task(issue())
        await asyncio.sleep(0)
        with pytest.warns(RuntimeWarning, match="overlaps a collective"):
            await group.barrier()
        release.set()
        await first

    with nothing_left():
        await run_ranks(1, main)


async def test_where_warnings_are_errors_the_others_hear_of_it() -> None:
    async def main(group: Any) -> None:
        if group.rank == 1:
            await group.all_reduce(np.ones(3))
            with pytest.raises(dist.CollectiveMismatchError, match=r"rank 0 refused the operation: .* overlaps"):
                await group.barrier()
            await group.barrier()
            return
        first = group.all_reduce(np.ones(3))

        async def another() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with pytest.raises(RuntimeWarning, match="overlaps"):
                    group.barrier()

        await asyncio.create_task(another())
        await first
        await group.barrier()

    with nothing_left(), another_rank(1, main) as address:
        async with dist.init_process_group(init_method=address, rank=0, world_size=2, progress="thread") as group:
            await main(group)


async def test_a_stream_may_be_closed_after_its_world() -> None:
    async def main(group: Any) -> None:
        async with group.broadcast_stream(np.zeros(3), 0):
            await group.close()

    with nothing_left():
        await run_ranks(1, main)


async def test_cancelling_the_opening_leaves_nothing() -> None:
    with nothing_left():
        opening = asyncio.ensure_future(
            _await(dist.init_process_group(store=dist.HashStore(), rank=0, world_size=2, progress="thread"))
        )
        await asyncio.sleep(0.05)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        with pytest.raises(dist.ConnectTimeoutError, match="missing: rank 1"):
            await dist.init_process_group(store=dist.HashStore(), rank=0, world_size=2, progress="thread", timeout=0.05)


async def test_cancelled_at_any_await_it_is_closed_all_the_same() -> None:
    async def join_and_leave() -> None:
        async with dist.init_process_group(
            init_method="tcp://127.0.0.1:0", rank=0, world_size=1, progress="thread", timeout=10
        ) as group:
            await group.barrier()

    async for cut, error in at_every_await(join_and_leave):
        with nothing_left():
            assert (error is None) == (not cut.reached)


async def _await(awaitable: Any) -> Any:
    return await awaitable


async def test_a_group_that_nobody_keeps_is_there_as_long_as_its_loop() -> None:
    """As of a server whose start-up joins, in a task of its own."""

    async def start_up() -> None:
        await dist.init_process_group(init_method="tcp://127.0.0.1:0", rank=0, world_size=1, progress="thread")

    with nothing_left():
        await asyncio.create_task(start_up())
        await turns(3)  # the loop holds what its last turns have called
        gc.collect()
        await dist.barrier()
        await dist.destroy_process_group()


async def test_the_others_hear_of_a_loop_that_ends_before_its_group() -> None:
    address, loop_factory = f"tcp://127.0.0.1:{free_port()}", type(asyncio.get_running_loop())
    threads = [threading.current_thread()]

    async def main(rank: int) -> None:
        group = await dist.init_process_group(
            init_method=address, rank=rank, world_size=2, timeout=LIMIT_S, progress="thread"
        )
        await group.barrier()
        if rank == 1:
            group.all_reduce(np.ones(3), tag=1)
            return
        waiting = asyncio.create_task(group.recv(np.zeros(1), 1).wait())
        while threads[-1].is_alive() or not waiting.done():
            gc.collect()
            await asyncio.sleep(0.01)
        with pytest.raises(dist.GroupAbortedError, match="rank 1's event loop ended before it was closed"):
            await waiting
        await group.close()

    def elsewhere() -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main(1))

    with nothing_left():
        threads.append(threading.Thread(target=elsewhere))
        threads[-1].start()
        async with asyncio.timeout(LIMIT_S):
            await main(0)


async def test_two_worlds_one_after_the_other_and_at_once() -> None:
    async def main(group: Any) -> None:
        async with dist.init_process_group(
            store=dist.HashStore(), rank=0, world_size=1, progress="thread", group_name="inner"
        ) as inner:
            assert dist.get_default_group() is inner
            await inner.barrier()
        await group.barrier()

    with nothing_left():
        for _ in range(2):
            await run_ranks(1, main)


async def test_a_store_of_the_callers_counts_the_rank_and_tells_it_of_its_restart() -> None:
    with nothing_left():
        async with dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT_S) as store:
            view = dist.PrefixStore("job", store)
            async with dist.init_process_group(store=view, rank=0, world_size=1, progress="thread"):
                assert (await store.status())["leases"] == 2  # it holds its keys, and it is here
                address = next(key for key in await store.list_keys() if key.endswith("/info/0"))
                await store.delete_key(address)
                assert store.on_incarnation_change is not None
                store.on_incarnation_change()
                await store.wait([address])
            assert (await store.status())["leases"] == 0


def test_virtual_time_is_refused() -> None:
    async def main(group: Any) -> None:
        with pytest.raises(ValueError, match="needs real time"):
            await dist.init_process_group(
                store=dist.HashStore(), rank=0, world_size=1, progress="thread", group_name="other"
            )

    run_world(1, main)


def test_a_wrong_progress_is_refused_at_the_call() -> None:
    with pytest.raises(ValueError, match='must be "loop" or "thread"'):
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, progress="fast")  # type: ignore[arg-type]


def test_operations_ask_their_group_for_nothing_but_its_core() -> None:
    """What they do besides runs in the caller's thread, also where the core is in the communication thread."""
    asked: list[str] = []

    class Asked:
        """Has what `Core` says, and nothing else of a group."""

        name, rank, size, ranks, group_id, timeout_s, is_world, world = "name", 0, 2, (0, 1), 1, None, True, World()
        pairs, group_rank = property(lambda self: self), None

        def __getattr__(self, name: str) -> Any:
            assert name in dir(Core) or name in dir(ThreadPairs)
            return lambda *arguments, **options: asked.append(name)

    group = ProcessGroup(Asked())  # type: ignore[arg-type]
    operations = dict(
        each for kind in Operations.__bases__ for each in vars(kind).items() if inspect.isfunction(each[1])
    )
    public = [name for name in operations if not name.startswith("_") and name not in ("refuse", "zeros")]
    for name in public:
        given = [one for one in inspect.signature(operations[name]).parameters.values() if one.default is one.empty]
        getattr(group, name)(*[1] * (len(given) - 1))
    assert len(public) > 40
    assert len([name for name in asked if name != "check_usable"]) == len(public)


class World:
    """What operations ask a world."""

    allow_pickle = False
