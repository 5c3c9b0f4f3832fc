"""IpcChannel: one tag's collectives through device memory that ranks share: their order, their slots, their signals.

The protocol between ranks, and why nothing can hang on the device:

1. A rank puts a copy or a reduction on its stream only once the host knows that all it reads is complete: the ranks
   that wrote the data have said TOLD. They say TOLD when an event recorded behind their work *has ended*, not when the
   event was recorded. (To wait on the device for another process's event would save the host a look at it. But such a
   wait never ends when that process is killed, and a wait that comes before the record waits for nothing.)
2. A rank writes a slot again only once all others have said that they are through with the slot: READ of that chunk
   within one operation, DONE of the operation between two. They say so when their own event has ended. And the rank
   itself must be through: others may be before, and its next operation is on another stream, which does not wait.
3. Every rank says DONE of every operation once, to all others: at the end of the operation, or when it was dropped
   here or elsewhere, and nothing of it runs on the device any more. Signals carry the operation's fingerprint, so that
   ranks that run different operations hear of the difference.
4. Ranks write their slots in the order of operations and their chunks. So of all operations that are not through on all
   ranks, the first can always go on: what was in its slots came before and is through.
5. Signals about operations that have not begun here are kept. Their number is bounded, as no rank gets further ahead of
   us than AHEAD operations (by 2, most wait for a slot before that). Of signals about ended operations only the
   fingerprint counts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from asyncdist.arrays.reduce_op import PremulSum, ReduceOp
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.concurrency import trace as events
from asyncdist.cuda.interface import Event, Stream
from asyncdist.errors import DistBackendError, DistError, PeerLostError, RemoteProtocolError
from asyncdist.gpu.ipc.operation import DONE, READ, TOLD, IpcOperation, Record, Signals
from asyncdist.gpu.ipc.scratch import SMALL_SLOTS, IpcScratch, open_scratch
from asyncdist.gpu.path import OnEnd, Surroundings
from asyncdist.gpu.threads import Helpers, close_all, in_thread

STREAMS: Final = 2
"""Operations of a tag alternate between the streams: one that waits for its caller's kernels holds up every other."""

AHEAD: Final = 64
"""Operations that others are not through with, at most, when a rank begins another. Mostly the slots are fewer, but an
operation that moves nothing here takes no slot."""

MAX_EARLY: Final = 4096
"""Signals that are kept of operations not begun here. Ranks get ahead by AHEAD, with a few signals each."""

ENDED_KEPT: Final = 2 * AHEAD
"""Ended operations whose fingerprints are remembered. Others may still send signals of the last AHEAD of them."""

DROPS_KEPT: Final = 256
"""Dropped operations that are remembered, to report each once. An operation is dropped soon after it was issued."""

CLOSED: Final = 4
"""The sender has closed our memory, and sends nothing more."""

_KINDS: Final = frozenset({TOLD, READ, DONE, CLOSED})


