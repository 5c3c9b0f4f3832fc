"""Execution: one collective under way on this rank.

It walks a program's graph: a step starts, in the call or the completion callback that made it ready, as soon as every
step it waits for is done. There is no task and no future per step; the transport reports through the `Sink` methods.

Work on memory (copies, reductions) is cut into slices of at most `SLICE_BYTES` between which the event loop runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from asyncdist.arrays import Array
from asyncdist.errors import DistError, GroupAbortedError
from asyncdist.executor.buffers import Bound
from asyncdist.executor.program import COPY, RECV, REDUCE, SEND, Program
from asyncdist.executor.scratch import ScratchPool
from asyncdist.transport.matching import Receive, SendOp
from asyncdist.transport.peer import PeerCore

__all__ = ["SLICE_BYTES", "Execution", "Kernel", "run_sliced"]

SLICE_BYTES: Final = 1 << 20
"""Bytes of one uninterrupted copy or reduction: about 0.3 ms, so that no callback holds the loop for a millisecond."""

Kernel = Callable[[Array, Array, Array], object]


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
    step = max(1, SLICE_BYTES // itemsize)

    def advance(start: int) -> None:
        stop = min(start + step, total)
        action(start, stop)
        if stop >= total:
            then()
        else:
            loop.call_soon(advance, stop)

    advance(0)


class Execution:
    """One rank's program on bound buffers.

    `peers` maps group ranks to connections. `on_done(execution, error)` is called exactly once: None when every step
    is done, or the first failure, after which the owner must drop the operation's messages and call `stop`.
    """

    __slots__ = (
        "_buffers",
        "_fingerprint",
        "_itemsize",
        "_kernel",
        "_loop",
        "_on_done",
        "_peers",
        "_pending",
        "_pool",
        "_prefix",
        "_program",
        "_remaining",
        "_staging",
        "_stopped",
        "_waiting",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        program: Program,
        buffers: Sequence[Bound],
        peers: Sequence[PeerCore | None],
        prefix: bytes,
        fingerprint: int,
        itemsize: int,
        kernel: Kernel | None,
        pool: ScratchPool,
        on_done: Callable[[Execution, BaseException | None], None],
    ) -> None:
        self._loop = loop
        self._program = program
        self._buffers = buffers
        self._peers = peers
        self._prefix = prefix
        self._fingerprint = fingerprint
        self._itemsize = itemsize
        self._kernel = kernel
        self._pool = pool
        self._on_done = on_done
        self._pending = program.pending.copy()
        self._remaining = len(program.kinds)
        self._waiting: set[int] = set()
        self._staging: dict[int, Array] = {}
        self._stopped = False

    def start(self) -> None:
        """Start every step that waits for none; may call `on_done` at once."""
        if self._remaining == 0:
            self._stopped = True
            self._on_done(self, None)
        else:
            self._advance(list(self._program.ready))

    def stop(self) -> None:
        """Forget the operation: later callbacks of the transport are ignored."""
        self._stopped = True
        for staging in self._staging.values():
            self._pool.give(staging)
        self._staging.clear()

    def waiting_for(self) -> tuple[int, ...]:
        """Group ranks whose messages have not come."""
        peers, kinds = self._program.peers, self._program.kinds
        receives = {peers[index] for index in self._waiting if kinds[index] != SEND}
        return tuple(sorted(receives or {peers[index] for index in self._waiting}))

    def _advance(self, ready: list[int]) -> None:
        pending, successors = self._pending, self._program.successors
        try:
            for index in ready:  # grows while it is walked: steps start in the order in which they became ready
                if self._stopped:
                    return
                if self._issue(index):
                    self._remaining -= 1
                    for successor in successors[index]:
                        pending[successor] -= 1
                        if not pending[successor]:
                            ready.append(successor)
        except DistError as error:  # a peer that is gone already refuses messages at once
            self.message_failed(None, error)
            return
        if not self._remaining and not self._stopped:
            self._stopped = True
            self._on_done(self, None)

    def _complete(self, index: int) -> None:
        if self._stopped:
            return
        self._remaining -= 1
        pending = self._pending
        ready = []
        for successor in self._program.successors[index]:
            pending[successor] -= 1
            if not pending[successor]:
                ready.append(successor)
        self._advance(ready)

    def _issue(self, index: int) -> bool:
        """Start a step; True if it is done already."""
        program = self._program
        kind = program.kinds[index]
        buffer, start, length = program.places[index]
        if kind == SEND:
            payload = self._buffers[buffer].octets(start, start + length)
            key = self._prefix + program.suffixes[index]
            send = SendOp(key, payload, b"", self, index, self._fingerprint)
            if self._peers[program.peers[index]].post_send(send):  # type: ignore[union-attr]
                return True
            self._waiting.add(index)
            return False
        if kind == RECV:
            target = self._buffers[buffer].octets(start, start + length)
            receive = Receive(self._prefix + program.suffixes[index], target, self, index)
            if self._peers[program.peers[index]].post_receive(receive):  # type: ignore[union-attr]
                return True
            self._waiting.add(index)
            return False
        if kind in (REDUCE, COPY):
            return self._issue_local(index, kind)
        return self._issue_recv_reduce(index, length)

    def _issue_recv_reduce(self, index: int, length: int) -> bool:
        program = self._program
        nbytes = length * self._itemsize
        staging = self._staging[index] = self._pool.take(nbytes)
        receive = Receive(self._prefix + program.suffixes[index], staging.data, self, index)
        if self._peers[program.peers[index]].post_receive(receive):  # type: ignore[union-attr]
            return self._reduce_staged(index)
        self._waiting.add(index)
        return False

    def _reduce_staged(self, index: int) -> bool:
        buffer, start, length = self._program.places[index]
        target = self._buffers[buffer].elements(start, start + length)
        staging = self._staging[index]
        incoming = staging[: length * self._itemsize].view(target.dtype)

        def then() -> None:
            self._pool.give(self._staging.pop(index))

        return self._local(index, length, self._combine(incoming, target, self._program.lefts[index]), then)

    def _issue_local(self, index: int, kind: int) -> bool:
        program = self._program
        buffer, start, length = program.places[index]
        target = self._buffers[buffer].elements(start, start + length)
        buffer, start, length = program.sources[index]
        source = self._buffers[buffer].elements(start, start + length)
        if kind == COPY:

            def copy(first: int, last: int) -> None:
                target[first:last] = source[first:last]

            return self._local(index, length, copy, _nothing)
        return self._local(index, length, self._combine(source, target, program.lefts[index]), _nothing)

    def _combine(self, incoming: Array, target: Array, incoming_left: bool) -> Callable[[int, int], object]:
        kernel = self._kernel
        assert kernel is not None, "a plan that reduces was given no reduction"
        if incoming_left:
            return lambda first, last: kernel(incoming[first:last], target[first:last], target[first:last])
        return lambda first, last: kernel(target[first:last], incoming[first:last], target[first:last])

    def _local(self, index: int, length: int, action: Callable[[int, int], object], then: Callable[[], object]) -> bool:
        """Do a step on memory: at once if it is small (True), else in slices with the loop running between (False)."""
        if length * self._itemsize <= SLICE_BYTES:
            action(0, length)
            then()
            return True

        def guarded(first: int, last: int) -> None:
            if not self._stopped:
                action(first, last)

        def finish() -> None:
            if not self._stopped:
                then()
                self._complete(index)

        # Even the first slice waits for the loop's next turn: `finish` must not run inside `_advance`.
        self._loop.call_soon(run_sliced, self._loop, length, self._itemsize, guarded, finish)
        return False

    # What the transport reports.

    def message_sent(self, token: Any) -> None:
        """A send's buffer may be reused."""
        if not self._stopped:
            self._waiting.discard(token)
            self._complete(token)

    def message_received(self, token: Any, receive: Receive) -> None:
        """A message is in its place (or in staging, to be reduced)."""
        if self._stopped:
            return
        self._waiting.discard(token)
        if token in self._staging and not self._reduce_staged(token):
            return
        self._complete(token)

    def message_failed(self, token: Any, error: BaseException) -> None:
        """A message cannot come or go any more.

        GroupAbortedError means that the peer gave the operation up; why, its or another rank's control message says,
        and until that is here the operation waits.
        """
        if not self._stopped and not isinstance(error, GroupAbortedError):
            self._stopped = True
            self._on_done(self, error)

    def allocate(self, token: Any, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Never called: every receive of a plan names its target."""
        raise AssertionError("a plan's receives have targets")


def _nothing() -> None:
    pass
