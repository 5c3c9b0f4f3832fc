"""The receiving half of a connection: brings messages and posted receives together.

A message that comes before its receive waits in the unexpected queue, an eager one whole, a long one as its offer. A
receive that meets an offer pulls the message. A `Stream` takes the bytes of a message into place. The receive of a
collective's long message pulls early, before the offer, as its key is unique: that saves a round trip. The id of an
early pull is chosen here, that of an offered message by the sender. An id is in use until the sender ends the stream,
even after the message is given up: so both ends agree on the ids in use. Each receive is in one state:

    POSTED        it waits for its message, or was refused in its post
                  -> PULLED_EARLY in its post; STREAMING at an offer or part of a message, RECEIVED at a whole one;
                     FAILED, WITHDRAWN, DROPPED
    PULLED_EARLY  it waits, and its PULL went ahead of any offer
                  -> STREAMING at the first answer; POSTED if the pull is taken back; FAILED, DROPPED
    STREAMING     it has met its message, whose bytes come
                  -> RECEIVED with the last byte; FAILED if the sender gives up or is lost; DROPPED
    RECEIVED      its message is in place
    FAILED        its sink was told an error, or its post raised one
    WITHDRAWN     it was taken back before it met a message
    DROPPED       it was given up, or its group was
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from asyncdist.errors import CollectiveMismatchError, RemoteProtocolError
from asyncdist.transport.protocol.flow_control import ReceiveWindow
from asyncdist.transport.protocol.frame import (
    EAGER_BYTES,
    EARLY_ID,
    EARLY_PULL_BYTES,
    FRAGMENT_BYTES,
    MAX_EARLY_PULLS,
    MAX_LENGTH,
    MESSAGE_OVERHEAD_BYTES,
    POINT_TO_POINT,
    TRAFFIC_CLASSES,
    Flag,
    Header,
    Kind,
    describe_key,
    pack_header,
    unpack_place,
)
from asyncdist.transport.protocol.matching import AnySourceTable, DroppedGroups, ReceiveTable, UnexpectedWatcher
from asyncdist.transport.protocol.operations import (
    EarlyStream,
    Receive,
    ReceiveState,
    Stream,
    StreamState,
    anew,
    given_up,
)
from asyncdist.transport.protocol.output_queue import OutputQueue
from asyncdist.transport.protocol.sender import Sender
from asyncdist.transport.protocol.unexpected_queue import UnexpectedQueue
from asyncdist.transport.protocol.zero_copy import ZeroCopy

_LAST_EARLY_ID: Final = 2 * EARLY_ID - 1

_KEY_ENDS: Final = frozenset(traffic.to_bytes(4, "little") for traffic in range(TRAFFIC_CLASSES))
"""How a key may end."""


class Receiver:
    """See the module. A key of this peer never has both posted receives and unexpected messages."""

    def __init__(
        self,
        peer_rank: int,
        sender: Sender,
        any_source: AnySourceTable,
        dropped: DroppedGroups,
        watchers: Mapping[bytes, UnexpectedWatcher],
    ) -> None:
        self.peer_rank = peer_rank
        self.error: BaseException | None = None
        self.pulls = Pulls(peer_rank, sender.queue)
        self.zero_copy: ZeroCopy | None = None
        self.partial: Stream | None = None  # the one whose payload is being read
        self._sender = sender
        self._any_source = any_source
        self.any_entries = any_source.entries
        self._orders = any_source.orders
        self._dropped = dropped
        self._table = ReceiveTable()
        self.entries = self._table.entries
        self.windows = tuple(
            ReceiveWindow(traffic, sender.queue, self._table, any_source.table) for traffic in range(TRAFFIC_CLASSES)
        )
        self._stalled = False  # the peer keeps messages of a traffic class back
        self._unexpected = UnexpectedQueue(self, any_source, watchers)
        self._queues = self._unexpected.queues

    # Posting

    def post_receive(self, receive: Receive) -> bool:
        """Post `receive`. True: complete, the sink is not called; False: the sink hears later.

        Raises `error` once failed, unless the message is here already; and, when the message that is here does not
        suit, what `allocate` raised or CollectiveMismatchError: that message is discarded and `receive` forgotten.
        """
        key = receive.key
        if key in self._queues:
            return self.take_unexpected(receive)
        if self.error is not None:
            raise anew(self.error)
        receive.source = self.peer_rank
        receive._order = next(self._orders)
        if key in self.entries:
            self._table.add(receive)
        else:
            self.entries[key] = receive
            target = receive.target
            if key[20] and target is not None and len(target) > (EARLY_PULL_BYTES if receive.bulk else EAGER_BYTES):
                self.pulls.pull_early(receive, target)
                self._sender.kick()
        if self._stalled:
            self.ask(key)
        return False

    def withdraw(self, receive: Receive) -> bool:
        """See PeerCore.withdraw."""
        if not self._table.remove(receive):
            return False
        self.pulls.cancel_early(receive)
        receive.state = ReceiveState.WITHDRAWN
        self._sender.kick()
        return True

    def put_back(self, receive: Receive, payload: bytes) -> None:
        """Undo `receive`, a point-to-point receive of `payload` that has ended well, but without a waiter.

        The message goes to the receive posted next for its key, or waits for one ahead of all others of that key.
        """
        key = receive.key
        if key in self._dropped:
            return
        heir = self._match(key)
        if heir is None:
            self._unexpected.put_back(key, payload, receive.meta, receive.fingerprint)
            return
        self._complete(heir, receive.meta, receive.fingerprint, payload)

    def take_unexpected(self, receive: Receive) -> bool:
        """Give the oldest unexpected message of its key to `receive`. Results and errors as `post_receive`."""
        message = self._unexpected.take(receive.key)
        payload = message.payload
        if payload is None and self.error is not None:  # an offer that can never come, ahead of messages that are here
            raise anew(self.error)
        receive.source = self.peer_rank
        receive.meta, receive.fingerprint = message.meta, message.fingerprint
        try:
            view = receive.target
            if view is None or len(view) != message.length:
                view = self._target(receive, message.length, message.meta)
            if payload is None:
                self.pulls.pull(receive, view, message.message_id)
                return False
            view[:] = payload
            receive.nbytes = message.length
            receive.state = ReceiveState.RECEIVED
            return True
        except BaseException:
            receive.state = ReceiveState.FAILED
            if payload is None:
                self._sender.queue.push_control(pack_header(Kind.DISCARD, message_id=message.message_id))
            raise
        finally:
            if self._sender.queue.urgent or self._sender.leaving:
                self._sender.kick()

    def oldest_arrival(self, key: bytes) -> int:
        """When the oldest unexpected message of `key` came, in the mesh's count of arrivals."""
        return self._queues[key][0].arrival

    # Messages

    def on_data(self, header: Header, meta: bytes, payload: memoryview) -> None:
        """An eager message, whole. What `payload` views may change afterwards."""
        self._admit(header)
        if not self._deliver(meta, header.fingerprint, header.key, payload):
            self._keep(meta, header.fingerprint, header.key, bytes(payload))

    def _deliver(self, meta: bytes, fingerprint: int, key: bytes, payload: memoryview) -> bool:
        """Give a message that is here whole to the receive posted for it; False if there is none."""
        receive = self._match(key)
        if receive is None:
            return False
        self.pulls.cancel_early(receive)
        self.windows[key[20]].owe(len(payload) + len(meta) + MESSAGE_OVERHEAD_BYTES)
        self._complete(receive, meta, fingerprint, payload)
        return True

    def _complete(self, receive: Receive, meta: bytes, fingerprint: int, payload: bytes | memoryview) -> None:
        view = self.target_or_fail(receive, len(payload), meta)
        if view is not None:
            view[:] = payload
            receive.nbytes = len(payload)
            receive.meta, receive.fingerprint = meta, fingerprint
            receive.state = ReceiveState.RECEIVED
            receive.sink.message_received(receive.token, receive)

    def on_early(self, meta: bytes, fingerprint: int, key: bytes, payload: memoryview) -> None:
        """An eager message, whole and without flags, for which no receive is posted."""
        self._check_key(key)
        self._keep(meta, fingerprint, key, bytes(payload))

    def _keep(self, meta: bytes, fingerprint: int, key: bytes, payload: bytes | memoryview) -> None:
        if key in self._dropped:
            self.windows[key[20]].owe(len(payload) + len(meta) + MESSAGE_OVERHEAD_BYTES)
            self._dropped.discard(key, self.peer_rank, meta)
        else:
            self._unexpected.add_message(key, payload, meta, fingerprint)

    def begin_data(self, header: Header, meta: bytes, *, fits: bool) -> Stream | None:
        """An eager message of which payload is still to come: where that goes.

        None if no receive is there to take it, and it `fits` where it can be gathered whole first.
        """
        key, length = header.key, header.length
        posted = key in self.entries or key in self.any_entries
        if fits and not posted:
            return None
        self._admit(header)
        receive = self._match(key) if posted else None
        if receive is None:
            return EarlyStream(meta, header.fingerprint, key, length)
        self.windows[key[20]].owe(length + len(meta) + MESSAGE_OVERHEAD_BYTES)
        self.pulls.cancel_early(receive)
        view = self.target_or_fail(receive, length, meta)
        if view is None:
            return Stream(None, None, length)
        receive.meta, receive.fingerprint = meta, header.fingerprint
        receive.state = ReceiveState.STREAMING
        return Stream(receive, view, length)

    def on_offer(self, header: Header, meta: bytes) -> None:
        """OFFER: a message waits to be pulled."""
        self._admit(header)
        _, flags, _, fingerprint, key, length, _, message_id = header
        crossed = self.pulls.crossed(key, length)
        if crossed is not None:
            if crossed.receive is not None:
                crossed.receive.meta = meta
            return
        self._unexpected.check_offer(key, message_id)
        if message_id >= EARLY_ID or message_id in self.pulls.by_id or length > MAX_LENGTH:
            raise RemoteProtocolError(
                f"rank {self.peer_rank} offered {length} bytes as message {message_id} ({describe_key(key)})"
            )
        receive = self._match(key)
        if receive is None and key not in self._dropped:
            self._unexpected.add_offer(key, length, meta, fingerprint, message_id, bool(flags & Flag.ASKED))
            return
        view = self.target_or_fail(receive, length, meta) if receive is not None else None
        if receive is None or view is None:
            flags = Flag.ABORT if receive is None else 0
            self._sender.queue.push_reply(pack_header(Kind.DISCARD, flags=flags, message_id=message_id))
            if receive is None:
                self._dropped.discard(key, self.peer_rank, meta)
            return
        receive.meta, receive.fingerprint = meta, fingerprint
        self.pulls.pull(receive, view, message_id)

    def on_withdraw(self, message_id: int) -> None:
        """WITHDRAW: the message will not come. One that is not known has crossed with our DISCARD."""
        if self._unexpected.withdraw(message_id):
            self._sender.queue.push_reply(pack_header(Kind.DISCARD, message_id=message_id))
        elif (stream := self.pulls.by_id.get(message_id)) is not None:
            if message_id >= EARLY_ID or stream.offset or stream.state:
                raise RemoteProtocolError(f"rank {self.peer_rank} withdrew message {message_id}, which is under way")
            self._abort(message_id, late=True)

    def on_fragment(self, header: Header, offset: int) -> Stream | None:
        """A fragment of a pulled message: where it goes. None if it was its end without payload."""
        flags, message_id = header.flags, header.message_id
        stream = self._answered(header.fingerprint, message_id)
        if flags & Flag.END:
            if stream.state is not StreamState.COPIED or header.length:
                raise RemoteProtocolError(f"rank {self.peer_rank} ended message {message_id}, which is not copied yet")
            self.pulls.end(message_id)
            self.finish(stream)
        elif flags & Flag.ABORT:
            self._abort(message_id, late=bool(flags & Flag.LATE))
        else:
            self.pulls.advance(stream, offset, header.length, message_id)
            return stream
        return None

    def _answered(self, fingerprint: int, message_id: int) -> Stream:
        """The stream of a pull. The first answer to an early pull takes its receive sender of the table."""
        stream, was_early = self.pulls.answered(message_id)
        receive = stream.receive
        if was_early and receive is not None:
            receive.state = ReceiveState.STREAMING
            receive.fingerprint = fingerprint
            self._table.remove(receive)
        return stream

    def _abort(self, message_id: int, *, late: bool) -> None:
        receive = self.pulls.abort(message_id)
        if receive is not None:
            receive.fail(given_up(self.peer_rank, late=late))

    def on_exposed(self, header: Header) -> None:
        """EXPOSED: the bytes of a pulled message are in the sender's memory, from where we copy them."""
        length, message_id = header.length, header.message_id
        stream = self._answered(header.fingerprint, message_id)
        zero_copy = self.zero_copy
        assert zero_copy is not None, "nothing is exposed over a connection without shared memory"
        if stream.offset or stream.state or length != stream.total:
            raise RemoteProtocolError(f"rank {self.peer_rank} exposed {length} bytes as message {message_id}")
        source = zero_copy.remote(*unpack_place(header.key), length)
        stream.state = StreamState.COPYING
        if stream.view is None:  # it was discarded, and will be aborted
            return

        def copied_or_not(copied: bool) -> None:
            stream.state = StreamState.COPIED if copied else StreamState.REFUSED
            flags = 0 if copied else Flag.ABORT
            self._sender.queue.push_control(pack_header(Kind.RELEASED, flags=flags, message_id=message_id))

        zero_copy.copy(stream, source, copied_or_not)

    def finish(self, stream: Stream) -> None:
        """The last byte of `stream` is in place."""
        receive, view = stream.receive, stream.view
        stream.abandon()
        if receive is not None:
            receive.nbytes = stream.total
            receive.state = ReceiveState.RECEIVED
            receive.sink.message_received(receive.token, receive)
        elif isinstance(stream, EarlyStream) and view is not None and not self._deliver(*stream.envelope, view):
            self._keep(*stream.envelope, view)

    # Matching

    def _match(self, key: bytes) -> Receive | None:
        """Remove and return the receive posted earliest among those of this peer and those from any."""
        if key not in self.any_entries:
            return self._table.pop(key)
        any_table = self._any_source.table
        own_head = self._table.head(key)
        any_head = any_table.head(key)
        if any_head is None or (own_head is not None and own_head._order < any_head._order):
            return self._table.pop(key)
        any_head.source = self.peer_rank
        return any_table.pop(key)

    def _target(self, receive: Receive, length: int, meta: bytes) -> memoryview:
        """Where `length` bytes go; raises if the receive cannot take them."""
        target = receive.target
        if target is None:
            target = receive.sink.allocate(receive.token, self.peer_rank, length, meta)
            if len(target) != length:
                raise ValueError(f"allocate returned {len(target)} bytes for a message of {length}")
        elif len(target) != length:
            raise CollectiveMismatchError(
                f"rank {self.peer_rank} sent {length} bytes where {len(target)} are expected here", self.peer_rank
            )
        return target

    def target_or_fail(self, receive: Receive, length: int, meta: bytes) -> memoryview | None:
        """Where `length` bytes go; None if the receive cannot take them, and has failed."""
        try:
            return self._target(receive, length, meta)
        except Exception as error:
            self.pulls.cancel_early(receive)
            receive.fail(error)
            return None

    def _admit(self, header: Header) -> None:
        """Check what every message must satisfy."""
        self._check_key(header.key)
        if header.flags & Flag.ASKED:
            self.windows[header.key[20]].answered(header.key)

    def _check_key(self, key: bytes) -> None:
        if key[20:] not in _KEY_ENDS:
            raise RemoteProtocolError(f"rank {self.peer_rank} sent a malformed key {key.hex()}")

    def on_stalled(self, key: bytes, stalled: int, number: int) -> None:
        """STALLED: from now on the peer keeps messages back until asked, or no longer does."""
        traffic = key[20]
        if traffic >= TRAFFIC_CLASSES or stalled > 1 or not number:
            raise RemoteProtocolError(f"rank {self.peer_rank} sent a malformed STALLED")
        window = self.windows[traffic]
        if stalled == bool(window.stall) or (not stalled and window.stall != number):
            raise RemoteProtocolError(f"rank {self.peer_rank} began or ended a stall twice")
        window.enter_stall(number if stalled else 0)
        self._stalled = any(window.stall for window in self.windows)
        if traffic == POINT_TO_POINT:
            self._any_source.stalled(self, bool(stalled))

    def ask(self, key: bytes) -> None:
        """A receive for `key` is posted: if the peer is stalled, have it send one."""
        if self.windows[key[20]].ask(key):
            self._sender.kick()

    # Ends

    def give_up(self, receive: Receive) -> None:
        """See PeerCore.give_up."""
        for message_id, stream in self.pulls.by_id.items():
            if stream.receive is receive:
                stream.drop()
                self._sender.queue.push_control(pack_header(Kind.DISCARD, message_id=message_id))
                self._sender.kick()
                break
        if self.partial is not None and self.partial.receive is receive:
            self.partial.drop()

    def fail(self, error: BaseException) -> None:
        """Fail every pending receive. Eager messages that are here already may still be taken."""
        if self.error is not None:
            return
        self.error = error
        pending = dict.fromkeys(self._table.take_all())
        streams = self.pulls.take_all()
        if self.partial is not None:
            streams.append(self.partial)
        for stream in streams:
            if stream.receive is not None:
                pending[stream.receive] = None
            stream.abandon()
        self._any_source.stalled(self, False)
        self._unexpected.forget_offers()
        for receive in pending:
            receive.fail(error)

    def drop_group(self, group: bytes) -> None:
        """Forget what belongs to `group`; what is under way into its arrays goes nowhere from now on."""
        self._table.drop_group(group)
        self.pulls.drop_group(group)
        if self.partial is not None and self.partial.belongs_to(group):
            self.partial.drop()
        for message in self._unexpected.drop_group(group):
            if message.payload is None:
                frame = pack_header(Kind.DISCARD, flags=Flag.ABORT, message_id=message.message_id)
                self._sender.queue.push_control(frame)
            self._dropped.discard(group, self.peer_rank, message.meta)
        self._sender.kick()

    def tell_unexpected(self, group: bytes, watcher: UnexpectedWatcher) -> None:
        """Tell `watcher` of the messages of `group` that no receive has met."""
        for key in list(self._queues):
            if key.startswith(group):
                watcher(self.peer_rank, key, self._queues)

    def statistics(self) -> dict[str, int]:
        """What is posted, unexpected and under way."""
        return {
            "receives_posted": sum(1 for _ in self._table),
            "unexpected_bytes": sum(window.unexpected_bytes for window in self.windows),
            "unexpected_offers": sum(window.unexpected_offers for window in self.windows),
            "unexpected_messages": sum(map(len, self._queues.values())),
            "streams_in": len(self.pulls.by_id),
        }


