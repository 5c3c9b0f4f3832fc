"""BaseMesh: what every mesh does alike, whatever its connections are made of."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

from asyncdist.concurrency import trace as events
from asyncdist.concurrency.spin import MeshSpins
from asyncdist.errors import ClosedError, DistError, PeerLostError
from asyncdist.transport.addresses import Endpoint, PeerAddress
from asyncdist.transport.context import Absence
from asyncdist.transport.host_memory import HostMemory
from asyncdist.transport.protocol.frame import FRAGMENT_BYTES, MAX_CALL_BYTES
from asyncdist.transport.protocol.matching import AnySourceTable, Discarded, DroppedGroups, UnexpectedWatcher
from asyncdist.transport.protocol.operations import NO_GOODBYE, Receive, SendOp, left_world, nobody_left
from asyncdist.transport.protocol.peer import PeerCore


class MeshOwner(Protocol):
    """Is told about peers. Calls come from the loop and must not raise; they may post, drop and abort."""

    def peer_connected(self, rank: int) -> None:
        """The connection to `rank` is open, whichever side dialed. A control message sent now goes ahead of all."""

    def peer_lost(self, rank: int, error: PeerLostError) -> None:
        """The connection to `rank` broke, or none could be made; operations with it have failed with `error`."""

    def peer_left(self, rank: int) -> None:
        """`rank` said goodbye: nothing more can be sent to it or received from it."""

    def control_received(self, rank: int, payload: bytes) -> None:
        """`rank` sent a control message."""


LOOK_AFTER_S: Final = 0.25
"""How long a receive from any source waits before the store is asked which ranks are gone: most wait for less."""
MAX_LOOK_AFTER_S: Final = 60.0
"""How long at most until a store that could not tell is asked again."""
BURST: Final = 4
"""Collectives under way between two of whose calls what has come through sockets of this host is taken. In a burst of
calls it would fill the system's buffers otherwise, and wait there longer than any cache keeps it."""


