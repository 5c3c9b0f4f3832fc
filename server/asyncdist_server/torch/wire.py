"""The wire of torch.distributed's TCPStore (torch 2.13): what a torch client sends, and how it is cut out of a stream.

There are no frames and no request ids. A request is one byte of query type and its fields, each reply is bare, and
nothing says where either ends but its own lengths. Integers are little-endian, strings carry a 64-bit length. There is
no reply that means an error: closing the connection is the only refusal.

    VALIDATE magic                nothing; must come first, once
    PING nonce                    the nonce
    SET APPEND QUEUE_PUSH key value, MULTI_SET pairs            nothing
    COMPARE_SET key expected desired                            a string
    GET key, MULTI_GET keys                                     a string for each key, empty if the key is missing
    ADD key amount                                              the sum
    CHECK keys                                                  0 if all are present, 1 otherwise
    WAIT keys, BARRIER key world_size                           0, later
    CANCEL_WAIT                                                 1, always
    GETNUMKEYS, QUEUE_LEN key                                   a number
    DELETE_KEY key                                              1 or 0, as 64 bits
    QUEUE_POP key                                               the length before, and a string if that is not 0
    LIST_KEYS                                                   a number, and as many strings
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from typing import Any, Final

from asyncdist_server.wire.large_frames import LongBytes
from asyncdist_server.wire.messages import MAX_ITEMS, Limits, ProtocolError

VALIDATE_MAGIC: Final = 0x3C85F7CE
FIRST_BYTE: Final = 0
"""The first byte of every torch client (the query VALIDATE). Native clients and HTTP begin with another."""
MAX_VECTOR_KEYS: Final = 4 * MAX_ITEMS
"""Most keys in one request: 131,072, as many as torch's own server takes."""
SMALL_BYTES: Final = 4096
"""A string below this is joined with its length: a copy costs less than one more piece to send."""
LONG_BYTES: Final = 512 * 1024
"""A string that is no longer is copied in less than a millisecond once it is whole."""
STOP_WAITING: Final = b"\x00"
WAIT_CANCELED: Final = b"\x01"


