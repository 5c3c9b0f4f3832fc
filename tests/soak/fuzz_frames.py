"""Frames for both doors of the store daemon, most of them wrong: what a hostile or broken client may send.

Each source begins with a valid frame with odd arguments and then, two times out of three, does something to its bytes
or its types. All of it follows from the seed.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgpack
from torch_wire_kit import VALIDATE, blob, number

from asyncdist_server.torch.wire import Query
from asyncdist_server.wire import messages as codes

KEYS: Final = [b"k", b"n", b"q", b"", b"\0", b"k" * 300, b"world/default/joins/0", b"\xff\xfe", b"x" * 9000]
VALUES: Final = [b"", b"1", b"-7", b"9223372036854775807", b"not a number", bytes(200), b"\xff" * 17]
NUMBERS: Final = [0, 1, -1, 2, 7, 255, 65_536, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63)]
TIMEOUTS: Final = [0, 0, 0, 1, 5, None, 2**53, 60_000]
LARGE_BYTES: Final = 300_000
HEADERS: Final = [
    b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1
    b"\xdc\xff\xff",
    b"\xdf\xff\xff\xff\xff",  # a map
    b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xdb\xff\xff\xff\xff",  # text
    b"\xc9\xff\xff\xff\xff\x01",  # an extension
    b"\xd9\xff",
    b"\x9f",
    b"\x8f",
    b"\xc1",
]

Request: TypeAlias = tuple[int, tuple[Callable[[], Any], ...]]
"""An operation, and what makes its arguments."""


class NativeFrames:
    """Frames of the native protocol, after the handshake."""

    def __init__(self, seed: int) -> None:
        self._random = rng = random.Random(seed)
        self._pack: Callable[[Any], bytes] = msgpack.Packer().pack
        self._ids = 0
        key, value, numbers = (lambda: rng.choice(KEYS)), (lambda: rng.choice(VALUES)), (lambda: rng.choice(NUMBERS))
        wait = lambda: rng.choice(TIMEOUTS)  # noqa: E731  it stands among the others
        keys = lambda: tuple(rng.choice(KEYS) for _ in range(rng.randrange(4)))  # noqa: E731
        lease = lambda: rng.randrange(1, 50)  # noqa: E731
        self._arguments: list[Request] = [
            (codes.SET, (key, value)),
            (codes.GET, (key, wait)),
            (codes.ADD, (key, numbers)),
            (codes.CHECK, (keys,)),
            (codes.WAIT, (keys, wait)),
            (codes.COMPARE_SET, (key, value, value)),
            (codes.DELETE, (key,)),
            (codes.APPEND, (key, value)),
            (codes.MULTI_GET, (keys, wait)),
            (codes.MULTI_SET, (lambda: (b"k", rng.choice(KEYS)), lambda: (b"1", rng.choice(VALUES)))),
            (codes.NUM_KEYS, ()),
            (codes.LIST_KEYS, (key, key)),
            (codes.QUEUE_PUSH, (key, value)),
            (codes.QUEUE_POP, (key, wait)),
            (codes.QUEUE_LEN, (key,)),
            (codes.QUEUE_RETURN, (key, value)),
            (codes.CANCEL, (lease,)),
            (codes.PING, ()),
            (codes.GRANT, (lease, lambda: rng.choice((1, 1000, 2**53)), lambda: rng.random() < 0.5)),
            (codes.KEEP_ALIVE, (lambda: tuple(rng.sample(range(1, 50), 3)),)),
            (codes.REVOKE, (lease,)),
            (codes.SET_LEASED, (key, value, lease)),
            (codes.HOLD, (key, lease, lease)),
            (codes.WATCH, (key, numbers, wait)),
            (codes.LOCK, (key, lease, wait)),
            (codes.UNLOCK, (key, numbers)),
            (codes.JOIN, (key, key, lease, numbers, lease, lease, wait)),
            (codes.LEAVE, (key, lease)),
        ]
        self._rare: list[Request] = [
            (codes.DELETE_NAMESPACE, ()),
            (codes.STATUS, ()),
            (codes.NAMESPACES, ()),
            (codes.WAITS, (lambda: True,)),
            (codes.CLIENTS, (lambda: True,)),
        ]
        self._spoils: list[tuple[int, Callable[[list[Any]], bytes]]] = [
            (68, self._as_it_is),
            (8, self._other_types),
            (11, self._flipped),
            (3, self._cut),
            (2, self._nested),
            (2, self._huge_count),
            (2, self._junk),
            (1, self._large),
        ]

    def frame(self) -> bytes:
        """Return the next frame, whose length is right."""
        (spoil,) = self._random.choices([each for _, each in self._spoils], [weight for weight, _ in self._spoils])
        return spoil([0, *(self._request() for _ in range(self._random.choice((1, 1, 1, 2, 5))))])

    def lie(self) -> bytes:
        """Return a frame whose length is wrong: nothing that is sent behind it is understood."""
        data = self._pack([0, self._request()])
        length = self._random.choice([0, 1, len(data) - 1, len(data) + 1, len(data) + 40, 2**26, 2**31, 2**32 - 1])
        return struct.pack(">I", length) + data

    def probe(self) -> tuple[bytes, int]:
        """Return a frame that is answered if it is read at all, and the id of the answer."""
        self._ids += 1
        request_id = 2**40 + self._ids
        return framed(self._pack([0, [request_id, codes.PING]])), request_id

    def _request(self) -> list[Any]:
        rng = self._random
        operation, arguments = rng.choice(self._rare if rng.random() < 0.005 else self._arguments)
        return [rng.randrange(1, 1000), operation, *(argument() for argument in arguments)]

    def _as_it_is(self, message: list[Any]) -> bytes:
        return framed(self._pack(message))

    def _other_types(self, message: list[Any]) -> bytes:
        rng = self._random
        place = message if rng.random() < 0.2 else rng.choice(message[1:])
        place[rng.randrange(len(place))] = self._anything()
        return framed(self._pack(message))

    def _anything(self, depth: int = 0) -> Any:
        rng = self._random
        kind = rng.randrange(10 if depth < 3 else 8)
        if kind < 8:
            odd = [None, True, 1.5, float("nan"), "text", -1, 2**64 - 1, b"", msgpack.ExtType(5, b"x"), 0, 99, b"k"]
            return rng.choice(odd)
        inner = [self._anything(depth + 1) for _ in range(rng.randrange(3))]
        return inner if kind == 8 else dict.fromkeys([b"a", "b", 3][: len(inner)], inner)

    def _flipped(self, message: list[Any]) -> bytes:
        data = bytearray(self._pack(message))
        for _ in range(self._random.choice((1, 1, 2, 8))):
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return framed(bytes(data))

    def _cut(self, message: list[Any]) -> bytes:
        data = self._pack(message)
        return framed(data[: self._random.randrange(1, len(data))])

    def _nested(self, message: list[Any]) -> bytes:
        depth = self._random.choice([2, 100, 511, 512, 1023, 1024, 1025, 20_000])
        opening = self._random.choice([b"\x91", b"\x92\x00", b"\x81\x91", b"\xdd\0\0\0\x01"])
        return framed(opening * depth + self._random.choice([b"", b"\xc0"]))

    def _huge_count(self, message: list[Any]) -> bytes:
        data = self._pack(message)
        at = self._random.randrange(len(data))
        header = self._random.choice(HEADERS)
        return framed(data[:at] + header * self._random.choice([1, 1, 200]) + data[at:])

    def _junk(self, message: list[Any]) -> bytes:
        return framed(self._random.randbytes(self._random.choice([1, 3, 17, 400])))

    def _large(self, message: list[Any]) -> bytes:
        if self._random.random() < 0.9:
            return self._as_it_is(message)
        large = [[1 + position, codes.SET, b"large", bytes(LARGE_BYTES)] for position in range(2)]
        many = [[1 + position, codes.GET, b"k", 0] for position in range(3000)]
        return framed(self._pack([0, *self._random.choice([large, many])]))


class HandshakeFrames:
    """What is sent instead of one message of the native handshake, or of the hello behind it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def spoil(self, message: bytes) -> bytes:
        """Return something like `message`."""
        rng = self._random
        data = bytearray(message)
        kind = rng.randrange(6)
        if kind < 3:
            for _ in range(rng.choice((1, 2, 9))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 3:
            del data[rng.randrange(len(data)) :]
        elif kind == 4:
            data[rng.randrange(len(data)) : 0] = rng.randbytes(rng.choice((1, 30, 2000)))
        else:
            data = bytearray(rng.randbytes(rng.choice((1, 5, 50, 3000))))
        return bytes(data)


class TorchFrames:
    """Requests of torch's protocol, after its magic number."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._nonces = 0
        self._spoils: list[tuple[int, Callable[[bytes], bytes]]] = [
            (66, lambda request: request),
            (12, self._flipped),
            (5, self._cut),
            (8, self._wrong_length),
            (4, self._junk),
            (4, self._spliced),
            (1, self._large),
        ]

    def frame(self) -> bytes:
        """Return the next request."""
        (spoil,) = self._random.choices([each for _, each in self._spoils], [weight for weight, _ in self._spoils])
        return spoil(self._request())

    def probe(self) -> tuple[bytes, bytes]:
        """Return a request that is answered if it is read at all, and the answer."""
        self._nonces += 1
        nonce = struct.pack("<I", (self._nonces * 2654435761) % 2**32)
        return bytes([Query.PING]) + nonce, nonce

    def _request(self) -> bytes:
        rng = self._random
        kind = Query(rng.randrange(1, 19)) if rng.random() < 0.999 else Query.LIST_KEYS
        key, value = blob(rng.choice(KEYS[:-1])), blob(rng.choice(VALUES))
        keys = [blob(rng.choice(KEYS[:-1])) for _ in range(rng.randrange(4))]
        listed = number(len(keys)) + b"".join(keys)
        fields = {
            Query.SET: key + value,
            Query.APPEND: key + value,
            Query.QUEUE_PUSH: key + value,
            Query.COMPARE_SET: key + value + value,
            Query.ADD: key + number(rng.choice(NUMBERS)),
            Query.BARRIER: key + number(rng.choice(NUMBERS)),
            Query.CHECK: listed,
            Query.WAIT: listed,
            Query.MULTI_GET: listed,
            Query.MULTI_SET: number(len(keys)) + b"".join(each + value for each in keys),
            Query.PING: b"ping",
            Query.GETNUMKEYS: b"",
            Query.LIST_KEYS: b"",
            Query.CANCEL_WAIT: b"",
        }
        return bytes([kind]) + fields.get(kind, key)

    def _flipped(self, request: bytes) -> bytes:
        data = bytearray(request)
        for _ in range(self._random.choice((1, 1, 2, 8))):
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(data)

    def _cut(self, request: bytes) -> bytes:
        return request[: self._random.randrange(1, len(request) + 1)]

    def _wrong_length(self, request: bytes) -> bytes:
        lie = self._random.choice([0, 1, 2**13, 2**13 + 1, 131_072, 131_073, 2**26, 2**32, 2**63, 2**64 - 1])
        return request[:1] + struct.pack("<Q", lie) + request[9:]

    def _junk(self, request: bytes) -> bytes:
        return self._random.randbytes(self._random.choice([1, 3, 17, 400]))

    def _spliced(self, request: bytes) -> bytes:
        other = self._request()
        return request[: self._random.randrange(len(request))] + other[self._random.randrange(len(other)) :]

    def _large(self, request: bytes) -> bytes:
        if self._random.random() < 0.9:
            return request
        many = [blob(b"%d" % position) for position in range(5000)]
        listed = bytes([Query.CHECK]) + number(len(many)) + b"".join(many)
        return self._random.choice([bytes([Query.SET]) + blob(b"large") + blob(bytes(LARGE_BYTES)), listed])

    def spoiled_magic(self) -> bytes:
        """What is said instead of the magic number."""
        return self._flipped(VALIDATE) if self._random.random() < 0.7 else self._random.randbytes(40)


def framed(payload: bytes) -> bytes:
    """Return `payload` as one frame of the native protocol."""
    return struct.pack(">I", len(payload)) + payload
