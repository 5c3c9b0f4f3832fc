"""Awaiting on one event loop what the communication thread's loop runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import Context
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from asyncdist.concurrency.tasks import uninterrupted
from asyncdist.errors import ClosedError
from asyncdist.threads.thread import CommunicationThread

__all__ = ["ThreadStream", "run_there"]

T = TypeVar("T")


async def run_there(thread: CommunicationThread, function: Callable[[], Awaitable[T]], context: Context) -> T:
    """Await `function()` in the thread and return its result, or raise what it raised.

    Cancelling cancels it there, once it has begun, and waits for its end, however it ends.
    """
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    tasks: list[asyncio.Task[T]] = []

    async def awaiting() -> T:
        return await function()

    def settle() -> None:
        if not ended.done():
            ended.set_result(None)

    def over(task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # it is raised here, unless we are cancelled
        with contextlib.suppress(RuntimeError):  # the waiting loop is closed
            loop.call_soon_threadsafe(settle)

    thread.submit(lambda: tasks.append(thread.start_task(awaiting(), context, over)))
    try:
        await asyncio.shield(ended)
    except asyncio.CancelledError:
        # In a later turn: a task cancelled before its first step never takes it, and closing must at least begin.
        thread.submit(lambda: thread.loop.call_soon(tasks[0].cancel))
        await uninterrupted(asyncio.wait([ended]))
        raise
    return tasks.pop().result()  # what it raises refers to this frame, which is not to refer to it


class ThreadStream(Generic[T]):
    """An asynchronous iterator whose steps are taken in the communication thread. Cancelling a step loses no item."""

    def __init__(
        self,
        thread: CommunicationThread,
        inner: AsyncIterator[T],
        context: Context,
        adopt: Callable[[Any], Any],
    ) -> None:
        """Called in the communication thread."""
        self._thread = thread
        self._inner = inner
        self._context = context
        self._adopt = adopt
        self._arrived: deque[T] = deque()
        if hasattr(inner, "work"):
            self.work = adopt(inner.work)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """The next item; raises what the stream raises."""
        if not self._arrived:
            await run_there(self._thread, self._next, self._context.copy())
        return self._arrived.popleft()

    async def _next(self) -> None:
        self._arrived.append(self._adopt(await anext(self._inner)))

    async def aclose(self) -> None:
        """End the stream early."""
        self._arrived.clear()
        close = getattr(self._inner, "aclose", None)
        if close is not None:
            with contextlib.suppress(ClosedError):  # its world was closed before, and with it the stream
                await run_there(self._thread, close, self._context.copy())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()