class BaseMesh:
    """Messages to and from every rank of a world: posting, matching from any source, and the state every mesh has."""

    asks_who_is_gone: ClassVar[bool] = True
    """Whether receives from any source have the store say which ranks are gone."""

    def __init__(self, rank: int, world_size: int, owner: MeshOwner) -> None:
        self.rank = rank
        self.world_size = world_size
        self.cores: list[PeerCore | None] = [None] * world_size
        self.address: PeerAddress | None = None
        self.spinner: MeshSpins | None = None
        self.memory: HostMemory | None = None
        self.crowded = False
        """Whether ranks of this host share cores; to be set before there are connections."""
        self.hear_out: Callable[[int], Awaitable[Absence]] | None = None
        """Asks the store, for a bounded time, why a rank takes no connection. What waits for that rank fails only then.
        To be set before there are connections."""
        self.absences: Callable[[], AsyncGenerator[int]] | None = None
        """Yields ranks that seem to be gone: first those that are, then each as it goes. Raises DistError once that is
        unknown, NotImplementedError where it is never known. To be set before there are connections."""
        self.lookups_failed = 0
        """How often it was not known where a rank listens: whoever keeps a core of it asks for another then."""
        self._owner = owner
        self._any_source = AnySourceTable()
        self._dropped = DroppedGroups()
        self.watchers: dict[bytes, UnexpectedWatcher] = {}
        """By group, the 8 bytes that its keys begin with; see `watch`."""
        self._gone: dict[int, bool] = {}  # whether it left with a goodbye
        self._lost_elsewhere: set[int] = set()  # ranks whose loss we have heard of without having met them
        self._all_ended = asyncio.Event()
        self._looks_for_absent = False
        self._closing = False
        self._closed_because = ""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def closing(self) -> bool:
        """Whether `close` or `abort` was called."""
        return self._closing

    def post_send(self, rank: int, op: SendOp) -> bool:
        """Send `op` to `rank`. True: complete, the sink is not called; False: the sink hears later.

        Raises ValueError for a rank outside the world, PeerLostError once the peer is lost or has left, ClosedError.
        """
        core = self.cores[rank] if 0 <= rank < self.world_size else None
        if core is None:
            core = self.peer(rank)
        return core.post_send(op)

    def post_receive(self, rank: int, receive: Receive) -> bool:
        """Post a receive from `rank`. Results and errors as `post_send`, and those of `PeerCore.post_receive`."""
        core = self.cores[rank] if 0 <= rank < self.world_size else None
        if core is None:
            core = self.peer(rank)
        return core.post_receive(receive)

    def post_receive_any(self, ranks: Collection[int], receive: Receive) -> bool:
        """Post a receive from whichever of `ranks` sends first. This dials no rank: senders dial.

        When one of `ranks` is lost the receive fails, as that rank might have been the one; when one leaves, or was
        lost before, it goes on until all others are gone. We count as a source only once we have sent something to
        ourselves. Raises PeerLostError if all are gone already, ValueError for a rank outside the world.
        """
        self._check_open()
        for rank in ranks:
            self._check_rank(rank)
        if self._any_source.post(receive, ranks):
            return True
        if self._all_gone(ranks) and self._any_source.withdraw(receive):
            raise nobody_left(self.rank, ranks, self._gone)
        if self.asks_who_is_gone and not self._looks_for_absent and self.absences is not None:
            self._looks_for_absent = True
            self._begin(self._look_for_absent(self.absences), "asyncdist looks for ranks that are gone")
        return False

    def is_gone(self, rank: int) -> bool:
        """Whether `rank` has left, or is lost to us."""
        return rank in self._gone

    def withdraw(self, receive: Receive, rank: int | None = None) -> bool:
        """Forget a posted receive; False if it was matched or has ended. With `rank` only that peer is asked."""
        source = receive.source if rank is None else rank
        if source is None:
            return self._any_source.withdraw(receive)
        core = self.cores[source]
        return core is not None and core.withdraw(receive)

    def withdraw_send(self, rank: int, op: SendOp) -> bool:
        """Take back a point-to-point send to `rank`; see `PeerCore.withdraw`."""
        core = self.cores[rank]
        return core is not None and core.withdraw(op)

    def lost_elsewhere(self, rank: int, error: PeerLostError) -> None:
        """Another rank has lost `rank`, which may never have connected to us: receives from any source fail for it."""
        if rank not in self._lost_elsewhere and not self.is_reached(rank):
            self._lost_elsewhere.add(rank)
            self._any_source.fail_source(rank, error)

    def give_up(self, rank: int, message: SendOp | Receive) -> bool:
        """End a point-to-point message with `rank` before its time; see `PeerCore.give_up`."""
        core = self.cores[rank]
        return core is None or core.give_up(message)

    def watch(self, group: bytes, watcher: UnexpectedWatcher) -> None:
        """Tell `watcher` of messages of `group` (8 bytes) that come before their receives.

        Those that are here already are told at once.
        """
        self.watchers[group] = watcher
        for core in self._all_cores():
            core.tell_unexpected(group, watcher)

    def put_back(self, receive: Receive, payload: bytes) -> None:
        """Undo a point-to-point receive that ended well unnoticed; see `PeerCore.put_back`."""
        core = None if receive.source is None else self.cores[receive.source]
        if core is not None:
            core.put_back(receive, payload)

    def connect(self, ranks: Iterable[int]) -> None:
        """Start connecting to all of `ranks`; addresses asked for in one turn of the loop are looked up together."""
        for rank in ranks:
            self.peer(rank)

    def issued(self, in_flight: int) -> None:
        """A collective was begun, and so many of its group are under way: in a burst, take what has come meanwhile."""
        if in_flight and not in_flight % BURST and self.spinner is not None:
            self.spinner.catch_up()

    def send_control(self, rank: int, payload: bytes) -> None:
        """Send a control message, ahead of everything queued. Raises as `post_send`."""
        self.peer(rank).send_control(payload)

    def broadcast_control(self, ranks: Iterable[int], payload: bytes) -> list[int]:
        """Send a control message to those of `ranks` that are connected now; returns them."""
        reached = [] if self._closing else [rank for rank in ranks if self.is_connected(rank)]
        for rank in reached:
            self.send_control(rank, payload)
        return reached

    def drop_group(self, group: bytes, discarded: Discarded | None = None) -> None:
        """Forget every operation of a group (8 bytes) or one operation (16 bytes), telling no sink.

        When this returns, no array of the group is read or written any more. `discarded` hears of the group's messages
        that are thrown away, those that are still to come included.
        """
        self._dropped.add(group, discarded)
        self._any_source.drop_group(group)
        for core in self._all_cores():
            core.drop_group(group)

    # -- the end

    async def close(self, timeout_s: float, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Leave: send what was posted, say goodbye to every peer, and wait for each to hang up, at most `timeout_s`.

        `last` is awaited then, before connections are refused: until it has ended, a rank that dials is told that this
        rank leaves. A peer that has not hung up by then is cut off. Operations still pending fail with ClosedError.
        A cancelled `close` aborts. Idempotent; concurrent calls wait for the same end.
        """
        try:
            if not self._closed_because:
                self._closing = True
                self._leave()
                self._look_for_end()
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._all_ended.wait()
                except TimeoutError:
                    text = "rank %d: ranks %s did not hang up within %g s and are cut off"
                    events.info(text, self.rank, self._not_ended(), timeout_s)
            if last is not None:
                await last()
        finally:
            self.abort("the mesh is closed")
            if self._tasks:
                await asyncio.gather(*self._tasks, return_exceptions=True)

    def abort(self, reason: str = "the mesh was aborted") -> None:
        """Close everything at once, without goodbye: peers see this rank as lost.

        Pending operations fail with ClosedError. Idempotent. `close` may still be awaited afterwards; then it only
        waits for what was cancelled here.
        """
        if self._closed_because:
            return
        self._closing = True
        self._closed_because = reason
        for task in self._tasks:
            task.cancel()
        error = ClosedError(f"rank {self.rank}: {reason}")
        self._close_all(error)
        self._any_source.fail(error)
        self._look_for_end()

    def _look_for_end(self) -> None:
        """Wake `close` once every connection has reached its end."""
        if self._closing and not self._not_ended():
            self._all_ended.set()

    # -- what the connections are made of

    async def listen(
        self, ips: Sequence[str] = ("127.0.0.1",), advertised: Sequence[Endpoint] = (), *, accept: bool = True
    ) -> PeerAddress:
        """Be reachable, and return the address to publish. Without `accept`, peers wait until that is called.

        Raises DistNetworkError naming the address that cannot be bound, and ClosedError.
        """
        raise NotImplementedError

    def accept(self) -> None:
        """Take connections from now on."""
        raise NotImplementedError

    def peer(self, rank: int) -> PeerCore:
        """Return the core of `rank`, connecting to it if that has not begun. Raises ValueError and ClosedError."""
        raise NotImplementedError

    def break_pair(self, rank: int, cause: Exception) -> None:
        """Give up on `rank`, as if its connection had broken: pending operations with it fail with PeerLostError."""
        raise NotImplementedError

    def forget(self, rank: int) -> None:
        """Keep nothing of a rank that is lost or has left: where ranks come and go, another one may get its number."""
        raise NotImplementedError

    def is_connected(self, rank: int) -> bool:
        """Whether the connection to `rank` is open: then its end will be noticed at once."""
        raise NotImplementedError

    def is_reached(self, rank: int) -> bool:
        """Whether `rank` is connected to us or is about to be: then its loss will be noticed here."""
        raise NotImplementedError

    def describe(self, rank: int) -> str:
        """One line about how `rank` is reached."""
        raise NotImplementedError

    def statistics(self) -> dict[str, Any]:
        """Counts, for tests and the curious."""
        raise NotImplementedError

    def _all_cores(self) -> Iterable[PeerCore]:
        """The cores of all connections, whichever side has made them."""
        raise NotImplementedError

    def _leave(self) -> None:
        """Say goodbye to every peer, behind what was posted."""
        raise NotImplementedError

    def _not_ended(self) -> list[int]:
        """Other ranks whose connections have not reached their end."""
        raise NotImplementedError

    def _close_all(self, error: ClosedError) -> None:
        """Close everything now; pending operations fail with `error`."""
        raise NotImplementedError

    # -- for subclasses

    def _new_core(self, rank: int) -> PeerCore:
        return PeerCore(
            self.rank,
            rank,
            self._owner.control_received,
            any_source=self._any_source,
            dropped=self._dropped,
            watchers=self.watchers,
            write_bytes=MAX_CALL_BYTES if self.crowded else FRAGMENT_BYTES,
        )

    def _begin(self, steps: Coroutine[Any, Any, None], name: str) -> None:
        """Run `steps` as a task that ends with the mesh."""
        task = asyncio.get_running_loop().create_task(steps, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look_for_absent(self, absences: Callable[[], AsyncGenerator[int]]) -> None:
        """While receives wait for any source, dial the ranks that seem to be gone, to hear what became of them.

        All of them are dialed, as a later receive may wait for one that no receive waits for now. A rank that is there
        after all is connected from then on.
        """
        pause_s = LOOK_AFTER_S
        try:
            while True:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_LOOK_AFTER_S)
                if not self._any_source.table:
                    return
                with contextlib.suppress(DistError):
                    await self._dial_absent(absences)
        except NotImplementedError:
            self.absences = None
        finally:
            self._looks_for_absent = False

    async def _dial_absent(self, absences: Callable[[], AsyncGenerator[int]]) -> None:
        """Dial those that are gone, as long as a receive from any source waits."""
        async with contextlib.aclosing(absences()) as absent:
            async for rank in absent:
                if self._closing or not self._any_source.table:
                    return
                if rank != self.rank:
                    self.connect([rank])

    def link_not_met(self, rank: int, then: Callable[[Absence], None]) -> None:
        """`rank` takes no connection. Call `then` once its last words were looked up; at once without `hear_out`."""
        if self.hear_out is None or self._closing:
            then(Absence.NONE)
        else:
            self._begin(self._hear_out(self.hear_out, rank, then), f"asyncdist words of rank {rank}")

    @staticmethod
    async def _hear_out(
        hear_out: Callable[[int], Awaitable[Absence]], rank: int, then: Callable[[Absence], None]
    ) -> None:
        absence = Absence.NONE
        try:
            absence = await hear_out(rank)
        finally:
            then(absence)

    def _source_gone(self, rank: int, error: PeerLostError) -> None:
        """`rank` is lost or has left: fail the receives from any source that it ends, for a loss each of them once."""
        self._gone[rank] = error.left
        if not error.left and rank not in self._lost_elsewhere:
            self._any_source.fail_source(rank, error)
            return
        for receive in list(self._any_source.table):
            if self._all_gone(receive.ranks) and self._any_source.table.remove(receive):
                receive.fail(error)

    def _all_gone(self, ranks: Collection[int]) -> bool:
        """Whether no rank can send any more: all others of `ranks` are gone, and this rank never sent to itself."""
        gone, own = self._gone, self.rank
        if not gone or (own in ranks and self.cores[own] is not None):
            return False
        return any(rank != own for rank in ranks) and all(rank in gone or rank == own for rank in ranks)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size} ranks")

    def _check_open(self) -> None:
        if self._closed_because:
            raise ClosedError(f"rank {self.rank}: {self._closed_because}")


class StreamPeer:
    """One rank as another sees it: the core of the pair's stream. `state` is for people."""

    def __init__(self, core: PeerCore, state: str) -> None:
        self.core = core
        self.state = state
        self.ended = False
        """Whether the rank is lost or has left, or the mesh is closed."""


P = TypeVar("P", bound=StreamPeer)


class StreamMesh(BaseMesh, Generic[P]):
    """A mesh that moves the bytes of each pair by itself, as one stream each way, and looks for the streams' ends."""

    unmet: ClassVar[str] = "not connected"
    """The state of a rank of which nothing is known."""

    def __init__(self, rank: int, world_size: int, owner: MeshOwner) -> None:
        super().__init__(rank, world_size, owner)
        self._peers: dict[int, P] = {}

    async def listen(
        self, ips: Sequence[str] = ("127.0.0.1",), advertised: Sequence[Endpoint] = (), *, accept: bool = True
    ) -> PeerAddress:
        """See BaseMesh.listen. The address says nothing: other ranks know their way."""
        self._check_open()
        self.address = PeerAddress("", (), b"")
        if accept:
            self.accept()
        return self.address

    def break_pair(self, rank: int, cause: Exception) -> None:
        """See BaseMesh.break_pair."""
        self._check_rank(rank)
        if not self._peer(rank).ended:
            self._peer_lost(rank, cause)

    def describe(self, rank: int) -> str:
        """See BaseMesh.describe."""
        peer = self._peers.get(rank)
        return f"rank {rank}: {'itself' if rank == self.rank else self.unmet if peer is None else peer.state}"

    def statistics(self) -> dict[str, Any]:
        """Peers by state."""
        return {"peers": dict(Counter(peer.state for peer in self._peers.values()))}

    def _peer(self, rank: int) -> P:
        return self._peers.get(rank) or self._new_peer(rank)

    def _all_cores(self) -> list[PeerCore]:
        return [peer.core for peer in self._peers.values()]

    def moved(self, rank: int) -> None:
        """Something was read from, or written to, a stream: look whether an end is reached."""
        peer = self._peers[rank]
        if peer.ended:
            return
        if peer.core.goodbye_sent:
            self._end_stream(rank, peer)
        if peer.core.left:
            self._peer_left(rank)

    def end_came(self, rank: int) -> None:
        """Nothing more will come from `rank`."""
        peer = self._peers[rank]
        if peer.ended:
            return
        if peer.core.left:
            self._peer_left(rank)
        elif self._closing and peer.core.goodbye_sent:
            self._finish(rank, "closed", closed_here(rank))
        else:
            self._ended_early(rank)

    def _ended_early(self, rank: int) -> None:
        """The stream of `rank` has ended without a goodbye."""
        if not self._peers[rank].ended:
            self._peer_lost(rank, ConnectionResetError(NO_GOODBYE))

    def _peer_left(self, rank: int) -> None:
        error = left_world(rank)
        self._finish(rank, "left", error)
        self._source_gone(rank, error)
        self._owner.peer_left(rank)

    def _peer_lost(self, rank: int, cause: Exception) -> None:
        error = PeerLostError(f"rank {self.rank} lost rank {rank}: {cause}", rank)
        error.__cause__ = cause
        self._finish(rank, "lost", error)
        if rank != self.rank:
            self._source_gone(rank, error)
            self._owner.peer_lost(rank, error)

    def _finish(self, rank: int, state: str, error: DistError) -> None:
        peer = self._peers[rank]
        peer.ended = True
        peer.state = state
        self._hang_up(rank, peer)
        peer.core.fail(error)
        self._look_for_end()

    # -- what the streams are made of

    def _new_peer(self, rank: int) -> P:
        """Make, and keep, what is known of `rank`."""
        raise NotImplementedError

    def _end_stream(self, rank: int, peer: P) -> None:
        """Send the end of our stream, behind the goodbye."""
        raise NotImplementedError

    def _hang_up(self, rank: int, peer: P) -> None:
        """Neither send nor take anything more."""
        raise NotImplementedError


def closed_here(rank: int) -> ClosedError:
    """What fails with a connection that was closed in order."""
    return ClosedError(f"the connection to rank {rank} was closed here")
