"""OutputQueue: what waits to be written to one connection, in which order, and what each write completed.

Order of writing: the rest of a frame begun, returned credit, control frames, data frames and offers (first in, first
out, so that messages of one key keep their order), then a fragment of each message being pulled in turn. Nothing but a
begun frame is ever committed to, so a control frame waits behind at most FRAGMENT_BYTES.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.protocol.frame import (
    COLLECTIVE,
    CREDIT_BYTES,
    FRAGMENT_BYTES,
    HEADER_BYTES,
    JOIN_BYTES,
    MAX_BUFFERS,
    MAX_CALL_BYTES,
    MAX_REPLIES,
    TRAFFIC_CLASSES,
    Flag,
    Kind,
    pack_fragment,
    pack_header,
)
from asyncdist.transport.protocol.operations import SendOp, SendState

Buffer: TypeAlias = bytes | memoryview

Writer: TypeAlias = Callable[[Sequence[Buffer]], int]
"""Non-blocking gather write: takes buffers, returns how many bytes the OS accepted (0 when it would block).

It must not raise for a broken connection: it notes the error, returns 0, and fails the core from the loop.
"""

Arm: TypeAlias = Callable[[], None]
"""Called when output is left over: `flush()` must be called once the socket is writable. May be called repeatedly."""


def rest_of(buffers: list[Buffer], sent: int) -> tuple[list[Buffer], int]:
    """What is left of `buffers` after `sent` bytes, and what is left of `sent` after `buffers`."""
    rest: list[Buffer] = []
    for buffer in buffers:
        if sent >= len(buffer):
            sent -= len(buffer)
        else:
            rest.append(memoryview(buffer)[sent:])
            sent = 0
    return rest, sent


def refuse(buffers: Sequence[Buffer]) -> int:
    """A writer before its connection is open, and after its end."""
    return 0


def nothing() -> None:
    """The same for `Arm`."""


URGENT_CREDIT_BYTES: Final = CREDIT_BYTES // 2
"""Credit owed from which a frame of its own returns it; less goes along with whatever is written next."""

_SENT: Final = SendState.SENT
_TRAFFIC_AT: Final = 28
"""Where in a frame its key names the traffic class."""
_DATA: Final = 0
_CONTROL: Final = 1
_FRAGMENT: Final = 2

_Frame: TypeAlias = tuple[int, bytes, memoryview | None, int, SendOp | None, int]
"""Bytes in all, head, payload, which queue it came from, its operation, offset of the payload in the message (or, for
a data frame without payload, the id it offers)."""


class OutputQueue:
    """See the module. `clear` says that nothing waits and a frame may be written past the queue."""

    def __init__(self) -> None:
        self.writer: Writer = refuse
        self._arm: Arm = nothing
        self.clear = False
        self.urgent = False  # something waits that only `kick` causes to be written
        self.flushing = False
        self.broken = False
        self.closed = False  # GOODBYE is queued: nothing may follow it
        self.streaming: dict[int, SendOp] = {}
        self.posting: SendOp | None = None  # its completion is told by a return value instead of the sink
        self.blocked = True  # until the shell calls flush
        self.write_bytes = FRAGMENT_BYTES
        """What the writer gets at a time. While a socket is in one long call, the kernel puts off what the receiver
        acknowledges, and the two take turns instead of copying at the same time (1.6 times as long for 1 MiB). Where
        both want the same core they take turns anyway, and more of them only cost."""
        self._control: deque[bytes] = deque()
        self._replies = 0
        self._data: deque[tuple[bytes, SendOp | None, int]] = deque()
        self._streams: deque[SendOp] = deque()
        self._credit_due = [0] * TRAFFIC_CLASSES
        self._begun: list[Buffer] = []
        self._begun_op: SendOp | None = None
        self._begun_final = False

    def open(self, writer: Writer, arm: Arm) -> None:
        """Write from now on."""
        self.writer = writer
        self._arm = arm
        self.blocked = False
        self.clear = not self.waiting

    @property
    def waiting(self) -> bool:
        """Whether anything is to be written, credit aside."""
        return bool(self._begun or self._control or self._data or self._streams)

    def push_control(self, frame: bytes) -> None:
        """Queue a frame that goes ahead of all messages."""
        if self.closed:
            return
        self._control.append(frame)
        self.clear = False
        self.urgent = True

    def push_reply(self, frame: bytes) -> None:
        """Queue an answer that the peer caused; a peer that causes them without reading is cut off."""
        self._replies += 1
        if self._replies > MAX_REPLIES:
            raise RemoteProtocolError(f"the peer does not read: {MAX_REPLIES} answers to it wait")
        self.push_control(frame)

    def drop_asks(self, traffic: int) -> None:
        """The peer's stall has ended, or begins: what asked for messages of an earlier one says nothing any more."""
        if any(frame[0] == Kind.ASK for frame in self._control):
            kept = [frame for frame in self._control if frame[0] != Kind.ASK or frame[_TRAFFIC_AT] != traffic]
            self._control = deque(kept)

    def push_data(self, head: bytes, op: SendOp | None = None, offer_id: int = 0) -> None:
        """Queue a frame that keeps its place among messages.

        With `op` alone, its payload follows the head. With `offer_id`, the head offers `op` under that id and is left
        out if `op._id` has become another by the time it is written: such an offer must not be made.
        """
        if self.closed:
            return
        self._data.append((head, op, offer_id))
        self.clear = False
        self.urgent = True

    def push_stream(self, op: SendOp) -> None:
        """Start sending `op` in fragments; `op._id` is the pull's."""
        op._offset = 0
        self.streaming[op._id] = op
        self._streams.append(op)
        self.clear = False
        self.urgent = True

    def push_exposed(self, frame: bytes, op: SendOp) -> None:
        """Queue the frame that exposes `op`, which is under way until `end_exposed`; `op._id` is the pull's."""
        self.streaming[op._id] = op
        self.push_data(frame, op, op._id)

    def end_exposed(self, op: SendOp) -> None:
        """The peer copies `op` no more. If the frame that exposes it is not written yet, it never will be."""
        del self.streaming[op._id]
        op._id = 0

    @property
    def exposing(self) -> bool:
        """Whether any message is exposed."""
        return any(op.state is SendState.EXPOSED for op in self.streaming.values())

    def return_credit(self, traffic: int, nbytes: int) -> None:
        """Give the peer credit back with the next write, or at once if it is much."""
        if self.closed:
            return
        due = self._credit_due[traffic] = self._credit_due[traffic] + nbytes
        self.clear = False
        if due > URGENT_CREDIT_BYTES:
            self.urgent = True

    def begin(self, rest: list[Buffer], op: SendOp | None) -> None:
        """The fast path wrote a frame in part: `rest` goes next, and completes `op`."""
        self._begun = rest
        self._begun_op = op
        self._begun_final = op is not None
        self._block()

    def stop_stream(self, op: SendOp) -> bool:
        """Send no more fragments of `op`; False if the last was sent or begun: then it completes by itself.

        True: the caller completes it, unless `finishing` says that a begun fragment still will.
        """
        if op.state is SendState.EXPOSED:
            self.end_exposed(op)
            return True
        try:
            self._streams.remove(op)
        except ValueError:
            return False
        del self.streaming[op._id]
        op._id = 0
        if self._begun_op is op:
            self._begun_final = True
        return True

    def finishing(self, op: SendOp) -> bool:
        """Whether a begun frame will complete `op`."""
        return self._begun_op is op

    def flush(self) -> bool:
        """Write, at most MAX_CALL_BYTES, about `write_bytes` at a time. True: nothing is left."""
        if self.flushing or not self._usable():
            return False
        self.flushing = True
        self.blocked = False
        try:
            budget = MAX_CALL_BYTES
            while budget > 0:
                frames, nbytes = self._gather(min(budget, self.write_bytes))
                if not nbytes:
                    self.clear = True
                    self.urgent = False
                    return True
                sent = self.writer(self._buffers(frames))
                budget -= nbytes
                self._commit(frames, sent)
                if not self._usable():  # a sink failed the connection
                    return False
                if sent < nbytes:
                    break
            self._block()
            return False
        finally:
            self.flushing = False

    def _usable(self) -> bool:
        return not self.broken and self.writer is not refuse

    def _block(self) -> None:
        self.clear = False
        self.blocked = True
        self._arm()

    def _gather(self, budget: int) -> tuple[list[_Frame], int]:
        """Take frames off the queues, up to `budget` bytes or a little more."""
        frames: list[_Frame] = []
        nbytes = sum(map(len, self._begun))
        for traffic, due in enumerate(self._credit_due):
            if due:
                flags = Flag.CREDIT_COLLECTIVE if traffic == COLLECTIVE else 0
                self._control.appendleft(pack_header(Kind.CREDIT, flags=flags, credit=due))
                self._credit_due[traffic] = 0
        control = self._control
        while control and nbytes < budget and len(frames) < MAX_BUFFERS:
            head = control.popleft()
            frames.append((len(head), head, None, _CONTROL, None, 0))
            nbytes += len(head)
        if not control:
            self._replies = 0
        data = self._data
        while data and nbytes < budget and len(frames) < MAX_BUFFERS:
            head, op, offer_id = data.popleft()
            size = len(head)
            payload = None
            if op is not None:
                if not offer_id:
                    payload = op.payload
                    size += len(payload)
                elif op._id != offer_id:
                    continue
            frames.append((size, head, payload, _DATA, op, offer_id))
            nbytes += size
        streams = self._streams
        while streams and nbytes < budget and len(frames) < MAX_BUFFERS:
            frame = self._next_fragment(streams.popleft())
            frames.append(frame)
            nbytes += frame[0]
        return frames, nbytes

    def _next_fragment(self, op: SendOp) -> _Frame:
        offset = op._offset
        payload = op.payload[offset : offset + FRAGMENT_BYTES]
        size = len(payload)
        op._offset = offset + size
        if op._offset < len(op.payload):
            self._streams.append(op)
        return HEADER_BYTES + size, pack_fragment(op._id, offset, size, op.fingerprint), payload, _FRAGMENT, op, offset

    def _buffers(self, frames: list[_Frame]) -> list[Buffer]:
        """What to hand to the writer: large payloads as they are, runs of small parts joined."""
        buffers: list[Buffer] = list(self._begun)
        run: list[Buffer] = []
        for _, head, payload, _, _, _ in frames:
            run.append(head)
            if payload is None:
                continue
            if len(payload) <= JOIN_BYTES:
                run.append(payload)
                continue
            buffers.append(b"".join(run) if len(run) > 1 else head)
            buffers.append(payload)
            run = []
        if run:
            buffers.append(b"".join(run))
        return buffers

    def _commit(self, frames: list[_Frame], sent: int) -> None:
        """Settle a write: complete what went out whole, keep the rest of a begun frame, put back all others."""
        done: list[SendOp] = []
        if self._begun:
            self._begun, sent = rest_of(self._begun, sent)
            if not self._begun:
                if self._begun_final and self._begun_op is not None:
                    done.append(self._begun_op)
                self._begun_op = None
        written = 0
        for frame in frames:
            if sent < frame[0]:
                break
            sent -= frame[0]
            written += 1
            op = frame[4]
            if op is not None and _completes(frame, op):
                done.append(op)
        if sent:
            self._begin_frame(frames[written], sent)
            written += 1
        for frame in reversed(frames[written:]):
            self._put_back(frame)
        for op in done:
            self._complete(op)

    def _begin_frame(self, frame: _Frame, sent: int) -> None:
        _, head, payload, _, op, _ = frame
        parts: list[Buffer] = [head] if payload is None else [head, payload]
        self._begun, _ = rest_of(parts, sent)
        self._begun_op = op if payload is not None else None
        self._begun_final = op is not None and _completes(frame, op)

    def _put_back(self, frame: _Frame) -> None:
        _, head, _, queue, op, offset = frame
        if queue == _CONTROL:
            self._control.appendleft(head)
        elif queue == _DATA:
            self._data.appendleft((head, op, offset))
        elif op is not None:
            if op._offset == len(op.payload):
                self._streams.appendleft(op)
            op._offset = offset

    def _complete(self, op: SendOp) -> None:
        if op._id:
            self.streaming.pop(op._id, None)
        posted = op is self.posting
        if posted:
            self.posting = None
        if op.state < _SENT:
            op.state = _SENT
            if not posted:
                op.sink.message_sent(op.token)

    def drop_group(self, group: bytes) -> list[tuple[SendOp, int]]:
        """Forget the messages of `group`; returns those of which nothing was written, with the id offered or 0.

        The rest of a frame begun is copied, so that every payload is free to change when this returns.
        """
        unsent = [entry for entry in self._data if entry[1] is not None and entry[1].key.startswith(group)]
        if unsent:
            self._data = deque(entry for entry in self._data if entry[1] is None or not entry[1].key.startswith(group))
        if self._begun_op is not None and self._begun_op.key.startswith(group):
            self._begun_op.drop()
            self.detach(self._begun_op)
        return [(op, offer_id) for _, op, offer_id in unsent if op is not None]

    def withdraw(self, op: SendOp) -> bool:
        """Forget the unwritten frame of `op`; False if there is none, or the peer has asked for it."""
        entry = next((entry for entry in self._data if entry[1] is op), None)
        if entry is None or entry[0][1] & Flag.ASKED:
            return False
        self._data.remove(entry)
        return True

    def detach(self, op: SendOp) -> None:
        """If a frame of `op` is begun, let the rest go from a copy, and complete nothing."""
        if self._begun_op is op:
            self._begun, self._begun_op, self._begun_final = [b"".join(self._begun)], None, False
            self.streaming.pop(op._id, None)

    def take_all(self) -> list[SendOp]:
        """The connection is gone: forget everything and return the operations that were waiting here."""
        self.broken = True
        self.clear = False
        ops = [op for _, op, offer_id in self._data if op is not None and not offer_id]
        ops.extend(self.streaming.values())
        if self._begun_op is not None:
            ops.append(self._begun_op)
        self._control.clear()
        self._data.clear()
        self._streams.clear()
        self._begun = []
        self._begun_op = None
        self.streaming.clear()
        self.writer, self._arm = refuse, nothing
        return ops


def _completes(frame: _Frame, op: SendOp) -> bool:
    """Whether nothing of `op` is left to write after `frame`."""
    payload = frame[2]
    return payload is not None and frame[5] + len(payload) == len(op.payload)
