"""Work: awaitable by many, cancelled by none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextvars import Context, ContextVar
from datetime import timedelta
from typing import Any

import pytest

from asyncdist.work import Work


def pending() -> Work[int]:
    return Work(asyncio.get_running_loop(), "all_reduce", 8 << 20, 17)


async def test_any_number_of_tasks_get_the_result() -> None:
    work = pending()
    waiting = [asyncio.ensure_future(_await(work)) for _ in range(5)]
    await asyncio.sleep(0)
    work._finish(3)
    assert await asyncio.gather(*waiting) == [3] * 5
    assert await work == 3


async def _await(work: Work[int]) -> int:
    return await work


async def test_cancelling_a_waiter_leaves_the_others_and_the_operation_alone() -> None:
    work = pending()
    first, second = asyncio.ensure_future(_await(work)), asyncio.ensure_future(_await(work))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not work.done()
    work._finish(1)
    assert await second == 1


async def test_a_failure_is_raised_each_time() -> None:
    work = pending()
    waiter = asyncio.ensure_future(_await(work))
    await asyncio.sleep(0)
    work._fail(ValueError("no"))
    for awaiting in (waiter, _await(work)):
        with pytest.raises(ValueError, match="no"):
            await awaiting
    assert work.done()
    assert not work.is_success()
    assert isinstance(work.exception(), ValueError)
    with pytest.raises(ValueError, match="no"):
        work.result()


async def test_what_is_not_done_has_no_outcome() -> None:
    work = pending()
    for ask in (work.result, work.exception):
        with pytest.raises(asyncio.InvalidStateError):
            ask()
    with pytest.raises(RuntimeError, match="no source rank"):
        work.source_rank()
    assert not work.cancel()
    work._finish(0)
    assert work.is_completed()
    assert work.is_success()


async def test_wait_bounds_only_the_waiting() -> None:
    work = pending()
    with pytest.raises(TimeoutError, match=r"all_reduce #17: did not end within 0.01 s"):
        await work.wait(0.01)
    with pytest.raises(TimeoutError, match=r"did not end within 0.01 s"):
        await work.wait(timedelta(milliseconds=10))
    assert not work.done()
    asyncio.get_running_loop().call_soon(work._finish, 2)
    assert await work.wait(5)
    assert await work.wait(0)


async def test_what_ended_in_the_turn_in_which_the_time_was_up_is_in_time() -> None:
    """As after a computation that took longer than both: what came meanwhile is read first."""
    work = pending()
    waiting = asyncio.create_task(work.wait(0.01))
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    loop.call_soon(time.sleep, 0.05)
    loop.call_soon(loop.call_soon, work._finish, 3)
    assert await waiting


async def test_waits_that_ended_early_leave_nothing_behind() -> None:
    work: Work[None] = Work(asyncio.get_running_loop(), "barrier")
    for _ in range(5):
        with pytest.raises(TimeoutError):
            await work.wait(timeout=0.0001)
    waiting = asyncio.create_task(work.wait(timeout=60))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert not work._callbacks
    assert not work._waiters
    work._finish(None)


async def test_wait_raises_the_failure() -> None:
    work = pending()
    asyncio.get_running_loop().call_soon(work._fail, ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await work.wait(5)


async def test_callbacks_are_called_once_from_the_loop() -> None:
    work = pending()
    seen: list[str] = []
    work.add_done_callback(lambda _: seen.append("before"))
    work.add_done_callback(lambda _: seen.append("too"))
    work._finish(0)
    assert seen == []
    work.add_done_callback(lambda _: seen.append("after"))
    await asyncio.sleep(0)
    assert seen == ["before", "too", "after"]


async def test_asyncio_wait_takes_works_as_they_are() -> None:
    first, second = pending(), pending()
    asyncio.get_running_loop().call_soon(first._finish, 1)
    done, left = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    assert (done, left) == ({first}, {second})
    assert second._callbacks is None  # nothing is left behind
    asyncio.get_running_loop().call_soon(second._fail, ValueError("no"))
    assert await asyncio.wait({first, second}, return_when=asyncio.FIRST_EXCEPTION) == ({first, second}, set())
    assert isinstance(second.exception(), ValueError)


async def test_callbacks_can_be_taken_back() -> None:
    work, seen = pending(), []
    for callback in (seen.append, print, seen.append):
        work.add_done_callback(callback)
    assert work.remove_done_callback(seen.append) == 2
    assert work.remove_done_callback(seen.append) == 0
    assert work.remove_done_callback(print) == 1
    work._finish(0)
    await asyncio.sleep(0)
    assert (seen, work.remove_done_callback(print), work.cancelled()) == ([], 0, False)


async def test_repr_is_a_status_line() -> None:
    work = pending()
    assert repr(work) == "<Work all_reduce #17 8 MiB pending>"
    work._fail(ValueError("no"))
    assert repr(work) == "<Work all_reduce #17 8 MiB failed: no>"


async def test_another_event_loop_is_refused_and_leaves_nothing_behind() -> None:
    work = pending()

    def elsewhere(waiting: Coroutine[Any, Any, Any]) -> None:
        with pytest.raises(RuntimeError, match=r"another event loop|a different loop"):
            asyncio.run(waiting)

    for waiting in (_await(work), work.wait(), work.wait(timeout=60)):
        await asyncio.to_thread(elsewhere, waiting)
    assert not work._waiters
    assert not work._callbacks
    asyncio.get_running_loop().call_soon(work._finish, 1)
    assert await work == 1


async def test_callbacks_run_in_the_context_in_which_they_were_added() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="of the transport")
    seen: list[str] = []

    def add(name: str, context: Context | None = None) -> None:
        variable.set(name)
        work.add_done_callback(lambda _: seen.append(variable.get()), context=context)

    work, named = pending(), Context()
    named.run(variable.set, "named")
    Context().run(add, "first")
    Context().run(add, "second", named)
    Context().run(work._finish, 0)
    Context().run(add, "late")
    await asyncio.sleep(0)
    assert seen == ["first", "named", "late"]
