"""Tasks of ours begin after what started them has returned, also where the program's tasks begin at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from eager_tasks import needs_eager_tasks, use_eager_tasks

from asyncdist.concurrency.tasks import start_task

Use = Callable[[asyncio.AbstractEventLoop], None]


def no_factory(loop: asyncio.AbstractEventLoop) -> None:
    """As a fresh loop is."""


def plain_tasks(loop: asyncio.AbstractEventLoop) -> None:
    def make(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> Any:
        return asyncio.Task(coroutine, loop=loop, **options)

    loop.set_task_factory(make)


factories = pytest.mark.parametrize(
    "use", [no_factory, plain_tasks, pytest.param(use_eager_tasks, marks=needs_eager_tasks)]
)


@factories
async def test_a_task_begins_once_its_starter_has_returned(use: Use) -> None:
    loop = asyncio.get_running_loop()
    use(loop)
    begun: list[asyncio.Task[str]] = []

    async def main() -> str:
        begun.append(task)
        await asyncio.sleep(0)
        return "done"

    task = start_task(loop, main(), name="ours")
    assert not begun
    assert await task == "done"
    assert begun == [task]
    assert task.get_name() == "ours"


@factories
async def test_what_it_raises_is_the_tasks(use: Use) -> None:
    loop = asyncio.get_running_loop()
    use(loop)

    async def main() -> None:
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        await start_task(loop, main(), name="fails")


@factories
async def test_cancelled_before_its_turn_it_never_begins(use: Use) -> None:
    loop = asyncio.get_running_loop()
    use(loop)
    begun: list[None] = []

    async def main() -> None:
        begun.append(None)

    task = start_task(loop, main(), name="cancelled")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not begun
