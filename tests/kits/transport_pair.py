"""Two or more connection cores joined by byte queues, and a sink that remembers; no sockets, no loop."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from asyncdist.transport.protocol.frame import pack_key
from asyncdist.transport.protocol.matching import AnySourceTable, DroppedGroups
from asyncdist.transport.protocol.operations import Receive, SendOp
from asyncdist.transport.protocol.peer import PeerCore

GROUP = 7
GROUP_BYTES = pack_key(GROUP, 0, 0, 0, 0)[:8]


def p2p(tag: int, group: int = GROUP) -> bytes:
    """The key of a point-to-point message."""
    return pack_key(group, tag, 0, 0, 0)


def collective(slot: int, group: int = GROUP) -> bytes:
    """The key of a collective's message."""
    return pack_key(group, 0, 1, slot, 1)


class Recorder:
    """A sink that remembers what it is told, and fails on being told twice."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.received: dict[Any, Receive] = {}
        self.failed: dict[Any, BaseException] = {}
        self.arrays: dict[Any, bytearray] = {}
        self.refuse: dict[Any, Exception] = {}
        self.order: list[Any] = []

    def _once(self, token: Any) -> None:
        assert token not in self.sent, token
        assert token not in self.received, token
        assert token not in self.failed, token
        self.order.append(token)

    def message_sent(self, token: Any) -> None:
        self._once(token)
        self.sent.append(token)

    def message_received(self, token: Any, receive: Receive) -> None:
        self._once(token)
        self.received[token] = receive

    def message_failed(self, token: Any, error: BaseException) -> None:
        self._once(token)
        self.failed[token] = error

    def allocate(self, token: Any, source: int, nbytes: int, meta: bytes) -> memoryview:
        if token in self.refuse:
            raise self.refuse[token]
        self.arrays[token] = bytearray(nbytes)
        return memoryview(self.arrays[token])


class Wire:
    """One direction of a connection: what `source` writes comes to `target` when `deliver` is called."""

    def __init__(self, source: PeerCore, target: PeerCore, rng: random.Random | None = None) -> None:
        self.source = source
        self.target = target
        self.rng = rng
        self.capacity = 1 << 60
        self.bytes = bytearray()
        self.armed = False
        self.written: list[int] = []

    def open(self) -> None:
        self.source.open(self._write, self._arm)

    def _write(self, buffers: Sequence[bytes | memoryview]) -> int:
        data = b"".join(buffers)
        room = max(0, self.capacity - len(self.bytes))
        if self.rng is not None and self.rng.random() < 0.3:
            room = min(room, self.rng.choice((0, 1, 47, 48, 49, 1000, self.rng.randrange(1 << 18))))
        self.bytes += data[:room]
        self.written.append(min(room, len(data)))
        return min(room, len(data))

    def _arm(self) -> None:
        self.armed = True

    def deliver(self, limit: int | None = None, step: int | None = None) -> bool:
        """Bring up to `limit` bytes across, `step` at a time; True if anything happened."""
        moved = 0
        if self.armed:
            self.armed = False
            before = len(self.bytes)
            if not self.source.flush():
                self.armed = True
            moved += len(self.bytes) != before
        while self.bytes and (limit is None or moved < limit):
            view = self.target.get_buffer()
            assert len(view) > 0
            count = min(len(view), len(self.bytes))
            if step is not None:
                count = min(count, step)
            if self.rng is not None and self.rng.random() < 0.5:
                count = min(count, self.rng.choice((1, 7, 48, 4096, count)))
            view[:count] = self.bytes[:count]
            del self.bytes[:count]
            self.target.buffer_updated(count)
            moved += count
        return bool(moved) or self.armed


class Pair:
    """Ranks 0 (`a`) and 1 (`b`), connected."""

    def __init__(self, rng: random.Random | None = None, opened: bool = True) -> None:
        self.controls: list[tuple[int, int, bytes]] = []
        self.any_source = AnySourceTable(), AnySourceTable()
        self.dropped = DroppedGroups(), DroppedGroups()
        self.a = self._core(0, 1)
        self.b = self._core(1, 0)
        self.ab = Wire(self.a, self.b, rng)
        self.ba = Wire(self.b, self.a, rng)
        if opened:
            self.open()

    def _core(self, rank: int, peer: int) -> PeerCore:
        def control(source: int, payload: bytes) -> None:
            self.controls.append((rank, source, payload))

        return PeerCore(rank, peer, control, any_source=self.any_source[rank], dropped=self.dropped[rank])

    def open(self) -> None:
        self.ab.open()
        self.ba.open()

    def run(self) -> None:
        """Deliver until nothing moves."""
        for _ in range(100_000):
            if not (self.ab.deliver() | self.ba.deliver()):
                return
        raise AssertionError("the two cores never come to rest")

    def drop_group(self, rank: int, group: bytes = GROUP_BYTES) -> None:
        self.dropped[rank].add(group)
        self.any_source[rank].drop_group(group)
        (self.a, self.b)[rank].drop_group(group)


def send(core: PeerCore, sink: Recorder, key: bytes, data: bytes, token: Any = None, meta: bytes = b"") -> SendOp:
    """Post a send; if it is complete at once, `sink` is told here."""
    op = SendOp(key, memoryview(data), meta, sink, token)
    if core.post_send(op):
        sink.message_sent(token)
    return op


def receive(core: PeerCore, sink: Recorder, key: bytes, nbytes: int | None, token: Any = None) -> Receive:
    """Post a receive of `nbytes` bytes, or (None) of whatever comes; `sink.arrays[token]` is its memory."""
    target = None
    if nbytes is not None:
        sink.arrays[token] = bytearray(nbytes)
        target = memoryview(sink.arrays[token])
    posted = Receive(key, target, sink, token)
    if core.post_receive(posted):
        sink.message_received(token, posted)
    return posted
