"""World: what all groups of one job in this process share - the store, the mesh, and news of peers (`control.py`).

News of a group that does not exist here yet is kept, within bounds, until it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgpack

from asyncdist.collectives.executor.buffers import ScratchPool
from asyncdist.concurrency import trace as events
from asyncdist.concurrency.loop import close_in_forked_child, place_of
from asyncdist.errors import CollectiveMismatchError, DistError, PeerLostError, RemoteProtocolError
from asyncdist.plan.selection.tuning import DEFAULT_TUNING
from asyncdist.transport.addresses import PeerAddress
from asyncdist.transport.base_mesh import BaseMesh
from asyncdist.transport.context import Absence
from asyncdist.world.address_book import AddressBook, children_of, parent_of
from asyncdist.world.clocks import HostClocks
from asyncdist.world.control import (
    Abort,
    Addresses,
    Check,
    Clock,
    Closed,
    ControlMessage,
    GroupMessage,
    Probe,
    Status,
    decode,
)
from asyncdist.world.host_losses import hear_losses
from asyncdist.world.init_method import StoreSource
from asyncdist.world.inspection import Inspection
from asyncdist.world.rendezvous import Met

if TYPE_CHECKING:
    from asyncdist.inspect.why import Why

__all__ = [
    "ABSENCES",
    "CLOSED",
    "CLOSED_SINCE",
    "ISSUED",
    "NOT_CALLED",
    "NOT_MADE",
    "GroupListener",
    "Meeting",
    "World",
]

ISSUED: Final = "issued"
NOT_CALLED: Final = "not called there"
CLOSED: Final = "group closed there"
NOT_MADE: Final = "group not made there"
ABSENCES: Final = (NOT_CALLED, CLOSED, NOT_MADE)
"""Why a rank has not issued a collective, as it stands in errors."""
CLOSED_SINCE: Final = "something else, and has closed the group since"
"""What a rank that has closed a group says of what it ran there."""

EARLY_GROUPS: Final = 256
"""Groups not created here yet whose news is kept: ranks run ahead of each other by a few `new_group` calls at most."""
EARLY_MESSAGES: Final = 64
"""News kept per such group."""
ABORTS_KEPT: Final = 256
"""News of aborted groups for ranks that connect later, the newest: for older ones nobody waits any more. A group has
two where somebody aborts it whose collectives had ended before."""
ENDED_KEPT: Final = 256
"""Groups closed here of which others may still ask what was issued on them, the newest."""
MAX_WORDS_BYTES: Final = 256 << 10
"""News of aborts that a leaving rank puts into the store, the newest: a few of the longest, hundreds of usual ones."""
WORDS_HEAD_BYTES: Final = 5
"""What msgpack puts before a list, or bytes, of any length."""
LEAVE_LIMIT_S: Final = 5.0
"""How long saying goodbye to peers may take."""
DOING_S: Final = 1.5
"""How long the store and the ranks may take, together, to say what ranks do."""
DOING_ASKED: Final = 4
"""Ranks that are asked what they do: each rank asks only whom it waits for, however many wait."""
WHY_S: Final = 0.4
"""The same for what an error says, which is not to come late."""
ALL_ASKED: Final = 8
"""Ranks of a world whose ranks are all asked why an operation does not end; of a larger one those that it waits for."""
DOUBTFUL_STORE_S: Final = 0.5
"""How long closing the store may take after a host was lost: launchers wait for three seconds in all."""


class GroupListener(Protocol):
    """What a group hears about."""

    group_id: int
    ranks: tuple[int, ...]
    usable: bool
    """Whether operations can be issued; False in a forked child."""

    def peer_lost(self, rank: int, error: PeerLostError) -> None:
        """A member is gone."""

    def peer_left(self, rank: int) -> None:
        """A member has left the world in order."""

    def control(self, sender: int, message: GroupMessage) -> None:
        """A control message about this group."""

    def made_differently(self, error: CollectiveMismatchError) -> None:
        """Another rank has made another group in place of this one, which can never be used."""

    def abort(self, reason: str) -> None:
        """Give up now, on all members."""


class Meeting(Protocol):
    """What the ranks met through, and say goodbye to: a `Rendezvous` in a store, or the world of MPI."""

    book: AddressBook
    """Where the ranks listen, as far as this one knows."""

    async def infos(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """What these ranks say of themselves, and where they can be asked; of all, or none. Raises DistError."""

    async def words_of(self, rank: int) -> tuple[bytes, Absence]:
        """What a rank that takes no connection has left to say, and what became of it."""

    def learn(self, first: int, addresses: Sequence[bytes]) -> bool:
        """Another rank tells where some ranks listen. Returns whether now, at last, all is known."""

    async def leave_words(self, words: bytes) -> bool:
        """Leave for those who find this rank gone what they should know. Returns whether they can find it."""

    async def leave(self) -> None:
        """Say goodbye, bounded."""

    async def resign(self) -> None:
        """Say that this rank cannot be in the world, bounded."""

    async def wait_for_goodbyes(self, lost: Collection[int]) -> None:
        """Wait, bounded, until every rank but the `lost` has said goodbye."""

    def hurry(self) -> None:
        """Wait for no goodbyes, nor long for the store."""


class EndedListener(Protocol):
    """What stands for a group that was closed here."""

    ranks: tuple[int, ...]

    def control(self, sender: int, message: GroupMessage) -> None:
        """As a group's."""


