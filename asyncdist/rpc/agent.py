"""Agent: all calls of one rank in one group, from `serve` to its end; and the functions that users call."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Container
from copy import copy
from functools import partial
from threading import get_ident
from typing import Any, Final

from asyncdist.concurrency.deadline import Timeout, timeout_seconds
from asyncdist.concurrency.integers import as_int
from asyncdist.concurrency.spin import Spins
from asyncdist.concurrency.tasks import start_task
from asyncdist.errors import DistError, GroupAbortedError, PeerLostError
from asyncdist.group.core import GroupCore
from asyncdist.group.default_group import Group, required_peer, resolve
from asyncdist.group.process_group import ProcessGroup
from asyncdist.rpc.calls import Call, Callee, Items, Lease
from asyncdist.rpc.messages import CALL, CALLS, CREATE, GONE, HEAD, RELEASE, STREAM, Keys, Outbox
from asyncdist.rpc.serving import Caller
from asyncdist.transport.base_mesh import BaseMesh
from asyncdist.work import Work, until_ended

__all__ = ["Reference", "call", "create", "serve", "statistics", "stream"]

MAX_CALLS: Final = 64
"""Calls of one rank under way at another: enough to hide any latency, and few enough for their memory."""
CLOSE_S: Final = 5.0
"""How long the end of `serve` waits for calls that are cancelled, and for their answers to be taken."""
MAX_HELD: Final = 1024
"""Messages held back for a rank that end the answers to its late calls: it does not read those that it has."""
TAG: Final = 0x72_70_63
"""Of the barrier at the end, so that the program's own go on meanwhile."""


class Ready(Work[None]):
    """Callers of which a message is here. A Work that begins anew each time, so that awaiting it looks as others do."""

    __slots__ = ("_callers",)

    def __init__(self, loop: asyncio.AbstractEventLoop, spinner: Spins | None) -> None:
        super().__init__(loop, "rpc.serve")
        self._spinner = spinner
        self._callers: deque[Caller] = deque()

    def add(self, caller: Caller) -> None:
        """A message of `caller` is here."""
        self._callers.append(caller)
        if not self._done:
            self._end()

    def take(self) -> Caller:
        """The caller that has waited longest."""
        caller = self._callers.popleft()
        if not self._callers:
            self._done = False
            self._waiters = None
        return caller


class Agent:
    """See the module. All calls come from the group's event loop."""

    def __init__(self, group: ProcessGroup, core: GroupCore, max_calls: int) -> None:
        generation = _generations.get(group, 0)
        _generations[group] = generation + 1
        self.group = group
        self.loop = group.world.loop
        self.mesh = group.world.mesh
        self.max_calls = max_calls
        self.keys = Keys(group.group_id, generation)
        self.outbox = Outbox(self.mesh)
        self.spinner = copy(self.mesh.spinner)
        """Of its own: what it learns of how long waits take is not what messages and collectives have taught."""
        self.arrivals = Ready(self.loop, self.spinner)
        self.callers: dict[int, Caller] = {}
        self.callees: dict[int, Callee] = {}
        self.closing = False
        self.thread = get_ident()
        self.failed = core.remember_failure
        self.untold = core.untold
        self._tasks: set[asyncio.Future[Any]] = set()
        self._numbers = 0
        self._serving = start_task(self.loop, self._serve(), name=f"rpc of group {group.name}")
        for rank in group.ranks:
            if self.mesh.is_connected(rank):
                self._hear(rank)
        self.mesh.watch(self.keys.group, self._came_unexpected)

    def next_number(self) -> int:
        """Of a call: never 0."""
        self._numbers = self._numbers % 0xFFFF_FFFF + 1
        return self._numbers

    def callee(self, rank: int) -> Callee:
        """A (global) rank to call. Raises ValueError for one that is not in the group."""
        rank = required_peer(self.group, rank, None, "rank")
        return self.callees.get(rank) or self.callees.setdefault(rank, Callee(self, rank))

    def reference(self, rank: int, number: int) -> Reference:
        """What a CREATE call gives."""
        return Reference(self, Lease(rank, number, self.loop, self._release))

    def _release(self, rank: int, number: int) -> None:
        if not self.closing:
            self.callee(rank).note(RELEASE, number)

    # Serving.

    def start(self, awaitable: Any) -> asyncio.Future[Any]:
        """Run what a function has returned, until the end at most."""
        task: asyncio.Future[Any] = asyncio.ensure_future(awaitable)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self) -> None:
        while True:
            await self.arrivals
            self.arrivals.take().handle()

    def _came_unexpected(self, rank: int, key: bytes, _queue: Container[bytes]) -> None:
        """A message of a rank that has not called before. Others have receives that wait for them."""
        if key == self.keys.requests and rank not in self.callers:
            self._hear(rank)

    def _hear(self, rank: int) -> None:
        caller = self.callers[rank] = Caller(self, rank)
        caller.listen()

    # The end.

    async def finish(self) -> None:
        """Wait for this rank's own calls, then until every other rank has come here, or is gone."""
        calls = [call for callee in self.callees.values() for call in [*callee.under_way, *callee.waiting]]
        await until_ended([call for call in calls if call.kind != STREAM])  # who iterates those?
        try:
            await self.group.barrier(tag=TAG, timeout=None)
        except (PeerLostError, GroupAbortedError):
            with contextlib.suppress(DistError):
                left = await self.group.shrink(timeout=None)
                await left.close()

    async def close(self) -> None:
        """Cancel what is under way on both sides. From now on calls to this rank are refused."""
        self.closing = True
        for callee in self.callees.values():
            for call in [*callee.waiting, *callee.under_way]:
                call.cancel()
        for caller in list(self.callers.values()):
            caller.end()
        try:
            async with asyncio.timeout(CLOSE_S):
                while self._tasks:
                    await asyncio.wait(self._tasks)
                emptied = asyncio.Event()
                self.outbox.emptied = emptied.set
                while self.outbox.sending:
                    emptied.clear()
                    await emptied.wait()
                self._serving.cancel()
                await asyncio.wait([self._serving])
        except TimeoutError:
            pass
        finally:
            self._serving.cancel()
            while self.arrivals.done():
                self.arrivals.take().handle()  # which refuses it
            for caller in list(self.callers.values()):
                caller.leave()
            self.mesh.watchers.pop(self.keys.group, None)
            self.mesh.drop_group(self.keys.group, partial(_refuse, self.mesh, self.keys))


