"""StagedPipeline: one tag's operations through the host's memory, as a pipeline.

    device --copy out--> pinned buffer --host collective--> pinned buffer --copy in--> device

Every portion of an operation takes a buffer through these three steps. There are several buffers, and a stream for each
direction, so that one portion is copied out while others are on the network or copied in. Each tag has buffers of its
own: if tags shared buffers, two ranks could each hold all of theirs for operations that the other has no buffer for. A
thread allocates each buffer when it is first needed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final

import numpy as np

from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.collectives.arguments import call as calls
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.collectives.host.backend import HostBackend
from asyncdist.cuda.interface import Pinned, Stream
from asyncdist.gpu.path import OnEnd, Surroundings
from asyncdist.gpu.staged.plan import Portion, host_call, portions, rounds_of
from asyncdist.gpu.streams import tell_queued
from asyncdist.gpu.threads import Helpers, close_all, close_behind, in_thread
from asyncdist.transport.protocol.frame import key_prefix, unpack_key

BUFFER_BYTES: Final = 4 << 20
"""A pinned buffer: PCIe moves it in about 100 us, ten times what starting a copy and hearing of its end take."""
BUFFERS: Final = 4
"""Buffers of a tag: one is copied out, one copied in, and two are on the network, the slowest of the three."""
SMALL_BUFFER_BYTES: Final = 64 << 10
"""A buffer of an operation that fits it whole. The time of smaller operations does not depend on their size."""
SMALL_BUFFERS: Final = 16
"""Small operations of a tag under way at once. Their buffers take 1 MiB."""

DROPPED_KEPT: Final = 64
"""Dropped operations that are remembered: parts may come until a later operation of the tag has ended."""

OPERATION_BYTES: Final = 12
"""Length of what keys of an operation's parts share: the backend's group, and its tag, our sequence number."""

_OUT: Final = 0
_HOST: Final = 1
_IN: Final = 2


@dataclass(slots=True, eq=False)
class _Portion:
    """A portion under way."""

    plan: Portion
    number: int
    buffer: Pinned
    slots: PinnedSlots
    step: int = _OUT
    queued: bool = False
    """Whether the copy of the results is on the stream."""


@dataclass(slots=True, eq=False)
class _Operation:
    """A call under way."""

    call: Call
    work: CollectiveWork
    on_end: OnEnd
    portions: Iterator[Portion] | None = None
    next: Portion | None = None
    number: int = 0
    exhausted: bool = False
    live: set[_Portion] = field(default_factory=set)
    stopped: bool = False
    waited: set[Stream] = field(default_factory=set)


class StagedPipeline:
    """See the module."""

    def __init__(
        self,
        around: Surroundings,
        tag: int,
        helpers: Helpers,
        dropped: Iterable[int] = (),
        spares: tuple[Spares | None, Spares | None] = (None, None),
    ) -> None:
        """`dropped` are operations of the tag that were refused before there was a pipeline.

        `spares` are large and small buffers that all pipelines which are given them share while nothing uses them.
        """
        self._around = around
        self._size = len(around.ranks)
        self._backend = around.exchange.host_backend(backend_name(tag))
        runtime = around.runtime
        self._helpers = helpers
        self._out = runtime.new_stream(around.device)
        try:
            self._in = runtime.new_stream(around.device)
        except BaseException:
            close_all(self._out)
            raise
        self._large = PinnedSlots(helpers, BUFFER_BYTES, BUFFERS, self._available, spares[0])
        self._small = PinnedSlots(helpers, SMALL_BUFFER_BYTES, SMALL_BUFFERS, self._available, spares[1])
        self._waiting: deque[_Operation] = deque()  # not all of their portions have been taken up
        self._operations: dict[int, _Operation] = {}
        self._dropped = deque(dropped, DROPPED_KEPT)
        self._pumping = False

    @property
    def parts_id(self) -> int:
        """The id of the host collectives that operations are made of."""
        return self._backend.group_id

    def start(self, call: Call, work: CollectiveWork, on_end: OnEnd) -> None:
        """Begin, behind the operations before."""
        operation = _Operation(call, work, on_end)
        self._operations[work.number] = operation
        self._waiting.append(operation)
        self._pump()

    def drop(self, sequence: int) -> None:
        """Forget an operation, begun or not. Its buffers are free once its copies have ended."""
        operation = self._operations.get(sequence)
        if operation is not None:
            self._stop(operation)
            self._pump()
            return
        self._dropped.append(sequence)
        drop_unbegun(self._around, self._backend, sequence)

    def waiting_for(self, sequence: int) -> tuple[int, ...]:
        """Global ranks."""
        operation = self._operations.get(sequence)
        if operation is None:
            return ()
        numbers = [portion.number for portion in operation.live if portion.step == _HOST] or [0]
        if not operation.live and operation.portions is not None and len(self._operations) > 1:
            return self.waiting_for(next(iter(self._operations)))  # it waits for buffers
        return tuple(sorted({rank for number in numbers for rank in self._backend.waiting_for(sequence, number)}))

    # The pipeline.

    def _available(self, error: BaseException | None) -> None:
        """There may be a buffer now; with `error` there will be none."""
        if error is not None:
            for operation in list(self._operations.values()):
                self._fail(operation, error)
        self._pump()

    def _pump(self) -> None:
        """Take up portions while there are buffers."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._waiting and self._take_up(self._waiting[0]):
                pass
        finally:
            self._pumping = False

    def _take_up(self, operation: _Operation) -> bool:
        """Take up the next portion of `operation`, the first one; False if that must wait."""
        if operation.stopped:
            self._waiting.popleft()
            return True
        if operation.portions is None and not self._cut(operation):
            return False
        if operation.next is None:
            assert operation.portions is not None
            operation.next = next(operation.portions, None)
        if operation.next is None:
            operation.exhausted = True
            self._waiting.popleft()
            self._end_if_over(operation)
            return True
        slots = self._small if _is_small(operation.call, self._size) else self._large
        buffer = slots.take()
        if buffer is None:
            return False
        portion = _Portion(operation.next, operation.number, buffer, slots)
        operation.next = None
        operation.number += 1
        operation.live.add(portion)
        outs = [(buffer.pointer + offset, pointer, nbytes) for offset, pointer, nbytes in portion.plan.outs]
        self._copy(operation, portion, self._out, outs, self._exchange)
        return True

    def _cut(self, operation: _Operation) -> bool:
        """Find out how many portions there are; False if the others must be asked."""
        call, size, rank = operation.call, self._size, self._around.rank
        if call.pieces is None:
            nbytes = SMALL_BUFFER_BYTES if _is_small(call, size) else BUFFER_BYTES
            parts = call.members or (call,)
            operation.portions = chain.from_iterable(portions(part, rank, size, nbytes) for part in parts)
            return True
        if operation.number:
            return False  # asked already
        operation.number = 1
        most = np.array([rounds_of(call, size, BUFFER_BYTES)], np.int64)

        def agreed(_work: CollectiveWork, error: BaseException | None) -> None:
            if error is not None:
                self._fail(operation, error)
            else:
                operation.portions = portions(call, rank, size, BUFFER_BYTES, int(most[0]))
            self._pump()

        detail = f"portions of {call.collective} {call.dtype.name}"
        question = replace(calls.all_reduce(most, ReduceOp.MAX), detail=detail)
        self._run(operation, question, 0, agreed)
        return operation.portions is not None

    def _copy(
        self,
        operation: _Operation,
        portion: _Portion,
        stream: Stream,
        transfers: Sequence[tuple[int, int, int]],
        then: Callable[[_Operation, _Portion], None],
    ) -> None:
        """Copy each (target, source, bytes), then call `then`."""
        if not transfers:
            then(operation, portion)
            return
        try:
            self._queue(operation, stream, transfers)
        except Exception as error:
            self._fail(operation, error)
        try:
            event = self._around.events.recorded(stream)  # also behind what was begun of something that failed
        except Exception as error:  # when the buffer is free is not known: it is freed at the end
            self._fail(operation, error)
            return

        def ended(error: BaseException | None) -> None:
            self._around.events.give((event,))
            if error is not None:
                self._fail(operation, error)
            if operation.stopped:
                self._release(operation, portion)
            else:
                then(operation, portion)

        self._around.completions.add(stream, (event,), ended, (event, operation.call, portion.buffer))
        portion.queued = stream is self._in
        if operation.exhausted and all(one.queued for one in operation.live) and not operation.stopped:
            tell_queued(operation.work, event)

    def _queue(self, operation: _Operation, stream: Stream, transfers: Sequence[tuple[int, int, int]]) -> None:
        if stream not in operation.waited:
            operation.waited.add(stream)
            for ready in operation.call.ready:
                stream.wait_event(ready)
        for target, source, nbytes in transfers:
            self._around.runtime.copy(target, source, nbytes, stream)

    def _exchange(self, operation: _Operation, portion: _Portion) -> None:
        """The portion is in its buffer: run the host collective."""
        portion.step = _HOST

        def ended(_work: CollectiveWork, error: BaseException | None) -> None:
            portion.step = _IN
            if error is not None:
                self._fail(operation, error)
                self._release(operation, portion)
                return
            ins = [(pointer, portion.buffer.pointer + offset, nbytes) for offset, pointer, nbytes in portion.plan.ins]
            self._copy(operation, portion, self._in, ins, self._done)

        self._run(operation, host_call(portion.plan, portion.buffer.array), portion.number, ended)

    def _run(self, operation: _Operation, call: Call, number: int, ended: OnEnd) -> None:
        work = operation.work
        name = f"{work.operation} on GPU arrays"
        part = CollectiveWork(self._around.loop, name, call.nbytes, work.number, number, None)
        try:
            self._backend.start(call, part, ended)
        except Exception as error:  # the mesh is gone, or memory is short
            ended(part, error)

    def _done(self, operation: _Operation, portion: _Portion) -> None:
        self._release(operation, portion)
        self._end_if_over(operation)

    def _release(self, operation: _Operation, portion: _Portion) -> None:
        """Give the portion's buffer back. Nothing uses the buffer any more."""
        if portion in operation.live:
            operation.live.discard(portion)
            portion.slots.give(portion.buffer)

    def _end_if_over(self, operation: _Operation) -> None:
        if operation.live or operation.stopped or not operation.exhausted:
            return
        operation.stopped = True
        del self._operations[operation.work.number]
        # Messages of a rank come in order: those of operations before this one are here, as a rule.
        while self._dropped and self._dropped[0] < operation.work.number:
            _drop_parked(self._around, self._backend, self._dropped.popleft())
        operation.on_end(operation.work, None)

    def _fail(self, operation: _Operation, error: BaseException) -> None:
        if not operation.stopped:
            self._stop(operation)
            operation.on_end(operation.work, error)

    def _stop(self, operation: _Operation) -> None:
        """Begin nothing more of an operation. Buffers in a copy are released after the copy."""
        operation.stopped = True
        sequence = operation.work.number
        del self._operations[sequence]
        ahead = range(operation.number, operation.number + BUFFERS)  # what others may have begun already
        for number in {portion.number for portion in operation.live} | {0, *ahead}:
            self._backend.drop(sequence, number)
        _drop_parked(self._around, self._backend, sequence)
        self._dropped.append(sequence)
        for portion in tuple(operation.live):
            if portion.step == _HOST:
                self._release(operation, portion)

    # The end.

    def stop(self) -> None:
        """Forget all operations, reporting nothing."""
        for operation in tuple(self._operations.values()):
            self._stop(operation)
        self._waiting.clear()

    def shut(self) -> None:
        """Give buffers and streams back, in a thread, once no copy uses them."""
        around, streams = self._around, (self._out, self._in)
        for stream in streams:
            around.completions.drop(stream)
        buffers = self._large.close() + self._small.close()
        self._helpers.start(close_behind, around.runtime, around.device, streams, buffers)


