"""start_task: a task of ours on a loop of the program's, which may have a task factory.

`asyncio.eager_task_factory` runs a coroutine up to its first wait before it returns the task. What keeps a task and
clears that at its end would do so in the wrong order, and what is queued behind the start would miss it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["start_task"]

T = TypeVar("T")


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
