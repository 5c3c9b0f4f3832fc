"""The unexpected queue: messages of one peer that came before their receives, within the bounds of flow control."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.protocol.frame import (
    CREDIT_BYTES,
    MAX_OFFERS,
    MESSAGE_OVERHEAD_BYTES,
    POINT_TO_POINT,
    describe_key,
)
from asyncdist.transport.protocol.matching import AnySourceTable, UnexpectedWatcher

if TYPE_CHECKING:
    from asyncdist.transport.protocol.receiver import Receiver


@dataclass(slots=True, eq=False)
class UnexpectedMessage:
    """A message that came before its receive: with its payload, or (None) an offer of it.

    `returned`: it had met a receive that was given up, and its sender has its credit back.
    """

    payload: bytes | memoryview | None
    length: int
    meta: bytes
    fingerprint: int
    message_id: int
    arrival: int = 0
    returned: bool = False


class UnexpectedQueue:
    """See the module. Messages are kept by key, in the order in which they came."""

    def __init__(
        self, owner: Receiver, any_source: AnySourceTable, watchers: Mapping[bytes, UnexpectedWatcher]
    ) -> None:
        self._owner = owner
        self._peer_rank = owner.peer_rank
        self._windows = owner.windows
        self._any_source = any_source
        self._watchers = watchers
        self._offers: dict[int, bytes] = {}  # the key of each
        self.queues: dict[bytes, deque[UnexpectedMessage]] = {}

    def add_message(self, key: bytes, payload: bytes | memoryview, meta: bytes, fingerprint: int) -> None:
        """Keep an eager message: `payload` itself. Raises RemoteProtocolError beyond the peer's credit."""
        length = len(payload)
        window = self._windows[key[20]]
        window.unexpected_bytes += length + len(meta) + MESSAGE_OVERHEAD_BYTES
        if window.unexpected_bytes > CREDIT_BYTES:
            raise RemoteProtocolError(f"rank {self._peer_rank} exceeds its credit of {CREDIT_BYTES} bytes")
        self._add(key, UnexpectedMessage(payload, length, meta, fingerprint, 0))

    def add_offer(self, key: bytes, length: int, meta: bytes, fingerprint: int, message_id: int, asked: bool) -> None:
        """Keep an offer. Raises RemoteProtocolError beyond MAX_OFFERS, unless it was `asked` for."""
        window = self._windows[key[20]]
        if window.unexpected_offers >= MAX_OFFERS and not asked:
            raise RemoteProtocolError(f"rank {self._peer_rank} has more than {MAX_OFFERS} offers open")
        window.unexpected_offers += 1
        self._offers[message_id] = key
        self._add(key, UnexpectedMessage(None, length, meta, fingerprint, message_id))

    def _add(self, key: bytes, message: UnexpectedMessage) -> None:
        between_two = key[20] == POINT_TO_POINT  # a receive from any source may take it, so their order counts
        if between_two:
            message.arrival = next(self._any_source.arrivals)
        queue = self.queues.get(key)
        if queue is not None:
            queue.append(message)
            return
        self.queues[key] = deque((message,))
        if between_two:
            self._any_source.holds(key, self._owner)
        watcher = self._watchers.get(key[:8])
        if watcher is not None:
            watcher(self._peer_rank, key, self.queues)

    def put_back(self, key: bytes, payload: bytes, meta: bytes, fingerprint: int) -> None:
        """Keep a point-to-point message that was taken already, ahead of all others of its key."""
        # Its arrival, 0, is before all others' too.
        message = UnexpectedMessage(payload, len(payload), meta, fingerprint, 0, returned=True)
        queue = self.queues.get(key)
        if queue is not None:
            queue.appendleft(message)
            return
        self.queues[key] = deque((message,))
        self._any_source.holds(key, self._owner)

    def check_offer(self, key: bytes, message_id: int) -> None:
        """Raise RemoteProtocolError if `message_id` is on offer already."""
        if message_id in self._offers:
            raise RemoteProtocolError(
                f"rank {self._peer_rank} offered message {message_id} twice ({describe_key(key)})"
            )

    def take(self, key: bytes) -> UnexpectedMessage:
        """Remove and return the oldest message of `key`."""
        queue = self.queues[key]
        message = queue.popleft()
        if not queue:
            self._forget(key)
        self._account(key, message)
        return message

    def withdraw(self, message_id: int) -> bool:
        """Forget the offer `message_id`, so that the messages behind it move up; False if it is not here."""
        key = self._offers.get(message_id)
        if key is None:
            return False
        queue = self.queues[key]
        offer = next(message for message in queue if message.payload is None and message.message_id == message_id)
        queue.remove(offer)
        if not queue:
            self._forget(key)
        self._account(key, offer)
        return True

    def _account(self, key: bytes, message: UnexpectedMessage) -> None:
        window = self._windows[key[20]]
        if message.payload is None:
            window.unexpected_offers -= 1
            self._offers.pop(message.message_id, None)
        elif not message.returned:
            charge = message.length + len(message.meta) + MESSAGE_OVERHEAD_BYTES
            window.unexpected_bytes -= charge
            window.owe(charge)

    def _forget(self, key: bytes) -> None:
        del self.queues[key]
        if key[20] == POINT_TO_POINT:
            self._any_source.holds_none(key, self._owner)

    def drop_group(self, group: bytes) -> list[UnexpectedMessage]:
        """Forget and return the messages of `group`."""
        dropped: list[UnexpectedMessage] = []
        for key in [key for key in self.queues if key.startswith(group)]:
            for message in self.queues[key]:
                self._account(key, message)
                dropped.append(message)
            self._forget(key)
        return dropped

    def forget_offers(self) -> None:
        """The peer is gone: keep what is here whole, and offers, which are errors now, only in front of that."""
        for key, queue in list(self.queues.items()):
            while queue and queue[-1].payload is None:
                queue.pop()
            if not queue:
                self._forget(key)
        self._offers.clear()
