"""The bridge to the communication thread: calls there, and what stands for their results where they were made.

A `Call` is made there and answered at the end of what it begins: an operation, or a coroutine. There are two ways to
wait for the answer. An ordinary thread waits on a lock (`complete`), a task on a future (`completed`). A `Bridge` adds
what belongs to one world: its context, its end, and what stands for its groups, Works and streams on the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from typing import Any, Generic, TypeVar

from asyncdist.concurrency.tasks import uninterrupted
from asyncdist.errors import ClosedError
from asyncdist.group.core import GroupCore
from asyncdist.group.process_group import ProcessGroup
from asyncdist.messages.work import RecvWork
from asyncdist.threads.thread import CommunicationThread, Reply, release
from asyncdist.work import Work

__all__ = ["Bridge", "Call", "ItemsThere", "call_forgotten", "complete", "completed", "give_up"]

T = TypeVar("T")


class LoopReply(Generic[T]):
    """A result or an exception to come, for one task of an event loop."""

    __slots__ = ("_error", "_loop", "_result", "ended")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ended: asyncio.Future[None] = loop.create_future()
        self._result: Any = None
        self._error: BaseException | None = None

    def set(self, result: T | None = None, error: BaseException | None = None) -> None:
        """Answer; called by the communication thread, at most once."""
        self._result = result
        self._error = error
        with contextlib.suppress(RuntimeError):  # the waiting loop is closed
            self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def take(self) -> T:
        """Return the answer, or raise it."""
        try:
            if self._error is not None:
                raise self._error
            return self._result  # type: ignore[no-any-return]
        finally:
            self._error = None  # it refers to this frame, and so to us


class Call:
    """A function called in the communication thread and what it begins there, up to its end.

    `adopt` makes of the result what stands for it on the other side.
    """

    def __init__(
        self,
        thread: CommunicationThread,
        reply: Reply[Any] | LoopReply[Any],
        context: Context,
        function: Callable[..., Any],
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
        adopt: Callable[[Any], Any] | None = None,
    ) -> None:
        self.reply = reply
        self.work: Work[Any] | None = None
        """The operation that the function has issued."""
        self.task: asyncio.Future[Any] | None = None
        """The future that the function has returned, or the coroutine that it has begun, until the end."""
        self._thread = thread
        self._context = context
        self._function = function
        self._arguments = arguments
        self._options = options or {}
        self._adopt = adopt

    def begin(self) -> Work[Any] | None:
        """In the communication thread: call, and answer now or at the end of what it began, which is returned."""
        try:
            result = self._context.run(self._function, *self._arguments, **self._options)
        except BaseException as error:
            self.reply.set(None, error)
            return None
        return self.follow(result)

    def follow(self, result: Any) -> Work[Any] | None:
        """As `begin`, where the function has been called and has returned `result`."""
        if isinstance(result, Work):
            self.work = result
            if result._done:
                self.work_ended()
            else:
                result._listener = self
                return result
        elif asyncio.isfuture(result):
            self._follow_future(result)
        elif inspect.isawaitable(result) and not isinstance(result, ProcessGroup):
            coroutine = result if asyncio.iscoroutine(result) else _await(result)
            self.task = self._thread.start_task(coroutine, self._context, self._task_ended)
        else:
            self.reply.set(result if self._adopt is None else self._adopt(result))
        return None

    def _follow_future(self, future: asyncio.Future[Any]) -> None:
        """Answer at the end of `future`. Requests of stores are futures that look for their reply when awaited."""
        awaited = future.__await__()
        with contextlib.suppress(BaseException):  # it is done then, and says so below
            next(awaited)
        awaited.close()
        if future.done():
            self._task_ended(future)
        else:
            self.task = future
            future.add_done_callback(self._task_ended, context=self._context)

    def work_ended(self) -> None:
        """See `asyncdist.work.Listener`."""
        work = self.work
        assert work is not None
        work._retrieved = True
        self.reply.set(work._result, work._error)

    def _task_ended(self, task: asyncio.Future[Any]) -> None:
        # What the coroutine raised is asked for and not raised here: its traceback would hold this frame, this frame
        # holds the task, and the task holds what the coroutine raised.
        self.task = None
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self.reply.set(None, error)
            return
        try:
            result = task.result() if self._adopt is None else self._adopt(task.result())
        except BaseException as problem:
            self.reply.set(None, problem)
        else:
            self.reply.set(result)

    def give_up(self) -> bool:
        """In the communication thread: nobody waits any more. A coroutine is cancelled, a message withdrawn.

        Returns whether an operation goes on that cannot be withdrawn.
        """
        work = self.work
        if self.task is not None:
            # In a later turn: a task cancelled before its first step never takes it, and closing must at least begin.
            self._thread.loop.call_soon(self.task.cancel)
        elif work is not None and work._done:
            if isinstance(work, RecvWork):
                work.give_back()
        elif work is not None:
            work._listener = None  # nobody will be told
            work._abandoned()
            return not work._done
        return False


async def _await(awaitable: Any) -> Any:
    return await awaitable


def complete(
    thread: CommunicationThread, function: Callable[[], Any], context: Context, *, cancels: bool = True
) -> Any:
    """Call `function` in the communication thread and wait, in an ordinary thread, for the end of what it begins.

    Ctrl-C, and what another signal's handler raises, ends the waiting at once; with `cancels` also what was begun.
    """
    reply: Reply[Any] = Reply(thread)
    call = Call(thread, reply, context, function)
    try:
        return reply.wait(begin=call.begin)
    except BaseException:
        if cancels and not reply.answered:
            with contextlib.suppress(ClosedError):
                thread.submit(call.give_up)
        raise


async def completed(
    thread: CommunicationThread,
    function: Callable[[], Any],
    context: Context,
    adopt: Callable[[Any], Any] | None = None,
) -> Any:
    """The same for a task of an event loop.

    Cancelling cancels what was begun, once it has begun, and waits for its end, however it ends.
    """
    reply: LoopReply[Any] = LoopReply(asyncio.get_running_loop())
    call = Call(thread, reply, context, function, adopt=adopt)
    thread.submit(call.begin)
    try:
        await asyncio.shield(reply.ended)
    except asyncio.CancelledError:
        thread.submit(call.give_up)
        await uninterrupted(asyncio.wait([reply.ended]))
        raise
    return reply.take()


def call_forgotten(thread: CommunicationThread, function: Callable[[], Any]) -> None:
    """Await `function()` in the communication thread, which is released then, without waiting for anything.

    For the garbage collector, which may call in any thread.
    """

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()
            release(thread)

    async def there() -> None:
        await function()

    if thread.alive:
        with contextlib.suppress(ClosedError):
            thread.submit(lambda: thread.start_task(there(), Context(), ended))


async def give_up(core: GroupCore, reason: str) -> None:
    """In the communication thread: end all groups of a world without waiting for what is under way."""
    for group in [core, *core.inner()]:
        group.abort(reason)
    with contextlib.suppress(Exception):
        await core.close()


class Bridge(ABC):
    """One world that the communication thread carries, as it is used from elsewhere."""

    def __init__(self, thread: CommunicationThread, core: GroupCore, context: Context) -> None:
        """`core` is that of the world's group. Calls are made in copies of `context`."""
        self.thread = thread
        self.core = core
        self.context = context

        async def leave(error: BaseException | None) -> None:
            await core.face.__aexit__(None if error is None else type(error), error, None)

        thread.at_exit[core] = leave

    def call(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        """Call `function` there, and return what stands here for its result."""
        return self._call(self.thread.call, function, arguments, options)

    def ask(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        """As `call`, for a function that begins nothing and changes nothing."""
        return self._call(self.thread.ask, function, arguments, options)

    def _call(self, how: Callable[..., Any], function: Callable[..., Any], *given: Any) -> Any:
        try:
            return how(self._called, function, *given)
        except ClosedError:
            self.check_open(function)
            raise

    def check_open(self, function: Callable[..., Any]) -> None:
        """Name the group and not the thread, which ends with its last world."""
        if self.core.closed:
            where = self.core.where(getattr(function, "__name__", "call"))
            raise ClosedError(f"{where}: the group is closed") from None

    def _called(self, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        # A context cannot be entered twice, and what a call asks of its arguments may call again: pickling, perhaps.
        return self.adopt(self.context.copy().run(function, *arguments, **options))

    def adopt(self, result: Any) -> Any:
        """What stands here for `result`; called in the communication thread."""
        if isinstance(result, Work):
            return self.adopt_work(result)
        if isinstance(result, ProcessGroup):
            return self.adopt_group(result)
        if type(result) in (list, tuple):
            return type(result)(map(self.adopt, result))
        if hasattr(result, "__anext__"):
            return self.adopt_stream(result)
        return result

    @abstractmethod
    def adopt_work(self, inner: Work[Any]) -> Any:
        """What stands here for a Work that nobody else knows."""

    @abstractmethod
    def adopt_group(self, inner: ProcessGroup) -> Any:
        """What stands here for a group."""

    @abstractmethod
    def adopt_stream(self, inner: AsyncIterator[Any]) -> Any:
        """What stands here for a stream."""

    def end(self) -> bool:
        """Need no thread any more once the world is closed; True at the call that finds that first."""
        if not self.core.closed or self.thread.at_exit.pop(self.core, None) is None:
            return False
        release(self.thread)
        return True


class ItemsThere(Generic[T]):
    """The items of an asynchronous iterator in the communication thread. A step that is given up loses no item."""

    def __init__(self, bridge: Bridge, inner: AsyncIterator[T]) -> None:
        """Called in the communication thread."""
        self._bridge = bridge
        self._inner = inner
        self._arrived: deque[T] = deque()
        if hasattr(inner, "work"):
            self.work = bridge.adopt(inner.work)

    async def _next(self) -> None:
        self._arrived.append(self._bridge.adopt(await anext(self._inner)))

    async def _close(self) -> None:
        if hasattr(self._inner, "aclose"):
            await self._inner.aclose()
