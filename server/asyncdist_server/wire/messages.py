"""The native wire contract of the store: what a client and the daemon say to each other after the token handshake.

Every frame is a 4-byte big-endian length followed by that many bytes of msgpack. Keys and values are byte strings.

    client -> server   hello      [version, client_id (16 bytes), [pending request ids]]                   once, first
    server -> client   welcome    [OK, version, incarnation (16 bytes), resumed, {limit name: number}]      once, or
                       refusal    [code, message], and the connection is closed
    client -> server   requests   [received, request, request, ...]     request = [id, operation, arguments...]
    server -> client   replies    [reply, reply, ...]                   reply = [id, code, value]

A frame carries everything one turn of the sender's loop produced, so that the cost of a frame is shared by its
requests. Requests are pipelined without limit but `Limits.in_flight`; each gets exactly one reply, blocked ones later
than those behind them. A request id is an integer in 1..2**63-1 that its client never uses for anything else, on any
connection; retrying a request means sending it again under its old id. Reply id 0 speaks of the connection: a
protocol error, told just before the server closes it; or `STOPPING`, told to every client of a daemon that stops in
order: the connection is lost as any other may be, and what it carried is to be retried.

Exactly once. The daemon remembers the reply of every mutation, and of every WATCH without a revision, until it knows
that the client has it:
* `received` counts the reply frames the client has read since the welcome on this connection, and covers everything in
  them. The server never waits for it.
* After a reconnect, `pending` of the hello names the mutations the client is going to retry; all else that was
  remembered is dropped. A retried mutation that was applied before is answered from memory, any other is applied now.
* `incarnation` differs from the last welcome's, or `resumed` is false: the daemon no longer knows this client (it
  restarted without its state, or the client was away for longer than `CLIENT_LINGER_S`). Then it is unknown whether
  pending mutations were applied: fail them, do not retry. Reads may be retried always.
* `GOODBYE` makes the daemon forget the client at once.

A client whose id is `OBSERVER_ID` only looks: it may ask for nothing but `OBSERVATIONS`, is not remembered, and there
may be many of them. So nothing it is told waits for the disk, and it can ask why others wait.

The namespace (job) and rank of a client are those its token handshake proved (`auth.store_context`). A hello may end
with a fourth element, the client's name as UTF-8, which is shown to people.

Requests and what their reply's value is (`timeout_ms` is an integer >= 0, or None to wait without limit):

    SET key value                     None
    GET key timeout_ms                the value; waits for the key
    ADD key amount                    the sum, an integer; INVALID if the value is not a number or the sum leaves int64
    CHECK [key...]                    True if all are present (a queue with items counts as present)
    WAIT [key...] timeout_ms          None, once all are present at the same moment
    COMPARE_SET key expected desired  bytes: desired if it was stored, else what torch's store answers
    DELETE key                        True if it existed
    APPEND key value                  None
    MULTI_GET [key...] timeout_ms     [value...], once all keys are present at the same moment
    MULTI_SET [key...] [value...]     None; all of them or none
    NUM_KEYS                          an integer
    LIST_KEYS prefix start            (next start or None, [key...]): the first of the keys with the prefix that are not
                                      before `start`, in order. None: there are no more
    QUEUE_PUSH key value              None
    QUEUE_POP key timeout_ms          the oldest item; waiting clients are served in the order they asked
    QUEUE_LEN key                     an integer
    QUEUE_RETURN key value            None; puts an item back to the head, for a pop whose caller was cancelled
    CANCEL id                         True if that blocked request was withdrawn (it is answered CANCELLED first), False
                                      if it was not blocked: it has been answered, or never existed
    DELETE_NAMESPACE                  how many keys and queues of this client's namespace were removed
    GRANT id ttl_ms bound             None; a lease that ends ttl_ms after its last KEEP_ALIVE or, if bound, after this
                                      client's connection was lost (at once after a goodbye). Clients draw ids at random
    KEEP_ALIVE [id...]                [id...] of those leases that are not there (any more)
    REVOKE id                         True if the lease was there; what hung on it goes
    SET_LEASED key value id           None; the key goes when the lease ends, unless SET or COMPARE_SET free it before
    HOLD prefix id linger_ms          None; when the last lease that holds a prefix has ended and linger_ms have passed,
                                      all that begins with it goes
    WATCH prefix revision timeout_ms  (next revision, [(revision, kind, key, value)...]), what happened to keys with the
                                      prefix from `revision` on; waits for something. None: nothing, at once, the start
    LOCK key id timeout_ms            the fencing token, once the key is free; the key goes when the lease ends
    UNLOCK key token                  True if the key was held with this token
    JOIN job name min max settle_ms id timeout_ms    (epoch, rank, [name...], revision), once a round is complete; waits
                                      for a living member of that name to go, takes the place of one whose connection is
                                      lost
    LEAVE job id                      True if the lease stood for a member of the job
    STATUS                            a map of what the daemon holds, for people
    WAITS everywhere                  [how many, [operation, [key...], waited_ms, namespace, name, rank, address]...]:
                                      waiting requests, longest first, in this namespace or in all
    NAMESPACES                        [how many, [name, keys, queues, clients]...]: those that hold most come first
    CLIENTS everywhere                [how many, [namespace, name, rank, address, waiting requests, away]...]: those of
                                      this namespace or of all, but the one that asks; away: it may come back
    PING                              None
    GOODBYE                           None, then the server closes the connection
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import msgpack

# Operation codes. Small integers, so that msgpack spends one byte on them.
SET: Final = 1
GET: Final = 2
ADD: Final = 3
CHECK: Final = 4
WAIT: Final = 5
COMPARE_SET: Final = 6
DELETE: Final = 7
APPEND: Final = 8
MULTI_GET: Final = 9
MULTI_SET: Final = 10
NUM_KEYS: Final = 11
LIST_KEYS: Final = 12
QUEUE_PUSH: Final = 13
QUEUE_POP: Final = 14
QUEUE_LEN: Final = 15
QUEUE_RETURN: Final = 16
CANCEL: Final = 17
DELETE_NAMESPACE: Final = 18
PING: Final = 19
GOODBYE: Final = 20
GRANT: Final = 21
KEEP_ALIVE: Final = 22
REVOKE: Final = 23
SET_LEASED: Final = 24
HOLD: Final = 25
WATCH: Final = 26
LOCK: Final = 27
UNLOCK: Final = 28
JOIN: Final = 29
LEAVE: Final = 30
STATUS: Final = 31
WAITS: Final = 32
NAMESPACES: Final = 33
CLIENTS: Final = 34

_OTHER_NAMES: Final = {DELETE: "delete_key", GRANT: "lease", SET_LEASED: "set with lease"}
OPERATION_NAMES: Final[Mapping[int, str]] = {
    code: _OTHER_NAMES.get(code, name.lower()) for name, code in list(globals().items()) if type(code) is int
}
"""What people call the operations: all constants above, in lower case but for three."""

MUTATIONS: Final = frozenset(
    {SET, ADD, COMPARE_SET, DELETE, APPEND, MULTI_SET, QUEUE_PUSH, QUEUE_POP, QUEUE_RETURN, DELETE_NAMESPACE}
    | {GRANT, REVOKE, SET_LEASED, HOLD, LOCK, UNLOCK, JOIN, LEAVE}
)
"""Operations whose replies the daemon remembers, and which a client names in `Hello.pending`."""

OBSERVATIONS: Final = (STATUS, WAITS, NAMESPACES, CLIENTS, PING, GOODBYE)
"""What a client may ask that only looks: nothing of what is told depends on a change."""

# Reply codes. The value of OK is the operation's; of TIMEOUT the list of keys still missing (at most
# MAX_MISSING_REPORTED), or of a join that waits for a name a text for people; of all others a text for people.
OK: Final = 0
TIMEOUT: Final = 1
LIMIT: Final = 2  # a documented bound; nothing of the request was applied
INVALID: Final = 3  # the request makes no sense on the stored value; nothing was applied
CANCELLED: Final = 4  # withdrawn by CANCEL
PROTOCOL: Final = 5  # the bytes broke this contract; the connection is closed
REFUSED: Final = 6  # this client may not connect now (version, too many connections, superseded)
COMPACTED: Final = 7  # events from that revision on are no longer all remembered
LEASE_LOST: Final = 8  # there is no such lease (any more); nothing was applied
STOPPING: Final = 9  # of id 0: the daemon stops; connect again, here once it is back or to another

# What a watch tells of a key.
EVENT_SET: Final = 1
EVENT_DELETE: Final = 2
EVENT_EXPIRE: Final = 3  # deleted because the lease it was bound to expired

PROTOCOL_VERSION: Final = 1

LENGTH_BYTES: Final = 4
CLIENT_ID_BYTES: Final = 16
INCARNATION_BYTES: Final = 16
OBSERVER_ID: Final = bytes(CLIENT_ID_BYTES)
"""The id of all that only look. A daemon of before takes it for an ordinary client's."""
MAX_REQUEST_ID: Final = 2**63 - 1
MAX_TIMEOUT_MS: Final = 2**53
"""Deadlines are floats in seconds; beyond this they lose their milliseconds."""

