"""NcclChannel: the communicators of one tag, one stream for each GPU, and the operations that go through them in order.

NCCL demands one order per communicator on all ranks. Here each tag has an order of its own, and so a communicator. An
ordinary channel has one communicator per rank, the channel of a multi-device form one per GPU of each rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from asyncdist.arrays.reduce_op import PremulSum
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.concurrency.tasks import start_task
from asyncdist.cuda import Communicator, Event, Memory, Nccl, Runtime, Stream
from asyncdist.errors import DistBackendError
from asyncdist.gpu.extents import aligned
from asyncdist.gpu.nccl.calls import ISSUE, Place, alone, talks_to
from asyncdist.gpu.path import OnEnd, Surroundings
from asyncdist.gpu.threads import Helpers, close_all, close_behind, discard_made, in_thread

_NOTHING: Final[frozenset[object]] = frozenset()

MAX_LAUNCHED: Final = 128
"""Operations of a channel that are on the GPU at once: enough that the GPU never waits for the next, and, with three
entries each and a few channels, below the thousand from which a launch blocks. The others wait here."""


LAUNCH_GRACE_S: Final = 1.0
"""How long an abort waits for a launch in a thread of ours: NCCL allows no abort while a thread puts operations of the
communicator together. A launch that takes longer waits for a peer, inside NCCL, where only an abort ends it."""

LEAST_SCRATCH_BYTES: Final = 2 << 20
"""CUDA allocates no less. Doubled until it is enough: all outgrown memory together is less than the last."""

_COMMUNICATOR: Final = "communicator"
"""The first launch connects, if the environment, or a library that used NCCL before us, wants it so."""


@dataclass(slots=True, eq=False)
class NcclOperation:
    """A call under way: an entry of `Completions`, once it is launched."""

    call: Call
    work: CollectiveWork
    on_end: OnEnd
    launched: bool = False
    events: Sequence[Event] = ()
    launch: Callable[[Call, Place], None] | None = field(init=False)

    def __post_init__(self) -> None:
        self.launch = alone(self.call)


class NcclChannel:
    """See the module. `first` is the sequence number from which on operations come here.

    `retire` is called whenever an operation has ended after a limit was set.
    """

    def __init__(
        self,
        around: Surroundings,
        nccl: Nccl,
        tag: int,
        first: int,
        devices: tuple[int, ...],
        retire: Callable[[NcclChannel], None],
    ) -> None:
        self.tag = tag
        self.first = first
        self.devices = devices
        self.limit: int | None = None
        """The number of a refused operation, if any: that operation and later ones never come here."""
        self.operations: dict[int, NcclOperation] = {}
        """Under way, by sequence number, oldest first."""
        self._around = around
        self._completions = around.completions
        self._events = around.events
        self._nccl = nccl
        self._retire = retire
        self._queue: deque[NcclOperation] = deque()
        self._launched = 0
        self._launching: asyncio.Task[None] | None = None
        self._prepared: set[object] = set()
        """What launches have prepared: the communicator, peers by rank, kernels by dtype."""
        self._launch_ended = threading.Event()
        self._launch_ended.set()
        self._streams: tuple[Stream, ...] = ()
        self._places: tuple[Place, ...] = ()
        self._scratches: tuple[_Scratch, ...] = ()
        self._communicators: tuple[Communicator, ...] = ()
        self._memory: list[Memory] = []
        self._left_behind: list[NcclOperation] = []
        self._completion_queue = around.completions.queue(self, self._complete)
        self._gone = False

    # Opening.

    @property
    def is_open(self) -> bool:
        """Whether there are communicators."""
        return bool(self._communicators)

    async def open(self, unique_id: bytes) -> None:
        """Join the communicators. Blocks threads, not the loop. After cancelling a thread aborts them."""
        around, nccl = self._around, self._nccl
        each = len(self.devices)
        size, first = len(around.ranks) * each, around.rank * each
        runtime, streams = around.runtime, list[Stream]()
        opening: list[tuple[asyncio.Future[Communicator], tuple[Runtime, int]]] = []
        try:
            streams.extend(map(runtime.new_stream, self.devices))
            for index, device in enumerate(self.devices):
                on, rank = (runtime, device), first + index
                made = in_thread(around.loop, nccl.open, size, unique_id, rank, device, on=on, discard=_abort)
                opening.append((made, on))
            found = await asyncio.gather(*(made for made, _ in opening))
        except BaseException:
            for made, on in opening:
                discard_made(made, on, _abort)
            close_all(*streams)
            raise
        self._streams = tuple(streams)
        self._scratches = tuple(_Scratch(self, device) for device in self.devices)
        self._places = tuple(
            Place(nccl, runtime, communicator, stream, scratch)
            for communicator, stream, scratch in zip(found, self._streams, self._scratches, strict=True)
        )
        self._communicators = tuple(found)
        self._go_on()

    # Operations.

    def carries(self, number: int) -> bool:
        """Whether the operation of that number comes here."""
        return self.first <= number and (self.limit is None or number < self.limit)

    def add(self, operation: NcclOperation) -> None:
        """Queue an operation behind the others."""
        self.operations[operation.work.number] = operation
        self._queue.append(operation)
        if self._communicators:
            self._go_on()

    def _go_on(self) -> None:
        """Launch what may be launched now."""
        while self._queue and self._launching is None and self._launched < MAX_LAUNCHED and not self._gone:
            operation = self._queue.popleft()
            operation.launched = True
            simple = operation.launch is not None and self._prepared
            unprepared = _NOTHING if simple else self._unprepared(operation.call)
            if unprepared:  # connecting to a peer blocks until it does the same, and compiling takes part of a second
                self._prepared |= unprepared
                self._launch_ended.clear()
                self._launching = start_task(self._around.loop, self._launch_there(operation), name="launch in NCCL")
                return
            try:
                self._launch(operation)
            except Exception as error:
                self._failed(operation, error)
            else:
                self._is_launched(operation)

    def _unprepared(self, call: Call) -> Set[object]:
        """What launching `call` needs for the first time and may block for."""
        needed: set[object] = {_COMMUNICATOR}
        for one in call.members or (call,):
            needed |= talks_to(one, self._communicators[0])
            if isinstance(one.op, PremulSum) and not self._nccl.native_premul_sum:
                needed.add(one.dtype)
        return needed - self._prepared

    async def _launch_there(self, operation: NcclOperation) -> None:
        try:
            await in_thread(self._around.loop, self._launch_now, operation, on=(self._around.runtime, self.devices[0]))
        except Exception as error:
            self._launching = None
            self._failed(operation, error)
        else:
            self._launching = None
            self._is_launched(operation)
        self._go_on()

    def _launch_now(self, operation: NcclOperation) -> None:
        """Runs in a thread."""
        try:
            self._launch(operation)
        finally:
            self._launch_ended.set()

    def _launch(self, operation: NcclOperation) -> None:
        """Queue everything on the GPU; called in the loop's thread or in a thread of its own."""
        call = operation.call
        for scratch in self._scratches:
            scratch.used = 0
        for stream in self._streams:
            for event in call.ready:
                stream.wait_event(event)
        if operation.launch is not None:
            operation.launch(call, self._places[0])
        else:
            self._launch_together(call.members or (call,))
        events: list[Event] = []
        operation.events = events
        for stream in self._streams:  # a comprehension would be a function of its own
            events.append(self._events.recorded(stream))  # noqa: PERF401

    def _launch_together(self, calls: Sequence[Call]) -> None:
        issued = [ISSUE[call.collective](call, self._places[self._place_of(call)]) for call in calls]
        parts = [part for part in issued if part is not None]
        if parts:
            with self._nccl.group():
                for part in parts:
                    part()

    def _place_of(self, member: Call) -> int:
        return self.devices.index(member.device) if len(self.devices) > 1 else 0

    def _is_launched(self, operation: NcclOperation) -> None:
        if self._gone:
            self._events.give(operation.events)
            return
        self._launched += 1
        tail = operation.work.on_device
        assert tail is not None, "every operation on GPU arrays has one"
        tail.queued(operation.events)
        self._completions.watch(self._completion_queue, operation)

    def _complete(self, operation: NcclOperation, error: BaseException | None) -> None:
        self._launched -= 1
        if self.operations.pop(operation.work.number, None) is not None:  # as `_finish`, which would be a call more
            operation.on_end(operation.work, error)
            if self.limit is not None:
                self._retire(self)
        self._events.give(operation.events)
        if self._queue:
            self._go_on()

    def _failed(self, operation: NcclOperation, error: BaseException) -> None:
        failure = error if isinstance(error, DistBackendError) else DistBackendError(f"{error}")
        if failure is not error:
            failure.__cause__ = error
        self._left_behind.append(operation)  # some of it may be on the stream, where no event tells of its end
        self._events.give(operation.events)
        self._finish(operation, failure)

    def _finish(self, operation: NcclOperation, error: BaseException | None) -> None:
        if self.operations.pop(operation.work.number, None) is not None:
            operation.on_end(operation.work, error)
            if self.limit is not None:
                self._retire(self)

    def forget(self, number: int) -> NcclOperation | None:
        """Forget an operation. If it is on the GPU it stays there, and its arrays are kept until the channel ends."""
        operation = self.operations.pop(number, None)
        if operation is not None:
            if operation.launched:
                self._left_behind.append(operation)
            else:
                self._queue.remove(operation)
        return operation

    def scratch(self, nbytes: int, device: int) -> Memory:
        """More temporary memory, given back when the channel is."""
        memory = self._around.runtime.allocate(nbytes, device)
        self._memory.append(memory)
        return memory

    # The end.

    def async_error(self) -> str:
        """What the library says has gone wrong meanwhile."""
        return next(filter(None, (communicator.async_error() for communicator in self._communicators)), "")

    def end(self, helpers: Helpers, *, in_order: bool) -> None:
        """Give everything up, in a thread. What the GPU may still use is kept until then. Idempotent.

        `in_order`: every rank does so, and nothing is under way. Otherwise what runs is aborted.
        """
        if self._gone:
            return
        self._gone = True
        self._completions.drop(self)
        kept = list(self.operations.values()), self._left_behind
        self.operations.clear()
        self._queue.clear()
        if self._launching is not None:
            helpers.keep(self._launching)
        if self._communicators:
            helpers.start(self._end_there, in_order, keep_alive=kept)

    def _end_there(self, in_order: bool) -> None:
        self._launch_ended.wait(LAUNCH_GRACE_S)
        for communicator in self._communicators:
            if in_order:
                with contextlib.suppress(DistBackendError):  # then it is aborted
                    communicator.destroy()
                    continue
            with contextlib.suppress(DistBackendError):  # of several, the others have to end all the same
                communicator.abort()
        for stream in self._streams:
            close_behind(self._around.runtime, stream.device, (stream,), ())
        close_all(*self._memory)


class _Scratch:
    """Temporary memory in the order of one stream: earlier launches have ended when a launch uses it from its start.

    Members of one call, which are launched together, have parts of their own.
    """

    def __init__(self, channel: NcclChannel, device: int) -> None:
        self._channel = channel
        self._device = device
        self._memory: Memory | None = None
        self.used = 0
        """Bytes, by this launch."""

    def __call__(self, nbytes: int) -> int:
        start = aligned(self.used)
        if self._memory is None or self._memory.nbytes < start + nbytes:
            doubled = 1 << (max(start + nbytes, LEAST_SCRATCH_BYTES) - 1).bit_length()
            self._memory = self._channel.scratch(doubled, self._device)
            start = 0  # what this launch had before stays where it is
        self.used = start + nbytes
        return self._memory.pointer + start


def _abort(communicator: Communicator) -> None:
    """Abort a communicator that opened after its channel was given up."""
    communicator.abort()