class Pulls:
    """See the module. `by_id` are all open pulls; `begun` counts those of which a fragment came."""

    def __init__(self, peer_rank: int, queue: OutputQueue) -> None:
        self._peer_rank = peer_rank
        self._queue = queue
        self.by_id: dict[int, Stream] = {}
        self.begun = 0
        self._early: dict[bytes, int] = {}  # unanswered early pulls, those withdrawn since included
        self._next_early_id = EARLY_ID

    def pull(self, receive: Receive, view: memoryview, message_id: int) -> None:
        """Have the offered message `message_id` sent into `view`."""
        receive.state = ReceiveState.STREAMING
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
        receive.state = ReceiveState.PULLED_EARLY
        self._early[key] = early_id
        self.by_id[early_id] = Stream(receive, view, len(view), key)
        self._queue.push_control(pack_header(Kind.PULL, key=key, length=len(view), message_id=early_id))

    def cancel_early(self, receive: Receive) -> None:
        """`receive` wants no more of its early pull, if it made one."""
        if receive.state is ReceiveState.PULLED_EARLY:
            receive.state = ReceiveState.POSTED
            early_id = self._early[receive.key]
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
        exposed = stream.state in (StreamState.COPYING, StreamState.COPIED)
        if offset != stream.offset or offset + length > stream.total or length > FRAGMENT_BYTES or exposed:
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
        """The sender ended the stream before its time; returns the receive that waits for it."""
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
                stream.drop()
                self._queue.push_control(pack_header(Kind.DISCARD, message_id=message_id))

    def take_all(self) -> list[Stream]:
        """The connection is gone: forget and return all streams."""
        streams = list(self.by_id.values())
        self.by_id.clear()
        self._early.clear()
        return streams
