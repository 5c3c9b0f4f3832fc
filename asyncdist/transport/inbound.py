"""Inbound: the receiving half of a connection. Brings messages and posted receives together."""

from __future__ import annotations

from collections import deque

from asyncdist.errors import CollectiveMismatchError, GroupAbortedError, RemoteProtocolError
from asyncdist.transport.credit import ReceiveWindow
from asyncdist.transport.frame import (
    CHANNELS,
    CREDIT_BYTES,
    EAGER_BYTES,
    EARLY_ID,
    FLAG_ABORT,
    FLAG_ASKED,
    FRAGMENT_BYTES,
    MAX_ASKS,
    MAX_EARLY_PULLS,
    MAX_LENGTH,
    MAX_OFFERS,
    MESSAGE_OVERHEAD_BYTES,
    POINT_TO_POINT,
    Kind,
    describe_key,
    group_of,
    pack_header,
)
from asyncdist.transport.matching import AnySourceTable, DroppedGroups, Parked, Receive, ReceiveTable
from asyncdist.transport.outbound import Outbound

__all__ = ["Inbound", "Stream"]

RETURN_CREDIT_BYTES = CREDIT_BYTES // 4
"""Credit is given back in portions, so that most messages cost no accounting beyond one addition."""


class Stream:
    """A message on its way into `view`: pulled, or eager and only partly here.

    `receive` and `view` are None once nobody wants it: the rest is thrown away. `early_key` is set while it is an early
    pull without an answer.
    """

    __slots__ = ("early_key", "offset", "receive", "total", "view")

    def __init__(self, receive: Receive, view: memoryview | None, total: int) -> None:
        self.receive: Receive | None = receive
        self.view = view
        self.total = total
        self.offset = 0
        self.early_key: bytes | None = None

    def abandon(self) -> None:
        """Write nowhere any more."""
        self.receive = None
        self.view = None