class Query(enum.IntEnum):
    """The query types, all that torch 2.13 has; a later byte closes the connection."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18


_KEY, _VALUE, _INT64, _UINT32, _KEYS, _PAIRS = range(6)
_FIELDS: Final[Mapping[int, tuple[int, ...]]] = {
    Query.VALIDATE: (_UINT32,),
    Query.SET: (_KEY, _VALUE),
    Query.COMPARE_SET: (_KEY, _VALUE, _VALUE),
    Query.GET: (_KEY,),
    Query.ADD: (_KEY, _INT64),
    Query.CHECK: (_KEYS,),
    Query.WAIT: (_KEYS,),
    Query.GETNUMKEYS: (),
    Query.DELETE_KEY: (_KEY,),
    Query.APPEND: (_KEY, _VALUE),
    Query.MULTI_GET: (_KEYS,),
    Query.MULTI_SET: (_PAIRS,),
    Query.CANCEL_WAIT: (),
    Query.PING: (_UINT32,),
    Query.QUEUE_PUSH: (_KEY, _VALUE),
    Query.QUEUE_POP: (_KEY,),
    Query.QUEUE_LEN: (_KEY,),
    Query.LIST_KEYS: (),
    Query.BARRIER: (_KEY, _INT64),
}
_LAYOUTS: Final = tuple(_FIELDS[query] for query in range(len(_FIELDS)))

# How the fields of the usual small requests lie behind the query and the length of the first string, or the count.
_OTHER, _ONE_KEY, _KEY_VALUE, _KEY_INT64, _KEY_LIST = range(5)
_SHAPE_OF: Final = {(_KEY,): _ONE_KEY, (_KEY, _VALUE): _KEY_VALUE, (_KEY, _INT64): _KEY_INT64, (_KEYS,): _KEY_LIST}
_SHAPES: Final = bytes(_SHAPE_OF.get(layout, _OTHER) for layout in _LAYOUTS)

_HEAD: Final = struct.Struct("<BQ")
_INTEGER: Final = struct.Struct("<q")
_LENGTH: Final = struct.Struct("<Q")
_NONCE: Final = struct.Struct("<I")
LENGTH_BYTES: Final = _LENGTH.size
HEAD_BYTES: Final = _HEAD.size

encode_integer = _INTEGER.pack
encode_nonce = _NONCE.pack
encode_length = _LENGTH.pack


def read_small(data: bytes, start: int, limits: Limits) -> tuple[tuple[Any, ...], int] | None:
    """Return the request that begins at `start` and where it ends, if it is one of the usual small ones and all there.

    This takes a quarter of a `TorchReader`'s time. All else, and all that is wrong, gives None and is for that reader.
    """
    size = len(data)
    position = start + HEAD_BYTES
    if size < position or data[start] >= len(_SHAPES):
        return None
    query, length = _HEAD.unpack_from(data, start)
    shape = _SHAPES[query]
    if shape == _KEY_LIST and length == 1 and size >= position + LENGTH_BYTES:
        (length,) = _LENGTH.unpack_from(data, position)
        position += LENGTH_BYTES
    elif shape in (_KEY_LIST, _OTHER):
        return None
    end = position + length
    if length > limits.key_bytes or end > size:
        return None
    key = data[position:end]
    if shape == _ONE_KEY:
        return (query, key), end
    if shape == _KEY_LIST:
        return (query, (key,)), end
    position = end + LENGTH_BYTES
    if size < position:
        return None
    if shape == _KEY_INT64:
        return (query, key, _INTEGER.unpack_from(data, end)[0]), position
    (length,) = _LENGTH.unpack_from(data, end)
    end = position + length
    return ((query, key, data[position:end]), end) if length <= limits.value_bytes and end <= size else None


class TorchReader:
    """Cuts a byte stream, in whatever segments it comes, into requests.

        reader.feed(data)
        while (request := reader.next()) is not None: ...    # (query, fields...)

    A field is bytes, an int, or a list of keys; MULTI_SET has keys and values as two lists. `next` raises
    `ProtocolError` on an unknown query, on any before VALIDATE, and on a length beyond the limits as soon as it is
    there; afterwards the reader must not be used again. Work and memory are linear in the bytes fed: a half-read list
    is gone on with.
    """

    __slots__ = (
        "_begun",
        "_buffer",
        "_fields",
        "_held",
        "_items",
        "_layout",
        "_limits",
        "_long",
        "_missing",
        "_needed",
        "_position",
        "_request",
        "_request_bytes",
    )

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._begun = False
        self._buffer: bytes | bytearray = b""
        self._position = 0
        self._needed = 1  # how many bytes from _position on must be there before anything can go on
        self._layout: tuple[int, ...] | None = None  # of the request being read
        self._fields = 0  # how many fields of it have been read
        self._request: list[Any] = []
        self._request_bytes = 0
        self._items: list[bytes] = []  # of the list being read
        self._missing = -1  # how many strings that list still lacks; -1 outside of lists
        self._held = 0
        self._long: LongBytes | None = None  # the string being read, where it is long; then the buffer is empty

    @property
    def buffered(self) -> int:
        """Bytes held: those not yet looked at, and those of an unfinished request."""
        long_bytes = 0 if self._long is None else self._long.received
        return len(self._buffer) - self._position + self._held + long_bytes

    @property
    def ready(self) -> bool:
        """Whether `next` has enough bytes to go on."""
        return len(self._buffer) - self._position >= self._needed

    @property
    def idle(self) -> bool:
        """Whether it is between two requests and has read everything."""
        return self._layout is None and self._position >= len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        if self._long is not None:
            data = bytes(self._long.feed(memoryview(data)))
            self._needed = 1 if self._long.left else 0
        if self._position >= len(self._buffer):
            self._buffer = data
        else:
            if type(self._buffer) is not bytearray:
                self._buffer = bytearray(memoryview(self._buffer)[self._position :])
            else:
                del self._buffer[: self._position]
            self._buffer += data
        self._position = 0

    def next(self) -> tuple[Any, ...] | None:
        """Return the next whole request, None before its last byte is there."""
        if not self.ready:
            return None
        if self._layout is None:
            query = self._buffer[self._position]
            if query >= len(_LAYOUTS):
                raise ProtocolError(f"unknown query type {query}")
            if not self._begun and query != FIRST_BYTE:
                raise ProtocolError("a torch client must begin with its magic number")
            self._begun = True
            self._position += 1
            self._layout = _LAYOUTS[query]
            self._request = [query]
            self._request_bytes = 0
        layout = self._layout
        while self._fields < len(layout):
            if not self._read_field(layout[self._fields]):
                self._held = self._request_bytes
                return None
            self._fields += 1
        self._layout = None
        self._fields = 0
        self._needed = 1
        self._held = 0
        if self._position >= len(self._buffer):
            self._forget_buffer()
        return tuple(self._request)

    def _forget_buffer(self) -> None:
        """Let go of what was read: a large request's bytes must not live as long as its connection."""
        self._buffer = b""
        self._position = 0

    def _read_field(self, kind: int) -> bool:
        """Append one field to the request; false if it is not all there."""
        if kind <= _VALUE:
            blob = self._read_string(kind)
            if blob is None:
                return False
            self._request.append(blob)
        elif kind == _INT64:
            if not self._has(_INTEGER.size):
                return False
            self._request.append(_INTEGER.unpack_from(self._buffer, self._position)[0])
            self._position += _INTEGER.size
        elif kind == _UINT32:
            if not self._has(_NONCE.size):
                return False
            self._request.append(_NONCE.unpack_from(self._buffer, self._position)[0])
            self._position += _NONCE.size
        else:
            return self._read_list(kind)
        return True

    def _read_list(self, kind: int) -> bool:
        pairs = kind == _PAIRS
        if self._missing < 0:
            if not self._has(LENGTH_BYTES):
                return False
            count = _LENGTH.unpack_from(self._buffer, self._position)[0]
            if count > MAX_VECTOR_KEYS:
                raise ProtocolError(f"{count} keys in one request, allowed are {MAX_VECTOR_KEYS}")
            self._position += LENGTH_BYTES
            self._missing = 2 * count if pairs else count
        items = self._items
        while self._missing:
            blob = self._read_string(_VALUE if pairs and self._missing % 2 else _KEY)
            if blob is None:
                return False
            items.append(blob)
            self._missing -= 1
        self._missing = -1
        self._items = []
        if pairs:
            self._request += [tuple(items[::2]), tuple(items[1::2])]
        else:
            self._request.append(tuple(items))
        return True

    def _read_string(self, kind: int) -> bytes | None:
        """Return one string, None if it is not all there."""
        if self._long is not None:  # it is whole now
            long, self._long = self._long, None
            self._needed = 1
            self._request_bytes += LENGTH_BYTES + long.received
            return long.value()
        buffer, position = self._buffer, self._position
        available = len(buffer) - position
        if available < LENGTH_BYTES:
            self._needed = LENGTH_BYTES
            return None
        length: int = _LENGTH.unpack_from(buffer, position)[0]
        limits = self._limits
        if length > (limits.key_bytes if kind == _KEY else limits.value_bytes):
            raise ProtocolError(f"a {'key' if kind == _KEY else 'value'} of {length} bytes is longer than allowed")
        total = LENGTH_BYTES + length
        if self._request_bytes + total > limits.frame_bytes:
            raise ProtocolError(f"a request of more than {limits.frame_bytes} bytes")
        if available < total:
            if length > LONG_BYTES:
                self._long = LongBytes(length)
                self._long.feed(memoryview(buffer)[position + LENGTH_BYTES :])
                self._forget_buffer()
            self._needed = total if self._long is None else 1
            return None
        self._needed = 1
        self._position = position + total
        self._request_bytes += total
        if type(buffer) is bytes:
            return buffer[position + LENGTH_BYTES : position + total]
        with memoryview(buffer) as view:  # one copy, where a slice of a bytearray would make two
            return bytes(view[position + LENGTH_BYTES : position + total])

    def _has(self, size: int) -> bool:
        enough = len(self._buffer) - self._position >= size
        self._needed = 1 if enough else size
        return enough
