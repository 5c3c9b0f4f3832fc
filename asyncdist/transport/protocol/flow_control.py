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
    MAX_ASKS,
    POINT_TO_POINT,
    Flag,
    Kind,
    describe_key,
    pack_header,
)
from asyncdist.transport.protocol.matching import ReceiveTable
from asyncdist.transport.protocol.operations import SendOp, SendState
from asyncdist.transport.protocol.output_queue import OutputQueue

RETURN_CREDIT_BYTES: Final = CREDIT_BYTES // 4
"""Credit is given back in portions, so that most messages cost no accounting beyond one addition."""


class SendWindow:
    """One traffic class as its sender sees it."""

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
    def holding(self) -> int:
        """How many messages are held back."""
        return len(self._held)

    def hold(self, op: SendOp) -> None:
        """Keep `op` back, behind all others; a stall begins with the first."""
        op.state = SendState.HELD
        self._held[op] = None
        self._keys.setdefault(op.key, deque()).append(op)
        if not self.stall:
            self.begin_stall()

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

    def release(self, op: SendOp) -> bool:
        """Hold `op` no longer; False if it is not held."""
        if op not in self._held:
            return False
        del self._held[op]
        ops = self._keys[op.key]
        ops.remove(op)  # in nearly all cases the first
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
        return bool(self.asked) and _count_answer(self.asked, key)


class ReceiveWindow:
    """One traffic class as its receiver sees it: what it owes to the sender, and in a stall has asked it for."""

    def __init__(self, traffic: int, queue: OutputQueue, table: ReceiveTable, any_table: ReceiveTable) -> None:
        self._traffic = traffic
        self._queue = queue
        self._table = table
        self._any_table = any_table
        self.owed = 0  # credit of messages that have met their receives, not yet given back
        self.unexpected_bytes = 0
        self.unexpected_offers = 0
        self.stall = 0  # its number: the sender keeps messages back until asked
        self.asked: dict[bytes, int] = {}
        self.unasked = False  # MAX_ASKS kept us from asking for all we wait for
        self.renewing = False  # and the sender was told to forget what we have asked for

    def owe(self, nbytes: int) -> None:
        """An eager message is no longer in anybody's way: its credit goes back, in portions."""
        self.owed += nbytes
        if self.owed > RETURN_CREDIT_BYTES:
            self._queue.return_credit(self._traffic, self.owed)
            self.owed = 0

    def enter_stall(self, number: int) -> None:
        """A stall begins: ask for all that is waited for. 0: it has ended."""
        self.asked.clear()
        self.unasked = self.renewing = False
        self.stall = number
        self._queue.drop_asks(self._traffic)
        if number:
            self._ask_for_all()

    def answered(self, key: bytes) -> None:
        """A message has come because it was asked for: there may be room to ask for others."""
        if not _count_answer(self.asked, key):
            raise RemoteProtocolError(f"the peer answered what it was not asked ({describe_key(key)})")
        if self.unasked and len(self.asked) <= MAX_ASKS // 2:
            self.unasked = self.renewing = False
            self._ask_for_all()

    def ask(self, key: bytes) -> bool:
        """A receive for `key` is posted: in a stall, have the sender send one. Whether the sender is told anything."""
        if not self.stall:
            return False
        wanted = self._table.count(key)
        if self._traffic == POINT_TO_POINT:
            wanted += self._any_table.count(key)
        count = self.asked.get(key, 0)
        if count < wanted and (count or len(self.asked) < MAX_ASKS):
            self.asked[key] = count + 1
            self._queue.push_control(pack_header(Kind.ASK, key=key, message_id=self.stall))
            return True
        self.unasked |= count < wanted
        return self.unasked and not self.renewing and self._renew(key)

    def _renew(self, key: bytes) -> bool:
        """Have the stall begin anew if most of what was asked for is waited for no more."""
        if len(self._table.entries) + len(self._any_table.entries) > MAX_ASKS // 2:
            return False
        self.renewing = True
        self._queue.push_control(pack_header(Kind.ASK, flags=Flag.END, key=key, message_id=self.stall))
        return True

    def _ask_for_all(self) -> None:
        for receive in self._table:
            if receive.key[20] == self._traffic:
                self.ask(receive.key)
        if self._traffic == POINT_TO_POINT:
            for receive in self._any_table:
                self.ask(receive.key)


def _count_answer(asked: dict[bytes, int], key: bytes) -> bool:
    """Ask for one message of `key` less; False if none was asked for."""
    count = asked.get(key, 0)
    if count > 1:
        asked[key] = count - 1
    elif count:
        del asked[key]
    return count > 0