def _is_small(call: Call, size: int) -> bool:
    """Whether a call fits a small buffer whole; all ranks say the same."""
    parts: Iterable[Call] = call.members or (call,)
    return call.pieces is None and all(2 * size * part.nbytes <= SMALL_BUFFER_BYTES for part in parts)


def backend_name(tag: int) -> str:
    """Name of the exchange's host collectives that carry a tag. Their tag is our sequence number."""
    return f"staged {tag}"


def drop_unbegun(around: Surroundings, backend: HostBackend, sequence: int) -> None:
    """Forget an operation that was not begun here, and what others may have begun of it."""
    for number in range(BUFFERS + 1):
        backend.drop(sequence, number)
    _drop_parked(around, backend, sequence)


def _drop_parked(around: Surroundings, backend: HostBackend, sequence: int) -> None:
    """Forget the parts of a dropped operation that have come. A rank that only sends may be ahead by more than
    BUFFERS."""
    keys: list[bytes] = []
    operation = key_prefix(backend.group_id, sequence, 0)[:OPERATION_BYTES]
    for core in filter(None, around.mesh.cores):
        core.tell_unexpected(operation, lambda _rank, key, _parked: keys.append(key))
    for key in keys:
        backend.drop(sequence, unpack_key(key).sequence)


class Spares:
    """Page-locked buffers that nothing uses: at most `most` are kept for the next."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.free: list[Pinned] = []

    def close(self) -> list[Pinned]:
        """Keep no more buffers. Returns them, for the caller to close."""
        self.most = 0
        free, self.free = self.free, []
        return free


class PinnedSlots:
    """At most `count` buffers of `nbytes` at a time. `available(error)` is called on the loop when one may be free.

    With an error there will be none. The driver takes milliseconds to page-lock a buffer: never on the loop, and
    buffers are kept, until `close` or in `spares`.
    """

    def __init__(
        self,
        helpers: Helpers,
        nbytes: int,
        count: int,
        available: Callable[[BaseException | None], object],
        spares: Spares | None = None,
    ) -> None:
        self.nbytes = nbytes
        self._count = count
        self._helpers = helpers
        self._available = available
        self._shared = spares is not None
        self._spares = spares or Spares(count)
        self._taken: set[Pinned] = set()
        self._allocating: asyncio.Future[Pinned] | None = None
        self._closed = False

    @property
    def taken(self) -> int:
        """Buffers in use."""
        return len(self._taken)

    def take(self) -> Pinned | None:
        """A buffer; None if none is free: then `available` follows."""
        if len(self._taken) == self._count or self._closed:
            return None
        if self._spares.free:
            buffer = self._spares.free.pop()
            self._taken.add(buffer)
            return buffer
        if self._allocating is None:
            loop, on = self._helpers.loop, self._helpers.on
            self._allocating = in_thread(loop, on[0].pinned, self.nbytes, on=on, discard=close_all)
            self._allocating.add_done_callback(self._allocated)
        return None

    def give(self, buffer: Pinned) -> None:
        """Take back a buffer that nothing uses any more."""
        if self._closed:
            return
        self._taken.remove(buffer)
        self._keep(buffer)

    def close(self) -> list[Pinned]:
        """Make no more buffers. Returns those in use, and all that are not shared, for the caller to close later."""
        self._closed = True
        buffers = [*self._taken]
        self._taken.clear()
        if not self._shared:
            buffers += self._spares.close()
        return buffers

    def _keep(self, buffer: Pinned) -> None:
        if len(self._spares.free) < self._spares.most:
            self._spares.free.append(buffer)
        else:
            self._helpers.start(buffer.close)
        self._available(None)

    def _allocated(self, future: asyncio.Future[Pinned]) -> None:
        self._allocating = None
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            if self._taken or self._spares.free:  # it goes on with those that there are
                self._count = len(self._taken) + len(self._spares.free)
            else:
                self._available(error)
        elif self._closed:
            self._helpers.start(future.result().close)
        else:
            self._keep(future.result())
