"""What each side of a connection counts per channel, so that memory at the receiver is bounded.

A sender may have CREDIT_BYTES of eager messages under way or parked and MAX_OFFERS offers unanswered. What exceeds
that it holds back, says so once (a stall, numbered), and lets a message go only for room or when asked for its key.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.protocol.frame import CREDIT_BYTES, EARLY_ID, MAX_ASKS, Kind, describe_key, pack_header
from asyncdist.transport.protocol.matching import SendOp
from asyncdist.transport.protocol.output import OutputQueue

__all__ = ["RETURN_CREDIT_BYTES", "ReceiveWindow", "SendWindow"]

RETURN_CREDIT_BYTES: Final = CREDIT_BYTES // 4
"""Credit is given back in portions, so that most messages cost no accounting beyond one addition."""


class SendWindow:
    """One channel as its sender sees it."""

    __slots__ = ("_channel", "_held", "_keys", "_last_stall", "_queue", "asked", "credit", "offers", "stall")

    def __init__(self, channel: int, queue: OutputQueue) -> None:
        self._channel = channel
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
        key = bytes(20) + bytes((self._channel, 0, 0, 0))
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
    """One channel as its receiver sees it."""

    __slots__ = (
        "_channel",
        "_queue",
        "asked",
        "owed",
        "parked_bytes",
        "parked_offers",
        "renewing",
        "stall",
        "unasked",
    )

    def __init__(self, channel: int, queue: OutputQueue) -> None:
        self._channel = channel
        self._queue = queue
        self.owed = 0  # credit used by messages that are no longer parked, not yet given back
        self.parked_bytes = 0
        self.parked_offers = 0
        self.stall = 0
        self.asked: dict[bytes, int] = {}
        self.unasked = False  # MAX_ASKS kept us from asking for all we wait for
        self.renewing = False  # and the sender was told to forget what we have asked for

    def owe(self, nbytes: int) -> None:
        """An eager message is no longer in anybody's way: its credit goes back, in portions."""
        self.owed += nbytes
        if self.owed > RETURN_CREDIT_BYTES:
            self._queue.return_credit(self._channel, self.owed)
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
