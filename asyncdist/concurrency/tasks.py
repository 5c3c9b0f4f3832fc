"""Tasks: how they start, how cleanup runs to its end, and what is logged when a wait takes long.

`start_task` is for the program's loops, which may have a task factory. `asyncio.eager_task_factory` runs a coroutine up
to its first wait before it returns the task. If a coroutine clears the attribute that holds its task, and ends at once,
the caller would set the attribute after that.

`uninterrupted` is for cleanup. `asyncio.shield` stops waiting at the first cancellation, and the code behind it would
run before the cleanup is done. More than one cancellation is usual: a time-out inside a cancelled task adds one, and a
cancel scope of anyio cancels at every await until its block is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

T = TypeVar("T")

PATIENCE_S: Final = 15.0
"""Processes that are started together meet sooner than this, even if each imports a large library first."""


def start_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
    """Run `coroutine` as a task that begins in a later turn of the loop, whatever the loop's task factory is."""
    if loop.get_task_factory() is None:
        return loop.create_task(coroutine, name=name)
    task = loop.create_task(_from_the_next_turn(coroutine), name=name)
    task.add_done_callback(lambda _task: coroutine.close())  # it may never have begun
    return task


async def _from_the_next_turn(coroutine: Coroutine[Any, Any, T]) -> T:
    await asyncio.sleep(0)
    return await coroutine


async def uninterrupted(cleaning: Coroutine[Any, Any, T]) -> T:
    """Run `cleaning`, which must be bounded in time, to its end; return its result or raise what it raised.

    If the caller is cancelled, CancelledError is raised instead once `cleaning` has ended. Raises RuntimeError, and
    does nothing, if no loop runs any more: the caller is destroyed after its loop.
    """
    try:
        task = asyncio.get_running_loop().create_task(cleaning)
    except RuntimeError:
        cleaning.close()
        raise
    task.add_done_callback(_ask)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        if cancelled is None:
            return task.result()
        raise cancelled
    finally:
        del task, cancelled  # what is raised refers to this frame


async def ended(*futures: asyncio.Future[Any]) -> None:
    """Wait until all have ended, well or not: for `uninterrupted`."""
    await asyncio.wait(futures)
    for future in futures:
        _ask(future)


def _ask(task: asyncio.Future[Any]) -> None:
    """Read the exception, so that asyncio does not warn if the caller was cancelled or destroyed with its loop."""
    if not task.cancelled():
        task.exception()


@contextmanager
def telling(tell: Callable[[], Coroutine[Any, Any, None]], after_s: float | None = None) -> Iterator[None]:
    """Run `tell` once if what is inside takes longer than `after_s` (PATIENCE_S); it is cancelled when that ends."""
    after_s = PATIENCE_S if after_s is None else after_s
    loop = asyncio.get_running_loop()
    tellers: list[asyncio.Task[None]] = []
    # A timer instead of a task, and no await at the end: cancelling the block inside takes no further turn.
    timer = loop.call_later(after_s, lambda: tellers.append(loop.create_task(tell(), name="tells what is waited for")))
    try:
        yield
    finally:
        timer.cancel()
        for teller in tellers:
            teller.cancel()
