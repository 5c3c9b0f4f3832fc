"""Lanes of one group: how its members agree to share memory, tag by tag, and which operation takes which place.

The members agree at the first collective of tag 0, and at the second of any other tag: a tag that is used once, such as
the number of a request, is not worth it. They exchange three small arrays, by collectives of their own:

1. The first makes all connections.
2. The second says whether the member shares memory with all others and has some left, and which of its segments the
   others shall map.
3. The third says whether it has mapped all segments, and whether it can read the others' memory (`process_memory`).

The lane is made if all members can make it. Collectives that are issued meanwhile wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from asyncdist.collectives.arguments import call as calls
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork, GroupBackend, OnEnd
from asyncdist.collectives.shared.layout import LANE_HEAD_BYTES, SKIPPED, LaneFault, item_bytes, pool_bytes
from asyncdist.collectives.shared.runner import Exposed, Lane, LaneRunner
from asyncdist.concurrency import trace as events
from asyncdist.errors import DistError, DistStoreError, PeerLostError, RemoteProtocolError
from asyncdist.plan.records import NO_LANE, SINGLE_COPY_BYTES, LaneMemory
from asyncdist.transport.base_mesh import BaseMesh
from asyncdist.transport.host_memory import HostMemory
from asyncdist.transport.protocol.zero_copy import place_of
from asyncdist.transport.shared_memory.doorbell import Ringer
from asyncdist.transport.shared_memory.process_memory import PROCESS, RemoteBytes

__all__ = ["RESERVED", "WITHOUT_LANE", "Lanes"]

FIRST_LANE_BYTES: Final = 12 << 20
"""Payloads in a rank's first lane. Two thirds are for items: what its largest collectives have under way, several
chunks of every slice."""
LANE_BYTES: Final = 3 << 20
"""Payloads in its other lanes, as long as there is memory to share."""

RESERVED: Final = range(2**32 - 3, 2**32)
"""Sequence numbers of the three exchanges, which no collective ever reaches."""
_GREETING, _OFFER, _MAPPED = RESERVED


class TagLane:
    """One tag's lane, or that there is none."""

    __slots__ = ("held", "lane", "mapped", "memory", "number", "offered", "segment")

    def __init__(self) -> None:
        self.lane: LaneRunner | None = None
        self.memory = NO_LANE
        """What every member has for its items in the lane. All know it."""
        self.number = 0
        self.held: deque[tuple[Call, CollectiveWork, OnEnd]] = deque()
        self.segment = 0
        self.mapped: LaneRunner | None = None  # the lane to be, if all others can make theirs
        self.offered = 0  # bytes of its pools

    def take_place(self, number: int) -> None:
        """Operation `number` comes next in the lane; those before it that never started here are skipped."""
        assert self.lane is not None
        while self.number < number:
            self.lane.add(SKIPPED)
            self.number += 1
        self.number = number + 1


WITHOUT_LANE: Final = TagLane()
"""For all that goes by messages."""


