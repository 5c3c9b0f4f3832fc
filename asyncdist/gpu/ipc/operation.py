"""IpcOperation: one collective through device memory that ranks share, chunk after chunk; and the ranks' signals.

Nothing that is put on a stream here waits for another rank: the host puts a stage on the stream once it knows that what
the stage reads is complete. So the device never waits for a process that may have died. What is on the stream ends,
whatever happens to other ranks.

Signals are short records between the members of a group, one ordered stream of records per pair and tag. A receive is
always posted for every member, so records never pile up in the transport: a signal costs one message and one callback.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from asyncdist.arrays.reduce_op import PremulSum
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.collectives.executor.runner import different
from asyncdist.cuda.interface import Event, Stream
from asyncdist.errors import ClosedError, CollectiveMismatchError, DistError, RemoteProtocolError
from asyncdist.gpu.ipc.plan import Chunk, Move, Stage, chunks, is_small
from asyncdist.gpu.ipc.scratch import LARGE_SLOTS, SMALL_SLOTS
from asyncdist.gpu.path import OnEnd, Surroundings
from asyncdist.gpu.streams import tell_queued
from asyncdist.transport.protocol.frame import COLLECTIVE, pack_key
from asyncdist.transport.protocol.operations import Receive, SendOp

if TYPE_CHECKING:
    from asyncdist.gpu.ipc.channel import IpcChannel

TOLD: Final = 1
"""The sender's stage of that chunk is complete: others may read what the sender has written into its slot."""
READ: Final = 2
"""The sender has read all it wants of that chunk: the slot may be written again."""
DONE: Final = 3
"""The sender is through with the whole operation, also if it was refused: it reads none of the slots any more."""

SIGNAL_MARK: Final = 0x3A3A_3A3A_3A3A_3A3A
"""Sets the id of records apart from the group's own id: dropping an operation of the group leaves records alone."""

_RECORD: Final = struct.Struct("<HHIIIQ")


class Record(NamedTuple):
    """A signal. `kind` says what the other fields mean."""

    kind: int
    stage: int = 0
    sequence: int = 0
    chunk: int = 0
    fingerprint: int = 0
    nbytes: int = 0


class Signals:
    """One tag's streams of records. `heard(member, record)` and `lost(member, error)` are called with group ranks.

    `lost` is called at most once per member, and no `heard` follows. Records may come before `open` returns.
    """

    def __init__(
        self,
        around: Surroundings,
        tag: int,
        heard: Callable[[int, Record], object],
        lost: Callable[[int, BaseException], object],
    ) -> None:
        self._mesh = around.mesh
        self._ranks = around.ranks
        self._rank = around.rank
        self._key = pack_key(around.group_id ^ SIGNAL_MARK, tag, 0, 0, COLLECTIVE)
        self._heard = heard
        self._lost = lost
        self._buffers = [bytearray(_RECORD.size) for _ in around.ranks]
        self._receives: dict[int, Receive] = {}
        self._gone: set[int] = set()
        self._hushed: set[int] = set()

    def open(self) -> None:
        """Connect to all other members and listen to them."""
        others = [rank for member, rank in enumerate(self._ranks) if member != self._rank]
        self._mesh.connect(others)
        for member in range(len(self._ranks)):
            if member != self._rank:
                self._listen(member)

    def tell(self, members: Iterable[int], record: Record) -> None:
        """Send `record` to `members`, except this rank and ranks that are gone."""
        payload = memoryview(_RECORD.pack(*record))
        for member in members:
            if member == self._rank or member in self._gone:
                continue
            try:
                self._mesh.post_send(self._ranks[member], SendOp(self._key, payload, b"", self, member))
            except DistError as error:
                self.message_failed(member, error)

    def hush(self, member: int) -> None:
        """Listen to `member` no more: take its receive back. `tell` still reaches it."""
        self._hushed.add(member)
        receive = self._receives.pop(member, None)
        if receive is not None:
            self._mesh.withdraw(receive, self._ranks[member])

    def _listen(self, member: int) -> None:
        """Post the next receive. A record that has come already is heard at once."""
        while member not in self._gone and member not in self._hushed:
            receive = Receive(self._key, memoryview(self._buffers[member]), self, member)
            self._receives[member] = receive
            try:
                if not self._mesh.post_receive(self._ranks[member], receive):
                    return
            except DistError as error:
                self.message_failed(member, error)
                return
            self._take(member)

    def _take(self, member: int) -> None:
        self._receives.pop(member, None)
        record = Record(*_RECORD.unpack(self._buffers[member]))
        try:
            self._heard(member, record)
        except RemoteProtocolError as error:
            self._mesh.break_pair(self._ranks[member], error)

    # What the transport reports; the token is the member.

    def message_sent(self, token: Any) -> None:
        """Records are copied when they are posted."""

    def message_received(self, token: Any, receive: Receive) -> None:
        """A record is here."""
        if token not in self._gone and token not in self._hushed:
            self._take(token)
            self._listen(token)

    def message_failed(self, token: Any, error: BaseException) -> None:
        """The member is gone, or the mesh is closed."""
        if token not in self._gone:
            self._gone.add(token)
            self._receives.pop(token, None)
            if token not in self._hushed:
                self._lost(token, error)

    def allocate(self, token: Any, source: int, nbytes: int, meta: bytes) -> memoryview:
        raise ClosedError("receives of records have targets")


