"""ThreadCore: the core of a group whose operations the communication thread carries out.

The `GroupCore` lives there; a ThreadCore stands for it on the caller's event loop. Collectives are checked and bound
here and handed over without waiting. Everything else is called there, in the order of the calls here, and waited
for: about as long as a system call takes, or until the thread is through with what it is doing, at most about a
millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import Context
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar, cast

import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import WorkKey
from asyncdist.concurrency.deadline import INHERIT, Timeout, timeout_seconds
from asyncdist.errors import ClosedError
from asyncdist.gpu.streams import carried
from asyncdist.group import default_group as context
from asyncdist.group.core import GroupCore, core_of
from asyncdist.group.misuse import OverlapWatch, watch, watches
from asyncdist.group.point_to_point import Pairs, check_tag
from asyncdist.group.process_group import ProcessGroup
from asyncdist.threads.bridge import Bridge, ItemsThere, call_forgotten, completed, give_up
from asyncdist.threads.thread import CommunicationThread, acquire, release
from asyncdist.threads.work import Courier, ThreadWork
from asyncdist.work import Work

__all__ = ["ThreadCore", "open_there"]

P = ParamSpec("P")
T = TypeVar("T")

FOREVER_S: Final = 1e9
"""When a timer is due that keeps a group alive for as long as its event loop, as sockets that it watches do others."""


class LoopBridge(Bridge):
    """A world as the tasks of one event loop use it."""

    def __init__(self, thread: CommunicationThread, core: GroupCore, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(thread, core, Context())
        self.courier = Courier(thread, loop)
        self.loop = loop
        self.caller = threading.get_ident()
        self._kept: asyncio.TimerHandle | None = None
        self._forgotten: weakref.finalize[Any, Any] | None = None

    def keep(self, core: ThreadCore) -> None:
        """Keep the world's group for as long as its loop; leave the world when nothing keeps the group any more."""
        leave = functools.partial(_leave_alone, self.thread, self.core)
        self._kept = self.loop.call_later(FOREVER_S, repr, core)
        self._forgotten = weakref.finalize(self, call_forgotten, self.thread, leave)
        self._forgotten.atexit = False

    async def complete(self, function: Callable[..., Any]) -> Any:
        """Await `function()` in the communication thread; see `completed`."""
        return await completed(self.thread, function, self.context.copy())

    def end(self) -> bool:
        ended = super().end()
        if ended and self._kept is not None and self._forgotten is not None:
            self._kept.cancel()
            self._forgotten.detach()
        return ended

    def adopt_work(self, inner: Work[T]) -> ThreadWork[T]:
        return ThreadWork[T](self.courier, inner.operation, inner.nbytes).adopt(inner)

    def adopt_group(self, inner: ProcessGroup) -> ProcessGroup:
        raise AssertionError("groups cross as their cores")

    def adopt_stream(self, inner: AsyncIterator[T]) -> ThreadStream[T]:
        return ThreadStream(self, inner)


