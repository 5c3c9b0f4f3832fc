"""Flow control: what each side of a connection counts per traffic class, so that memory at the receiver is bounded.

A sender may have CREDIT_BYTES of eager messages on their way or in the unexpected queue, and MAX_OFFERS offers without
an answer. It holds back what exceeds that. It says so once (a stall, numbered), and lets a message go only when there
is room, or when the receiver asks for a message of its key (a credit request: ASK).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.protocol.frame import (
    CREDIT_BYTES,
    EARLY_ID,
    FLAG_END,
    MAX_ASKS,
    POINT_TO_POINT,
    TRAFFIC_CLASSES,
    Kind,
    describe_key,
    pack_header,
)
from asyncdist.transport.protocol.matching import AnySourceTable, ReceiveTable, SourcePeer
from asyncdist.transport.protocol.operations import SendOp
from asyncdist.transport.protocol.output_queue import OutputQueue

__all__ = ["RETURN_CREDIT_BYTES", "Asking", "ReceiveWindow", "SendWindow"]

RETURN_CREDIT_BYTES: Final = CREDIT_BYTES // 4
"""Credit is given back in portions, so that most messages cost no accounting beyond one addition."""


class SendWindow:
    """One traffic class as its sender sees it."""

    __slots__ = ("_held", "_keys", "_last_stall", "_queue", "_traffic", "asked", "credit", "offers", "stall")

    def __init__(self, traffic: int, queue: OutputQueue) -> None:
        self._traffic = traffic
        self._queue = queue
        self._last_stall = 0
        self.credit = CREDIT_BYTES
        self.offers = 0  # made, or about to be, and not answered
        self.stall = 0  # the number of the present stall; 0 when there is none
        self.asked: dict[bytes, int] = {}  # messages the receiver waits for, in this stall
        self._held: OrderedDict[SendOp, None] = OrderedDict()
        self._keys: dict[bytes, deque[SendOp]] = {}

    @property
    def holding(self) -> bool:
        """Whether any message is held back."""
        return bool(self._held)

    @property
    def held_count(self) -> int:
        """How many messages are held back."""
        return len(self._held)

    def hold(self, op: SendOp) -> None:
        """Keep `op` back, behind all others."""
        self._held[op] = None
        self._keys.setdefault(op.key, deque()).append(op)

    def holds(self, key: bytes) -> bool:
        """Whether a message of `key` is held back: then later ones of that key must wait behind it."""
        return key in self._keys

    def oldest(self) -> SendOp | None:
        """The message held back longest."""
        return next(iter(self._held), None)

    def oldest_of(self, key: bytes) -> SendOp | None:
        """The message of `key` held back longest."""
        ops = self._keys.get(key)
        return ops[0] if ops else None

    def release(self, op: SendOp) -> None:
        """Hold `op`, the oldest of its key, no longer."""
        del self._held[op]
        ops = self._keys[op.key]
        ops.popleft()
        if not ops:
            del self._keys[op.key]

    def withdraw(self, op: SendOp) -> bool:
        """Hold `op`, of whatever age, no longer; False if it is not held."""
        if op not in self._held:
            return False
        del self._held[op]
        ops = self._keys[op.key]
        ops.remove(op)
        if not ops:
            del self._keys[op.key]
        return True

    def take_all(self) -> list[SendOp]:
        """Hold nothing any more; returns what was held."""
        ops = list(self._held)
        self._held.clear()
        self._keys.clear()
        return ops

    def drop_group(self, group: bytes) -> list[SendOp]:
        """Hold nothing of `group` any more; returns what was held of it."""
        keys = [key for key in self._keys if key.startswith(group)]
        ops = [op for key in keys for op in self._keys.pop(key)]
        for op in ops:
            del self._held[op]
        return ops

    def begin_stall(self) -> None:
        """From now on what has no room goes only when asked for."""
        self.stall = self._last_stall = self._last_stall % (EARLY_ID - 1) + 1
        self._say_stalled(1)

    def end_stall(self) -> None:
        """There is room again."""
        self.asked.clear()
        self._say_stalled(0)
        self.stall = 0

    def renew_stall(self) -> None:
        """The receiver waits for few of the keys that it has asked for, so all are forgotten and it asks once more.

        Should fewer than a fourth be left to forget, it is about to hear of the others.
        """
        if self.stall and len(self.asked) >= MAX_ASKS // 4:
            self.end_stall()
            self.begin_stall()

    def _say_stalled(self, stalled: int) -> None:
        key = bytes(20) + bytes((self._traffic, 0, 0, 0))
        self._queue.push_data(pack_header(Kind.STALLED, key=key, length=stalled, message_id=self.stall))

    def grant(self, nbytes: int) -> None:
        """The receiver gave credit back."""
        self.credit += nbytes
        if self.credit > CREDIT_BYTES:
            raise RemoteProtocolError(f"the peer gave back {self.credit - CREDIT_BYTES} bytes of credit it never had")

    def ask(self, key: bytes) -> None:
        """The receiver waits for a message of `key` that is not here yet."""
        if len(self.asked) >= MAX_ASKS and key not in self.asked:
            raise RemoteProtocolError(f"the peer asked for more than {MAX_ASKS} keys at a time ({describe_key(key)})")
        self.asked[key] = self.asked.get(key, 0) + 1

    def answer(self, key: bytes) -> bool:
        """Whether a message of `key` that now goes was asked for; counts it as the answer."""
        count = self.asked.get(key, 0)
        if count > 1:
            self.asked[key] = count - 1
        elif count:
            del self.asked[key]
        return count > 0


class ReceiveWindow:
    """One traffic class as its receiver sees it."""

    __slots__ = (
        "_queue",
        "_traffic",
        "asked",
        "owed",
        "renewing",
        "stall",
        "unasked",
        "unexpected_bytes",
        "unexpected_offers",
    )

    def __init__(self, traffic: int, queue: OutputQueue) -> None:
        self._traffic = traffic
        self._queue = queue
        self.owed = 0  # credit of messages that have met their receives, not yet given back
        self.unexpected_bytes = 0
        self.unexpected_offers = 0
        self.stall = 0
        self.asked: dict[bytes, int] = {}
        self.unasked = False  # MAX_ASKS kept us from asking for all we wait for
        self.renewing = False  # and the sender was told to forget what we have asked for

    def owe(self, nbytes: int) -> None:
        """An eager message is no longer in anybody's way: its credit goes back, in portions."""
        self.owed += nbytes
        if self.owed > RETURN_CREDIT_BYTES:
            self._queue.return_credit(self._traffic, self.owed)
            self.owed = 0

    def ask(self, key: bytes, wanted: int) -> bool:
        """Whether to ask once more, when `wanted` messages of `key` are waited for."""
        count = self.asked.get(key, 0)
        if count >= wanted:
            return False
        if not count and len(self.asked) >= MAX_ASKS:
            self.unasked = True
            return False
        self.asked[key] = count + 1
        return True

    def answered(self, key: bytes) -> None:
        """The peer says that this message of `key` answers an ASK."""
        count = self.asked.get(key, 0)
        if count > 1:
            self.asked[key] = count - 1
        elif count:
            del self.asked[key]
        else:
            raise RemoteProtocolError(f"the peer answered what it was not asked ({describe_key(key)})")


