"""Cancelling an operation at each of its awaits in turn."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any

__all__ = ["Cut", "at_every_await", "cancelling_at"]

MAX_AWAITS = 400
"""More awaits than any operation here has."""


class Cut:
    """Where an operation is to be cancelled: at its await number `at`, from 1; `reached` says whether it got there.

    `whom` is the task to cancel, by default the one that runs the operation; `again` cancels it at every later await
    as well, as a cancel scope of anyio does.
    """

    def __init__(self, at: int, whom: asyncio.Task[Any] | None = None, *, again: bool = False) -> None:
        self.at = at
        self.whom = whom
        self.again = again
        self.reached = False


@types.coroutine
def cancelling_at(cut: Cut, operation: Awaitable[Any]) -> Generator[Any, Any, Any]:
    """Await `operation` as a task would, but have the task cancelled as it waits for the time that `cut` names."""
    steps = operation.__await__()
    count = 0
    error: BaseException | None = None
    while True:
        try:
            awaited = steps.send(None) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value
        count += 1
        if count == cut.at or (cut.again and cut.reached):
            cut.reached = True
            task = cut.whom or asyncio.current_task()
            assert task is not None
            task.cancel()
        error = None
        try:
            yield awaited
        except BaseException as raised:  # for the operation to deal with
            error = raised


async def at_every_await(
    make: Callable[[], Awaitable[Any]], *, again: bool = False
) -> AsyncIterator[tuple[Cut, BaseException | None]]:
    """Make the operation again and again, each time cancelled one await later, until it ends before that.

    Yields where it was cut and what it raised then, if anything.
    """
    for at in range(1, MAX_AWAITS):
        cut = Cut(at, again=again)
        operation = make()

        async def run(cut: Cut = cut, operation: Awaitable[Any] = operation) -> None:
            await cancelling_at(cut, operation)

        task = asyncio.create_task(run())
        await asyncio.wait([task])
        cancelled = task.cancelled()
        yield cut, asyncio.CancelledError() if cancelled else task.exception()
        if not cut.reached:
            return
    raise AssertionError(f"it awaits more than {MAX_AWAITS} times")
