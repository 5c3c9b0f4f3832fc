"""Calls as their caller sees them: `Call`, the Work of one; `Items`, of one whose answer is a stream; `Callee`."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from asyncdist.arrays.host import Array
from asyncdist.arrays.objects import decode, encode
from asyncdist.errors import (
    ClosedError,
    CollectiveTimeoutError,
    DistError,
    PeerLostError,
    RemoteError,
    RemoteProtocolError,
)
from asyncdist.rpc import messages
from asyncdist.rpc.messages import (
    ANSWERS,
    CANCEL,
    CREATE,
    FAILURE,
    GONE,
    HEAD,
    ITEM,
    MORE,
    RELEASE,
    RESULT,
    STREAM,
    Arrivals,
    Inbox,
    octets_of,
)
from asyncdist.transport.protocol.operations import Receive, SendOp
from asyncdist.work import Work

if TYPE_CHECKING:
    from asyncdist.rpc.agent import Agent

AHEAD: Final = 8
"""Items of a stream that its callee may send before they are asked for: enough to keep both ranks busy."""


class Callee:
    """A rank that this one calls: how many calls are under way there, and which wait for their turn here."""

    def __init__(self, agent: Agent, rank: int) -> None:
        self.agent = agent
        self.rank = rank
        self.under_way: set[Call] = set()
        self.waiting: OrderedDict[Call, None] = OrderedDict()
        self._begins = False

    def issue(self, call: Call) -> None:
        """Send a call, or keep it until another one has ended."""
        if len(self.under_way) < self.agent.max_calls and not self.waiting:
            self.under_way.add(call)
            call.send()
        else:
            self.waiting[call] = None

    def ended(self, call: Call) -> None:
        """A call has its last answer, or will never have it: others may go."""
        self.under_way.discard(call)
        call.lease = None
        if not self._begins:  # where the rank is lost each call that begins ends at once
            self._begins = True
            while self.waiting and len(self.under_way) < self.agent.max_calls:
                following, _ = self.waiting.popitem(last=False)
                self.under_way.add(following)
                following.send()
            self._begins = False

    def note(self, kind: int, number: int, argument: int = 0) -> None:
        """Tell the callee something about a call. If it is lost or has left, it knows."""
        with contextlib.suppress(DistError):
            self.agent.outbox.post(self.rank, self.agent.keys.requests, HEAD.pack(kind, number, argument))


class Lease:
    """What keeps an object on another rank: held by its reference, and by each call of it that is under way.

    When nobody holds it, `release` is called in a later turn of the loop, as it may be collected anywhere.
    """

    def __init__(
        self, rank: int, number: int, loop: asyncio.AbstractEventLoop, release: Callable[[int, int], None]
    ) -> None:
        self.rank = rank
        self.number = number
        self._loop = loop
        self._release = release

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._release, self.rank, self.number)


class Call(Work[Any], Inbox):
    """A call under way. Done with its answer, or before it: when it is cancelled or its time is up.

    When the last waiter is cancelled, so is the call. Either way the receive of its answer stays until that is here.
    """

    __slots__ = ("_arrays", "_callee", "_name", "_ops", "_payload", "_timer", "kind", "lease", "number", "octets")

    def __init__(
        self, callee: Callee, kind: int, name: str, lease: Lease | None, args: Sequence[Any], kwargs: Any
    ) -> None:
        agent = callee.agent
        apart: list[Array] = []
        traced = None if messages.tracing is None else messages.tracing.called(name, callee.rank)
        request = [name, list(args), kwargs] if traced is None else [name, list(args), kwargs, traced[0]]
        self._payload: memoryview | None = encode(request, apart=apart)
        self._arrays = octets_of(apart)
        super().__init__(agent.loop, "rpc", self._payload.nbytes)
        if traced is not None:
            self.add_done_callback(traced[1])
        self._spinner = agent.spinner
        self._callee = callee
        self._name = name
        self._ops: list[SendOp] = []
        self._timer: asyncio.TimerHandle | None = None
        self.kind = kind
        self.number = agent.next_number()
        self.lease = lease

    @property
    def where(self) -> str:
        """The beginning of every message about this call."""
        agent, rank = self._callee.agent, self._callee.rank
        return f"{agent.group.where('rpc')} {self._name!r} (rank {rank})"

    def expire_after(self, timeout_s: float) -> None:
        """Bound the call; called once."""
        self._timer = self._loop.call_later(timeout_s, self._expire, timeout_s)

    def send(self) -> None:
        """Its turn has come."""
        callee, payload = self._callee, self._payload
        agent, rank = callee.agent, callee.rank
        assert payload is not None, "a call is sent once"
        target = self.lease.number if self.lease is not None else 0
        self._payload = None
        self.post_receive(agent.mesh, rank, agent.keys.answer(self.number))
        if self._done:  # the callee is lost
            return
        try:
            agent.outbox.post(rank, agent.keys.requests, HEAD.pack(self.kind, self.number, target), payload)
            if self._arrays:
                self._ops = agent.outbox.post_arrays(rank, agent.keys.request_arrays(self.number), self._arrays)
                self._arrays = []
        except DistError:  # the receive hears of it, too
            return

    def cancel(self) -> bool:
        """Cancel the call here and on the callee, which raises CancelledError there; False if it has ended.

        The arguments' arrays are free when this returns.
        """
        if self._done:
            return False
        self._retrieved = True
        self._give_up(ClosedError(f"{self.where}: was cancelled here"))
        return True

    def _abandoned(self) -> None:
        self.cancel()

    def _untold(self) -> None:
        self._callee.agent.untold(self)

    def _expire(self, timeout_s: float) -> None:
        what = f"{self.where}: did not end within {timeout_s:g} s, and is cancelled there"
        self._give_up(CollectiveTimeoutError(what, (self._callee.rank,)))

    def _give_up(self, error: DistError) -> None:
        callee = self._callee
        if self._payload is not None:  # it is not sent yet
            del callee.waiting[self]
            self.lease = None
            self._payload = None
            self._arrays = []
        else:
            callee.agent.outbox.withdraw(callee.rank, self._ops)
            callee.note(CANCEL, self.number)
        self._fail(error)

    def _end(self) -> None:
        super()._end()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._error is not None:
            self._callee.agent.failed(self)

    # What the transport reports.

    def message_received(self, token: object, receive: Receive) -> None:
        """An answer is here."""
        kind = receive.meta[0] if len(receive.meta) == 1 else -1
        apart: list[Array] = []
        octets = self.octets
        self.octets = octets[:0]
        try:
            if kind not in ANSWERS or (kind == ITEM and self.kind != STREAM):
                raise RemoteProtocolError(f"an answer of unknown kind {kind}")
            value = None if kind == GONE else decode(octets, apart=apart)
        except RemoteProtocolError as error:
            self.message_failed(None, error)
            return
        if not apart:
            self._answered(kind, value)
            return

        def arrived(error: BaseException | None) -> None:
            if error is None:
                self._answered(kind, value)
            else:
                self.message_failed(None, error)

        agent = self._callee.agent
        Arrivals(agent.mesh, self._callee.rank, apart, arrived).begin(agent.keys.answer_arrays(self.number))

    def message_failed(self, token: object, error: BaseException) -> None:
        """No answer will come."""
        if not self._done:
            if isinstance(error, PeerLostError):
                explained: BaseException = PeerLostError(f"{self.where}: {error}", error.rank, error.left)
                explained.__cause__ = error.__cause__
            else:
                explained = type(error)(f"{self.where}: {error}") if type(error) is RemoteProtocolError else error
            self._fail(explained)
        self._callee.ended(self)

    def _answered(self, kind: int, value: Any) -> None:
        """An answer is here, with its arrays."""
        if kind == ITEM:
            try:
                self._item(value)
            except RemoteProtocolError as error:
                self.message_failed(None, error)
                return
            self.post_receive(self._callee.agent.mesh, self._callee.rank, self._callee.agent.keys.answer(self.number))
            return
        if self._done:
            if kind == RESULT and self.kind == CREATE:
                self._callee.note(RELEASE, self.number)
        elif kind == RESULT:
            agent, rank = self._callee.agent, self._callee.rank
            self._finish(agent.reference(rank, self.number) if self.kind == CREATE else value)
        elif kind == FAILURE:
            self._fail(self._failure(value))
        else:
            rank = self._callee.rank
            self._fail(PeerLostError(f"{self.where}: rank {rank} does not serve calls any more", rank, left=True))
        self._callee.ended(self)

    def _failure(self, value: Any) -> DistError:
        rank = self._callee.rank
        match value:
            case [str() as kind, str() as text, str() as traceback]:
                return RemoteError(f"{self.where}: raised {kind}: {text}\n\nThere: {traceback}", rank, kind, traceback)
        return RemoteProtocolError(f"{self.where}: rank {rank} sent a malformed failure")

    def _item(self, value: Any) -> None:
        raise AssertionError("a call has one answer")


class Items(Call):
    """A call of an asynchronous generator: done once that is, while items may still wait here."""

    __slots__ = ("_arrival", "_items")

    def __init__(self, callee: Callee, name: str, lease: Lease | None, args: Sequence[Any], kwargs: Any) -> None:
        super().__init__(callee, STREAM, name, lease, args, kwargs)
        self._items: deque[Any] = deque()
        self._arrival: asyncio.Future[None] | None = None

    async def iterate(self) -> AsyncGenerator[Any, None]:
        """Yield the items as they come; then raise what the callee did. Ended early, it cancels the call."""
        taken = 0
        try:
            while True:
                while self._items:
                    yield self._items.popleft()
                    taken += 1
                    if taken == AHEAD // 2 and not self._done:
                        self._callee.note(MORE, self.number, taken)
                        taken = 0
                if self._done:
                    self.result()
                    return
                self._arrival = self._loop.create_future()
                await self._arrival
        finally:
            self._items.clear()
            self.cancel()

    def _item(self, value: Any) -> None:
        if not self._done:
            if len(self._items) == AHEAD:
                raise RemoteProtocolError(f"more than {AHEAD} items that were not asked for")
            self._items.append(value)
            self._wake()

    def _end(self) -> None:
        super()._end()
        self._wake()

    def _wake(self) -> None:
        arrival = self._arrival
        if arrival is not None and not arrival.done():
            arrival.set_result(None)