@dataclass(slots=True, eq=False)
class _Running:
    """A chunk under way; `at` is the stage that comes next, or is on the stream."""

    index: int
    chunk: Chunk
    slot: int
    at: int = 0
    busy: bool = False

    @property
    def is_last(self) -> bool:
        """Whether all of it is on the stream."""
        return self.busy and self.at == len(self.chunk.stages) - 1


class IpcOperation:
    """One call under way on this rank. `on_end(work, error)` is called once, unless the operation is stopped before."""

    def __init__(
        self, channel: IpcChannel, call: Call, work: CollectiveWork, on_end: OnEnd, fingerprint: int, stream: Stream
    ) -> None:
        self._channel = channel
        self.call = call
        self._on_end = on_end
        self.fingerprint = fingerprint
        self.stream = stream
        self.work = work
        self.sequence = work.number
        small_bytes = channel.scratch.small_bytes
        self._small = is_small(call, channel.size, small_bytes)
        slot_bytes = small_bytes if self._small else channel.scratch.large_bytes
        self._chunks: Iterator[Chunk] = chain.from_iterable(
            chunks(part, channel.rank, channel.size, slot_bytes, small_bytes) for part in call.members or (call,)
        )
        self._exhausted = False
        self._writes_on = True  # whether the last chunk taken up writes
        self._next = 0
        self._running: list[_Running] = []
        self._heard: dict[tuple[int, int, int], int] = {}  # bytes announced, by member, chunk, stage
        self._unread: dict[int, set[int]] = {}  # by chunk, the ranks that are still to read our slot
        self._wrote: dict[int, int] = {}  # by slot, our last chunk there; chunks between may write nothing
        self._queued = False
        self.begun = False  # whether anything has been put on the stream
        self.last_event: Event | None = None
        self.stopped = False

    # Moving on.

    def pump(self) -> None:
        """Put all stages on the stream that may go; may end the operation."""
        held_others_up = self.is_to_write
        moved = True
        while moved and not self.stopped:
            moved = self._fill()
            for running in tuple(self._running):
                if not running.busy and not self.stopped and self._may_go(running):
                    moved = True
                    self._go(running)
        if held_others_up and not self.is_to_write:
            self._channel.pump_after(self.sequence)
        if self.stopped:
            return
        if self._exhausted and not self._running:
            self.stopped = True
            self._channel.ended(self)
            self._on_end(self.work, None)
            return
        error = self._channel.lost_among(self.waiting_for)
        if error is not None:
            self.fail(error)
        elif self.last_event is not None and self._exhausted and all(one.is_last for one in self._running):
            tell_queued(self.work, self.last_event)

    def _fill(self) -> bool:
        """Take up as many chunks as there are slots; return whether there was any."""
        before = self._next
        while not self._exhausted and len(self._running) < LARGE_SLOTS:
            chunk = next(self._chunks, None)
            if chunk is None:
                self._exhausted = True
                break
            self._writes_on = chunk.writes
            self._running.append(_Running(self._next, chunk, self._slot(self._next)))
            self._next += 1
        return self._next > before

    def _slot(self, index: int) -> int:
        if self._small:
            return self.sequence % SMALL_SLOTS
        return SMALL_SLOTS + (self.sequence + index) % LARGE_SLOTS

    def _may_go(self, running: _Running) -> bool:
        """Whether the next stage has everything it waits for."""
        stage = running.chunk.stages[running.at]
        if not running.at and running.chunk.writes and not self._slot_is_free(running):
            return False
        return all((member, running.index, running.at - 1) in self._heard for member in stage.wait)

    def _slot_is_free(self, running: _Running) -> bool:
        """Whether all earlier readers are through with the slot, and no earlier chunk is still to write there.

        Slots come free in any order: the chunk two after this one may be taken up while this one still waits. Writes go
        in the order of operations, on all ranks. If this operation took a slot that an earlier one is still to write,
        the earlier one would wait until others are through with this one, and the others for us and the earlier one.
        """
        if any(one.slot == running.slot and one.index < running.index for one in self._running):
            return False
        if not self._small and self._channel.is_to_write_before(self.sequence):
            return False
        return not self._readers_of(running.slot)

    def _readers_of(self, slot: int) -> set[int]:
        """Members that may still read a slot of ours."""
        user = self._channel.slot_users.get(slot, -1)
        if user != self.sequence:
            return self._channel.reading(user)
        return self._unread.get(self._wrote[slot], set())

    @property
    def is_to_write(self) -> bool:
        """Whether the operation is still to write a large slot of ours, as far as is known.

        Only calls of several members write again after a chunk that wrote nothing.
        """
        if self._small or self.stopped:
            return False
        if any(one.chunk.writes and not one.at and not one.busy for one in self._running):
            return True
        return not self._exhausted and (self._writes_on or bool(self.call.members))

    def _go(self, running: _Running) -> None:
        """Put a stage on the stream."""
        chunk = running.chunk
        stage = chunk.stages[running.at]
        for member in stage.wait:
            announced = self._heard.pop((member, running.index, running.at - 1))
            if stage.expected and announced != stage.expected[member]:
                rank, expected = self._channel.ranks[member], stage.expected[member]
                text = f"rank {rank} has {announced} bytes for this rank, which expects {expected} of it"
                self.fail(CollectiveMismatchError(text, rank))
                return
        if not running.at and chunk.writes:
            self._channel.slot_users[running.slot] = self.sequence
            self._unread.pop(self._wrote.get(running.slot, -1), None)
            self._wrote[running.slot] = running.index
            self._unread[running.index] = set(chunk.readers)
        if not stage.work:
            self._complete(running, stage)
            return
        try:
            event = self._enqueue(running.slot, stage)
        except Exception as error:
            self.fail(error)
            return
        running.busy = True

        def ended(error: BaseException | None) -> None:
            running.busy = False
            if error is not None:
                self.fail(error)
            elif not self.stopped:
                self._complete(running, stage)
                self.pump()

        self._channel.watch(self.stream, event, ended, self.call)

    def _enqueue(self, slot: int, stage: Stage) -> Event:
        if not self._queued:
            self._queued = True
            for ready in self.call.ready:
                self.stream.wait_event(ready)
        self.begun = True
        self._queue(slot, stage)
        self.last_event = event = self._channel.recorded(self.stream)
        return event

    def _queue(self, slot: int, stage: Stage) -> None:
        runtime, stream, address = self._channel.runtime, self.stream, self._channel.scratch.address
        dtype = self.call.dtype
        for step in stage.work:
            target = address(step.target, slot)
            if isinstance(step, Move):
                runtime.copy(target, address(step.source, slot), step.nbytes, stream)
                continue
            sources = [address(source, slot) for source in step.sources]
            count = step.nbytes // dtype.itemsize
            if isinstance(step.op, PremulSum):
                runtime.scale(dtype, target, sources[0], step.op.factor, count, stream)
            else:
                runtime.reduce(step.op, dtype, target, sources, count, stream)

    def _complete(self, running: _Running, stage: Stage) -> None:
        """A stage's work has ended on the device."""
        channel = self._channel
        if stage.announced:
            for member in stage.tell:
                channel.tell((member,), self._record(TOLD, running, stage.announced[member]))
        elif stage.tell:
            channel.tell(stage.tell, self._record(TOLD, running))
        running.at += 1
        if running.at < len(running.chunk.stages):
            return
        if running.chunk.sources and not self._small:
            channel.tell(running.chunk.sources, self._record(READ, running))
        self._running.remove(running)

    def _record(self, kind: int, running: _Running, nbytes: int = 0) -> Record:
        return Record(kind, running.at, self.sequence, running.index, self.fingerprint, nbytes)

    # News.

    def heard(self, member: int, record: Record) -> None:
        """Take note of a record about this operation; the caller moves the operation on."""
        if record.fingerprint != self.fingerprint:
            self.fail(different(self._channel.ranks[member]))
        elif record.kind == TOLD:
            self._heard[member, record.chunk, record.stage] = record.nbytes
        elif record.kind == READ:
            unread = self._unread.get(record.chunk)
            if unread is not None:
                unread.discard(member)

    def waiting_for(self) -> set[int]:
        """Members whose records the next stages wait for; if none, members that still read a slot that we need."""
        idle = [running for running in self._running if not running.busy]
        missing = {
            member
            for running in idle
            for member in running.chunk.stages[running.at].wait
            if (member, running.index, running.at - 1) not in self._heard
        }
        if missing:
            return missing
        for running in idle:
            if not running.at:
                missing |= self._readers_of(running.slot)
        return missing - {self._channel.rank}

    def fail(self, error: BaseException) -> None:
        """The operation cannot go on."""
        if self.stopped:
            return
        self.stop()
        self._channel.gave_up(self)
        self._on_end(self.work, error)

    def stop(self) -> None:
        """Put nothing more on the stream and report nothing. What is on the stream ends by itself."""
        self.stopped = True
        self._running.clear()
        self._chunks = iter(())
