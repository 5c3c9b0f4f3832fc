"""Torch's requests cut out of a stream: every query, every limit, and no more work than bytes."""

from __future__ import annotations

import random
import struct

import pytest
from torch_wire_kit import VALIDATE, number, query

from asyncdist_server.torch.wire import LONG_BYTES, MAX_VECTOR_KEYS, Query, TorchReader
from asyncdist_server.wire.messages import Limits, ProtocolError

LIMITS = Limits(frame_bytes=4096, key_bytes=100, value_bytes=1000)


def read(data: bytes, limits: Limits = LIMITS) -> list[tuple[object, ...]]:
    reader = begun(TorchReader(limits))
    reader.feed(data)
    found = []
    while (request := reader.next()) is not None:
        found.append(request)
    assert reader.buffered == 0
    return found


def begun(reader: TorchReader) -> TorchReader:
    """A reader that has had the magic number."""
    reader.feed(VALIDATE)
    assert reader.next() == (Query.VALIDATE, 0x3C85F7CE)
    return reader


def test_every_query_is_read() -> None:
    stream = VALIDATE + b"".join(
        [
            query(Query.SET, b"k", b"v"),
            query(Query.COMPARE_SET, b"k", b"", b"w"),
            query(Query.GET, b""),
            query(Query.ADD, b"n", -1),
            query(Query.CHECK, [b"a", b"b"]),
            query(Query.WAIT, []),
            query(Query.GETNUMKEYS),
            query(Query.DELETE_KEY, b"k"),
            query(Query.APPEND, b"k", b""),
            query(Query.MULTI_GET, [b"a"]),
            bytes([Query.MULTI_SET]) + number(2) + b"".join(query(Query.SET, b"k", b"v")[1:] for _ in range(2)),
            query(Query.CANCEL_WAIT),
            bytes([Query.PING]) + b"\x01\x02\x03\x04",
            query(Query.QUEUE_PUSH, b"q", b"i"),
            query(Query.QUEUE_POP, b"q"),
            query(Query.QUEUE_LEN, b"q"),
            query(Query.LIST_KEYS),
            query(Query.BARRIER, b"b", 2**63 - 1),
        ]
    )
    requests = read(stream)
    assert {request[0] for request in requests} == set(Query)
    assert requests == [
        (0, 0x3C85F7CE),
        (1, b"k", b"v"),
        (2, b"k", b"", b"w"),
        (3, b""),
        (4, b"n", -1),
        (5, (b"a", b"b")),
        (6, ()),
        (7,),
        (8, b"k"),
        (9, b"k", b""),
        (10, (b"a",)),
        (11, (b"k", b"k"), (b"v", b"v")),
        (12,),
        (13, 0x04030201),
        (14, b"q", b"i"),
        (15, b"q"),
        (16, b"q"),
        (17,),
        (18, b"b", 2**63 - 1),
    ]


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [
        (query(Query.GET, bytes(100)), query(Query.GET, bytes(101))),
        (query(Query.SET, b"k", bytes(1000)), query(Query.SET, b"k", bytes(1001))),
        (query(Query.CHECK, [bytes(100)]), query(Query.CHECK, [bytes(101)])),
        # Four values of 1,000 bytes and 96 for keys and lengths make a frame exactly.
        (
            bytes([Query.MULTI_SET]) + number(4) + (number(7) + bytes(7) + number(1000) + bytes(1000)) * 4,
            bytes([Query.MULTI_SET]) + number(4) + (number(8) + bytes(8) + number(1000) + bytes(1000)) * 4,
        ),
        (query(Query.LIST_KEYS), b"\x13"),
    ],
)
def test_limits_at_and_one_past(allowed: bytes, refused: bytes) -> None:
    frame = Limits(frame_bytes=4 * (7 + 1000 + 16), key_bytes=100, value_bytes=1000)
    assert len(read(allowed, frame)) == 1
    with pytest.raises(ProtocolError):
        read(refused, frame)


def test_as_many_keys_as_torch_takes_and_no_more() -> None:
    ((_, keys),) = read(query(Query.CHECK, [b"k"] * MAX_VECTOR_KEYS), Limits())
    assert isinstance(keys, tuple)
    assert len(keys) == MAX_VECTOR_KEYS
    with pytest.raises(ProtocolError, match="131073 keys"):
        read(bytes([Query.CHECK]) + number(MAX_VECTOR_KEYS + 1))