class World:
    """Owner of the mesh, and the post office of its control messages."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rank: int,
        world_size: int,
        source: StoreSource,
        rendezvous: Meeting,
        world_id: bytes,
    ) -> None:
        self.loop = loop
        self.rank = rank
        self.world_size = world_size
        self.world_id = world_id
        self.options: dict[str, Any] = {}
        self.tuning = DEFAULT_TUNING
        """What the choice of algorithms depends on: rank 0's, once it is known."""
        self.allow_pickle = False
        self.rank_0_hosts = False
        """Whether rank 0 takes the store with it when it ends."""
        self.host = ""
        """What the ranks of this host, and no others, have in common."""
        self.inspection: Inspection | None = None
        """Where this process answers whoever asks what it does."""
        self.pool = ScratchPool()
        self.groups: dict[int, GroupListener] = {}
        self.lost: dict[int, PeerLostError] = {}
        self.mesh: BaseMesh
        self.leaving = False
        """Whether the world's group is being closed."""
        self.closed = False
        self.forked = False
        self._source = source
        self._rendezvous = rendezvous
        self._aborts: deque[tuple[tuple[int, ...], bytes]] = deque(maxlen=ABORTS_KEPT)
        self._ended: dict[int, EndedListener] = {}
        self._early: dict[int, list[tuple[int, GroupMessage]]] = {}
        self._decider = 0
        self.clocks = HostClocks(loop, self._host_of, lambda other, message: self._send(other, message.encode()))
        self._launcher: asyncio.BaseTransport | None = None
        self._stopped: frozenset[int] = frozenset()
        self._store_in_doubt = False
        self._place = place_of(loop)
        close_in_forked_child(self)

    @property
    def store(self) -> Any:
        """The store the world met through."""
        return self._source.store

    def formed(self, met: Met) -> None:
        """All ranks are there, and have agreed."""
        self.options = met.options
        self.allow_pickle = met.allow_pickle
        self.rank_0_hosts = met.options.get("rank 0 hosts") is True
        self._decider = met.decider

    async def hear_launcher(self, environ: Mapping[str, str]) -> None:
        """From now on the launcher of this host tells, if there is one, whose hosts are gone, and who is stopped."""
        told = self._host_lost, self._are_stopped
        self._launcher = await hear_losses(self.rank, self.world_size, environ, *told)

    def _are_stopped(self, ranks: frozenset[int]) -> None:
        self._stopped = ranks

    def is_stopped(self, rank: int) -> bool:
        """Whether the process of `rank` is known to be stopped, by a signal or by a debugger."""
        memory = self.mesh.memory
        return rank in self._stopped or (memory is not None and memory.stopped(rank))

    @property
    def asks(self) -> bool:
        """Whether ranks can be asked what they do."""
        return self.inspection is not None and not getattr(self.loop, "virtual_time", False)

    async def doing(self, ranks: Sequence[int]) -> dict[int, str]:
        """What the first few of these do, of those that say so in time: `it sleeps in time.sleep at train.py:7 (load)`.

        Never raises but CancelledError.
        """
        asked = ranks[:DOING_ASKED]
        look = await self._look(asked, DOING_S)
        return {} if look is None else {one: look.doing(one) for one in asked if one not in look.job.missing}

    async def why(self, ranks: Sequence[int], about: Mapping[str, Any]) -> str:
        """Why the operation `about`, which waits for `ranks`, does not end: what `asyncdist why` says of it.

        Empty where that is not known within `WHY_S`. Never raises but CancelledError.
        """
        asked = range(self.world_size) if self.world_size <= ALL_ASKED else {self.rank, *ranks}
        look = await self._look(asked, WHY_S, about)
        return "" if look is None else look.hang()

    async def _look(self, ranks: Collection[int], limit_s: float, about: Mapping[str, Any] | None = None) -> Why | None:
        if self.inspection is None or not self.asks:
            return None
        from asyncdist.world.live import look  # for programs that wait long only

        return await look(self._rendezvous.infos, self.inspection.token, ranks, limit_s, about)

    def _host_lost(self, ranks: range, why: str) -> None:
        for rank in ranks:
            if self.mesh.is_reached(rank) if self.closed else rank != self.rank and rank < self.world_size:
                self.mesh.break_pair(rank, ConnectionError(why))
                self._store_in_doubt = True  # it may be there as well
                self._rendezvous.hurry()

    def address_of(self, rank: int) -> PeerAddress | None:
        """Where a rank listens, as far as this one knows."""
        with contextlib.suppress(RemoteProtocolError):
            return self._rendezvous.book.get(rank)
        return None

    def _host_of(self, rank: int) -> str | None:
        address = self.address_of(rank)
        return None if address is None else address.host_id

    def _stop_watching(self) -> None:
        self.clocks.stop()
        if self._launcher is not None:
            self._launcher.close()

    def _answer_no_more(self) -> None:
        inspection, self.inspection = self.inspection, None
        if inspection is not None:
            inspection.close()

    def pass_on_addresses(self) -> None:
        """Tell the ranks below this one in the tree where all ranks listen, unless the store has told them."""
        book = self._rendezvous.book
        children = children_of(self.rank, self._decider, self.world_size)
        if book.complete and not book.told_at_once:
            for first, addresses in book.pieces():
                payload = Addresses(first, addresses).encode()
                for child in children:
                    self._send(child, payload)

    def register(self, group: GroupListener) -> None:
        """Deliver news to `group` from now on, old news first, if it is a member's."""
        self.groups[group.group_id] = group
        for sender, message in self._early.pop(group.group_id, ()):
            if sender in group.ranks:
                group.control(sender, message)
        for rank, error in self.lost.items():
            if rank in group.ranks:
                group.peer_lost(rank, error)

    def unregister(self, group_id: int, ended: EndedListener) -> None:
        """A group is closed here; `ended` hears what others say of it later."""
        del self.groups[group_id]
        self._ended[group_id] = ended
        if len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]
        for sender, message in [question for kept in self._early.values() for question in kept]:
            if isinstance(message, Closed) and message.parent_id == group_id:
                self._tell_never_made(sender, message)

    def tell(self, ranks: tuple[int, ...], message: ControlMessage, *, dial: bool) -> list[int]:
        """Send a control message to `ranks`, ourselves excepted; with `dial`, also to those not connected yet.

        Who has left or is lost needs no news, and does not keep it from the others. Returns those it is sent to.
        """
        payload = message.encode()
        others = [rank for rank in ranks if rank != self.rank]
        if not dial:
            return self.mesh.broadcast_control(others, payload)
        return [rank for rank in others if self._send(rank, payload)]

    def tell_aborted(self, ranks: tuple[int, ...], message: Abort) -> None:
        """Send the news of an abort to those of `ranks` that are connected, and to the others once they are.

        Who issues an operation connects to those it needs. So all who wait for the group hear of its end, however few
        were connected when it came, and nobody connects for the news alone.
        """
        self.tell(ranks, message, dial=False)
        self._aborts.append((ranks, message.encode()))

    def _send(self, rank: int, payload: bytes) -> bool:
        try:
            self.mesh.send_control(rank, payload)
        except DistError:
            return False
        return True

    def check_thread(self, where: str) -> None:
        """Raise RuntimeError unless this is the thread of the world's event loop."""
        if threading.get_ident() != self._place.thread:
            raise RuntimeError(f"{where}: called from another thread than the group was made in")

    def close_after_fork(self) -> None:
        """In a forked child: the groups are the parent's."""
        self.closed = self.forked = True
        for group in self.groups.values():
            group.usable = False

    # What the mesh reports.

    def peer_connected(self, rank: int) -> None:
        """A peer is connected: tell it of the groups that have been aborted meanwhile."""
        for ranks, payload in self._aborts:
            if rank in ranks:
                self._send(rank, payload)
        self.clocks.connected(rank, self.host)

    def peer_lost(self, rank: int, error: PeerLostError) -> None:
        """A peer's connection ended without a goodbye, here or, as we hear, at another rank."""
        if rank in self.lost or rank == self.rank:
            return
        events.info("rank %d lost rank %d: %s", self.rank, rank, error)
        self.lost[rank] = error
        for group in list(self.groups.values()):
            if rank in group.ranks:
                group.peer_lost(rank, error)

    def lost_elsewhere(self, rank: int, error: PeerLostError) -> None:
        """Another rank has lost `rank`. Our own connection to it, if there is one, will tell; else this has to do."""
        if rank not in self.lost and rank != self.rank:
            self.mesh.lost_elsewhere(rank, error)
            self.peer_lost(rank, error)

    def peer_left(self, rank: int) -> None:
        """A peer said goodbye: no failure of the groups; the mesh fails what still depended on it."""
        events.info("rank %d: rank %d has left", self.rank, rank)
        for group in list(self.groups.values()):
            if rank in group.ranks:
                group.peer_left(rank)

    def control_received(self, rank: int, payload: bytes) -> None:
        """A control message came. Raises RemoteProtocolError for anything malformed."""
        message = decode(rank, payload, self.world_size)
        if isinstance(message, Addresses):
            self._hear_addresses(rank, message)
        elif isinstance(message, Clock):
            self.clocks.heard(rank, message)
        elif isinstance(message, GroupMessage):
            self._hear(rank, message)

    def _hear(self, rank: int, message: GroupMessage) -> None:
        group = self.groups.get(message.group_id) or self._ended.get(message.group_id)
        if group is not None:
            if rank not in group.ranks:
                raise RemoteProtocolError(f"rank {rank} sent news of a group it does not belong to")
            group.control(rank, message)
        elif isinstance(message, Probe):
            self.tell((rank,), Status(message.group_id, message.tag, message.sequence, NOT_MADE), dial=False)
        elif isinstance(message, Closed) and message.parent_id in self._ended:
            self._tell_never_made(rank, message)
        elif not isinstance(message, Status):
            self._keep(rank, message)

    def _hear_addresses(self, rank: int, message: Addresses) -> None:
        if rank != parent_of(self.rank, self._decider, self.world_size):
            raise RemoteProtocolError(f"rank {rank} sent addresses, which this rank has from another one")
        if self._rendezvous.learn(message.first, message.addresses):
            self.pass_on_addresses()

    def _keep(self, rank: int, message: GroupMessage) -> None:
        """Keep news of a group that is still to come, unless there is too much already."""
        if len(self._early) < EARLY_GROUPS or message.group_id in self._early:
            parked = self._early.setdefault(message.group_id, [])
            room = EARLY_MESSAGES // 2 if isinstance(message, Check) else EARLY_MESSAGES  # the others matter more
            if len(parked) < room:
                parked.append((rank, message))

    def _tell_never_made(self, rank: int, question: Closed) -> None:
        """The group that `rank` asks about was to be made of one that is closed here."""
        if question.asked and not self.leaving:  # else the goodbye of this rank says so
            self.tell((rank,), Closed(question.group_id, question.parent_id, False), dial=False)

    async def hear_out(self, rank: int) -> Absence:
        """`rank` takes no connection: hear, bounded, which groups it aborted before, and why; and what became of it."""
        words, absence = await self._rendezvous.words_of(rank)
        try:
            for payload in _split_words(rank, words):
                self.control_received(rank, payload)
        except RemoteProtocolError as error:
            events.info("rank %d: %s", self.rank, error)
        return absence

    async def _leave_words(self) -> bool:
        """Say in the store why groups were aborted: those who look for this rank only later find nobody to ask.

        Where there is time, before connections are refused: whoever comes meanwhile is told over them. Returns whether
        the store was there.
        """
        if not self._aborts:
            return True
        return await self._rendezvous.leave_words(_join_words([payload for _, payload in self._aborts]))

    def store_ended(self, in_order: bool) -> None:
        """The store that rank 0 hosts is gone: unless it was stopped `in_order`, rank 0 was lost with it.

        A connection to it that is open tells so itself, behind what is still to be read there.
        """
        if not (in_order or self.closed or self.mesh.is_connected(0)):
            self.mesh.break_pair(0, ConnectionError("the store that it hosts is gone"))

    async def close(self) -> None:
        """Leave: flush, say goodbye to every peer and in the store, stop hosting. Bounded."""
        if self.closed:
            return
        self.closed = True
        try:
            answers = await self._leave_words()
            # In the store we have left only once everything is sent, but before connections are refused: whoever dials
            # us finds us leaving or gone, and cannot take us for lost in between.
            await self.mesh.close(LEAVE_LIMIT_S, self._rendezvous.leave if answers or not self.rank_0_hosts else None)
            if self._source.server is not None:
                await self._rendezvous.wait_for_goodbyes(self.lost)
        finally:
            self._stop_watching()
            await self._close_store()

    async def _close_store(self) -> None:
        self._answer_no_more()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DOUBTFUL_STORE_S if self._store_in_doubt else None):
                await self._source.close()

    def hurry(self) -> None:
        """Leaving was cancelled: end it soon, without waiting for others to leave."""
        self._rendezvous.hurry()

    async def abandon(self) -> None:
        """End at once: peers see this rank as lost. In the store it resigns, bounded, so that it may join again."""
        if not self.closed:
            for group in list(self.groups.values()):
                group.abort("the event loop ended before it was closed")
            try:
                await self.resign()
            finally:
                await self._close_store()

    async def resign(self) -> None:
        """The same, but leaving the store open."""
        self.closed = True
        self._stop_watching()
        self._answer_no_more()
        self.mesh.abort()
        await self._leave_words()
        await self._rendezvous.resign()


def _join_words(payloads: list[bytes]) -> bytes:
    """The newest of `payloads` that fit MAX_WORDS_BYTES, the oldest of them first."""
    kept: list[bytes] = []
    room = MAX_WORDS_BYTES - WORDS_HEAD_BYTES
    for payload in reversed(payloads):
        room -= len(payload) + WORDS_HEAD_BYTES
        if room < 0:
            break
        kept.append(payload)
    words: bytes = msgpack.packb(kept[::-1])
    return words


def _split_words(rank: int, words: bytes) -> list[bytes]:
    """The payloads that `_join_words` has joined. Raises RemoteProtocolError for anything else."""
    if not words:
        return []
    payloads: Any = None
    if len(words) <= MAX_WORDS_BYTES:
        with contextlib.suppress(ValueError, msgpack.UnpackException):
            payloads = msgpack.unpackb(words, max_array_len=ABORTS_KEPT, max_map_len=0)
    if not isinstance(payloads, list) or not all(isinstance(payload, bytes) for payload in payloads):
        raise RemoteProtocolError(f"rank {rank} left malformed words in the store")
    return payloads
