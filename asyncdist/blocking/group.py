"""Worlds and groups as ordinary threads use them: `init_process_group`, and the `ProcessGroup` that comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import Context, ContextVar
from types import TracebackType
from typing import Any, ParamSpec, Self

from asyncdist import init as initialize
from asyncdist.blocking.stores import Store, inner_store
from asyncdist.blocking.work import ChunkStream, Work, refuse_loop
from asyncdist.errors import ClosedError
from asyncdist.group import WORLD
from asyncdist.group.core import GroupCore, core_of
from asyncdist.group.non_member import NonMember
from asyncdist.group.process_group import ProcessGroup as InnerGroup
from asyncdist.threads.bridge import Bridge, Call, complete, give_up
from asyncdist.threads.thread import CommunicationThread, Reply, acquire, from_here, look_for, release
from asyncdist.work import Work as InnerWork

__all__ = [
    "WORLD",
    "ProcessGroup",
    "Session",
    "current_session",
    "destroy_process_group",
    "get_default_group",
    "init_process_group",
    "inner_of",
    "is_initialized",
    "session_of",
]

P = ParamSpec("P")

_current: ContextVar[Session | None] = ContextVar("asyncdist_blocking_session", default=None)
_open: list[Session] = []
_gone: list[Session] = []
"""Sessions of the process that this one was forked from: kept, as to free what they hold would reach into its loop."""


class Session(Bridge):
    """One open world. Calls from any thread; they are issued in the order in which they are made."""

    def __init__(self, thread: CommunicationThread, core: GroupCore, context: Context) -> None:
        super().__init__(thread, core, context)
        self.interrupted: weakref.WeakSet[InnerWork[Any]] = weakref.WeakSet()
        """What somebody no longer waits for since Ctrl-C: leaving must not wait for it either."""
        self.store: object = None
        """The store that the caller gave, which must outlive the world."""

    def complete(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        """As `call`, and wait for the end of what it begins, a Work or a coroutine; returns that one's result.

        Ctrl-C ends the waiting at once. A send or receive is withdrawn then, unless it has matched; other operations go
        on.
        """
        thread, context = self.thread, self.context.copy()
        reply: Reply[Any] | None = None
        try:
            if not thread.take():
                reply = Reply(thread)
                call = Call(thread, reply, context, function, arguments, options, self.adopt)
                return reply.wait(begin=call.begin)
            try:
                begun = context.run(function, *arguments, **options)
                if isinstance(begun, InnerWork) and look_for(begun) and begun._error is None:
                    begun._retrieved = True
                    return begun._result  # without a Reply and a Call: small operations count nanoseconds
                reply = Reply(thread)
                call = Call(thread, reply, context, function, adopt=self.adopt)
                work = call.follow(begun)
                if not reply.answered:
                    reply.run_loop(work)
            finally:
                thread.progress_lock.give()
            return reply.wait()
        except ClosedError:
            self.check_open(function)
            raise
        except BaseException as error:
            if reply is None:
                from_here(error)
            elif not reply.answered:
                thread.submit(self._give_up, call)
            raise

    def _give_up(self, call: Call) -> None:
        if call.give_up() and call.work is not None:
            self.interrupted.add(call.work)

    def adopt_work(self, inner: InnerWork[Any]) -> Work[Any]:
        return Work(self, inner)

    def adopt_group(self, inner: InnerGroup) -> ProcessGroup:
        return ProcessGroup(inner, self)

    def adopt_stream(self, inner: AsyncIterator[Any]) -> ChunkStream:
        return ChunkStream(self, inner)

    def close(self, group: InnerGroup, error: BaseException | None = None) -> None:
        """Close `group`, and the session with the world's; after `error` it is aborted first. May be called again.

        Ctrl-C ends only the waiting.
        """
        if not self.thread.alive:
            if group is self.core.face:
                self.disown()
            return
        try:
            complete(self.thread, lambda: self._close(group, error), self.context.copy(), cancels=False)
        except Exception:
            self.end()
            raise
        except BaseException:
            self.thread.submit(self._end_when_closed)
            raise
        self.end()

    def _end_when_closed(self) -> None:
        """In the thread: somebody waits no more for what may end this world."""
        if self.core._closing is not None:
            self.core._closing.add_done_callback(lambda _closing: self.end())

    def end(self) -> bool:
        ended = super().end()
        if ended:
            self.store = None
            with contextlib.suppress(ValueError):  # it is of another process
                _open.remove(self)
        return ended

    def disown(self) -> None:
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
            group.abort(reason)
            for core in self.core.inner() if group is self.core.face else ():
                core.abort(reason)
        await group.__aexit__(None if error is None else type(error), error, None)


def current_session() -> Session | None:
    """The session that calls without a group act on: this context's, else the only one open; None where there is none.

    Raises ValueError where there are several to choose from.
    """
    session = _current.get()
    if session is not None and session in _open:
        return session
    if len(_open) > 1:
        names = ", ".join(session.core.name for session in _open)
        raise ValueError(f"several worlds are open ({names}) and this thread opened none: pass group=")
    return _open[0] if _open else None


def session_of(group: InnerGroup) -> Session | None:
    """The session of a group as the communication thread knows it; None once its world is closed."""
    return next((session for session in _open if session.core.world is group.world), None)


class ProcessGroup:
    """A group: pass it as `group=`, or call its methods, which are `asyncdist.ProcessGroup`'s with group ranks.

    Operations wait and return their result; with `async_op=True` they return a `Work`. `isend` and `irecv` always do.
    `with group:` closes it at the end, or aborts it on an exception.
    """

    def __init__(self, inner: InnerGroup, session: Session) -> None:
        self._inner = inner
        self._session = session

    def __repr__(self) -> str:
        return f"<blocking {repr(self._inner)[1:]}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessGroup) and other._inner is self._inner

    def __hash__(self) -> int:
        return id(self._inner)

    def abort(self, reason: str = "") -> None:
        """Give up now: every operation under way raises `GroupAbortedError`, here and on all connected members."""
        self._session.thread.call(self._inner.abort, reason)

    def close(self) -> None:
        """Wait for everything under way, then leave; see `asyncdist.ProcessGroup.close`. May be called again."""
        refuse_loop("ProcessGroup.close")
        self._session.close(self._inner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        refuse_loop("ProcessGroup.__exit__")
        self._session.close(self._inner, error)

    def __getattr__(self, name: str) -> Any:
        """Every attribute and operation of a group exists here too."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._inner, name)
        if inspect.ismethod(value):
            value = vars(self)[name] = _method(self._session, name, value)
        return value