class IpcChannel:
    """See the module."""

    def __init__(self, around: Surroundings, tag: int, scratch: IpcScratch, streams: Sequence[Stream]) -> None:
        self.rank = around.rank
        self.ranks = around.ranks
        self.size = len(around.ranks)
        self.device = around.device
        self.runtime = around.runtime
        self.completions = around.completions
        self.recorded = around.events.recorded
        self.scratch = scratch
        self.slot_users: dict[int, int] = {}
        """By slot, the operation that wrote there last."""
        self.closed = False
        """Whether the channel carries out no operation any more."""
        self._around = around
        self._tag = tag
        self._others = frozenset(range(self.size)) - {self.rank}
        self._streams = streams
        self._held: deque[tuple[Call, CollectiveWork, OnEnd, int]] = deque()
        self._operations: dict[int, IpcOperation] = {}
        self._last = -1  # the newest operation that has begun here
        self._reading: dict[int, set[int]] = {}  # by operation, the ranks that have not said DONE, ours among them
        self._early: list[tuple[int, Record]] = []
        self._dropped: deque[int] = deque(maxlen=DROPS_KEPT)
        self._lost: dict[int, BaseException] = {}
        self._compiled: set[tuple[ReduceOp, np.dtype[Any]]] = set()
        self._compiling: asyncio.Future[None] | None = None
        self._watched = 0
        self._not_closed = set(self._others)
        self._quiet: asyncio.Future[None] | None = None
        self._free: Callable[[], object] | None = None
        self._ended: dict[int, int] = {}
        """Fingerprints of the last operations that have ended well here."""
        self._signals = Signals(around, tag, self._hear, self._lose)
        self.tell = self._signals.tell
        self._signals.open()

    # Operations.

    def start(self, call: Call, work: CollectiveWork, on_end: OnEnd, fingerprint: int) -> None:
        """Begin, or wait until earlier ones have made room."""
        self._held.append((call, work, on_end, fingerprint))
        self._admit()

    def drop(self, sequence: int) -> None:
        """Forget an operation, begun or not, and tell the others DONE."""
        if self.closed or sequence in self._dropped:
            return
        self._dropped.append(sequence)
        self._held = deque(entry for entry in self._held if entry[1].number != sequence)
        operation = self._operations.pop(sequence, None)
        if operation is not None:
            operation.stop()
        self._say_done(sequence, operation, 0 if operation is None else operation.fingerprint)

    def waiting_for(self, sequence: int) -> tuple[int, ...]:
        """Group ranks that an operation waits for."""
        operation = self._operations.get(sequence)
        if operation is None and any(entry[1].number == sequence for entry in self._held):
            operation = next(iter(self._operations.values()), None)
        return () if operation is None else tuple(sorted(operation.waiting_for()))

    def stop(self) -> None:
        """Forget all operations, reporting nothing."""
        self.closed = True
        self._held.clear()
        for operation in self._operations.values():
            operation.stop()
        self._operations.clear()
        self._early.clear()
        self._look()

    # What operations ask.

    def reading(self, sequence: int) -> set[int]:
        """The ranks that may still use our slots for an earlier operation."""
        return self._reading.get(sequence, set())

    def is_to_write_before(self, sequence: int) -> bool:
        """Whether an operation before this one is still to write a large slot of ours."""
        return any(one.is_to_write for one in self._operations.values() if one.sequence < sequence)

    def pump_after(self, sequence: int) -> None:
        """Move on the operations after one that has no more to write."""
        for operation in tuple(self._operations.values()):
            if operation.sequence > sequence:
                operation.pump()

    def watch(
        self, stream: Stream, event: Event, ended: Callable[[BaseException | None], object], keep: object
    ) -> None:
        """Call `ended` when the event has ended, and give the event back. Until then `shut` waits."""
        self._watched += 1

        def over(error: BaseException | None) -> None:
            self._watched -= 1
            self._around.events.give((event,))
            ended(error)
            self._look()

        self.completions.add(stream, (event,), over, (event, keep, self))

    def ended(self, operation: IpcOperation) -> None:
        """It has ended well."""
        del self._operations[operation.sequence]
        if len(self._ended) >= ENDED_KEPT:
            del self._ended[next(iter(self._ended))]
        self._ended[operation.sequence] = operation.fingerprint
        self._say_done(operation.sequence, None, operation.fingerprint)

    def gave_up(self, operation: IpcOperation) -> None:
        """It has failed here."""
        self._operations.pop(operation.sequence, None)
        self._dropped.append(operation.sequence)
        self._say_done(operation.sequence, operation, operation.fingerprint)

    def _admit(self) -> None:
        while self._held and len(self._operations) < SMALL_SLOTS and len(self._reading) < AHEAD and not self.closed:
            if not self._is_compiled(self._held[0][0]):
                return
            call, work, on_end, fingerprint = self._held.popleft()
            stream = self._streams[work.number % STREAMS]
            operation = IpcOperation(self, call, work, on_end, fingerprint, stream)
            sequence = operation.sequence
            self._operations[sequence] = operation
            self._last = sequence
            self._reading[sequence] = set(range(self.size)) - self._lost.keys()
            early, self._early = self._early, []
            for member, record in early:
                if record.sequence > sequence:
                    self._early.append((member, record))
                elif record.sequence == sequence:
                    self._apply(member, record)
            operation.pump()

    def _is_compiled(self, call: Call) -> bool:
        """Whether the kernels of a call are compiled; else a thread compiles them, and later operations wait too."""
        op = ReduceOp.PREMUL_SUM if isinstance(call.op, PremulSum) else call.op
        if not isinstance(op, ReduceOp) or (op, call.dtype) in self._compiled:
            return True
        if self._compiling is None:
            key = (op, call.dtype)
            self._compiling = in_thread(self._around.loop, self._compile, *key, on=self._around.on)

            def compiled(future: asyncio.Future[None]) -> None:
                self._compiling = None
                if not future.cancelled():
                    future.exception()  # if it cannot be compiled, launching it says so
                    self._compiled.add(key)
                    self._admit()

            self._compiling.add_done_callback(compiled)
        return False

    def _compile(self, op: ReduceOp, dtype: np.dtype[Any]) -> None:
        if op is ReduceOp.PREMUL_SUM:
            self.runtime.prepare_scale(dtype, self.device)
            op = ReduceOp.SUM
        self.runtime.prepare_reduce(op, dtype, self.size, self.device)

    def _say_done(self, sequence: int, operation: IpcOperation | None, fingerprint: int) -> None:
        """Send DONE once nothing of the operation is on the device: now, unless it was dropped under way."""

        def over(_error: BaseException | None = None) -> None:
            self.tell(self._others, Record(DONE, sequence=sequence, fingerprint=fingerprint))
            self._is_through(self.rank, sequence)
            self._around.loop.call_soon(self._go_on)

        event = self._event_behind(operation)
        if operation is None or event is None:
            over()
        else:
            self.watch(operation.stream, event, over, operation.call)
            self._around.loop.call_soon(self._go_on)  # it writes nothing more: what is to write behind it may have room

    def _event_behind(self, operation: IpcOperation | None) -> Event | None:
        """An event behind all of an operation; None if nothing of it is on the device, or the device is broken."""
        if operation is None or not operation.begun:
            return None
        try:
            return self.recorded(operation.stream)
        except Exception:  # the operation has failed for that reason already
            return None

    # Signals.

    def _hear(self, member: int, record: Record) -> None:
        if record.kind not in _KINDS:
            raise RemoteProtocolError(f"rank {self.ranks[member]} sent a signal of unknown kind {record.kind}")
        if record.kind == CLOSED:
            self._signals.hush(member)
            rank = self.ranks[member]
            self._lose(member, PeerLostError(f"rank {rank} has left the group (it closed it)", rank, left=True))
        elif self.closed:
            return
        elif record.sequence > self._last:
            if len(self._early) >= MAX_EARLY:
                raise RemoteProtocolError(f"rank {self.ranks[member]} is further ahead than it can be")
            self._early.append((member, record))
        else:
            self._apply(member, record)
            operation = self._operations.get(record.sequence)
            if record.kind == DONE:
                self._go_on()
            elif operation is not None:
                operation.pump()

    def _apply(self, member: int, record: Record) -> None:
        if record.kind == DONE:
            self._is_through(member, record.sequence)
            if not record.fingerprint:
                return
        operation = self._operations.get(record.sequence)
        if operation is not None and not operation.stopped:
            operation.heard(member, record)
        elif self._ended.get(record.sequence, record.fingerprint) != record.fingerprint:
            self._around.owner.differs(self._tag, record.sequence, self.ranks[member])

    def _is_through(self, member: int, sequence: int) -> None:
        """`member`, perhaps this rank, neither reads nor writes our slots for an operation any more."""
        reading = self._reading.get(sequence)
        if reading is not None:
            reading.discard(member)
            if not reading:
                del self._reading[sequence]

    def _go_on(self) -> None:
        """Move on the operations that may have waited for a slot."""
        for operation in tuple(self._operations.values()):
            operation.pump()
        self._admit()
        self._look()

    def _lose(self, member: int, error: BaseException) -> None:
        """A member is lost or has left: it reads nothing any more, and no operation that needs it can end."""
        self._not_closed.discard(member)
        self._free_if_closed()
        self._lost.setdefault(member, error)
        for sequence in list(self._reading):
            self._is_through(member, sequence)
        self._go_on()

    def lost_among(self, waiting_for: Callable[[], set[int]]) -> BaseException | None:
        """Why what an operation waits for will never come, if so."""
        if not self._lost:
            return None
        return next((self._lost[member] for member in sorted(waiting_for()) if member in self._lost), None)

    # The end.

    async def shut(self, helpers: Helpers, limit_s: float) -> None:
        """Close all others' memory, once nothing here uses it and others have read ours, at most `limit_s` from now.

        Ours is freed when all others have closed it, or are gone, which may be much later. Where what runs here does
        not end in time nothing is closed: the process's end does that.
        """
        loop = self._around.loop
        self._quiet = loop.create_future()
        self._look()
        if self._quiet not in (await asyncio.wait([self._quiet], timeout=limit_s))[0]:
            events.info("group %x: others have not read all that was written for them", self._around.group_id)
        self._quiet = None
        self.stop()
        if self._watched:
            return
        for stream in self._streams:
            self.completions.drop(stream)
        close_all(*self._streams)
        with contextlib.suppress(DistBackendError):  # of a broken GPU: others must hear of the end all the same
            await in_thread(loop, self.scratch.close_others, on=self._around.on)
        self.tell(self._others, Record(CLOSED))
        self._free = lambda: helpers.start(self.scratch.free)
        self._free_if_closed()

    def _look(self) -> None:
        """Tell `shut` if what it waits for has come."""
        quiet = self._quiet
        if quiet is not None and not quiet.done() and not self._watched and (self.closed or not self._reading):
            quiet.set_result(None)

    def _free_if_closed(self) -> None:
        free = self._free
        if free is not None and not self._not_closed:
            self._free = None
            free()


async def open_channel(around: Surroundings, tag: int, *, first: bool) -> IpcChannel | None:
    """Make a channel, together with all ranks; None, on all of them, if some rank cannot open another's memory.

    Raises DistError, as when a rank is gone. Cancelling frees our memory.
    """
    streams: list[Stream] = []  # made first: once there is memory that all have opened, nothing of CUDA is to fail
    scratch: IpcScratch | None = None
    channel: IpcChannel | None = None
    try:
        streams.extend(around.runtime.new_stream(around.device) for _ in range(STREAMS))
        scratch = await open_scratch(around, tag, first=first)
        if scratch is not None:
            channel = IpcChannel(around, tag, scratch, streams)
        return channel
    except DistError:
        raise
    except Exception as error:
        raise DistBackendError(f"no device memory: {error}") from error
    finally:
        if channel is None:
            close_all(*streams)
            if scratch is not None:  # the mesh is closed, and so are all others' channels
                await in_thread(around.loop, scratch.undo, on=around.on)