MAX_KEY_BYTES: Final = 8 * 1024
"""Longest key. torch's daemon has the same bound; keys are copied into waiters and error messages."""
MAX_VALUE_BYTES: Final = 64 * 1024 * 1024
"""Longest value and queue item (default). The store is for rendezvous data, tensors travel between peers."""
FRAME_SLACK_BYTES: Final = 1024 * 1024
"""What a frame may hold besides one value of the largest size: keys, other small requests, msgpack's own bytes."""
MAX_FRAME_BYTES: Final = MAX_VALUE_BYTES + FRAME_SLACK_BYTES
"""Longest frame (default), in both directions. Bounds what one connection can make its reader buffer."""
MAX_ITEMS: Final = 32_768
"""Most requests in a frame and keys in a request. msgpack allocates arrays from their headers, up to 1,024 nested:
1,024 headers x this x 8 bytes = 256 MiB is the most that a hostile frame can ask for, for a moment."""
MAX_ELEMENTS: Final = 512 * 1024
"""Most elements in a frame that the daemon reads, arrays among them: one of a byte or two becomes an object of up to
72, so that a frame of the longest kind took gigabytes. Several requests with the most keys have room."""
MAX_IN_FLIGHT: Final = 65_536
"""Most requests of one client without a reply it is known to have (default). Bounds remembered replies."""
MAX_NAMESPACE_BYTES: Final = 255
"""Longest name of a namespace: a job id and an attempt number."""
MAX_CLIENT_NAME_BYTES: Final = 255
"""Longest name of a client, which is shown to people beside what it waits for."""
MAX_LEASES: Final = 65_536
"""Leases of all namespaces; each costs about 1 KiB. Four for each of the most connections: a rank has two, one short,
to be seen soon to be gone, and one for the keys of its world, which outlive a broken connection."""
MAX_LEASE_ID: Final = 2**63 - 1
MAX_MEMBERS: Final = 65_536
"""Members of one job; a round is worked out anew whenever one comes or goes."""
MAX_MISSING_REPORTED: Final = 100
"""Most keys in the reply to an expired wait: enough to say which rank is missing, bounded for a wait on thousands."""
MAX_CONNECTIONS: Final = 16_384
"""Connections (default). About 4 KiB each while idle, so that a full daemon stays within 100 MiB."""
MAX_WAITERS: Final = 262_144
"""Blocked requests of all clients together (default); each costs about 1 KiB."""
MAX_MEMORY_BYTES: Final = 1024 * 1024 * 1024
"""Keys, values, queues, blocked requests and remembered replies together (default)."""
CLIENT_LINGER_S: Final = 120.0
"""How long the replies of a client that went away are kept. Longer than a client's default time to reconnect."""