def _method(session: Session, name: str, method: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(method)
    def call(*arguments: Any, async_op: bool = False, **options: Any) -> Any:
        refuse_loop(f"ProcessGroup.{name}")
        if async_op or name in ("isend", "irecv"):
            return session.call(method, *arguments, **options)
        return session.complete(method, *arguments, **options)

    return call


def inner_of(value: Any) -> Any:
    """`value` as the communication thread knows it: a group's handle replaced by the group."""
    return value._inner if isinstance(value, ProcessGroup) else value


def _joining(function: Callable[P, Any]) -> Callable[P, ProcessGroup]:
    def init_process_group(*args: P.args, **kwargs: P.kwargs) -> ProcessGroup:
        """Join a world; arguments and errors are those of `asyncdist.init_process_group`. Ctrl-C gives up.

        The group returned is the default group; `with init_process_group() as group:` leaves it at the end. It starts
        the process's communication thread, which makes the progress while no thread waits.
        """
        refuse_loop("init_process_group")
        if "progress" in kwargs:
            raise TypeError("progress= is for asyncdist.init_process_group: here a thread does it in any case")
        store = next((value for value in (*args, *kwargs.values()) if isinstance(value, Store)), None)
        if "store" in kwargs:
            kwargs["store"] = inner_store(kwargs["store"])
        opening = function(*map(inner_store, args), **kwargs)
        return _join(str(kwargs.get("group_name") or "default"), opening, store)

    init_process_group.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    init_process_group.__qualname__ = "init_process_group"
    return init_process_group


init_process_group = _joining(initialize.init_process_group)


def _join(name: str, opening: Awaitable[InnerGroup], store: Store | None) -> ProcessGroup:
    """Join a world in the communication thread; it is the default of the calling context. Ctrl-C gives up joining."""
    for session in [each for each in _open if not each.thread.alive]:
        session.disown()
    if any(session.core.name == name for session in _open):
        raise ValueError(f"group {name!r} is initialized already: destroy it first, or give another group_name=")
    thread = acquire()
    context = Context()
    opened: list[GroupCore] = []

    async def there() -> None:
        opened.append(core_of(await opening))

    reply: Reply[None] = Reply(thread)
    call = Call(thread, reply, context, there)

    def cancel() -> bool:
        under_way = call.task is not None
        call.give_up()
        return under_way

    try:
        thread.submit(call.begin)
        reply.wait()
    except BaseException:
        try:
            if not reply.answered:
                with contextlib.suppress(Exception, asyncio.CancelledError):
                    if thread.call(cancel):
                        reply.wait()
            if opened:
                complete(thread, lambda: give_up(opened[0], "joining was interrupted"), Context(), cancels=False)
        finally:
            release(thread)
        raise
    session = Session(thread, opened[0], context)
    session.store = store
    _open.append(session)
    _current.set(session)
    return ProcessGroup(session.core.face, session)


def destroy_process_group(group: ProcessGroup | NonMember | None = None) -> None:
    """Close `group`; without one, the default group and with it all groups of its world.

    Waits for everything under way, except where waiting for it was interrupted (Ctrl-C): then the group is aborted.
    Raises the first failure nobody asked about, and ValueError where there is no group.
    """
    refuse_loop("destroy_process_group")
    if not isinstance(group, NonMember):
        (get_default_group() if group is None else group).close()


def get_default_group() -> ProcessGroup:
    """The group that calls without `group=` act on. Raises ValueError if there is none."""
    session = current_session()
    if session is None:
        raise ValueError("the default process group has not been initialized: call init_process_group() first")
    return ProcessGroup(session.core.face, session)


def is_initialized() -> bool:
    """Whether there is a default group."""
    try:
        return current_session() is not None
    except ValueError:
        return False
