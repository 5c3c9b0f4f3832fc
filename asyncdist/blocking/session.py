"""Session: a world as ordinary threads use it, and how a call gets from them to the communication thread and back."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import weakref
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from typing import Any

from asyncdist.blocking.stream import ChunkStream
from asyncdist.blocking.work import Work
from asyncdist.errors import ClosedError
from asyncdist.group.process_group import ProcessGroup as InnerGroup
from asyncdist.messages.work import RecvWork
from asyncdist.threads.opening import give_up, leave_at_exit
from asyncdist.threads.reply import Reply
from asyncdist.threads.thread import CommunicationThread, acquire, release
from asyncdist.work import Work as InnerWork

__all__ = ["Session", "await_there", "current_session", "open_session", "session_of"]

_current: ContextVar[Session | None] = ContextVar("asyncdist_blocking_session", default=None)
_open: list[Session] = []
_gone: list[Session] = []
"""Sessions of the process that this one was forked from: kept, as to free what they hold would reach into its loop."""


class Session:
    """One open world. Calls from any thread; they are issued in the order in which they are made."""

    def __init__(
        self,
        thread: CommunicationThread,
        inner: InnerGroup,
        where: Context,
        wrap: Callable[[InnerGroup, Session], object],
    ) -> None:
        self.thread = thread
        self.inner = inner
        self.interrupted: weakref.WeakSet[InnerWork[Any]] = weakref.WeakSet()
        """What somebody no longer waits for since Ctrl-C: leaving must not wait for it either."""
        self.store: object = None
        """The store that the caller gave, which must outlive the world."""
        self._where = where
        self._wrap = wrap

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call `function` in the thread with this world as the default, and return what stands here for its result."""
        try:
            return self.thread.call(lambda: self.adopt(self._run(function, *arguments, **options)))
        except ClosedError:
            self._check_open(function)
            raise

    def complete(self, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """As `call`, and wait for the end of what it begins, a Work or a coroutine; returns that one's result.

        Ctrl-C ends the waiting at once. A send or receive is withdrawn then, unless it has matched; other operations go
        on.
        """
        call = _Completion(self, lambda: self._run(function, *arguments, **options))
        try:
            self.thread.submit(call.begin)
            return call.reply.wait()
        except ClosedError:
            self._check_open(function)
            raise
        except BaseException as error:
            if not isinstance(error, Exception):
                self.thread.submit(call.give_up)
            raise

    def _run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        # A context cannot be entered twice, and what a call asks of its arguments may call again: pickling, perhaps.
        return self._where.copy().run(function, *arguments, **options)

    def _check_open(self, function: Callable[..., Any]) -> None:
        """Name the group and not the thread, which ends with its last world."""
        if self.inner.closed:
            where = self.inner.where(getattr(function, "__name__", "call"))
            raise ClosedError(f"{where}: the group is closed") from None

    def adopt(self, result: Any) -> Any:
        """What stands outside the thread for `result`; called in the thread."""
        if isinstance(result, InnerWork):
            return Work(self, result)
        if isinstance(result, InnerGroup):
            return self._wrap(result, self)
        if type(result) in (list, tuple):
            return type(result)(map(self.adopt, result))
        if hasattr(result, "__anext__"):
            return ChunkStream(self, result)
        return result

    def start(self, coroutine: Coroutine[Any, Any, Any], done: Callable[[asyncio.Task[Any]], object]) -> Any:
        """Run a coroutine as a task of the thread; called in the thread."""
        return self.thread.start_task(coroutine, self._where.copy(), done)

    def close(self, group: InnerGroup, error: BaseException | None = None) -> None:
        """Close `group`, and the session with the world's; after `error` it is aborted first. May be called again.

        Ctrl-C ends only the waiting.
        """
        if not self.thread.alive:
            if group is self.inner:
                self._disown()
            return
        try:
            await_there(self.thread, lambda: self._close(group, error), self._where.copy())
        except Exception:
            self._end()
            raise
        except BaseException:
            self.thread.submit(self._end_when_closed)
            raise
        self._end()

    def _end_when_closed(self) -> None:
        """In the thread: somebody waits no more for what may end this world."""
        if self.inner._closing is not None:
            self.inner._closing.add_done_callback(lambda _closing: self._end())

    def _end(self) -> None:
        """Once the world's group is closed, be no open world any more and need no thread."""
        if not self.inner.closed:
            return
        try:
            _open.remove(self)
        except ValueError:  # it is none, in this thread or in another
            return
        self.thread.at_exit.pop(self.inner, None)
        self.store = None
        release(self.thread)

    def _disown(self) -> None:
        """Be no world of this process: the thread is its parent's, or has ended."""
        if self in _open:
            _open.remove(self)
            _gone.append(self)

    async def _close(self, group: InnerGroup, error: BaseException | None) -> None:
        left = [work for work in self.interrupted if not work._done]
        if left:
            reason = f"rank {group.world.rank} was interrupted while it waited for {left[0].operation}"
            for work in left:
                work._retrieved = True  # whoever was interrupted knows
            for inner in [group, *group._inner()]:
                inner.abort(reason)
        await group.__aexit__(None if error is None else type(error), error, None)


class _Completion:
    """One call and what it begins, up to its end."""

    def __init__(self, session: Session, function: Callable[[], Any]) -> None:
        self.reply: Reply[Any] = Reply(session.thread)
        self._session = session
        self._function = function
        self._work: InnerWork[Any] | None = None
        self._task: asyncio.Task[Any] | None = None

    def begin(self) -> None:
        """In the thread: call, and answer now or at the end of what it began."""
        try:
            result = self._function()
        except BaseException as error:
            self.reply.set(None, error)
            return
        if isinstance(result, InnerWork):
            self._work = result
            if result._done:
                self.work_ended()
            else:
                result._listener = self
        elif inspect.isawaitable(result) and not isinstance(result, InnerGroup):
            self._task = self._session.start(_await(result), self._task_ended)
        else:
            self.reply.set(self._session.adopt(result))

    def work_ended(self) -> None:
        work = self._work
        assert work is not None
        work._retrieved = True
        self.reply.set(work._result, work._error)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self.reply.run(lambda: self._session.adopt(task.result()))

    def give_up(self) -> None:
        """In the thread: the caller was interrupted and waits no more."""
        if self._task is not None:
            self._task.cancel()
        work = self._work
        if work is None:
            return
        if work._done:
            if isinstance(work, RecvWork):
                work.give_back()
            return
        work._listener = None  # who waits no more will not be told
        work._abandoned()
        if not work._done:
            self._session.interrupted.add(work)


async def _await(awaitable: Any) -> Any:
    return await awaitable


def await_there(
    thread: CommunicationThread, function: Callable[[], Any], where: Context, *, cancels: bool = False
) -> Any:
    """Await `function()` in the thread and return its result.

    Ctrl-C ends only the waiting; with `cancels` what is awaited as well.
    """
    reply: Reply[Any] = Reply(thread)
    tasks: list[asyncio.Task[Any]] = []

    def begin() -> None:
        try:
            awaitable = function()
        except BaseException as error:  # wrong arguments, found at the call
            reply.set(None, error)
        else:
            tasks.append(thread.start_task(_await(awaitable), where, lambda task: reply.run(task.result)))

    try:
        thread.submit(begin)
        return reply.wait()
    except BaseException as error:
        if cancels and not isinstance(error, Exception):
            thread.submit(lambda: [task.cancel() for task in tasks])
        raise


def current_session() -> Session | None:
    """The session that calls without a group act on: this context's, else the only one open; None where there is none.

    Raises ValueError where there are several to choose from.
    """
    session = _current.get()
    if session is not None and session in _open:
        return session
    if len(_open) > 1:
        names = ", ".join(session.inner.name for session in _open)
        raise ValueError(f"several worlds are open ({names}) and this thread opened none: pass group=")
    return _open[0] if _open else None


def session_of(group: InnerGroup) -> Session | None:
    """The session of a group as the communication thread knows it; None once its world is closed."""
    return next((session for session in _open if session.inner.world is group.world), None)


def open_session(name: str, opening: Callable[[], Any], wrap: Callable[[InnerGroup, Session], Any]) -> Any:
    """Join a world in the communication thread; it is the default of the calling context. Ctrl-C gives up joining."""
    for session in [each for each in _open if not each.thread.alive]:
        session._disown()
    if any(session.inner.name == name for session in _open):
        raise ValueError(f"group {name!r} is initialized already: destroy it first, or give another group_name=")
    thread = acquire()
    where = Context()
    opened: list[InnerGroup] = []
    tasks: list[asyncio.Task[Any]] = []
    reply: Reply[None] = Reply(thread)

    async def there() -> None:
        opened.append(await opening())

    def give_up_joining() -> None:
        with contextlib.suppress(Exception, asyncio.CancelledError):
            if thread.call(lambda: any(task.cancel() for task in tasks)):  # not before it has begun
                reply.wait()

    try:
        thread.submit(lambda: tasks.append(thread.start_task(there(), where, lambda task: reply.run(task.result))))
        try:
            reply.wait()
        except Exception:
            raise
        except BaseException:
            give_up_joining()
            raise
    except BaseException:
        if opened:
            await_there(thread, lambda: give_up(opened[0], "joining was interrupted"), Context())
        release(thread)
        raise
    leave_at_exit(thread, opened[0])
    session = Session(thread, opened[0], where, wrap)
    _open.append(session)
    _current.set(session)
    return wrap(opened[0], session)
