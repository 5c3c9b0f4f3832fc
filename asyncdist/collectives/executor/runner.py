"""Execution: one collective under way on this rank.

It walks a program's graph: a step starts, in the call or the completion callback that made it ready, as soon as every
step it waits for is done. There is no task and no future per step; the transport reports through the `Sink` methods.

Work on memory (copies, reductions) is cut into slices of at most `SLICE_BYTES` between which the event loop runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from asyncdist.arrays.host import Array
from asyncdist.arrays.reduction import Kernel
from asyncdist.collectives.executor.buffers import Bound, ScratchPool
from asyncdist.collectives.executor.program import (
    COPY,
    PIECE_SUFFIX,
    PUBLISH,
    RECV,
    RECV_REDUCE,
    SEND,
    Instruction,
    Program,
)
from asyncdist.errors import CollectiveMismatchError, DistError, GroupAbortedError
from asyncdist.transport.protocol.frame import CREDIT_BYTES
from asyncdist.transport.protocol.operations import Receive, SendOp
from asyncdist.transport.protocol.peer import PeerCore
from asyncdist.transport.protocol.zero_copy import BULK_BYTES as EXPOSED_BULK_BYTES

SLICE_BYTES: Final = 1 << 20
"""Bytes of one uninterrupted copy or reduction: about 0.3 ms, so that no callback holds the loop for a millisecond."""


START_STEPS: Final = 64
"""Steps that are started in one turn of the loop, of those that wait for none: some microseconds each."""

BULK_BYTES: Final = CREDIT_BYTES // 2
"""What an operation may send from one rank to another without being asked for it, but for its short messages. So two of
them may be under way before credit is used up."""


class Publisher(Protocol):
    """Steps of one execution that publish to, and fetch from, the ranks of its host."""

    def issue(self, index: int, step: Instruction) -> bool:
        """Try a step; True if it is done, else `step_done` follows."""

    def end(self) -> None:
        """The execution has ended, well or not: read and publish nothing more. Idempotent."""

    def slow_readers(self) -> set[int]:
        """Members that keep us from publishing, or from ending."""


class Resources(NamedTuple):
    """What all executions of a group share. `peers` are its connections, by group rank."""

    loop: asyncio.AbstractEventLoop
    peers: Sequence[PeerCore | None]
    pool: ScratchPool


class Execution:
    """One rank's program on bound buffers.

    `ended(error)`, for subclasses to say, is called exactly once: None when
    every step is done, or the first failure, after which the operation's messages must be dropped and `stop` called.
    """

    __slots__ = (
        "_budget",
        "_fingerprint",
        "_folded",
        "_line",
        "_loop",
        "_not_bulk",
        "_peers",
        "_pending",
        "_prefix",
        "_program",
        "_shared",
        "_staging",
        "_stopped",
        "buffers",
        "itemsize",
        "kernel",
        "pool",
        "remaining",
        "waiting",
    )

    def __init__(
        self,
        resources: Resources,
        program: Program,
        buffers: Sequence[Bound],
        prefix: bytes,
        fingerprint: int,
        itemsize: int = 1,
        kernel: Kernel | None = None,
    ) -> None:
        self._loop, self._peers, self.pool = resources
        self._program = program
        self.buffers = buffers
        self._prefix = prefix
        self._fingerprint = fingerprint
        self.itemsize = itemsize
        self._not_bulk = BULK_BYTES // itemsize
        self.kernel = kernel
        self._pending = program.pending.copy()
        self.remaining = len(program.pending)
        """Steps that are not done, and whatever else must come before the end (`hold`)."""
        self.waiting: set[int] = set()
        """Steps that were issued and are not done."""
        self._staging: dict[int, Array] = {}
        self._folded: dict[int, int] = {}  # by step, the elements that were reduced before they were all here
        self._budget = SLICE_BYTES
        self._line: deque[Callable[[], None]] = deque()  # work on memory, one slice in a turn of the loop
        self._stopped = False
        self._shared: Publisher | None = None

    def start(self) -> None:
        """Start every step that waits for none; may call `ended` at once."""
        self._start_from(0)

    def _start_from(self, first: int) -> None:
        if self._stopped:
            return
        ready = self._program.first_steps(self.itemsize)
        if first + START_STEPS < len(ready):
            self._loop.call_soon(self._start_from, first + START_STEPS)
        self._advance(list(ready[first : first + START_STEPS]))

    def ended(self, error: BaseException | None) -> None:
        """Every step is done (None), or one has failed."""
        raise NotImplementedError

    def stop(self) -> None:
        """Forget the operation: later callbacks of the transport are ignored."""
        self._stopped = True
        for staging in self._staging.values():
            self.pool.give(staging)
        self._staging.clear()
        self._line.clear()

    def waiting_for(self) -> tuple[int, ...]:
        """Group ranks whose messages have not come; failing those, the ranks that have not taken ours."""
        waiting = [self._program.instructions[index] for index in self.waiting]
        receives = {step.peer for step in waiting if step.kind not in (SEND, PUBLISH)}
        if not receives and self._shared is not None:
            receives = self._shared.slow_readers()
        return tuple(sorted(receives or {step.peer for step in waiting if step.peer >= 0}))

    def _advance(self, ready: list[int]) -> None:
        """Start the steps of `ready`, and those that become ready by steps that are done at once."""
        pending, instructions = self._pending, self._program.instructions
        single_copy, shared = self._program.single_copy, self._shared
        self._budget = SLICE_BYTES
        try:
            # It grows while it is walked. Steps start in the order in which they became ready; but what is lent, which
            # costs nothing and the others may wait for, before all else.
            for place, index in enumerate(ready, 1):
                if self._stopped:
                    return
                step = instructions[index]
                if shared is not None and step.kind >= PUBLISH:
                    done = shared.issue(index, step)
                    if not done:
                        self.waiting.add(index)
                else:
                    done = self._issue(index, step)
                if done:
                    self.remaining -= 1
                    for successor in step.successors:
                        pending[successor] -= 1
                        if not pending[successor]:
                            if single_copy and step.kind == PUBLISH == instructions[successor].kind:
                                ready.insert(place, successor)
                            else:
                                ready.append(successor)
        except Exception as error:  # a peer that is gone already refuses messages at once; or memory is short
            if isinstance(error, DistError):
                error.__traceback__ = None  # the group may keep it, and the frames it came through hold arrays
            self.message_failed(None, error)
            return
        if not self.remaining and not self._stopped:
            self._stopped = True
            self.ended(None)

    def _complete(self, index: int) -> None:
        if self._stopped:
            return
        self.remaining -= 1
        pending = self._pending
        ready = []
        for successor in self._program.instructions[index].successors:
            pending[successor] -= 1
            if not pending[successor]:
                ready.append(successor)
        self._advance(ready)

    def _issue(self, index: int, step: Instruction) -> bool:
        """Start a step; True if it is done already."""
        kind, peer, suffix, buffer, start, stop, source, source_start, source_stop, together, left, _, _ = step
        bulk = together > self._not_bulk
        if kind == SEND:
            payload = self.buffers[buffer].octets(start, stop)
            send = SendOp(self._prefix + suffix, payload, b"", self, index, self._fingerprint, bulk=bulk)
            done = self._peers[peer].post_send(send)  # type: ignore[union-attr]
        elif kind == RECV:
            target = self.buffers[buffer].octets(start, stop)
            receive = Receive(self._prefix + suffix, target, self, index, bulk=bulk)
            done = self._peers[peer].post_receive(receive)  # type: ignore[union-attr]
            if done and receive.fingerprint != self._fingerprint:
                raise mismatch(receive)
        elif kind == RECV_REDUCE:
            nbytes = (stop - start) * self.itemsize
            staging = self._staging[index] = self.pool.take(nbytes)
            fold = partial(self._fold, index) if nbytes >= EXPOSED_BULK_BYTES else None
            receive = Receive(self._prefix + suffix, staging.data, self, index, bulk=bulk, fold=fold)
            done = self._peers[peer].post_receive(receive)  # type: ignore[union-attr]
            if done:
                if receive.fingerprint != self._fingerprint:
                    raise mismatch(receive)
                return self._reduce_staged(index)
        else:
            assert kind < PUBLISH, "a plan that publishes was given no shared memory"
            return self._combine(
                index,
                kind,
                self.buffers[source].elements(source_start, source_stop),
                self.buffers[buffer].elements(start, stop),
                left,
            )
        if not done:
            self.waiting.add(index)
        return done

    def _reduce_staged(self, index: int) -> bool:
        """Reduce what has been received into its place; True if that is done already."""
        step = self._program.instructions[index]
        folded = self._folded.pop(index, 0) if self._folded else 0
        target = self.buffers[step.buffer].elements(step.start + folded, step.stop)
        return self._combine(index, RECV_REDUCE, self._staging[index].view(target.dtype)[folded:], target, step.left)

    def _fold(self, index: int, octets: Array, start: int) -> None:
        """Reduce a part of what a receive is to reduce, out of the memory of its sender."""
        if self._stopped:
            return
        step = self._program.instructions[index]
        first = start // self.itemsize
        folded = self._folded[index] = first + len(octets) // self.itemsize
        target = self.buffers[step.buffer].elements(step.start + first, step.start + folded)
        try:
            self.reduce(octets.view(target.dtype), target, step.left)
        except Exception as error:  # a reduction of the user's own
            self.message_failed(None, error)

    def _combine(self, index: int, kind: int, source: Array, target: Array, left: bool) -> bool:
        """Do the work on memory of a step: at once if it is small (True), else in slices (False).

        What one call of `_advance` does at once is bounded as well: what is more waits in line.
        """
        if target.nbytes <= (SLICE_BYTES if kind == RECV_REDUCE else self._budget):
            self._budget -= target.nbytes
            self._apply(kind, source, target, left)
            if kind == RECV_REDUCE:
                self.pool.give(self._staging.pop(index))
            return True

        def apply_slice(first: int, last: int) -> None:
            if self._stopped:
                return
            try:
                self._apply(kind, source[first:last], target[first:last], left)
            except Exception as error:  # a reduction of the user's own
                self.message_failed(None, error)

        def finish() -> None:
            if not self._stopped:
                if kind == RECV_REDUCE:
                    self.pool.give(self._staging.pop(index))
                self._complete(index)
            if self._line:  # else all is forgotten
                self._line.popleft()
                if self._line:
                    self._loop.call_soon(self._line[0])

        # Even the first slice waits for the loop's next turn: `finish` must not run inside `_advance`.
        self._line.append(partial(run_sliced, self._loop, target.size, self.itemsize, apply_slice, finish))
        if len(self._line) == 1:
            self._loop.call_soon(self._line[0])
        return False

    def _apply(self, kind: int, source: Array, target: Array, left: bool) -> None:
        if kind == COPY:
            target[...] = source
            return
        self.reduce(source, target, left)

    def reduce(self, source: Array, target: Array, left: bool) -> None:
        """Reduce `source` into `target`; `left`: as the left operand."""
        kernel = self.kernel
        assert kernel is not None, "a plan that reduces was given no reduction"
        if left:
            kernel(source, target, target)
        else:
            kernel(target, source, target)

    # What shared memory asks and reports.

    def send(self, index: int, step: Instruction) -> bool:
        """Send by message what a step publishes; True if it has gone."""
        payload = self.buffers[step.buffer].octets(step.start, step.stop)
        send = SendOp(self._prefix + PIECE_SUFFIX, payload, b"", self, index, self._fingerprint)
        done: bool = self._peers[step.peer].post_send(send)  # type: ignore[union-attr]
        return done

    def receive(self, index: int, step: Instruction, nbytes: int) -> bool:
        """Receive an item of `nbytes` bytes that comes by message; True if it is here.

        Raises CollectiveMismatchError.
        """
        target, peer = self.buffers[step.buffer].octets(step.start, step.stop), self._peers[step.peer]
        assert peer is not None
        if nbytes != len(target):
            raise another_length(peer.peer_rank, nbytes, len(target))
        receive = Receive(self._prefix + PIECE_SUFFIX, target, self, index)
        done: bool = peer.post_receive(receive)
        if done and receive.fingerprint != self._fingerprint:
            raise mismatch(receive)
        return done

    def hold(self) -> None:
        """Do not end before `release`: others may read our arrays."""
        self.remaining += 1

    def release(self) -> None:
        """All members have read the buffers: what `hold` held back may end."""
        if not self._stopped:
            self.remaining -= 1
            self._advance([])

    def step_done(self, index: int) -> None:
        """A step that was issued, and was not done then, is."""
        self.waiting.discard(index)
        self._complete(index)

    # What the transport reports.

    def message_sent(self, token: Any) -> None:
        """A send's buffer may be reused."""
        if not self._stopped:
            self.waiting.discard(token)
            self._complete(token)

    def message_received(self, token: Any, receive: Receive) -> None:
        """A message is in its place (or in staging, to be reduced)."""
        if self._stopped:
            return
        if receive.fingerprint != self._fingerprint:
            self.message_failed(token, mismatch(receive))
            return
        self.waiting.discard(token)
        try:
            if token in self._staging and not self._reduce_staged(token):
                return
        except Exception as error:  # a reduction of the user's own
            self.message_failed(None, error)
            return
        self._complete(token)

    def message_failed(self, token: Any, error: BaseException) -> None:
        """A message cannot come or go any more.

        GroupAbortedError means that the peer gave the operation up; why, its or another rank's control message says,
        and until that is here the operation waits.
        """
        if not self._stopped and not isinstance(error, GroupAbortedError):
            self._stopped = True
            self.ended(error)

    def allocate(self, token: Any, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Never called: every receive of a plan names its target."""
        raise AssertionError("a plan's receives have targets")


class DifferentOperation(CollectiveMismatchError):
    """All that is known yet is that another operation runs there."""


def different(rank: int) -> DifferentOperation:
    """Global rank `rank` runs another operation in this place of the order."""
    return DifferentOperation(
        f"rank {rank} runs something else in this place of the order: another collective, reduction, dtype, root, size "
        "or algorithm",
        rank,
    )


def another_length(rank: int, sent: int, expected: int) -> CollectiveMismatchError:
    """Global rank `rank` has sent `sent` bytes where `expected` are expected."""
    return CollectiveMismatchError(f"rank {rank} sent {sent} bytes where {expected} are expected here", rank)


def mismatch(receive: Receive) -> CollectiveMismatchError:
    """The error of a message that belongs to another operation at its sender."""
    assert receive.source is not None
    return different(receive.source)


def run_sliced(
    loop: asyncio.AbstractEventLoop,
    total: int,
    itemsize: int,
    action: Callable[[int, int], object],
    then: Callable[[], object],
) -> None:
    """Call `action(start, stop)` over `total` elements, at most SLICE_BYTES at a time, letting the loop run between.

    `then` is called once all is done: within this call when one slice is enough.
    """
    _run_slice(loop, 0, total, max(1, SLICE_BYTES // itemsize), action, then)


def _run_slice(
    loop: asyncio.AbstractEventLoop,
    start: int,
    total: int,
    step: int,
    action: Callable[[int, int], object],
    then: Callable[[], object],
) -> None:
    # No closure, as one that schedules itself refers to itself, and arrays would wait for the garbage collector.
    stop = min(start + step, total)
    action(start, stop)
    if stop >= total:
        then()
    else:
        loop.call_soon(_run_slice, loop, stop, total, step, action, then)