def _refuse(mesh: BaseMesh, keys: Keys, source: int, head: bytes) -> None:
    """Answer a call that came too late."""
    if len(head) == HEAD.size:
        kind, number, _ = HEAD.unpack(head)
        with contextlib.suppress(DistError):
            if kind in CALLS and mesh.peer(source).statistics()["held"] < MAX_HELD:
                Outbox(mesh).post(source, keys.answer(number), bytes((GONE,)))


_agents: dict[ProcessGroup, Agent] = {}
_generations: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How often each group has served: a call of a rank that is ahead waits until this one serves again."""


@contextlib.asynccontextmanager
async def serve(group: Group = None, *, max_calls: int = MAX_CALLS) -> AsyncIterator[None]:
    """Within it, this rank takes calls of the group's other ranks, and may call them. Every rank enters it.

    A call of a rank that has not entered yet waits for it. At the end of the block this rank waits for the calls it
    has issued, and goes on serving until all ranks have come to their ends, or are lost: so a rank that only serves
    has an empty block. An exception, or cancelling, ends it at once: what this rank has called is cancelled there,
    and what others have called on this rank raises PeerLostError there, with `left` set.

    `max_calls`, which is the same on all ranks: calls of one rank that are under way on another at a time. More wait
    on the caller, in their order. Raises RuntimeError if this rank serves the group already, and where the group's
    operations are carried out in a communication thread.
    """
    found = resolve(group)
    if as_int(max_calls, "max_calls must be an int") < 1:
        raise ValueError(f"max_calls must be at least 1, but is {max_calls}")
    core = found._core
    if not isinstance(core, GroupCore):
        raise RuntimeError(f"{found.where('rpc')}: the group is in a communication thread, which runs no functions")
    if found in _agents:
        raise RuntimeError(f"{found.where('rpc')}: this rank serves the group already")
    found.check_usable("rpc")
    agent = _agents[found] = Agent(found, core, max_calls)
    try:
        yield
        await agent.finish()
    finally:
        del _agents[found]
        await agent.close()


def call(rank: int, name: str, /, *args: Any, timeout: Timeout = None, group: Group = None, **kwargs: Any) -> Work[Any]:
    """Call the function registered as `name` on `rank` (global); `await` gives what it returns.

    Arguments and result are what objects of collectives may be: None, numbers, str, bytes, containers of them, numpy
    arrays; never pickled. Arrays above 256 KiB go from and to their own memory: arguments must not be changed until the
    call has ended, nor what a function returns until it has been sent (return a copy of what the next call writes to).

    Issued at the call. When its last waiter is cancelled, or after `timeout` (seconds or a timedelta; None, the
    default, is no limit), it is cancelled on the callee as well: a coroutine raises CancelledError there.

    Raises RemoteError for what the function raised, with its traceback as text; PeerLostError, naming the rank, as
    soon as it is lost, or serves no more; CollectiveTimeoutError; TypeError and ValueError at the call for what cannot
    be sent; RuntimeError outside of `serve`.
    """
    return _issue(_agent_of(group), CALL, rank, name, None, args, kwargs, timeout)


def create(
    rank: int, name: str, /, *args: Any, timeout: Timeout = None, group: Group = None, **kwargs: Any
) -> Work[Reference]:
    """As `call`, but what the function (or class) gives stays on `rank`; `await` gives a `Reference` to it."""
    return _issue(_agent_of(group), CREATE, rank, name, None, args, kwargs, timeout)


def stream(rank: int, name: str, /, *args: Any, group: Group = None, **kwargs: Any) -> AsyncGenerator[Any, None]:
    """Iterate over what the asynchronous generator registered as `name` yields on `rank` (global).

        async for batch in rpc.stream(1, "batches", epoch=3):

    The call is issued when the first item is asked for. The generator is at most 8 items ahead. When the iteration
    ends early (`aclose()`, or cancelling), it is cancelled. Raises as `call`, behind the items that came before.
    """
    return _iterate(_agent_of(group), rank, name, None, args, kwargs)


def statistics(group: Group = None) -> dict[str, int]:
    """Counts of what this rank has under way and keeps, for tests and the curious."""
    agent = _agent_of(group)
    callers, callees = agent.callers.values(), agent.callees.values()
    return {
        "calls issued": sum(len(callee.under_way) for callee in callees),
        "calls waiting": sum(len(callee.waiting) for callee in callees),
        "calls running": sum(len(caller.running) for caller in callers),
        "objects": sum(len(caller.objects) for caller in callers),
        "tasks": len(agent._tasks),
        "sends": len(agent.outbox.sending),
    }


class Reference:
    """An object on another rank, which keeps it until this is released, is garbage, or this rank has gone.

    So the lease of an object is its holder's connection: nothing is renewed, and nothing is left behind.
    """

    def __init__(self, agent: Agent, lease: Lease) -> None:
        self._agent = agent
        self._lease: Lease | None = lease
        self.rank = lease.rank
        """Where the object is."""

    def __repr__(self) -> str:
        return f"<Reference to an object on rank {self.rank}{'' if self._lease else ' (released)'}>"

    def call(self, method: str, /, *args: Any, timeout: Timeout = None, **kwargs: Any) -> Work[Any]:
        """Call a method of the object, which must be public (no `_` before its name); see `rpc.call`."""
        return _issue(self._agent, CALL, self.rank, method, self._held(), args, kwargs, timeout)

    def stream(self, method: str, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Iterate over what an asynchronous generator method of the object yields; see `rpc.stream`."""
        return _iterate(self._agent, self.rank, method, self._held(), args, kwargs)

    def release(self) -> None:
        """The object is not needed any more: its rank drops it once the calls issued before have ended. Idempotent."""
        self._lease = None

    def _held(self) -> Lease:
        if self._lease is None or self._agent.closing:
            why = "its rpc.serve() has ended" if self._lease else "it is released"
            raise RuntimeError(f"{self!r}: {why}")
        return self._lease

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _agent_of(group: Group) -> Agent:
    found = resolve(group)
    agent = _agents.get(found)
    if agent is None or agent.closing:
        raise RuntimeError(f"{found.where('rpc')}: calls are made within `async with rpc.serve():`")
    if get_ident() != agent.thread:
        found.world.check_thread(found.where("rpc"))
    return agent


def _issue(
    agent: Agent, kind: int, rank: int, name: str, lease: Lease | None, args: Any, kwargs: Any, timeout: Timeout
) -> Call:
    timeout_s = None if timeout is None else timeout_seconds(timeout, agent.group.timeout_s)
    callee = agent.callees.get(rank) or agent.callee(rank)
    made = Call(callee, kind, name, lease, args, kwargs)
    callee.issue(made)
    if timeout_s is not None and not made._done:
        made.expire_after(timeout_s)
    return made


async def _iterate(
    agent: Agent, rank: int, name: str, lease: Lease | None, args: Any, kwargs: Any
) -> AsyncGenerator[Any, None]:
    callee = agent.callee(rank)
    items = Items(callee, name, lease, args, kwargs)
    callee.issue(items)
    async with contextlib.aclosing(items.iterate()) as iterated:
        async for item in iterated:
            yield item
