"""Cleaning up is waited for, however often whoever waits is cancelled."""

from __future__ import annotations

import asyncio
import gc

import pytest
from socket_world import turns

from asyncdist.concurrency.tasks import uninterrupted


async def test_it_gives_what_the_cleaning_gives() -> None:
    async def clean() -> int:
        await asyncio.sleep(0)
        return 3

    async def fail() -> None:
        raise OSError("no")

    assert await uninterrupted(clean()) == 3
    with pytest.raises(OSError, match="no"):
        await uninterrupted(fail())


@pytest.mark.parametrize("fails", [False, True])
async def test_cancelled_again_and_again_it_waits_for_the_end(fails: bool) -> None:
    may_end = asyncio.Event()
    ended = False

    async def clean() -> None:
        nonlocal ended
        await may_end.wait()
        ended = True
        if fails:
            raise OSError("nobody is told, as the cancellation is raised")

    async def owner() -> None:
        try:
            await uninterrupted(clean())
        finally:
            assert ended

    task = asyncio.create_task(owner())
    for _ in range(5):
        await turns(2)
        task.cancel()
    await turns(5)
    assert not task.done()
    may_end.set()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_it_ends_where_the_end_of_the_loop_cancels_every_task() -> None:
    before = asyncio.all_tasks()
    task = asyncio.create_task(uninterrupted(asyncio.sleep(3600)))
    await turns(2)
    for each in asyncio.all_tasks() - before:
        each.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_nobody_hears_of_an_error_where_a_coroutine_is_destroyed() -> None:
    """As one is whose loop has ended: the test's own loop would be told."""

    async def clean() -> None:
        raise OSError("the loop is closed")

    async def owner() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await uninterrupted(clean())

    coroutine = owner()
    coroutine.send(None)
    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        coroutine.close()
    del coroutine  # it is left where it waits
    await turns(2)
    gc.collect()


def test_nothing_is_begun_where_a_coroutine_is_destroyed_after_its_loop() -> None:
    """Nor is anything left that Python would say was never awaited."""
    begun = []

    async def clean() -> None:
        begun.append(1)

    async def owner() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await uninterrupted(clean())

    loop = asyncio.new_event_loop()
    coroutine = owner()
    task = loop.create_task(coroutine)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="loop"):
        coroutine.close()
    gc.collect()
    assert not begun