FRAME_TARGET_BYTES: Final = 256 * 1024
"""A sender starts a new frame once this much is in the current one (advice, not a limit)."""
RECYCLE_PACKER_BYTES: Final = 1024 * 1024
"""msgpack's packer never gives its buffer back; after a larger frame it is replaced."""


class ProtocolError(Exception):
    """The bytes of the other side break this contract. Only that connection is closed."""


class Limits(NamedTuple):
    """The bounds a daemon enforces. The first five are told to clients in the welcome."""

    frame_bytes: int = MAX_FRAME_BYTES
    key_bytes: int = MAX_KEY_BYTES
    value_bytes: int = MAX_VALUE_BYTES
    items: int = MAX_ITEMS
    in_flight: int = MAX_IN_FLIGHT
    connections: int = MAX_CONNECTIONS
    waiters: int = MAX_WAITERS
    memory_bytes: int = MAX_MEMORY_BYTES


_TOLD_LIMITS: Final = Limits._fields[:5]


class Hello(NamedTuple):
    """A client's first frame. `pending` are the ids of mutations it will retry on this connection."""

    client_id: bytes
    pending: tuple[int, ...] = ()
    name: str = ""


class Welcome(NamedTuple):
    """The server's answer. See the module docstring for what `incarnation` and `resumed` mean to retries."""

    incarnation: bytes
    resumed: bool
    limits: Limits


