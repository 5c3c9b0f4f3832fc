"""The sending half of a connection: how each message goes, and the answers to what the peer's receiving half says.

A short message goes at once (MPI's eager protocol). A long one is offered, and goes when the receiver pulls it
(rendezvous: an OFFER is UCX's RTS, a PULL its get). The receiver of a collective's long message knows the key and the
length, and may pull before there is an offer: an early pull. Each send is in one state:

    POSTED     it is in its post, or was refused there
               -> SENT if written whole at once, EAGER, OFFERED, HELD; STREAMING, EXPOSED for an early pull
    EAGER      its DATA frame is queued, or written in part
               -> SENT with its last byte; WITHDRAWN if none is written; DROPPED, FAILED
    HELD       it has no frame, as the peer has no room for it
               -> EAGER, OFFERED for room or when asked; STREAMING, EXPOSED for an early pull; WITHDRAWN, DROPPED,
               FAILED
    OFFERED    its OFFER is queued or sent, and not answered
               -> STREAMING, EXPOSED when pulled; SENT when discarded, FAILED if so at a group's end; WITHDRAWN,
               DROPPED
    STREAMING  its fragments are sent
               -> SENT with its last byte or when discarded; DROPPED, FAILED
    EXPOSED    the peer copies it out of this rank's memory
               -> SENT when copied or discarded; STREAMING if it cannot be read; DROPPED, FAILED
    SENT       it is complete: its payload is free
    FAILED     its sink was told an error, as the peer is lost or has left
    WITHDRAWN  it was taken back; the peer still answers an offer that was sent
    DROPPED    it was given up, or its group was; a frame that is begun goes on from a copy
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Final

from asyncdist.errors import ClosedError, PeerLostError, RemoteProtocolError
from asyncdist.transport.protocol.flow_control import SendWindow
from asyncdist.transport.protocol.frame import (
    COLLECTIVE,
    EAGER_BYTES,
    EARLY_ID,
    EARLY_PULL_BYTES,
    HEADER,
    JOIN_BYTES,
    MAX_CONTROL_BYTES,
    MAX_EARLY_PULLS,
    MAX_LENGTH,
    MAX_META_BYTES,
    MAX_OFFERS,
    MESSAGE_OVERHEAD_BYTES,
    POINT_TO_POINT,
    TRAFFIC_CLASSES,
    Flag,
    Kind,
    describe_key,
    pack_exposed,
    pack_fragment,
    pack_header,
)
from asyncdist.transport.protocol.matching import DroppedGroups
from asyncdist.transport.protocol.operations import SendOp, SendState, anew, fail_all, not_received
from asyncdist.transport.protocol.output_queue import OutputQueue
from asyncdist.transport.protocol.zero_copy import ZeroCopy

_NO_PAYLOAD = memoryview(b"")

_pack = HEADER.pack
_DATA = Kind.DATA
_SENT: Final = SendState.SENT


class Sender:
    """See the module. Every message is in exactly one place: the output queue, held back, offered, or streaming."""

    def __init__(self, peer_rank: int, dropped: DroppedGroups) -> None:
        self._peer_rank = peer_rank
        self._dropped = dropped
        self.queue = OutputQueue()
        self.windows = tuple(SendWindow(traffic, self.queue) for traffic in range(TRAFFIC_CLASSES))
        self.error: BaseException | None = None
        self.zero_copy: ZeroCopy | None = None
        self._offers = Offers(self.windows)
        self._early_pulls = EarlyPulls(peer_rank)
        self.corked = False  # input is being handled: what it causes is written together at its end
        self.leaving = False
        self.goodbye_sent = False
        self._goodbye_queued = False

    # Posting

    def post_send(self, op: SendOp) -> bool:
        """Send `op`. True: complete, the sink is not called; False: the sink hears later.

        Raises `error` once failed, ClosedError after `goodbye`, ValueError for meta beyond MAX_META_BYTES.
        """
        queue = self.queue
        if queue.clear:
            payload = op.payload
            nbytes = len(payload)
            meta = op.meta
            key = op.key
            window = self.windows[key[20]]
            credit = window.credit - nbytes - len(meta) - MESSAGE_OVERHEAD_BYTES
            most = EARLY_PULL_BYTES if op.bulk else EAGER_BYTES
            if nbytes <= most and credit >= 0 and not window.stall and len(meta) <= MAX_META_BYTES:
                window.credit = credit
                head = _pack(_DATA, 0, len(meta), op.fingerprint, key, nbytes, 0, 0) + meta
                if nbytes <= JOIN_BYTES:
                    frame = head + payload
                    sent = queue.writer((frame,))
                    if sent != len(frame):
                        queue.begin([memoryview(frame)[sent:]], None)
                    op.state = _SENT
                    return True
                sent = queue.writer((head, payload))
                if sent == len(head) + nbytes:
                    op.state = _SENT
                    return True
                op.state = SendState.EAGER
                queue.begin(
                    [memoryview(head)[sent:], payload] if sent < len(head) else [payload[sent - len(head) :]], op
                )
                return False
        return self._post_queued(op)

    def _post_queued(self, op: SendOp) -> bool:
        if self.error is not None:
            raise anew(self.error)
        if self.leaving:
            raise ClosedError(f"cannot send to rank {self._peer_rank}: the connection is being closed")
        if len(op.meta) > MAX_META_BYTES:
            raise ValueError(f"meta of {len(op.meta)} bytes exceeds {MAX_META_BYTES}")
        if len(op.payload) > MAX_LENGTH:
            raise ValueError(f"message of {len(op.payload)} bytes exceeds {MAX_LENGTH}")
        queue = self.queue
        if queue.flushing:
            self._dispatch(op)
            return False
        queue.posting = op
        self._dispatch(op)
        self.kick()
        sent = queue.posting is None
        queue.posting = None
        return sent

    def _dispatch(self, op: SendOp) -> None:
        """Choose the way of a new message: to the peer's early pull, eagerly, as an offer, or held back."""
        key = op.key
        window = self.windows[key[20]]
        if window.holds(key):
            window.hold(op)
            return
        early_id = self._early_pulls.take(key, len(op.payload)) if self._early_pulls else 0
        if early_id:
            self._stream_early(op, early_id)
        elif not self._send_or_offer(window, op, asked=window.answer(key)):
            window.hold(op)

    def _send_or_offer(self, window: SendWindow, op: SendOp, asked: bool) -> bool:
        """Queue `op` eagerly or as an offer; False if there is room for neither (never when `asked`)."""
        nbytes = len(op.payload)
        charge = nbytes + len(op.meta) + MESSAGE_OVERHEAD_BYTES
        flags = Flag.ASKED if asked else 0
        if charge <= window.credit and nbytes <= (EARLY_PULL_BYTES if op.bulk else EAGER_BYTES):
            window.credit -= charge
            op.state = SendState.EAGER
            head = _pack(_DATA, flags, len(op.meta), op.fingerprint, op.key, nbytes, 0, 0)
            self.queue.push_data(head + op.meta, op)
            return True
        if not asked and (window.offers >= MAX_OFFERS or (window.holding and window.oldest() is not op)):
            return False
        op.state = SendState.OFFERED
        self._offers.add(op, self.queue.streaming)
        self.queue.push_data(self._offer(op, flags), op, op._id)
        return True

    def _offer(self, op: SendOp, flags: int = 0) -> bytes:
        return _pack(Kind.OFFER, flags, len(op.meta), op.fingerprint, op.key, len(op.payload), 0, op._id) + op.meta

    # Holding back

    def _release(self, traffic: int) -> None:
        """There is room again: let held messages go, oldest first, and end the stall with half the offers answered."""
        window = self.windows[traffic]
        if not window.stall:
            return
        while (op := window.oldest()) is not None:
            if not self._send_or_offer(window, op, asked=False):
                return
            window.release(op)
        if window.offers <= MAX_OFFERS // 2:
            window.end_stall()

    # What the peer's receiving half says

    def on_pull(self, key: bytes, length: int, message_id: int) -> None:
        """PULL: by an offer's id, or early, by key."""
        if message_id >= EARLY_ID:
            self._on_early_pull(key, length, message_id)
            return
        op = self._offers.answered(message_id)
        if op is None:
            raise RemoteProtocolError(f"rank {self._peer_rank} pulled message {message_id}, which is not on offer")
        self._stream(op, message_id)
        self._release(op.key[20])

    def _on_early_pull(self, key: bytes, length: int, message_id: int) -> None:
        self._early_pulls.check(key, length, message_id, self.queue.streaming)
        window = self.windows[COLLECTIVE]
        op = self._offers.collective(key)
        held = window.oldest_of(key)
        if op is not None and (op.state >= _SENT or len(op.payload) == length):
            self._offers.answered(op._id)
            self._stream_early(op, message_id)
            self._release(COLLECTIVE)
        elif op is None and held is not None and len(held.payload) == length:
            window.release(held)
            self._stream_early(held, message_id)
            self._release(COLLECTIVE)
        elif key in self._dropped:
            self.queue.push_reply(pack_fragment(message_id, 0, 0, flags=Flag.ABORT))
        else:
            self._early_pulls.add(key, length, message_id)

    def on_discard(self, message_id: int, *, ended: bool) -> None:
        """DISCARD: the peer gives this message up, or the rest of it. Unknown ids are streams that ended meanwhile.

        `ended`: as its group has there, whose messages between two ranks are told so.
        """
        op = self._offers.answered(message_id)
        if op is not None:
            op._id = 0
            if ended and op.key[20] == POINT_TO_POINT:
                fail_all([op], not_received(self._peer_rank))
            else:
                op.complete()
            self._release(op.key[20])
        elif message_id in self.queue.streaming:
            op = self.queue.streaming[message_id]
            if self._stop(op, self.queue.push_reply) and not self.queue.finishing(op):
                op.complete()
        elif self._early_pulls.cancel(message_id):
            self.queue.push_reply(pack_fragment(message_id, 0, 0, flags=Flag.ABORT))

    def on_credit(self, traffic: int, nbytes: int) -> None:
        """CREDIT: eager messages have met their receives."""
        self.windows[traffic].grant(nbytes)
        self._release(traffic)

    def on_ask(self, key: bytes, stall: int, *, anew: bool) -> None:
        """ASK: the peer has a receive for `key` and nothing from us; or few receives for all it has asked for."""
        if key[20] >= TRAFFIC_CLASSES:
            raise RemoteProtocolError(f"rank {self._peer_rank} asked on channel {key[20]}")
        window = self.windows[key[20]]
        if stall != window.stall:
            return  # it crossed with the end of its stall
        if anew:
            window.renew_stall()
            return
        op = window.oldest_of(key)
        if op is None:
            window.ask(key)
            return
        self._send_or_offer(window, op, asked=True)
        window.release(op)

    def peer_left(self) -> None:
        """GOODBYE came: nothing on offer or held back will ever be pulled."""
        error = PeerLostError(f"rank {self._peer_rank} left without receiving the message", self._peer_rank, left=True)
        unwanted = self._offers.take_all() + [op for window in self.windows for op in window.take_all()]
        for op in unwanted:
            op._id = 0
        fail_all(unwanted, error)

    # Streams

    def _stream_early(self, op: SendOp, message_id: int) -> None:
        """Serve an early pull. An offer that goes before the fragments only carries the meta."""
        if op.meta and op.state < _SENT:
            op._id = message_id
            self.queue.push_data(self._offer(op), op, message_id)
        self._stream(op, message_id)

    def _stream(self, op: SendOp, message_id: int) -> None:
        if op.state >= _SENT:  # it has ended since it was offered
            if op.state is not SendState.WITHDRAWN:
                self.queue.push_reply(pack_fragment(message_id, 0, 0, flags=Flag.ABORT))
            return
        op._id = message_id
        place = None if self.zero_copy is None else self.zero_copy.expose(op.payload, bulk=op.bulk)
        if place is None:
            op.state = SendState.STREAMING
            self.queue.push_stream(op)
        else:
            op.state = SendState.EXPOSED
            self.queue.push_exposed(pack_exposed(message_id, *place, len(op.payload), op.fingerprint), op)

    def on_released(self, message_id: int, *, copied: bool) -> bool:
        """RELEASED: an exposed message was copied, or could not be. False: stopped meanwhile, it has had its end."""
        op = self.queue.streaming.get(message_id)
        if op is None:
            return False
        if op.state is not SendState.EXPOSED:
            raise RemoteProtocolError(f"rank {self._peer_rank} released message {message_id}, which was not exposed")
        self.queue.end_exposed(op)
        if copied:
            self.queue.push_reply(pack_fragment(message_id, 0, 0, flags=Flag.END))
            op.complete()
        else:
            op._id = message_id
            op.state = SendState.STREAMING
            self.queue.push_stream(op)
        return True

    def _stop(self, op: SendOp, push: Callable[[bytes], None], flags: int = Flag.ABORT) -> bool:
        """End a stream before its time; False if its last fragment is begun. The caller ends `op`."""
        message_id = op._id
        if not self.queue.stop_stream(op):
            return False
        push(pack_fragment(message_id, 0, 0, flags=flags))
        return True

    # Everything else

    def send_control(self, payload: bytes) -> None:
        """Send a CONTROL frame ahead of everything queued. Raises `error` once failed, ValueError, ClosedError."""
        if self.error is not None:
            raise anew(self.error)
        if len(payload) > MAX_CONTROL_BYTES:
            raise ValueError(f"control payload of {len(payload)} bytes exceeds {MAX_CONTROL_BYTES}")
        if self._goodbye_queued:
            raise ClosedError(f"cannot send to rank {self._peer_rank}: the connection is being closed")
        push = self.queue.push_reply if self.corked else self.queue.push_control  # corked: the peer has caused it
        push(pack_header(Kind.CONTROL, length=len(payload)) + payload)
        self.kick()

    def kick(self) -> None:
        """Write what must be written, unless the socket is full or input is being handled."""
        queue = self.queue
        if (queue.urgent or self.leaving) and not queue.blocked and not self.corked:
            self.flush()

    def flush(self) -> bool:
        """Write what is queued, at most MAX_CALL_BYTES. True: all is written, and `arm()` asks for the next call."""
        done = self.queue.flush()
        if done and self.leaving and not self._goodbye_queued and not self._undelivered():
            self.queue.push_data(pack_header(Kind.GOODBYE))
            self.queue.closed = self._goodbye_queued = True
            done = self.queue.flush()
        if done and self._goodbye_queued:
            self.goodbye_sent = True
        if self.leaving:
            self.queue.clear = False
        return done

    def _undelivered(self) -> bool:
        return self._offers.unanswered or any(w.holding for w in self.windows) or self.queue.exposing

    @property
    def has_output(self) -> bool:
        """Whether anything posted or queued is still to be delivered to the peer."""
        return self.queue.waiting or bool(self.queue.streaming) or self._undelivered()

    def goodbye(self) -> None:
        """Send GOODBYE once everything posted is sent, and take no further sends. Watch `goodbye_sent`. Idempotent."""
        self.leaving = True
        self.queue.clear = False
        self.kick()

    def fail(self, error: BaseException) -> None:
        """Fail whatever is not complete."""
        if self.error is not None:
            return
        self.error = error
        held = [op for window in self.windows for op in window.take_all()]
        self._early_pulls.clear()
        fail_all(self.queue.take_all() + self._offers.take_all() + held, error)

    def withdraw(self, op: SendOp) -> bool:
        """See PeerCore.withdraw."""
        if self.queue.streaming.get(op._id) is op:
            return False
        traffic = op.key[20]
        message_id = op._id
        if self.queue.withdraw(op):
            self._unsend(op, message_id)
        elif self._offers.withdraw(op):
            self.queue.push_data(pack_header(Kind.WITHDRAW, message_id=message_id))  # not ahead of its offer
        elif not self.windows[traffic].release(op):
            return False
        op.state = SendState.WITHDRAWN
        self._release(traffic)
        self.kick()
        return True

    def give_up(self, op: SendOp) -> bool:
        """See PeerCore.give_up."""
        stopped = False
        if self.queue.streaming.get(op._id) is op:
            stopped = self._stop(op, self.queue.push_control, Flag.ABORT | Flag.LATE)
        else:
            op.payload = memoryview(bytes(op.payload))
        op.drop()
        self.queue.detach(op)
        self.kick()
        return stopped

    def drop_group(self, group: bytes) -> None:
        """Forget the messages of `group`, those the peer knows of as soon as it answers."""
        for op in [op for op in self.queue.streaming.values() if op.key.startswith(group)]:
            self._stop(op, self.queue.push_control)
            op.drop()
        for op, offer_id in self.queue.drop_group(group):
            self._unsend(op, offer_id)
            op.drop()
        self._offers.drop_group(group)
        for window in self.windows:
            for op in window.drop_group(group):
                op.drop()
        for message_id in self._early_pulls.drop_group(group):
            self.queue.push_control(pack_fragment(message_id, 0, 0, flags=Flag.ABORT))
        for traffic in range(TRAFFIC_CLASSES):
            self._release(traffic)
        self.kick()

    def _unsend(self, op: SendOp, offer_id: int) -> None:
        """The peer has heard nothing of a message: take back what it was charged."""
        if not offer_id:
            self.windows[op.key[20]].credit += len(op.payload) + len(op.meta) + MESSAGE_OVERHEAD_BYTES
        elif self._offers.get(offer_id) is op:
            self._offers.answered(offer_id)

    def statistics(self) -> dict[str, int]:
        """What is offered, held back and under way."""
        return {
            "offered": len(self._offers),
            "held": sum(window.holding for window in self.windows),
            "early_pulls": len(self._early_pulls),
            "streams_out": len(self.queue.streaming),
            "credit": sum(window.credit for window in self.windows),
        }


class Offers:
    """Offered messages by id. One that is dropped stays, marked as settled, until the peer has answered."""

    def __init__(self, windows: tuple[SendWindow, ...]) -> None:
        self._windows = windows
        self._by_id: dict[int, SendOp] = {}
        self._collective: dict[bytes, SendOp] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, message_id: int) -> SendOp | None:
        """The message that is offered under this id."""
        return self._by_id.get(message_id)

    @property
    def unanswered(self) -> bool:
        """Whether anyone here still waits for an answer."""
        return any(op.state < _SENT for op in self._by_id.values())

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

    def drop_group(self, group: bytes) -> None:
        """Drop the messages of `group`; their payload is free."""
        for op in self._by_id.values():
            if op.key.startswith(group):
                op.drop()
                op.payload = _NO_PAYLOAD

    def withdraw(self, op: SendOp) -> bool:
        """Free the payload of `op`, which stays until its offer is answered; False if it is not on offer."""
        if self._by_id.get(op._id) is not op:
            return False
        op.payload = _NO_PAYLOAD
        return True

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