class Inbound:
    """See the module. A key of this peer never has both posted receives and parked messages."""

    __slots__ = (
        "_any_source",
        "_dropped",
        "_early",
        "_next_early_id",
        "_offers",
        "_orders",
        "_out",
        "_parked",
        "_stalled",
        "_table",
        "any_entries",
        "entries",
        "error",
        "open_streams",
        "partial",
        "peer_rank",
        "streams",
        "windows",
    )

    def __init__(self, peer_rank: int, out: Outbound, any_source: AnySourceTable, dropped: DroppedGroups) -> None:
        self.peer_rank = peer_rank
        self.error: BaseException | None = None
        self.windows = tuple(ReceiveWindow() for _ in range(CHANNELS))
        self.streams: dict[int, Stream] = {}
        self.open_streams = 0  # those of which some fragment came
        self.partial: Stream | None = None  # the one whose payload is being read
        self._out = out
        self._any_source = any_source
        self.any_entries = any_source.entries
        self._orders = any_source.orders
        self._dropped = dropped
        self._table = ReceiveTable()
        self.entries = self._table.entries
        self._parked: dict[bytes, deque[Parked]] = {}
        self._offers: set[int] = set()  # ids of parked offers
        self._early: dict[bytes, int] = {}  # unanswered early pulls, those withdrawn since included
        self._next_early_id = EARLY_ID
        self._stalled = False  # on any channel

    # Posting

    def post_receive(self, receive: Receive) -> bool:
        """See PeerCore.post_receive."""
        key = receive.key
        if key in self._parked:
            return self.take_parked(receive)
        if self.error is not None:
            raise self.error
        receive.source = self.peer_rank
        receive._order = next(self._orders)
        if key in self.entries:
            self._table.add(receive)
        else:
            self.entries[key] = receive
            target = receive.target
            if key[20] and target is not None and len(target) > EAGER_BYTES:
                self._pull_early(receive, len(target))
        if self._stalled:
            self.ask(key)
        return False

    def withdraw(self, receive: Receive) -> bool:
        """See PeerCore.withdraw."""
        if not self._table.remove(receive):
            return False
        self._cancel_early(receive)
        self._out.kick()
        return True

    def take_parked(self, receive: Receive) -> bool:
        """Give the oldest parked message of its key to `receive`. Results and errors as PeerCore.post_receive."""
        key = receive.key
        parked = self._unpark(key)
        window = self.windows[key[20]]
        payload = parked.payload
        receive.source = self.peer_rank
        if payload is not None:
            charge = parked.length + len(parked.meta) + MESSAGE_OVERHEAD_BYTES
            window.parked_bytes -= charge
            self.owe(key[20], charge)
            self._out.kick()
            view = self._target(receive, parked.length, parked.meta)
            view[:] = payload
            receive.nbytes = parked.length
            receive.meta = parked.meta
            receive.fingerprint = parked.fingerprint
            return True
        window.parked_offers -= 1
        self._offers.discard(parked.message_id)
        try:
            view = self._target(receive, parked.length, parked.meta)
        except BaseException:
            self._out.queue.push_control(pack_header(Kind.DISCARD, message_id=parked.message_id))
            self._out.kick()
            raise
        receive.meta = parked.meta
        receive.fingerprint = parked.fingerprint
        self._pull(receive, view, parked.message_id)
        self._out.kick()
        return False

    def oldest_arrival(self, key: bytes) -> int:
        """When the oldest parked message of `key` came, in the mesh's count of arrivals."""
        return self._parked[key][0].arrival

    def ask(self, key: bytes) -> None:
        """A receive for `key` is posted: if the peer is stalled, have it send one."""
        channel = key[20]
        window = self.windows[channel]
        if not window.stall:
            return
        wanted = self._table.count(key)
        if channel == POINT_TO_POINT:
            wanted += self._any_source.table.count(key)
        if window.ask(key, wanted):
            self._out.queue.push_control(pack_header(Kind.ASK, key=key, message_id=window.stall))
            self._out.kick()

    def _pull_early(self, receive: Receive, length: int) -> None:
        """Have a large collective message sent without an offer. Only one per key, so that it is clear which."""
        key = receive.key
        if len(self._early) >= MAX_EARLY_PULLS or key in self._early:
            return
        early_id = self._next_early_id
        while early_id in self.streams:
            early_id = early_id + 1 if early_id + 1 < 2 * EARLY_ID else EARLY_ID
        self._next_early_id = early_id + 1 if early_id + 1 < 2 * EARLY_ID else EARLY_ID
        self._early[key] = early_id
        stream = self.streams[early_id] = Stream(receive, receive.target, length)
        stream.early_key = key
        self._out.queue.push_control(pack_header(Kind.PULL, key=key, length=length, message_id=early_id))
        self._out.kick()

    def _cancel_early(self, receive: Receive) -> None:
        """`receive` wants no more of its early pull, if it made one; the stream stays until the sender ends it."""
        early_id = self._early.get(receive.key, 0)
        if early_id and self.streams[early_id].receive is receive:
            self.streams[early_id].abandon()
            self._out.queue.push_control(pack_header(Kind.DISCARD, message_id=early_id))

    # Messages

    def on_data(self, flags: int, meta: bytes, fingerprint: int, key: bytes, length: int, payload: memoryview) -> None:
        """An eager message, whole."""
        self._admit(flags, key)
        receive = self._match(key)
        charge = length + len(meta) + MESSAGE_OVERHEAD_BYTES
        if receive is None:
            self._park_data(meta, fingerprint, key, payload, charge)
            return
        self.owe(key[20], charge)
        view = self._target_or_fail(receive, length, meta)
        if view is not None:
            view[:] = payload
            self._received(receive, length, meta, fingerprint)

    def begin_data(self, flags: int, meta: bytes, fingerprint: int, key: bytes, length: int) -> Stream | None:
        """An eager message of which payload is still to come: where that goes, or None if it must be gathered first.

        Only if a receive is there to take it.
        """
        if key not in self.entries and key not in self.any_entries:
            return None
        self._admit(flags, key)
        receive = self._match(key)
        assert receive is not None
        self.owe(key[20], length + len(meta) + MESSAGE_OVERHEAD_BYTES)
        view = self._target_or_fail(receive, length, meta)
        receive.meta = meta
        receive.fingerprint = fingerprint
        stream = Stream(receive, view, length)
        if view is None:
            stream.abandon()
        return stream

    def on_offer(self, flags: int, meta: bytes, fingerprint: int, key: bytes, length: int, message_id: int) -> None:
        """A message that waits to be pulled."""
        self._admit(flags, key)
        early_id = self._early.get(key, 0)
        if early_id and self.streams[early_id].total == length:
            self._crossed(early_id, meta, fingerprint)
            return
        if message_id >= EARLY_ID or message_id in self._offers or message_id in self.streams:
            raise RemoteProtocolError(f"rank {self.peer_rank} offered message {message_id} twice ({describe_key(key)})")
        if length > MAX_LENGTH:
            raise RemoteProtocolError(f"rank {self.peer_rank} offered {length} bytes ({describe_key(key)})")
        receive = self._match(key)
        if receive is None:
            self._park_offer(flags, meta, fingerprint, key, length, message_id)
            return
        view = self._target_or_fail(receive, length, meta)
        if view is None:
            self._out.queue.push_reply(pack_header(Kind.DISCARD, message_id=message_id))
            return
        receive.meta = meta
        receive.fingerprint = fingerprint
        self._pull(receive, view, message_id)

    def _crossed(self, early_id: int, meta: bytes, fingerprint: int) -> None:
        """The offer of a message pulled already: its sender takes the pull for the answer."""
        receive = self.streams[early_id].receive
        if receive is not None:
            receive.meta = meta
            receive.fingerprint = fingerprint

    def _pull(self, receive: Receive, view: memoryview, message_id: int) -> None:
        self.streams[message_id] = Stream(receive, view, len(view))
        self._out.queue.push_control(pack_header(Kind.PULL, message_id=message_id))

    def on_fragment(self, flags: int, fingerprint: int, offset: int, length: int, message_id: int) -> Stream | None:
        """A piece of a pulled message: where it goes. None if it was its end without payload."""
        stream = self.streams.get(message_id)
        if stream is None:
            raise RemoteProtocolError(f"rank {self.peer_rank} sent a fragment of message {message_id}, never pulled")
        if stream.early_key is not None:
            self._answer_early(stream, fingerprint)
        if flags & FLAG_ABORT:
            self._aborted(stream, message_id)
            return None
        if offset != stream.offset or offset + length > stream.total or length > FRAGMENT_BYTES:
            raise RemoteProtocolError(
                f"rank {self.peer_rank} sent bytes {offset} to {offset + length} of message {message_id}, "
                f"expected those from {stream.offset} of {stream.total}"
            )
        if not length and stream.total:
            raise RemoteProtocolError(f"rank {self.peer_rank} sent an empty fragment of message {message_id}")
        if not offset:
            self.open_streams += 1
        if offset + length == stream.total:
            del self.streams[message_id]
            self.open_streams -= 1
        return stream

    def _answer_early(self, stream: Stream, fingerprint: int) -> None:
        """The first frame for an early pull: its receive is matched now."""
        key = stream.early_key
        stream.early_key = None
        if key is not None:
            del self._early[key]
        if stream.receive is not None:
            stream.receive.fingerprint = fingerprint
            self._table.remove(stream.receive)

    def _aborted(self, stream: Stream, message_id: int) -> None:
        del self.streams[message_id]
        if stream.offset:
            self.open_streams -= 1
        receive = stream.receive
        stream.abandon()
        if receive is not None:
            error = GroupAbortedError(
                f"rank {self.peer_rank} aborted the group while it sent this message ({describe_key(receive.key)})",
                "aborted by the sender",
                self.peer_rank,
            )
            receive.sink.message_failed(receive.token, error)

    def finish(self, stream: Stream) -> None:
        """The last byte of `stream` is in place."""
        if stream is self.partial:
            self.partial = None
        receive = stream.receive
        stream.abandon()
        if receive is not None:
            receive.nbytes = stream.total
            receive.sink.message_received(receive.token, receive)

    # Matching

    def _match(self, key: bytes) -> Receive | None:
        """Remove and return the receive posted earliest among those of this peer and those from any."""
        any_head = self._any_source.table.head(key) if key in self.any_entries else None
        own_head = self._table.head(key)
        if any_head is None or (own_head is not None and own_head._order < any_head._order):
            return None if own_head is None else self._table.pop(key)
        self._any_source.table.pop(key)
        any_head.source = self.peer_rank
        return any_head

    def _target(self, receive: Receive, length: int, meta: bytes) -> memoryview:
        """Where `length` bytes go; raises if the receive cannot take them."""
        target = receive.target
        if target is None:
            target = receive.sink.allocate(receive.token, self.peer_rank, length, meta)
            if len(target) != length:
                raise ValueError(f"allocate returned {len(target)} bytes for a message of {length}")
        elif len(target) != length:
            raise CollectiveMismatchError(
                f"rank {self.peer_rank} sent {length} bytes where {len(target)} are expected here "
                f"({describe_key(receive.key)})"
            )
        return target

    def _target_or_fail(self, receive: Receive, length: int, meta: bytes) -> memoryview | None:
        try:
            return self._target(receive, length, meta)
        except Exception as error:
            self._cancel_early(receive)
            receive.sink.message_failed(receive.token, error)
            return None

    def _received(self, receive: Receive, length: int, meta: bytes, fingerprint: int) -> None:
        receive.nbytes = length
        receive.meta = meta
        receive.fingerprint = fingerprint
        receive.sink.message_received(receive.token, receive)

    def _admit(self, flags: int, key: bytes) -> None:
        """Check what every message must satisfy."""
        if key[20] >= CHANNELS or key[21] or key[22] or key[23]:
            raise RemoteProtocolError(f"rank {self.peer_rank} sent a malformed key {key.hex()}")
        if flags & FLAG_ASKED:
            window = self.windows[key[20]]
            window.answered(key)
            if window.unasked and len(window.asked) * 2 < MAX_ASKS:
                self._ask_for_all(key[20])

    # Parking

    def _park_data(self, meta: bytes, fingerprint: int, key: bytes, payload: memoryview, charge: int) -> None:
        if group_of(key) in self._dropped:
            self.owe(key[20], charge)
            return
        window = self.windows[key[20]]
        if window.parked_bytes + charge > CREDIT_BYTES:
            raise RemoteProtocolError(f"rank {self.peer_rank} exceeds its credit of {CREDIT_BYTES} bytes")
        window.parked_bytes += charge
        self._park(key, Parked(bytes(payload), len(payload), meta, fingerprint, 0, self._any_source.next_arrival()))

    def _park_offer(self, flags: int, meta: bytes, fingerprint: int, key: bytes, length: int, message_id: int) -> None:
        if group_of(key) in self._dropped:
            self._out.queue.push_reply(pack_header(Kind.DISCARD, message_id=message_id))
            return
        window = self.windows[key[20]]
        if window.parked_offers >= MAX_OFFERS and not flags & FLAG_ASKED:
            raise RemoteProtocolError(f"rank {self.peer_rank} has more than {MAX_OFFERS} offers open")
        window.parked_offers += 1
        self._offers.add(message_id)
        self._park(key, Parked(None, length, meta, fingerprint, message_id, self._any_source.next_arrival()))

    def _park(self, key: bytes, parked: Parked) -> None:
        queue = self._parked.get(key)
        if queue is not None:
            queue.append(parked)
            return
        self._parked[key] = deque((parked,))
        if key[20] == POINT_TO_POINT:
            self._any_source.parked(key, self)

    def _unpark(self, key: bytes) -> Parked:
        queue = self._parked[key]
        parked = queue.popleft()
        if not queue:
            self._forget_parked(key)
        return parked

    def _forget_parked(self, key: bytes) -> None:
        del self._parked[key]
        self._any_source.unparked(key, self)

    def owe(self, channel: int, nbytes: int) -> None:
        """An eager message is no longer in anybody's way: its credit goes back, in portions."""
        window = self.windows[channel]
        window.owed += nbytes
        if window.owed > RETURN_CREDIT_BYTES:
            self._out.queue.return_credit(channel, window.owed)
            window.owed = 0

    # Stalls

    def on_stalled(self, key: bytes, stalled: int, number: int) -> None:
        """STALLED: from now on the peer keeps messages back until asked, or no longer does."""
        channel = key[20]
        if channel >= CHANNELS or stalled > 1 or not number:
            raise RemoteProtocolError(f"rank {self.peer_rank} sent a malformed STALLED")
        window = self.windows[channel]
        if stalled == bool(window.stall) or (not stalled and window.stall != number):
            raise RemoteProtocolError(f"rank {self.peer_rank} began or ended a stall twice")
        window.asked.clear()
        window.unasked = False
        window.stall = number if stalled else 0
        self._stalled = any(window.stall for window in self.windows)
        if channel == POINT_TO_POINT:
            self._any_source.stalled(self, bool(stalled))
        if stalled:
            self._ask_for_all(channel)

    def _ask_for_all(self, channel: int) -> None:
        self.windows[channel].unasked = False
        for receive in self._table:
            if receive.key[20] == channel:
                self.ask(receive.key)
        if channel == POINT_TO_POINT:
            for receive in self._any_source.table:
                self.ask(receive.key)

    # Ends

    def fail(self, error: BaseException) -> None:
        """Fail every pending receive. Eager messages that are here already may still be taken."""
        if self.error is not None:
            return
        self.error = error
        pending = dict.fromkeys(self._table.take_all())
        streams = list(self.streams.values())
        if self.partial is not None:
            streams.append(self.partial)
            self.partial = None
        for stream in streams:
            if stream.receive is not None:
                pending[stream.receive] = None
            stream.abandon()
        self.streams.clear()
        self._early.clear()
        self._offers.clear()
        self._any_source.stalled(self, False)
        for key in list(self._parked):
            self._forget_offers(key)
        for receive in pending:
            receive.sink.message_failed(receive.token, error)

    def _forget_offers(self, key: bytes) -> None:
        """Keep the messages of `key` that are here, up to the first that can never come."""
        queue = self._parked[key]
        whole: deque[Parked] = deque()
        for parked in queue:
            if parked.payload is None:
                break
            whole.append(parked)
        if not whole:
            self._forget_parked(key)
        else:
            self._parked[key] = whole

    def drop_group(self, group: bytes) -> None:
        """Forget what belongs to `group`; what is under way into its arrays goes nowhere from now on."""
        for receive in self._table.take_group(group):
            self._cancel_early(receive)
        push = self._out.queue.push_control
        for message_id, stream in self.streams.items():
            if stream.receive is not None and stream.receive.key.startswith(group):
                stream.abandon()
                push(pack_header(Kind.DISCARD, message_id=message_id))
        partial = self.partial
        if partial is not None and partial.receive is not None and partial.receive.key.startswith(group):
            partial.abandon()
        for key in [key for key in self._parked if key.startswith(group)]:
            window = self.windows[key[20]]
            for parked in self._parked[key]:
                if parked.payload is None:
                    window.parked_offers -= 1
                    self._offers.discard(parked.message_id)
                    push(pack_header(Kind.DISCARD, message_id=parked.message_id))
                else:
                    charge = parked.length + len(parked.meta) + MESSAGE_OVERHEAD_BYTES
                    window.parked_bytes -= charge
                    self.owe(key[20], charge)
            self._forget_parked(key)
        self._out.kick()

    def statistics(self) -> dict[str, int]:
        """What is posted, parked and under way."""
        return {
            "receives_posted": sum(1 for _ in self._table),
            "parked_bytes": sum(window.parked_bytes for window in self.windows),
            "parked_offers": sum(window.parked_offers for window in self.windows),
            "parked_messages": sum(map(len, self._parked.values())),
            "streams_in": len(self.streams),
        }