class Asking:
    """The receiving side of one peer's stalls. `stalled`: it keeps messages of a traffic class back."""

    __slots__ = ("_any_source", "_owner", "_peer_rank", "_queue", "_table", "_windows", "stalled")

    def __init__(
        self,
        peer_rank: int,
        owner: SourcePeer,
        table: ReceiveTable,
        any_source: AnySourceTable,
        windows: tuple[ReceiveWindow, ...],
        queue: OutputQueue,
    ) -> None:
        self._peer_rank = peer_rank
        self._owner = owner
        self._table = table
        self._any_source = any_source
        self._windows = windows
        self._queue = queue
        self.stalled = False

    def on_stalled(self, key: bytes, stalled: int, number: int) -> None:
        """STALLED: from now on the peer keeps messages back until asked, or no longer does."""
        traffic = key[20]
        if traffic >= TRAFFIC_CLASSES or stalled > 1 or not number:
            raise RemoteProtocolError(f"rank {self._peer_rank} sent a malformed STALLED")
        window = self._windows[traffic]
        if stalled == bool(window.stall) or (not stalled and window.stall != number):
            raise RemoteProtocolError(f"rank {self._peer_rank} began or ended a stall twice")
        window.asked.clear()
        window.unasked = window.renewing = False
        window.stall = number if stalled else 0
        self.stalled = any(window.stall for window in self._windows)
        self._queue.drop_asks(traffic)
        if traffic == POINT_TO_POINT:
            self._any_source.stalled(self._owner, bool(stalled))
        if stalled:
            self._ask_for_all(traffic)

    def answered(self, key: bytes) -> None:
        """A message has come because it was asked for: there may be room to ask for others."""
        traffic = key[20]
        window = self._windows[traffic]
        window.answered(key)
        if window.unasked and len(window.asked) <= MAX_ASKS // 2:
            self._ask_for_all(traffic)

    def ask(self, key: bytes) -> bool:
        """A receive for `key` is posted: if the peer is stalled, have it send one. Whether it is told anything."""
        traffic = key[20]
        window = self._windows[traffic]
        if not window.stall:
            return False
        wanted = self._table.count(key)
        if traffic == POINT_TO_POINT:
            wanted += self._any_source.table.count(key)
        asked = window.ask(key, wanted)
        if asked:
            self._queue.push_control(pack_header(Kind.ASK, key=key, message_id=window.stall))
            return True
        return window.unasked and not window.renewing and self._renew(key)

    def _renew(self, key: bytes) -> bool:
        """Have the stall begin anew if most of what was asked for is waited for no more."""
        window = self._windows[key[20]]
        if len(self._table.entries) + len(self._any_source.entries) > MAX_ASKS // 2:
            return False
        window.renewing = True
        self._queue.push_control(pack_header(Kind.ASK, flags=FLAG_END, key=key, message_id=window.stall))
        return True

    def _ask_for_all(self, traffic: int) -> None:
        self._windows[traffic].unasked = self._windows[traffic].renewing = False
        for receive in self._table:
            if receive.key[20] == traffic:
                self.ask(receive.key)
        if traffic == POINT_TO_POINT:
            for receive in self._any_source.table:
                self.ask(receive.key)
