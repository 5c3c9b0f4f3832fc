"""Cancelled at every step: joining, sending, receiving and leaving clean up, and lose nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable

import numpy as np
import pytest
from socket_world import descriptors, socket_world, turns

import asyncdist as dist
from asyncdist.store import HashStore

PATIENCE_STEPS = 400
"""More turns of the loop than any of these operations takes."""


async def cancelled_after(steps: int, operation: Awaitable[object]) -> bool:
    """Start an operation and cancel it after so many turns; False if it had ended by then."""
    task = asyncio.ensure_future(operation)
    await turns(steps)
    ended = task.done()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, dist.DistError):
        await task
    return not ended


@pytest.mark.parametrize("hosted", [False, True])
async def test_joining_cancelled_at_every_step_leaves_nothing_open(hosted: bool) -> None:
    before = descriptors()
    steps, interrupted = 0, True
    while interrupted and steps < PATIENCE_STEPS:
        store = None if hosted else HashStore()

        async def join(rank: int, store: dist.Store | None = store) -> None:
            method = None if store is not None else "tcp://127.0.0.1:0"
            async with dist.init_process_group(
                init_method=method, store=store, rank=rank, world_size=1 if hosted else 2, timeout=10
            ):
                pass

        interrupted = await cancelled_after(
            steps, join(0) if hosted else asyncio.gather(*(asyncio.create_task(join(rank)) for rank in range(2)))
        )
        if store is not None:
            await store.close()
        steps += 1 if steps < 40 else 13
    await turns(20)
    assert descriptors() <= before + 2  # the default executor's and the loop's own
    assert len(asyncio.all_tasks()) == 1


async def test_a_recv_cancelled_at_every_step_loses_no_message() -> None:
    async with socket_world(2) as (sender, receiver):
        for nbytes in (8, 300_000):
            sent, taken = [], 0
            for steps in range(0, 40, 2):
                got = np.zeros(nbytes // 8)

                async def receive(got: np.ndarray = got) -> None:
                    await receiver.recv(got, 0)

                sent.append(sender.isend(np.full(nbytes // 8, float(len(sent))), 1))
                task = asyncio.ensure_future(receive())
                await turns(steps)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                    taken += 1
            await turns(200)
            # What cancelled receives had matched already is gone with them, in order; nothing else is.
            got = np.zeros(nbytes // 8)
            left = 0
            last = -1.0
            while True:
                work = receiver.recv(got, 0)
                await turns(60)
                if not work.done():
                    assert work.cancel()
                    work.exception()
                    break
                await work
                assert got[0] > last
                assert (got == got[0]).all()
                last = got[0]
                left += 1
            assert taken + left <= len(sent)
            assert left >= 1
            for work in sent:
                await work


async def test_waiters_of_collectives_and_sends_cancelled_at_every_step_change_nothing() -> None:
    async with socket_world(3) as groups:
        for steps in range(0, 60, 3):
            arrays = [np.full(50_000, float(rank)) for rank in range(3)]
            works = [group.all_reduce(array) for group, array in zip(groups, arrays, strict=True)]
            messages = [groups[rank].isend(np.full(20_000, rank), (rank + 1) % 3) for rank in range(3)]

            async def wait_for_all(works: list[dist.Work[object]] = [*works, *messages]) -> None:  # noqa: B006
                for work in works:
                    await work

            task = asyncio.ensure_future(wait_for_all())
            await turns(steps)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            for rank, group in enumerate(groups):
                got = np.zeros(20_000, int)
                await group.recv(got, (rank - 1) % 3)
                assert got[0] == (rank - 1) % 3
            for work, array in zip(works, arrays, strict=True):
                await work
                assert (array == 3.0).all()


async def test_closing_cancelled_at_every_step_still_closes() -> None:
    for steps in range(1, 40, 2):
        async with socket_world(2) as groups:
            await asyncio.gather(*(group.barrier() for group in groups))
            other = asyncio.ensure_future(groups[1].close())
            await cancelled_after(steps, groups[0].close())
            assert groups[0].closed
            await other


async def test_store_requests_cancelled_at_every_step_leave_the_store_usable() -> None:
    import asyncdist_server

    server = await asyncio.to_thread(asyncdist_server.serve_in_thread, "127.0.0.1", 0)
    try:
        async with dist.TCPStore("127.0.0.1", server.port) as store:
            for steps in range(30):
                await cancelled_after(steps, store.get(f"missing {steps}"))
                await cancelled_after(steps, store.queue_pop("queue"))
                await store.set("key", str(steps))
                assert await store.get("key") == str(steps).encode()
            await store.queue_push("queue", "item")
            assert await store.queue_pop("queue", timeout=5) == b"item"
    finally:
        await asyncio.to_thread(server.close)
