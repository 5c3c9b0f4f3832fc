"""Offers: what the sending half has offered and not heard of again, and what the peer pulled before it was offered."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.protocol.credit import SendWindow
from asyncdist.transport.protocol.frame import COLLECTIVE, EARLY_ID, EARLY_PULL_BYTES, MAX_EARLY_PULLS, describe_key
from asyncdist.transport.protocol.matching import SendOp

__all__ = ["WITHDRAWN", "EarlyPulls", "Offers"]

_NO_PAYLOAD = memoryview(b"")

WITHDRAWN: Final = -2
"""Offset of an operation that is: its pull was answered before it came."""


class Offers:
    """Offered messages by id. One that is dropped stays, marked as settled, until the peer has answered."""

    __slots__ = ("_by_id", "_collective", "_next_id", "_windows")

    def __init__(self, windows: tuple[SendWindow, ...]) -> None:
        self._windows = windows
        self._by_id: dict[int, SendOp] = {}
        self._collective: dict[bytes, SendOp] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def wanted(self) -> bool:
        """Whether anyone here still waits for an answer."""
        return any(not op._settled for op in self._by_id.values())

    def add(self, op: SendOp, taken: Container[int]) -> None:
        """Give `op` an id that is not `taken`, and keep it."""
        message_id = self._next_id
        while message_id in self._by_id or message_id in taken:
            message_id = message_id + 1 if message_id + 1 < EARLY_ID else 1
        self._next_id = message_id + 1 if message_id + 1 < EARLY_ID else 1
        op._id = message_id
        self._by_id[message_id] = op
        self._windows[op.key[20]].offers += 1
        if op.key[20] == COLLECTIVE:
            self._collective[op.key] = op

    def collective(self, key: bytes) -> SendOp | None:
        """The offered collective message of `key`."""
        return self._collective.get(key)

    def answered(self, message_id: int) -> SendOp | None:
        """The offer has its answer: it is none any more."""
        op = self._by_id.pop(message_id, None)
        if op is not None:
            self._windows[op.key[20]].offers -= 1
            if self._collective.get(op.key) is op:
                del self._collective[op.key]
        return op

    def unmake(self, op: SendOp, message_id: int) -> None:
        """The offer was never sent."""
        if self._by_id.get(message_id) is op:
            self.answered(message_id)

    def drop_group(self, group: bytes) -> None:
        """Nobody here wants the messages of `group` delivered any more; their payload is free."""
        for op in self._by_id.values():
            if op.key.startswith(group):
                self._let_go(op)

    def withdraw(self, op: SendOp) -> bool:
        """The same for `op`; False if it is not on offer."""
        if self._by_id.get(op._id) is not op:
            return False
        self._let_go(op)
        op._offset = WITHDRAWN
        return True

    @staticmethod
    def _let_go(op: SendOp) -> None:
        op._settled = True
        op.payload = _NO_PAYLOAD

    def take_all(self) -> list[SendOp]:
        """No answer will come: forget and return all."""
        ops = list(self._by_id.values())
        self._by_id.clear()
        self._collective.clear()
        for window in self._windows:
            window.offers = 0
        return ops


class EarlyPulls:
    """Pulls of collective messages not posted here yet: key to id and length."""

    __slots__ = ("_by_id", "_by_key", "_peer_rank")

    def __init__(self, peer_rank: int) -> None:
        self._peer_rank = peer_rank
        self._by_key: dict[bytes, tuple[int, int]] = {}
        self._by_id: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def check(self, key: bytes, length: int, message_id: int, streaming: Container[int]) -> None:
        """Raise RemoteProtocolError unless the peer may pull this."""
        if key in self._by_key or message_id in self._by_id or message_id in streaming:
            raise RemoteProtocolError(f"rank {self._peer_rank} pulled one message twice ({describe_key(key)})")
        if key[20] != COLLECTIVE or length <= EARLY_PULL_BYTES:
            raise RemoteProtocolError(f"rank {self._peer_rank} pulled early what it must not ({describe_key(key)})")
        if len(self._by_key) >= MAX_EARLY_PULLS:
            raise RemoteProtocolError(f"rank {self._peer_rank} has more than {MAX_EARLY_PULLS} early pulls")

    def add(self, key: bytes, length: int, message_id: int) -> None:
        """Keep a pull until its message is posted, or it is canceled."""
        self._by_key[key] = message_id, length
        self._by_id[message_id] = key

    def take(self, key: bytes, length: int) -> int:
        """Remove and return the id of the pull of just this message; 0 if there is none."""
        message_id, wanted = self._by_key.get(key, (0, 0))
        if not message_id or wanted != length:
            return 0
        del self._by_key[key], self._by_id[message_id]
        return message_id

    def cancel(self, message_id: int) -> bool:
        """Forget a pull; False if there is none of that id."""
        key = self._by_id.pop(message_id, None)
        if key is None:
            return False
        del self._by_key[key]
        return True

    def drop_group(self, group: bytes) -> list[int]:
        """Forget the pulls of `group` and return their ids."""
        keys = [key for key in self._by_key if key.startswith(group)]
        ids = [self._by_key.pop(key)[0] for key in keys]
        for message_id in ids:
            del self._by_id[message_id]
        return ids

    def clear(self) -> None:
        """Forget all."""
        self._by_key.clear()
        self._by_id.clear()