def test_a_length_is_refused_before_its_bytes_come() -> None:
    for data in (
        bytes([Query.GET]) + struct.pack("<Q", 2**64 - 1),
        bytes([Query.WAIT]) + number(1) + number(101),
        bytes([Query.MULTI_SET]) + struct.pack("<Q", 2**63),
    ):
        with pytest.raises(ProtocolError):
            read(data)


def test_a_half_read_request_is_counted_and_gone_on_with() -> None:
    reader = begun(TorchReader(LIMITS))
    data = query(Query.MULTI_GET, [b"a", b"bb", b"ccc"])
    for position, byte in enumerate(data[:-1]):
        reader.feed(bytes([byte]))
        assert reader.next() is None
        assert not reader.ready
        assert position - 16 <= reader.buffered <= position + 1
    reader.feed(data[-1:])
    assert reader.next() == (Query.MULTI_GET, (b"a", b"bb", b"ccc"))
    assert reader.buffered == 0


def test_a_large_list_in_pieces_is_read_once() -> None:
    """Each string is looked at when it is there, not again with every segment."""
    looked_at = 0
    original = TorchReader._read_string

    class Counting(TorchReader):
        def _read_string(self, kind: int) -> bytes | None:
            nonlocal looked_at
            looked_at += 1
            return original(self, kind)

    reader = begun(Counting(Limits()))
    data = query(Query.WAIT, [b"key-%05d" % i for i in range(5000)])
    for start in range(0, len(data), 100):
        reader.feed(data[start : start + 100])
        request = reader.next()
    assert request is not None
    assert looked_at <= 5000 + len(data) // 100 + 1


def test_nothing_is_held_for_who_does_not_begin_with_the_magic_number() -> None:
    reader = TorchReader(LIMITS)
    reader.feed(bytes([Query.SET]))
    with pytest.raises(ProtocolError, match="must begin"):
        reader.next()


def test_the_bytes_of_a_large_request_are_let_go() -> None:
    reader = begun(TorchReader(Limits()))
    data = query(Query.SET, b"/k", bytes(100_000))
    reader.feed(data[:50_000])
    assert reader.next() is None
    reader.feed(data[50_000:])
    assert reader.next() is not None
    assert len(reader._buffer) == 0


@pytest.mark.parametrize("seed", range(6))
def test_long_strings_however_they_are_cut(seed: int) -> None:
    """They are put together as they come, those that are no longer than the limit once they are whole."""
    generator = random.Random(seed)
    long, limit, short = (generator.randbytes(LONG_BYTES + past) for past in (1, 0, -LONG_BYTES + 10))
    pairs = [b"a", long, b"b", limit, b"c", long, b"d", short]
    stream = b"".join(
        [
            query(Query.SET, b"k", long),
            query(Query.GET, b"k"),
            bytes([Query.MULTI_SET]) + number(4) + b"".join(map(query_string, pairs)),
            query(Query.COMPARE_SET, b"k", long, long),
            query(Query.CHECK, [b"k"]),
        ]
    )
    reader, found = begun(TorchReader(Limits())), []
    cuts = sorted(generator.sample(range(1, len(stream)), 5 * seed))
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        reader.feed(stream[start:end])
        while (request := reader.next()) is not None:
            found.append(request)
        assert reader.buffered <= end
        assert not reader.ready
    assert reader.idle
    assert reader.buffered == 0
    assert found == [
        (Query.SET, b"k", long),
        (Query.GET, b"k"),
        (Query.MULTI_SET, tuple(pairs[::2]), tuple(pairs[1::2])),
        (Query.COMPARE_SET, b"k", long, long),
        (Query.CHECK, (b"k",)),
    ]


def query_string(value: bytes) -> bytes:
    return query(Query.GET, value)[1:]


def test_what_is_there_of_a_long_string_counts() -> None:
    reader = begun(TorchReader(Limits()))
    data = query(Query.SET, b"k", bytes(LONG_BYTES + 1))
    for start in range(0, len(data), 100_000):
        reader.feed(data[start : start + 100_000])
        assert (reader.next() is None) is (start + 100_000 < len(data))
        if start + 100_000 < len(data):
            assert start + 100_000 - 20 <= reader.buffered <= start + 100_000
    assert reader.buffered == 0