class ThreadStream(ItemsThere[T]):
    """An asynchronous iterator whose steps are taken in the communication thread. Cancelling a step loses no item."""

    _bridge: LoopBridge

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """The next item; raises what the stream raises."""
        if not self._arrived:
            await self._bridge.complete(self._next)
        return self._arrived.popleft()

    async def aclose(self) -> None:
        """End the stream early."""
        self._arrived.clear()
        with contextlib.suppress(ClosedError):  # its world was closed before, and with it the stream
            await self._bridge.complete(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


def _called_there(name: str, method: Callable[Concatenate[Pairs, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A method of `Pairs`, called in the communication thread; `name` is that of the operation in errors."""

    @functools.wraps(method)
    def call(self: ThreadPairs, *arguments: P.args, **options: P.kwargs) -> T:
        self._core.check_usable(name if options.get("abandon", True) else f"i{name}")
        made: T = self._core.bridge.call(method, self._core.inner_core.pairs, *map(carried, arguments), **options)
        return made

    return cast(Callable[Concatenate[Any, P], T], call)


class ThreadPairs:
    """The messages of a group whose `Pairs` are in the communication thread."""

    def __init__(self, core: ThreadCore) -> None:
        self._core = core
        self.group_rank = core.inner_core.pairs.group_rank

    send = _called_there("send", Pairs.send)
    send_objects = _called_there("send_object_list", Pairs.send_objects)
    receive = _called_there("recv", Pairs.receive)
    receive_array = _called_there("recv_array", Pairs.receive_array)
    receive_objects = _called_there("recv_object_list", Pairs.receive_objects)


class ThreadCore:
    """See the module, and `Core` of the groups' operations for what its methods do."""

    face: ProcessGroup

    def __init__(self, inner: GroupCore, bridge: LoopBridge) -> None:
        self.bridge = bridge
        self.inner_core = inner
        self.world = inner.world
        self.group_id = inner.group_id
        self.ranks = inner.ranks
        self.size = inner.size
        self.rank = inner.rank
        self.name = inner.name
        self.backend_names = inner.backend_names
        self.is_world = inner.is_world
        self.where = inner.where
        self.pairs = cast(Pairs, ThreadPairs(self))  # it has what operations use
        self.watches = watches(bridge.loop, inner.world.options)
        self._works: dict[WorkKey, IssuedWork] = {}  # those issued here and under way, for the overlap
        self._issued = 0
        self._overlap = OverlapWatch(self, bridge.loop)

    def __repr__(self) -> str:
        return f"{self.inner_core!r}"[:-1] + " communication thread>"

    @property
    def closed(self) -> bool:
        return self.inner_core.closed

    @property
    def timeout_s(self) -> float | None:
        return self.inner_core.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float | None) -> None:
        self.inner_core.timeout_s = timeout_s

    def check_usable(self, operation: str) -> None:
        inner = self.inner_core
        if inner._closing is not None or inner.closed or inner.world.forked:
            inner.check_usable(operation)  # raises
        if threading.get_ident() != self.bridge.caller or not self.bridge.loop.is_running():
            raise RuntimeError(f"{self.where(operation)}: called from another event loop than the group was made on")

    # What is checked here and handed over.

    def issue(
        self, operation: str, tag: int, timeout: Timeout, prepare: Callable[..., Call], /, *arguments: Any
    ) -> Work[Any]:
        self.check_usable(operation)
        inner, thread = self.inner_core, self.bridge.thread
        if inner._aborted is not None:
            raise inner.aborted_error(operation, inner._aborted)
        tag = check_tag(tag)
        try:
            timeout_s = INHERIT if timeout is INHERIT else timeout_seconds(timeout, None)
            call = prepare(*arguments)
            if call.device is not None:
                devices = thread.call(inner._backends.on_gpus)
                devices.check(call)
                devices.mark_ready(call)  # the current streams are this thread's
            self._overlap.issue(tag, operation)
        except Exception as error:  # wrong, as a rule; or a function of the user's fails, or a warning is an error
            thread.submit(_quietly, inner.refuse, operation, tag, error)
            raise
        self._issued += 1
        work = IssuedWork(self.bridge.courier, self._works, (tag, self._issued), operation, call.nbytes)
        self._works[work.key] = work
        thread.submit(self._issue, work, operation, tag, timeout_s, call)
        return watch(work) if self.watches else work

    def _issue(self, work: IssuedWork, operation: str, tag: int, timeout: Timeout, call: Call) -> None:
        """In the communication thread."""
        try:
            inner = self.inner_core.issue(operation, tag, timeout, lambda: call)
        except Exception as error:
            work.refuse(error)
        else:
            work.follow(inner)

    def refuse(self, operation: str, tag: int, error: Exception) -> None:
        self.check_usable(operation)
        self.bridge.thread.submit(_quietly, self.inner_core.refuse, operation, tag, error)

    # What is called in the communication thread.

    def _call(self, operation: str, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.check_usable(operation)
        return self.bridge.call(method, *map(carried, arguments), **options)

    def all_reduce_of_the_left(self, *arguments: Any) -> Work[Any]:
        work: Work[Any] = self._call("all_reduce", self.inner_core.all_reduce_of_the_left, *arguments)
        return watch(work) if self.watches else work

    def stream(self, operation: str, *arguments: Any) -> Any:
        return self._call(operation, self.inner_core.stream, operation, *arguments)

    def shared_array(self, extents: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
        array: Array | None = self.bridge.call(self.inner_core.shared_array, extents, dtype)
        return array

    def bind_device(self, device: int | None) -> None:
        self._call("bind_device", self.inner_core.bind_device, device)

    def subgroup(self, *arguments: Any, **options: Any) -> ThreadCore | None:
        made = self._call("make_subgroup", self.inner_core.subgroup, *arguments, **options)
        return None if made is None else ThreadCore(made, self.bridge)

    async def survivors(self, timeout_s: float | None) -> tuple[int, ...]:
        self.check_usable("shrink")
        found: tuple[int, ...] = await self.bridge.complete(functools.partial(self.inner_core.survivors, timeout_s))
        return found

    def losses(self) -> AsyncIterator[Any]:
        found: AsyncIterator[Any] = self._call("membership", self.inner_core.losses)
        return found

    # The end.

    def abort(self, reason: str = "") -> None:
        with contextlib.suppress(ClosedError):
            self.bridge.call(self.inner_core.abort, reason)

    def leave_with(self, error: BaseException) -> None:
        with contextlib.suppress(ClosedError):
            self.bridge.call(self.inner_core.leave_with, error)

    async def close(self) -> None:
        if self.bridge.thread.alive and not self.world.forked:
            try:
                await self.bridge.complete(self.inner_core.close)
            finally:
                self.bridge.end()


class IssuedWork(ThreadWork[Any]):
    """A collective handed over; it is among its group's until it has ended, and does not keep the group alive."""

    __slots__ = ("_works", "key")

    def __init__(
        self, courier: Courier, works: dict[WorkKey, IssuedWork], key: WorkKey, operation: str, nbytes: int
    ) -> None:
        super().__init__(courier, operation, nbytes)
        self._works = works
        self.key = key

    def _end(self) -> None:
        self._works.pop(self.key, None)
        super()._end()


def _quietly(function: Callable[..., object], *arguments: Any) -> None:
    with contextlib.suppress(Exception):  # the group has ended meanwhile, and everybody knows
        function(*arguments)


async def open_there(open_world: Callable[[], Awaitable[ProcessGroup]]) -> ProcessGroup:
    """Await `open_world()` in the communication thread; the group becomes the default of the caller's context.

    Raises what it raises. Cancelling leaves nothing open.
    """
    loop = asyncio.get_running_loop()
    if getattr(loop, "virtual_time", False):
        raise ValueError('progress="thread" needs real time: under virtual time there are no threads')
    thread = acquire()
    opened: list[GroupCore] = []

    async def there() -> None:
        opened.append(core_of(await open_world()))

    try:
        await completed(thread, there, Context())
    except BaseException:
        try:
            if opened:  # cancelled at the last moment
                given_up = functools.partial(give_up, opened[0], "joining was cancelled")
                await completed(thread, given_up, Context())
        finally:
            release(thread)
        raise
    bridge = LoopBridge(thread, opened[0], loop)
    core = ThreadCore(opened[0], bridge)
    bridge.keep(core)
    group = ProcessGroup(core)
    context.register_world(group)
    return group


async def _leave_alone(thread: CommunicationThread, core: GroupCore) -> None:
    await give_up(core, f"rank {core.world.rank}'s event loop ended before it was closed")
    thread.at_exit.pop(core, None)