class Lanes:
    """See the module; owned by the group's backend."""

    def __init__(
        self,
        backend: GroupBackend,
        loop: asyncio.AbstractEventLoop,
        mesh: BaseMesh,
        on_different: Callable[[int, int, int], None],
    ) -> None:
        self._backend = backend
        self._loop = loop
        self._mesh = mesh
        self._on_different = on_different
        self._memory = mesh.memory
        self._tags: dict[int, TagLane] = {}
        self.decided: dict[int, TagLane] = {}
        """Those of which it is known whether they have a lane; calls of others wait."""
        if self._memory is not None:
            self._memory.on_left(self._left)

    def admit(self, call: Call, work: CollectiveWork, on_end: OnEnd) -> TagLane | None:
        """What `call`, of a tag that is not decided, may start with now; if None it is kept until that has been."""
        tag = self._tags.get(work.tag)
        first_of_many = work.tag != 0 and work.number == 0
        if first_of_many or work.number >= _GREETING:
            return WITHOUT_LANE
        if tag is not None:
            tag.held.append((call, work, on_end))
            return None
        tag = self._tags[work.tag] = TagLane()
        tag.held.append((call, work, on_end))
        try:
            self._exchange(work.tag, _GREETING, np.zeros(1, np.uint64), self._greeted)
        except BaseException:
            del self._tags[work.tag]
            raise
        return None

    def lane(self, number: int) -> LaneRunner | None:
        """The lane of tag `number`, if it has one."""
        return self._tags.get(number, WITHOUT_LANE).lane

    def lane_memory(self, number: int) -> LaneMemory:
        """What every member has for its items in the lane of tag `number`."""
        return self._tags.get(number, WITHOUT_LANE).memory

    def holds(self, tag: int, sequence: int) -> bool:
        """Whether that operation waits for a decision."""
        found = self._tags.get(tag)
        return found is not None and any(work.number == sequence for _, work, _ in found.held)

    def drop(self, tag: int, sequence: int) -> None:
        """Forget an operation that waits for a decision."""
        found = self._tags.get(tag)
        if found is not None:
            found.held = deque(entry for entry in found.held if entry[1].number != sequence)

    def settle(self) -> None:
        """Look once more at what the members have begun."""
        for tag in self._tags.values():
            if tag.lane is not None:
                tag.lane.poll()

    def close(self) -> None:
        """Touch no shared memory any more, and give ours back. Idempotent."""
        if self._memory is not None:
            self._memory.forget(self._left)
        for number, tag in self._tags.items():
            if number not in self.decided:
                for exchange in RESERVED:
                    self._backend.drop(number, exchange)
            tag.held.clear()
            self.decided[number] = tag
            tag.mapped = None
            if tag.lane is not None and self._memory is not None:
                tag.lane.close()
                self._memory.lanes.pop(tag.lane, None)
                self._memory.doorbell.remove(tag.lane.poll)
                tag.lane, tag.memory = None, NO_LANE
            self._free(tag)

    # -- agreeing

    def _exchange(
        self, tag: int, number: int, value: np.ndarray[tuple[int], np.dtype[np.uint64]], then: Callable[..., None]
    ) -> None:
        """Gather everybody's `value`, and call `then(tag, everybody's)`."""
        backend = self._backend
        gathered = np.zeros((len(backend.ranks), value.size), np.uint64)
        # With a detail, so that no other call takes it for its own.
        call = replace(
            calls.all_gather_into_tensor(gathered, value, len(backend.ranks)),
            algorithm="direct",
            detail="sharing memory",
        )

        def ended(_work: CollectiveWork, error: BaseException | None) -> None:
            if tag in self.decided:
                return
            if error is None:
                try:
                    then(tag, gathered)
                except Exception as failure:
                    error = failure
            if isinstance(error, DistStoreError):  # of one operation elsewhere; but on this one all others wait
                error = DistError(str(error))
            if error is not None:
                self._decided(tag, error)

        backend.start(call, CollectiveWork(self._loop, "sharing memory", value.nbytes, tag, number, None), ended)

    def _greeted(self, tag: int, _gathered: object) -> None:
        """All members are connected: say whether we share memory with each of them, and which segment is ours."""
        backend = self._backend
        others = [rank for rank in backend.ranks if rank != self._mesh.rank]
        offer = np.zeros(2, np.uint64)
        memory = self._memory
        if memory is not None and all(rank in memory.connections for rank in others):
            payload_bytes = LANE_BYTES if memory.segments else FIRST_LANE_BYTES
            number = self._tags[tag].segment = memory.new_segment(LANE_HEAD_BYTES + payload_bytes)
            if number and memory.share(number, others):
                offer[:] = 1, number
        self._exchange(tag, _OFFER, offer, self._offered)

    def _offered(self, tag: int, gathered: np.ndarray[tuple[int, int], np.dtype[np.uint64]]) -> None:
        backend, memory, state = self._backend, self._memory, self._tags[tag]
        able = [rank for rank, (can, _) in zip(backend.ranks, gathered, strict=True) if can]
        if len(able) < len(backend.ranks) or memory is None:
            who = f"only ranks {able} share some with all others" if able else "no rank shares some with all others"
            events.info("group %x tag %d: no shared memory; %s", backend.group_id, tag, who)
            self._free(state)
            self._decided(tag)
            return
        problem = self._map(tag, [int(number) for _, number in gathered])
        if problem:
            events.info("group %x tag %d: no shared memory: %s", backend.group_id, tag, problem)
        reads = not problem and all(
            (connection := memory.connections.get(rank)) is not None and connection.zero_copy.reads
            for rank in backend.ranks
            if rank != self._mesh.rank
        )
        self._exchange(tag, _MAPPED, np.array([not problem, reads], np.uint64), self._mapped)

    def _map(self, tag: int, numbers: Sequence[int]) -> str:
        """Make our side of a lane of the members' segments; why not, if that cannot be. Raises RemoteProtocolError."""
        backend, memory, state = self._backend, self._memory, self._tags[tag]
        assert memory is not None
        views: list[memoryview] = []
        ringers: list[Ringer | None] = []
        for rank, number in zip(backend.ranks, numbers, strict=True):
            if rank == self._mesh.rank:
                views.append(memory.segments[state.segment].view)
                ringers.append(None)
                continue
            connection = memory.connections.get(rank)
            if connection is None:
                return f"rank {rank} is gone"
            try:
                view = connection.take_segment(number).view
                if not pool_bytes(len(view)):
                    raise RemoteProtocolError(f"it shares {len(view)} bytes, more than {LANE_HEAD_BYTES} needed")
            except OSError as error:
                return f"this rank cannot map what rank {rank} shares: {error}"
            except RemoteProtocolError as error:
                self._mesh.break_pair(rank, error)  # which ends all that it takes part in, on the other members too
                raise
            views.append(view)
            ringers.append(connection.ringer)
        state.offered = min(item_bytes(len(view)) for view in views)
        lane = Lane(backend.rank, views, partial(_borrow, memory, backend.ranks))
        expose = partial(_expose, memory, [rank for rank in backend.ranks if rank != self._mesh.rank])
        state.mapped = LaneRunner(
            self._loop, lane, backend.ranks, ringers, self._mesh.break_pair, expose, partial(self._on_different, tag)
        )
        return ""

    def _mapped(self, tag: int, gathered: np.ndarray[tuple[int, int], np.dtype[np.uint64]]) -> None:
        state, memory = self._tags[tag], self._memory
        if not gathered[:, 0].all():
            state.mapped = None
            self._free(state)
            self._decided(tag)
            return
        assert memory is not None
        assert state.mapped is not None
        state.lane, state.memory = state.mapped, LaneMemory(state.offered, bool(gathered[:, 1].all()))
        memory.doorbell.add(state.lane.poll, state.lane.inline.look)
        memory.lanes[state.lane] = None
        for rank in self._backend.ranks:
            core = self._mesh.cores[rank]
            if core is not None and isinstance(core.error, PeerLostError):  # it knew all before us, and has left since
                self._left(rank, core.error)
        self._decided(tag)

    def _left(self, rank: int, error: PeerLostError) -> None:
        """A peer has said goodbye: what it has not begun will never be."""
        if rank in self._backend.ranks:
            member = self._backend.ranks.index(rank)
            for tag in self._tags.values():
                if tag.lane is not None:
                    tag.lane.left(member, error)

    def _free(self, tag: TagLane) -> None:
        if tag.segment and self._memory is not None:
            self._memory.free(tag.segment)
        tag.segment = 0

    def _decided(self, tag: int, error: BaseException | None = None) -> None:
        state = self._tags[tag]
        self.decided[tag] = state
        held = list(state.held)
        state.held.clear()
        for call, work, on_end in held:
            if work._done:  # the one before it has ended the group
                continue
            try:
                if error is None:
                    self._backend.start(call, work, on_end)
                    continue
                failure = error
            except Exception as unable:  # out of memory, or the mesh is gone
                failure = unable
            on_end(work, failure)


def _expose(memory: HostMemory, others: Sequence[int], octets: memoryview, single_copy: bool) -> Exposed | None:
    """Where all of `others` (global ranks) can read a buffer of ours, if anywhere.

    Those that have not mapped its segment are asked to, so that a later operation can expose it.
    """
    connections = [memory.connections.get(rank) for rank in others]
    peers = [connection.zero_copy for connection in connections if connection is not None]
    own = memory.own if single_copy and len(octets) >= SINGLE_COPY_BYTES else None
    place = place_of(octets, memory.arrays, own, peers) if len(peers) == len(others) else None
    return None if place is None else Exposed(*place, SINGLE_COPY_BYTES if place[0] == PROCESS else 0)


def _borrow(
    memory: HostMemory, ranks: Sequence[int], member: int, segment: int, offset: int, length: int
) -> memoryview | RemoteBytes | None:
    """What `member` has exposed; None if it is gone. Raises LaneFault if it has not offered that."""
    connection = memory.connections.get(ranks[member])
    if connection is None:
        return None
    try:
        return connection.zero_copy.remote(segment, offset, length)
    except RemoteProtocolError as error:
        raise LaneFault(member, str(error)) from None
