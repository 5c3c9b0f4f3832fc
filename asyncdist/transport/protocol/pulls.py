"""Pulls: the messages this end has asked to be sent, each a stream of fragments into its place.

A large collective message is pulled early, at the post of its receive and before it was offered, as its key is unique:
that saves a round trip. Its id is ours; the id of an offered message is the sender's. An entry stays until the sender
ends the stream, even if nobody wants it any more, so both ends always agree on which ids are in use.
"""

from __future__ import annotations

from typing import Final

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.protocol.frame import EARLY_ID, FRAGMENT_BYTES, MAX_EARLY_PULLS, Kind, pack_header
from asyncdist.transport.protocol.matching import Receive
from asyncdist.transport.protocol.output import OutputQueue

__all__ = ["COPIED", "COPYING", "NOT_COPIED", "NOT_LENT", "EarlyStream", "Pulls", "Stream"]

NOT_LENT: Final = 0
COPYING: Final = 1
COPIED: Final = 2
NOT_COPIED: Final = 3  # it could not be read, and travels
"""Where a message stands that its sender may have lent."""

_LAST_EARLY_ID: Final = 2 * EARLY_ID - 1


class Stream:
    """A message on its way into `view`: pulled, or eager and only partly here.

    `receive` and `view` are None once nobody wants it: the rest is thrown away. `early_key` is set while it is an early
    pull without an answer.
    """

    __slots__ = ("early_key", "lent", "offset", "receive", "total", "view")

    def __init__(
        self, receive: Receive | None, view: memoryview | None, total: int, early_key: bytes | None = None
    ) -> None:
        self.receive = receive
        self.view = view
        self.total = total
        self.offset = 0
        self.lent = NOT_LENT
        self.early_key = early_key

    def abandon(self) -> None:
        """Write nowhere any more."""
        self.receive = None
        self.view = None

    def belongs_to(self, group: bytes) -> bool:
        """Whether someone of `group` still wants it."""
        return self.receive is not None and self.receive.key.startswith(group)


class EarlyStream(Stream):
    """An eager message that no receive waits for, on its way into memory of its own."""

    __slots__ = ("envelope",)

    def __init__(self, meta: bytes, fingerprint: int, key: bytes, length: int) -> None:
        super().__init__(None, memoryview(bytearray(length)), length)
        self.envelope = meta, fingerprint, key


class Pulls:
    """See the module. `by_id` are all open pulls; `begun` counts those of which a fragment came."""

    __slots__ = ("_early", "_next_early_id", "_peer_rank", "_queue", "begun", "by_id")

    def __init__(self, peer_rank: int, queue: OutputQueue) -> None:
        self._peer_rank = peer_rank
        self._queue = queue
        self.by_id: dict[int, Stream] = {}
        self.begun = 0
        self._early: dict[bytes, int] = {}  # unanswered early pulls, those withdrawn since included
        self._next_early_id = EARLY_ID

    def pull(self, receive: Receive, view: memoryview, message_id: int) -> None:
        """Have the offered message `message_id` sent into `view`."""
        self.by_id[message_id] = Stream(receive, view, len(view))
        self._queue.push_control(pack_header(Kind.PULL, message_id=message_id))

    def pull_early(self, receive: Receive, view: memoryview) -> None:
        """Have the message of `receive.key` sent without an offer; left to its offer if that is unclear or too many."""
        key = receive.key
        if len(self._early) >= MAX_EARLY_PULLS or key in self._early:
            return
        early_id = self._next_early_id
        while early_id in self.by_id:
            early_id = early_id + 1 if early_id < _LAST_EARLY_ID else EARLY_ID
        self._next_early_id = early_id + 1 if early_id < _LAST_EARLY_ID else EARLY_ID
        self._early[key] = early_id
        self.by_id[early_id] = Stream(receive, view, len(view), key)
        self._queue.push_control(pack_header(Kind.PULL, key=key, length=len(view), message_id=early_id))

    def cancel_early(self, receive: Receive) -> None:
        """`receive` wants no more of its early pull, if it made one."""
        early_id = self._early.get(receive.key, 0)
        if early_id and self.by_id[early_id].receive is receive:
            self.by_id[early_id].abandon()
            self._queue.push_control(pack_header(Kind.DISCARD, message_id=early_id))

    def crossed(self, key: bytes, length: int) -> Stream | None:
        """The early pull that an offer of `length` bytes has crossed: its sender takes that for the answer."""
        early_id = self._early.get(key, 0)
        stream = self.by_id[early_id] if early_id else None
        return stream if stream is not None and stream.total == length else None

    def answered(self, message_id: int) -> tuple[Stream, bool]:
        """The stream a fragment belongs to, and whether this is the first answer to an early pull."""
        stream = self.by_id.get(message_id)
        if stream is None:
            raise RemoteProtocolError(f"rank {self._peer_rank} sent a fragment of message {message_id}, never pulled")
        if stream.early_key is None:
            return stream, False
        del self._early[stream.early_key]
        stream.early_key = None
        return stream, True

    def advance(self, stream: Stream, offset: int, length: int, message_id: int) -> None:
        """A fragment came: check that it is the next, and forget the stream with its last."""
        lent = stream.lent in (COPYING, COPIED)
        if offset != stream.offset or offset + length > stream.total or length > FRAGMENT_BYTES or lent:
            raise RemoteProtocolError(
                f"rank {self._peer_rank} sent bytes {offset} to {offset + length} of message {message_id}, "
                f"expected those from {stream.offset} of {stream.total}"
            )
        if not length and stream.total:
            raise RemoteProtocolError(f"rank {self._peer_rank} sent an empty fragment of message {message_id}")
        if not offset:
            self.begun += 1
        if offset + length == stream.total:
            self.end(message_id)
            self.begun -= 1

    def end(self, message_id: int) -> None:
        """The sender ended the stream."""
        del self.by_id[message_id]

    def abort(self, message_id: int) -> Receive | None:
        """The sender ended the stream before its time; returns who was waiting for it."""
        stream = self.by_id.pop(message_id)
        if stream.offset:
            self.begun -= 1
        receive = stream.receive
        stream.abandon()
        return receive

    def drop_group(self, group: bytes) -> None:
        """Write nothing more into arrays of `group`, and have their senders stop."""
        for message_id, stream in self.by_id.items():
            if stream.belongs_to(group):
                stream.abandon()
                self._queue.push_control(pack_header(Kind.DISCARD, message_id=message_id))

    def take_all(self) -> list[Stream]:
        """The connection is gone: forget and return all streams."""
        streams = list(self.by_id.values())
        self.by_id.clear()
        self._early.clear()
        return streams
