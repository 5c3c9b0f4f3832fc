"""ThreadedGroup: a group whose operations the communication thread carries out.

The group itself, `inner`, lives there; this one stands for it on the caller's event loop. Operations that are checked
and planned from their arguments alone (`ISSUED_HERE`) are checked here and handed over without waiting. All other
methods, those of later versions among them, are called there, in the order of the calls here, and waited for: about as
long as a system call takes, or until the thread is through with what it is doing, at most about a millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, cast

from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.concurrency.deadline import INHERIT, Timeout, timeout_seconds
from asyncdist.errors import ClosedError
from asyncdist.gpu.streams import carried
from asyncdist.group.methods.coalesced import Coalesced, MultiDevice
from asyncdist.group.methods.collectives import Collectives, Exchanges, Scans
from asyncdist.group.overlap_warning import OverlapWatch
from asyncdist.group.point_to_point import Pairs, check_tag
from asyncdist.group.process_group import ProcessGroup
from asyncdist.group.unretrieved import watch, watches
from asyncdist.threads.awaiting import ThreadStream, run_there
from asyncdist.threads.thread import release
from asyncdist.threads.work import Courier, ThreadWork
from asyncdist.work import Work

__all__ = ["ThreadedGroup"]

KEPT: Final = frozenset({"where", "group_rank_of", "aborted_error"})
"""Methods that read nothing but what never changes: they run in the caller's thread."""
ISSUED_HERE: Final = (Collectives, Coalesced, Exchanges, MultiDevice, Scans)
"""Operations that run in the caller's thread: of their group they use what ThreadedGroup has itself (see `Issuer`)."""