class HelloRefused(Exception):
    """The server answered the hello with a refusal; `code` is a reply code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Encoder:
    """Makes frames. It owns one msgpack packer, so use one encoder per thread (per loop is the natural choice)."""

    __slots__ = ("pack",)

    def __init__(self) -> None:
        self.pack: Callable[[object], bytes] = msgpack.Packer().pack

    def frame(self, message: object) -> bytes:
        """Return `message` as one frame. Raises `ValueError` for what msgpack cannot hold (an int beyond 64 bits)."""
        payload = self.pack(message)
        if len(payload) > RECYCLE_PACKER_BYTES:
            self.pack = msgpack.Packer().pack
        return len(payload).to_bytes(LENGTH_BYTES, "big") + payload

    def hello(self, hello: Hello) -> bytes:
        """Return a client's first frame."""
        name = hello.name.encode(errors="replace")[:MAX_CLIENT_NAME_BYTES]
        return self.frame((PROTOCOL_VERSION, hello.client_id, hello.pending, name))

    def welcome(self, welcome: Welcome) -> bytes:
        """Return the server's answer to a hello."""
        limits = dict(zip(_TOLD_LIMITS, welcome.limits, strict=False))
        return self.frame((OK, PROTOCOL_VERSION, welcome.incarnation, welcome.resumed, limits))

    def refusal(self, code: int, message: str) -> bytes:
        """Return the server's no to a hello."""
        return self.frame((code, message))

    def requests(self, received: int, requests: Sequence[tuple[Any, ...]]) -> bytes:
        """Return `requests` (tuples of id, operation, arguments) as one frame; `received` acknowledges reply frames."""
        return self.frame((received, *requests))

    def replies(self, replies: Sequence[tuple[int, int, Any]]) -> bytes:
        """Return `replies` (tuples of id, code, value) as one frame."""
        if len(replies) == 1 and type(value := replies[0][2]) is tuple and Names in map(type, value):
            return self._shared(*replies[0])
        return self.frame(replies)

    def _shared(self, request_id: int, code: int, value: tuple[Any, ...]) -> bytes:
        """Return one reply with names that are encoded already, and only copied; msgpack's heads of arrays by hand."""
        pack = self.pack
        parts = [each.encoded if type(each) is Names else pack(each) for each in value]
        payload = b"".join((b"\x91\x93", pack(request_id), pack(code), bytes((0x90 + len(value),)), *parts))
        return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


