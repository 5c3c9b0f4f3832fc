"""Worlds whose making or closing is cut short: whoever made them has nothing left, and the others hear of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from cancel_sweep import Cut, at_every_await, cancelling_at
from distant_store import DistantStore
from group_kit import outcome
from punctual import assert_within, punctual
from socket_world import descriptors, socket_world, turns
from waiting import eventually

import asyncdist as dist
import asyncdist_server
from asyncdist.collectives.backend import Backend
from asyncdist.group.core import core_of
from asyncdist.store import HashStore
from asyncdist.transport.addresses import PeerAddress
from asyncdist.transport.mesh import Mesh
from asyncdist_server.serving.user_token import make_user_token

CLOSED_S = 5.0
"""Far less than a collective may take, far more than closing does."""


NAMED_S = 1.0
"""How soon failures are to name the rank."""


def at_most(count: int) -> Callable[[], bool]:
    """Whether no more than `count` descriptors are open."""
    return lambda: descriptors() <= count


async def test_a_closing_that_the_end_of_the_loop_cancels_at_any_await_leaves_nothing_open() -> None:
    before = 0
    cut = Cut(0)
    while not cut.at or cut.reached:
        cut = Cut(cut.at + 1)
        group = await dist.init_process_group(init_method="tcp://127.0.0.1:0", rank=0, world_size=1, timeout=10)
        close = core_of(group)._close

        async def closing(cut: Cut = cut, close: Any = close) -> None:
            await cancelling_at(cut, close())

        core_of(group)._close = closing  # type: ignore[method-assign]
        await asyncio.gather(group.close(), return_exceptions=True)
        await turns(10)
        if not before:
            before = descriptors()  # the default executor's with it
        await eventually(at_most(before), f"cancelled at await {cut.at}")
        assert group.closed
    assert cut.at > 3


async def test_a_backend_that_cannot_be_made_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_arguments: object) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setitem(Backend._factories, "unable", unable)
    store = HashStore()

    async def join(rank: int) -> dist.ProcessGroup:
        name = "unable" if rank else "aio"
        return await dist.init_process_group(name, store=store, rank=rank, world_size=2, timeout=10)

    before = descriptors()
    group, failure = await asyncio.gather(
        *(asyncio.create_task(join(rank)) for rank in range(2)), return_exceptions=True
    )
    assert isinstance(failure, RuntimeError)
    assert isinstance(group, dist.ProcessGroup)
    error = await outcome(group.all_reduce(np.ones(3)))
    assert isinstance(error, dist.PeerLostError)
    assert error.rank == 1
    assert "could not be in this world" in str(error)
    await group.close()
    await store.close()
    assert descriptors() <= before + 1  # the default executor's


@punctual
async def test_who_cannot_listen_is_named_on_all_ranks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    listen = Mesh.listen

    async def unable(self: Mesh, ips: Sequence[str], *rest: Any, **options: bool) -> PeerAddress:
        return await listen(self, ["192.0.2.213"] if self.rank == 1 else ips, *rest, **options)

    monkeypatch.setattr(Mesh, "listen", unable)
    store = DistantStore(HashStore())  # type: ignore[abstract] # its verbs are made there

    async def join(rank: int) -> dist.ProcessGroup:
        return await dist.init_process_group(store=store, rank=rank, world_size=3, timeout=10)

    before, started = descriptors(), time.monotonic()
    failed = await asyncio.gather(*(asyncio.create_task(join(rank)) for rank in range(3)), return_exceptions=True)
    assert_within(NAMED_S, time.monotonic() - started)
    assert isinstance(failed[1], dist.DistNetworkError)
    for failure in failed:
        assert isinstance(failure, dist.DistError)
        assert "rank 1: cannot listen on 192.0.2.213: " in str(failure)
        assert "ASYNCDIST_SOCKET_IFNAME" in str(failure)
    await store.close()
    assert descriptors() <= before + 1  # the default executor's


async def test_a_closing_that_the_end_of_the_loop_cancels_ends_what_is_under_way() -> None:
    async with socket_world(2) as (group, other):
        await asyncio.gather(group.barrier(), other.barrier())
        works = [group.all_reduce(np.ones(3)), group.isend(np.ones(1_000_000), 1), other.barrier(tag=1)]
        closing = asyncio.create_task(group.close())
        await turns(5)
        assert group._core._closing is not None
        group._core._closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        async with asyncio.timeout(CLOSED_S):
            for work in works:
                with pytest.raises(dist.GroupAbortedError, match="rank 0 aborted the group: the event loop ended"):
                    await work


@pytest.mark.parametrize("pending", ["all_reduce", "isend", "all_reduce in a group"])
async def test_cancelling_close_aborts_what_is_under_way(pending: str) -> None:
    async with socket_world(2) as (group, other):
        await asyncio.gather(group.barrier(), other.barrier())
        inner = [each.make_subgroup([0, 1], None, "inner") for each in (group, other)]
        assert inner[0] is not None
        if pending == "isend":
            work: dist.Work[Any] = group.isend(np.ones(1_000_000), 1)
        else:
            work = (group if pending == "all_reduce" else inner[0]).all_reduce(np.ones(3))
        closing = asyncio.create_task(group.close())
        await turns(5)
        assert not closing.done()
        closing.cancel()
        done, _ = await asyncio.wait([closing], timeout=CLOSED_S)
        assert done
        assert closing.cancelled()
        assert group.closed
        with pytest.raises(dist.GroupAbortedError, match="rank 0 aborted the group: closing it was cancelled"):
            await work


@pytest.mark.parametrize("again", [False, True])
async def test_cancelling_close_at_any_await_closes(again: bool) -> None:
    store = HashStore()
    groups: list[dist.ProcessGroup] = []

    async def open_and_close() -> None:
        group = await dist.init_process_group(store=store, rank=0, world_size=1, timeout=10)
        groups.append(group)
        await cancelling_at(cut, group.close())

    cut = Cut(0, again=again)
    while not cut.at or cut.reached:
        cut = Cut(cut.at + 1, again=again)
        task = asyncio.create_task(open_and_close())
        await asyncio.wait([task])
        assert task.cancelled() == cut.reached
        assert groups[-1].closed
    await store.close()


async def test_joining_cancelled_at_every_await_leaves_no_descriptor() -> None:
    before = descriptors()
    async for cut, error in at_every_await(_join_and_leave):
        # Two of the default executor's.
        await eventually(at_most(before + 2), f"cancelled at await {cut.at}")
        assert (error is None) == (not cut.reached)


@pytest.mark.parametrize("progress", ["loop", "thread"])
async def test_joining_and_leaving_cancelled_at_every_await_from_one_on_leave_nothing_behind(progress: Any) -> None:
    async def join_and_leave() -> None:
        async with dist.init_process_group(
            init_method="tcp://127.0.0.1:0", rank=0, world_size=1, timeout=10, progress=progress
        ):
            pass

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncdist")]

    before, tasks = threads(), len(asyncio.all_tasks())
    async for cut, error in at_every_await(join_and_leave, again=True):
        assert (error is None) == (not cut.reached)
        where = f"cancelled from await {cut.at} on"
        assert len(asyncio.all_tasks()) <= tasks, where
        assert threads() == before, where


async def test_a_rank_cancelled_at_every_await_from_one_on_may_join_again() -> None:
    server = await asyncio.to_thread(asyncdist_server.serve_in_thread, "127.0.0.1", 0, token=make_user_token())

    async def join_and_leave() -> None:
        async with dist.init_process_group(
            init_method=f"tcp://127.0.0.1:{server.port}", rank=0, world_size=1, timeout=10
        ):
            pass

    try:
        async for _cut, error in at_every_await(join_and_leave, again=True):
            assert error is None or isinstance(error, asyncio.CancelledError)
            await join_and_leave()
    finally:
        await asyncio.to_thread(server.close)


async def _join_and_leave() -> None:
    async with dist.init_process_group(init_method="tcp://127.0.0.1:0", rank=0, world_size=1, timeout=10):
        pass
