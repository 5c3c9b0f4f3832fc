"""Tasks of the library: how they start, how they clean up to the end, and how they tell those who wait for long.

`start_task` is for loops of the program, which may have a task factory. `asyncio.eager_task_factory` runs a coroutine
up to its first wait before it returns the task: a caller that keeps the task, and clears that place at its end, would
do so in the wrong order.

`uninterrupted` is for cleaning up. `asyncio.shield` ends the waiting at the first cancellation: cleaning up then goes
on unwatched, and what follows meets what it was to take away. Cancellations come in numbers: from a time-out within a
task that is cancelled as well, and from a cancel scope of anyio at every await until its block is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

__all__ = ["PATIENCE_S", "start_task", "telling", "uninterrupted"]

T = TypeVar("T")

PATIENCE_S: Final = 15.0
"""Processes that are started together are there sooner, also when each imports a large library first."""


def start_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
    """Run `coroutine` as a task that begins once the caller has returned to the loop, whatever makes its tasks."""
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

    Cancelling raises CancelledError in their place, once that end has come. Raises RuntimeError, and does nothing,
    where no loop runs any more: whoever waits is destroyed after its loop.
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


def _ask(task: asyncio.Future[Any]) -> None:
    """Nobody may ask what it raised: whoever waited was cancelled, or destroyed with its loop."""
    if not task.cancelled():
        task.exception()


@contextmanager
def telling(tell: Callable[[], Coroutine[Any, Any, None]], after_s: float | None = None) -> Iterator[None]:
    """Run `tell` once if what is inside takes longer than `after_s` (PATIENCE_S); it is cancelled when that ends."""
    after_s = PATIENCE_S if after_s is None else after_s
    loop = asyncio.get_running_loop()
    tellers: list[asyncio.Task[None]] = []
    # A timer and no task, and nothing awaited at the end: who cancels what is inside waits for nothing more.
    timer = loop.call_later(after_s, lambda: tellers.append(loop.create_task(tell(), name="tells what is waited for")))
    try:
        yield
    finally:
        timer.cancel()
        for teller in tellers:
            teller.cancel()