class FrameReader:
    """Cuts a byte stream into frames; holds at most one unfinished frame.

    `feed` returns the payloads completed by `data`, without their lengths; they may be views of a buffer that belongs
    to them alone. A length of 0 or beyond `max_frame_bytes` ends the stream as soon as it is there: `error` says so
    then, and `feed` raises it unless it has payloads from before it to return. How the stream is cut changes nothing.
    """

    __slots__ = ("_buffer", "_max_frame_bytes", "error", "needed")

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self.needed = LENGTH_BYTES
        """So many bytes has the unfinished frame, with its length, as far as that is known."""
        self.error: ProtocolError | None = None
        """Why nothing more can be read, once all that came before it has been returned."""

    @property
    def buffered(self) -> int:
        """Bytes of the unfinished frame held now."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[memoryview]:
        """Take the next bytes of the stream and return the payloads they complete."""
        if self.error is not None:
            raise self.error
        buffer = self._buffer
        if buffer:
            buffer += data
            if len(buffer) < self.needed:
                return []
            data = buffer
        view = memoryview(data)
        payloads: list[memoryview] = []
        start = 0
        end = len(view)
        needed = LENGTH_BYTES
        while end - start >= LENGTH_BYTES:
            length = int.from_bytes(view[start : start + LENGTH_BYTES], "big")
            if not 0 < length <= self._max_frame_bytes:
                return self._end(payloads, length)
            needed = LENGTH_BYTES + length
            if end - start < needed:
                break
            payloads.append(view[start + LENGTH_BYTES : start + needed])
            start += needed
            needed = LENGTH_BYTES
        self.needed = needed
        if data is not buffer or payloads:
            # The payloads keep the old buffer; the rest starts a new one, so that a large frame is never copied.
            self._buffer = bytearray(view[start:])
        return payloads

    def take_unfinished(self) -> tuple[int, bytearray]:
        """Give up the unfinished frame: return its size and what is there of it. The next bytes begin another one."""
        size, begun = self.needed - LENGTH_BYTES, self._buffer[LENGTH_BYTES:]
        self.needed, self._buffer = LENGTH_BYTES, bytearray()
        return size, begun

    def _end(self, payloads: list[memoryview], length: int) -> list[memoryview]:
        """Note that a frame cannot have this `length`; what came before it still counts."""
        self.error = ProtocolError(f"frame of {length} bytes, allowed are 1 to {self._max_frame_bytes}")
        self._buffer = bytearray()
        if not payloads:
            raise self.error
        return payloads


def decode_requests(
    payload: bytes | bytearray | memoryview, max_items: int = MAX_ITEMS, taken_out: Sequence[bytes] = ()
) -> tuple[Any, ...]:
    """Return (received, request, request, ...). Only `received` is checked; each request is checked when it is run.

    `taken_out` are byte strings in whose place the payload has extensions of one byte.
    """
    message = _decode(payload, max_items=max_items, taken_out=taken_out)
    if not message or type(message[0]) is not int or message[0] < 0:
        raise ProtocolError("a request frame must begin with the count of reply frames received")
    return message


def decode_replies(payload: bytes | memoryview) -> tuple[tuple[int, int, Any], ...]:
    """Return the replies of one frame, each (id, code, value)."""
    message = _decode(payload, text=True)
    for reply in message:
        if type(reply) is not tuple or len(reply) != 3 or type(reply[0]) is not int or type(reply[1]) is not int:
            raise ProtocolError("a reply must be an id, a code and a value")
    return message


def decode_hello(payload: bytes | memoryview, max_in_flight: int = MAX_IN_FLIGHT) -> Hello:
    """Return the hello of a client; raises `HelloRefused` if it speaks another version."""
    message = _decode(payload, max_items=max_in_flight)
    if not message or type(message[0]) is not int:
        raise ProtocolError("a hello must begin with the protocol version")
    if message[0] != PROTOCOL_VERSION:
        # Before anything else is looked at: a later version may say more.
        raise HelloRefused(REFUSED, f"the client speaks store protocol {message[0]}, this server {PROTOCOL_VERSION}")
    if not 3 <= len(message) <= 4:
        raise ProtocolError("a hello must be a version, a client id, pending request ids and perhaps a name")
    _, client_id, pending = message[:3]
    name = message[3] if len(message) > 3 else b""
    if type(name) is not bytes or len(name) > MAX_CLIENT_NAME_BYTES:
        raise ProtocolError(f"a client's name must be at most {MAX_CLIENT_NAME_BYTES} bytes")
    if type(client_id) is not bytes or len(client_id) != CLIENT_ID_BYTES:
        raise ProtocolError(f"a client id must be {CLIENT_ID_BYTES} bytes")
    if type(pending) is not tuple or not all(type(i) is int and 0 < i <= MAX_REQUEST_ID for i in pending):
        raise ProtocolError("pending request ids must be integers in 1..2**63-1")
    return Hello(client_id, pending, name.decode(errors="replace"))


def decode_welcome(payload: bytes | memoryview) -> Welcome:
    """Return the server's welcome; raises `HelloRefused` if it said no."""
    message = _decode(payload, text=True)
    if len(message) == 2 and type(message[0]) is int and type(message[1]) is str:
        raise HelloRefused(*message)
    if len(message) != 5 or message[0] != OK or message[1] != PROTOCOL_VERSION:
        raise ProtocolError("the server's welcome is not one of this protocol version")
    _, _, incarnation, resumed, told = message
    if type(incarnation) is not bytes or len(incarnation) != INCARNATION_BYTES:
        raise ProtocolError(f"an incarnation must be {INCARNATION_BYTES} bytes")
    if type(resumed) is not bool or type(told) is not dict:
        raise ProtocolError("the server's welcome lacks its flag or its limits")
    limits = Limits()
    for name in _TOLD_LIMITS:
        value = told.get(name)
        if type(value) is not int or value <= 0:
            raise ProtocolError(f"the server's welcome lacks the limit {name}")
        limits = limits._replace(**{name: value})
    return Welcome(incarnation, resumed, limits)