class ThreadedGroup(ProcessGroup):
    """See the module. To the caller it is a ProcessGroup of its own event loop."""

    def __init__(self, inner: ProcessGroup, courier: Courier, caller: int) -> None:
        # Not ProcessGroup's own: what that sets up is `inner`'s business.
        self._inner_group = inner
        self._courier = courier
        self._communication = courier.thread
        self._loop = courier.loop
        self._thread = caller
        self._is_world = inner._is_world
        self._group_rank = inner._group_rank
        self._backends = inner._backends
        self.world = inner.world
        self.group_id = inner.group_id
        self.ranks = inner.ranks
        self.size = inner.size
        self.rank = inner.rank
        self.name = inner.name
        self.timeout_s = inner.timeout_s
        self.pairs = cast(Pairs, _Forwarding(self, inner.pairs))
        self._works: dict[tuple[int, int], CollectiveWork] = {}  # those issued here and under way, for the overlap
        self._issued = 0
        self._overlap = OverlapWatch(self, self._loop)
        self.watches = watches(self._loop, inner.world.options)
        self._closing = None
        self._releases = inner._is_world

    def __repr__(self) -> str:
        return f"{self._inner_group!r}"[:-1] + " progress thread>"

    @property
    def closed(self) -> bool:  # type: ignore[override]
        return self._inner_group.closed

    @property
    def _aborted(self) -> BaseException | None:  # type: ignore[override]
        return self._inner_group._aborted

    # Issuing.

    def check_usable(self, operation: str) -> None:
        inner = self._inner_group
        if inner._closing is not None or inner.closed or inner.world.forked:
            inner.check_usable(operation)  # raises
        if threading.get_ident() != self._thread or not self._loop.is_running():
            raise RuntimeError(f"{self.where(operation)}: called from another event loop than the group was made on")

    def _collective(
        self, operation: str, tag: int, timeout: Timeout, prepare: Callable[..., Call], *arguments: Any
    ) -> Any:
        self.check_usable(operation)
        inner = self._inner_group
        if inner._aborted is not None:
            raise inner.aborted_error(operation, inner._aborted)
        tag = check_tag(tag)
        try:
            timeout_s = INHERIT if timeout is INHERIT else timeout_seconds(timeout, None)
            call = prepare(*arguments)
            if call.device is not None:
                devices = self._communication.call(inner._backends.on_gpus)
                devices.check(call)
                devices.mark_ready(call)  # the current streams are this thread's
            self._overlap.issue(tag, operation)
        except Exception as error:  # wrong, as a rule; or a function of the user's fails, or a warning is an error
            self._communication.submit(_quietly, inner.refuse, operation, tag, error)
            raise
        self._issued += 1
        work = _IssuedWork(self, (tag, self._issued), operation, call.nbytes)
        self._works[work.key] = cast(CollectiveWork, work)
        self._communication.submit(self._issue, work, operation, tag, timeout_s, call)
        return watch(work) if self.watches else work

    def _issue(self, work: ThreadWork[Any], operation: str, tag: int, timeout: Timeout, call: Call) -> None:
        """In the communication thread."""
        try:
            inner = self._inner_group._collective(operation, tag, timeout, lambda: call)
        except Exception as error:
            work.refuse(error)
        else:
            work.follow(inner)

    def refuse(self, operation: str, tag: int, error: Exception) -> None:
        self.check_usable(operation)
        self._communication.submit(_quietly, self._inner_group.refuse, operation, tag, error)

    def forward(self, target: object, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of `target` in the communication thread and bring its result here."""
        there = tuple(map(_inner_of, arguments)), {key: _inner_of(value) for key, value in options.items()}
        return self._communication.call(lambda: self._adopt(getattr(target, name)(*there[0], **there[1])))

    def _adopt(self, result: Any) -> Any:
        """What stands here for `result`; called in the communication thread."""
        if isinstance(result, Work):
            return ThreadWork(self._courier, result.operation, result.nbytes).adopt(result)
        if isinstance(result, ProcessGroup):
            return ThreadedGroup(result, self._courier, self._thread)
        if type(result) in (list, tuple):
            return type(result)(map(self._adopt, result))
        if hasattr(result, "__anext__"):
            return ThreadStream(self._communication, result, Context(), self._adopt)
        return result

    async def forward_coroutine(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Await a coroutine method of `inner` in the communication thread."""

        async def there() -> Any:
            return self._adopt(await getattr(self._inner_group, name)(*map(_inner_of, arguments), **options))

        return await run_there(self._communication, there, Context())

    # The end.

    def abort(self, reason: str = "") -> None:
        with contextlib.suppress(ClosedError):
            self._communication.call(self._inner_group.abort, reason)

    async def close(self) -> None:
        if self.world.forked:
            return
        if self._communication.alive:
            try:
                await run_there(self._communication, self._inner_group.close, Context())
            finally:
                if self._inner_group.closed:
                    self._is_left()

    def hold(self, timer: asyncio.TimerHandle, forgotten: weakref.finalize[Any, Any]) -> None:
        """Until it is left, `timer` keeps the group alive; `forgotten` is called when nothing does any more."""
        self._kept, self._forgotten = timer, forgotten
        forgotten.atexit = False

    def _is_left(self) -> None:
        if self._releases:
            self._releases = False
            self._kept.cancel()
            self._forgotten.detach()
            self._communication.at_exit.pop(self._inner_group, None)
            release(self._communication)

    def _inner(self) -> list[ProcessGroup]:
        groups = self._communication.call(self._inner_group._inner)
        return [ThreadedGroup(group, self._courier, self._thread) for group in groups]


class _IssuedWork(ThreadWork[Any]):
    """A collective handed over; it is among the group's until it has ended, and does not keep the group alive."""

    __slots__ = ("_works", "key")

    def __init__(self, group: ThreadedGroup, key: tuple[int, int], operation: str, nbytes: int) -> None:
        super().__init__(group._courier, operation, nbytes)
        self._works = group._works
        self.key = key

    def _end(self) -> None:
        self._works.pop(self.key, None)
        super()._end()


class _Forwarding:
    """An object of `inner` as seen from here: its methods are called there, after the checks of every call."""

    def __init__(self, group: ThreadedGroup, target: object) -> None:
        self._group = weakref.ref(group)
        self._target = target

    def __getattr__(self, name: str) -> Any:
        if not callable(getattr(type(self._target), name, None)):
            return getattr(self._target, name)
        group = self._group()
        assert group is not None

        def call(*arguments: Any, **options: Any) -> Any:
            group.check_usable(name)
            return group.forward(self._target, name, *arguments, **options)

        return call


def _quietly(function: Callable[..., object], *arguments: Any) -> None:
    with contextlib.suppress(Exception):  # the group has ended meanwhile, and everybody knows
        function(*arguments)


def _inner_of(value: Any) -> Any:
    return value._inner_group if isinstance(value, ThreadedGroup) else carried(value)


def _forwarding(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        def coroutine(self: ThreadedGroup, *arguments: Any, **options: Any) -> Coroutine[Any, Any, Any]:
            self.check_usable(name)
            return self.forward_coroutine(name, *arguments, **options)

        return coroutine

    @functools.wraps(method)
    def forward(self: ThreadedGroup, *arguments: Any, **options: Any) -> Any:
        self.check_usable(name)
        return self.forward(self._inner_group, name, *arguments, **options)

    return forward


def _generate() -> None:
    """Give ThreadedGroup a forwarding method for each public one of ProcessGroup's that does not run here."""
    here = KEPT.union(vars(ThreadedGroup), *map(vars, ISSUED_HERE))
    for name in dir(ProcessGroup):
        method = inspect.getattr_static(ProcessGroup, name)
        if not name.startswith("_") and name not in here and inspect.isfunction(method):
            setattr(ThreadedGroup, name, _forwarding(name, method))


_generate()