def _refuse_extension(_code: int, _data: bytes) -> NoReturn:
    raise ValueError("it has an extension")  # one without any data, which no limit forbids


def _decode(
    payload: bytes | bytearray | memoryview,
    max_items: int | None = None,
    text: bool = False,
    taken_out: Sequence[bytes] = (),
) -> tuple[Any, ...]:
    """Return the one msgpack array in `payload`, arrays as tuples; `text` admits text and maps of the server."""
    size = len(payload)
    if max_items is not None and size > MAX_ELEMENTS and more_elements_than(MAX_ELEMENTS, payload):
        raise ProtocolError(f"more than {MAX_ELEMENTS} elements in a frame")
    in_order = iter(taken_out)
    try:
        message = msgpack.unpackb(
            payload,
            use_list=False,
            max_array_len=size if max_items is None else min(size, max_items + 1),
            max_map_len=64 if text else 0,
            max_str_len=size if text else 0,
            max_ext_len=1 if taken_out else 0,
            ext_hook=_refuse_extension if not taken_out else lambda _code, _data: next(in_order),
        )
    except ValueError as error:
        # All of msgpack's complaints, and those of its text decoder, are ValueErrors.
        raise ProtocolError(f"not a valid msgpack message: {error or type(error).__name__}") from error
    if type(message) is not tuple:
        raise ProtocolError("a message must be an array")
    return message


# An element of a byte or two becomes an object of up to 72 bytes: the bytes of a message do not bound what decoding it
# takes. So elements are counted before a message is decoded, and afterwards their memory is charged.

ELEMENT_BYTES: Final = 48
"""What an element takes: its place in an array, and an integer or an empty byte string..."""
ARRAY_BYTES: Final = 24
"""... and an array more than that."""
BIN_LENGTHS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4}
"""How many bytes the length of a byte string has, behind its first one."""

_NUMBERS: Final = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
_ARRAYS: Final = {0xDC: 3, 0xDD: 5}
HEADS: Final = [0 if first in BIN_LENGTHS else (_NUMBERS | _ARRAYS).get(first, 1) for first in range(256)]
"""How many bytes an element that begins with that one has before the next, but for byte strings. Text, maps and
extensions are not decoded; it does not matter where they end."""


def more_elements_than(limit: int, payload: bytes | bytearray | memoryview) -> bool:
    """Return whether a message that `messages` decodes has more than `limit` elements, arrays among them.

    Takes time for `limit` elements at most. What it says of any other bytes does not matter.
    """
    position, end, count = 0, len(payload), 0
    while position < end:
        if count == limit:
            return True
        count += 1
        first = payload[position]
        head = HEADS[first]
        if head:
            position += head
        else:
            start = position + 1
            position = start + BIN_LENGTHS[first]
            position += int.from_bytes(payload[start:position], "big")
    return False


def held_bytes(message: tuple[Any, ...]) -> int:
    """Return what a decoded message takes, at most, besides the bytes in its byte strings."""
    elements = arrays = 0
    level: Sequence[Any] = message
    while level:  # a level at a time, as one array at a time would take ten times as long
        inner = [each for each in level if type(each) is tuple]
        elements += len(level)
        arrays += len(inner)
        level = list(itertools.chain.from_iterable(inner))
    return ELEMENT_BYTES * elements + ARRAY_BYTES * arrays


class Names(list[bytes]):
    """The names of a job's members. Nothing may change the list: all answers hold the same object, encoded once.

    A round of n members makes n answers of n names each. To measure and encode all of these names would hold the
    daemon's loop for long.
    """

    __slots__ = ("encoded", "size_bytes")

    def __init__(self, names: Iterable[bytes]) -> None:
        super().__init__(names)
        self.encoded: bytes = msgpack.packb(list(self))
        """As a message has them."""
        self.size_bytes = sum(map(len, self))
        """Of all names together."""
