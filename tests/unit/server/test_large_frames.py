"""Large frames: decoded as they arrive, however they are cut, to what all others are decoded to, and as strictly."""

from __future__ import annotations

import random

import pytest
from server_kit import MemoryClient

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.wire import messages as m
from asyncdist_server.wire.large_frames import LARGE_FRAME_BYTES, TAKEN_OUT_BYTES, LargeFrame, RequestReader
from asyncdist_server.wire.messages import (
    LENGTH_BYTES,
    MAX_ELEMENTS,
    Encoder,
    FrameReader,
    ProtocolError,
    decode_requests,
)

RANDOM = random.Random(3)
LARGE = RANDOM.randbytes(LARGE_FRAME_BYTES + 1)
LONGEST_KEPT, SHORTEST_TAKEN = RANDOM.randbytes(TAKEN_OUT_BYTES), RANDOM.randbytes(TAKEN_OUT_BYTES + 1)
REQUESTS = [
    (1, m.SET, b"key", LARGE),
    (2, m.ADD, b"n", 1 << 40),
    (3, m.MULTI_SET, [b"a", b"b", b"c", b""], [SHORTEST_TAKEN, LONGEST_KEPT, bytes(70_000), b"\xd4\x00\x00"]),
    (4, m.GET, b"key", None),
    (5, m.SET, b"last", SHORTEST_TAKEN),
]
FRAME = Encoder().requests(7, REQUESTS)


def read(stream: bytes, cuts: list[int]) -> tuple[list[memoryview | LargeFrame], RequestReader]:
    reader = RequestReader(m.MAX_FRAME_BYTES)
    found: list[memoryview | LargeFrame] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        if reader.error is None:
            found += reader.feed(stream[start:end])
    return found, reader


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


@pytest.mark.parametrize("seed", range(8))
def test_it_is_what_one_that_comes_whole_is(seed: int) -> None:
    (payload,) = FrameReader().feed(FRAME)
    stream = FRAME + Encoder().requests(8, [(6, m.PING)])
    cuts = sorted(random.Random(seed).sample(range(1, len(stream)), 4 * seed + 1))
    found, reader = read(stream, cuts)
    decoded = [each.decode(m.MAX_ITEMS) if isinstance(each, LargeFrame) else decode_requests(each) for each in found]
    assert decoded == [decode_requests(payload), (8, (6, m.PING))]
    assert reader.buffered == 0


def test_cut_at_each_byte_of_its_heads() -> None:
    for size in (LARGE_FRAME_BYTES, LARGE_FRAME_BYTES + 1):
        frame = Encoder().requests(0, [(1, m.SET, b"k", bytes(size)), (2, m.SET, b"l", SHORTEST_TAKEN)])
        for cut in (
            *range(LENGTH_BYTES, 30),
            *range(len(frame) - len(SHORTEST_TAKEN) - 20, len(frame) - len(SHORTEST_TAKEN)),
        ):
            ((only,), _) = read(frame, [cut])
            assert isinstance(only, LargeFrame)
            assert only.decode(m.MAX_ITEMS)[1][3] == bytes(size)
            assert [len(value) for value in only.values] == [size, len(SHORTEST_TAKEN)]
            assert len(only.rest) < 100


@pytest.mark.parametrize(("payload_bytes", "large"), [(LARGE_FRAME_BYTES, False), (LARGE_FRAME_BYTES + 1, True)])
def test_a_frame_is_large_beyond_the_limit(payload_bytes: int, large: bool) -> None:
    frame = Encoder().requests(0, [(1, m.SET, b"k", bytes(payload_bytes - 13))])
    assert len(frame) == payload_bytes + LENGTH_BYTES
    ((only,), _) = read(frame, [1000])
    assert isinstance(only, LargeFrame) is large


@pytest.mark.parametrize("past", [0, 1])
def test_as_many_elements_as_others_and_not_one_more(past: int) -> None:
    frame = framed(b"\xdd" + (MAX_ELEMENTS - 1 + past).to_bytes(4, "big") + bytes(MAX_ELEMENTS - 1 + past))
    found, reader = read(frame, [1000, 200_000])
    assert len(found) == 1 - past
    assert (reader.error is not None) is bool(past)
    if past:
        assert f"more than {MAX_ELEMENTS} elements" in str(reader.error)


@pytest.mark.parametrize(
    "start",
    [
        b"\x93\x00\xd4\x00\x00\xc6" + LARGE_FRAME_BYTES.to_bytes(4, "big"),  # an extension, as is put in for a value
        b"\x93\x00\xc7\x01\x00\x00\xc6" + LARGE_FRAME_BYTES.to_bytes(4, "big"),
        b"\x93\x00\xc7\x00\x00\xc6" + LARGE_FRAME_BYTES.to_bytes(4, "big"),
        b"\x93\x00\xa1a\xc6" + LARGE_FRAME_BYTES.to_bytes(4, "big"),  # text
        b"\x93\x00\x81\x01\x01\xc6" + LARGE_FRAME_BYTES.to_bytes(4, "big"),  # a map
        b"\x93\x00\xa3\xc6\x00\x01\xc6" + LARGE_FRAME_BYTES.to_bytes(4, "big"),  # text with what looks like a value
        b"\x93\x00\x01\xc6\xff\xff\xff\xff",  # longer than its frame
        b"\x92\x00\xc6" + LARGE_FRAME_BYTES.to_bytes(4, "big"),  # something behind the message
        b"\x94\x00\x01\xc6" + LARGE_FRAME_BYTES.to_bytes(4, "big"),  # too short
        b"\x93\xff\x00\xc6" + LARGE_FRAME_BYTES.to_bytes(4, "big"),  # a count below 0
        b"\x00" * 10,
    ],
)
def test_what_is_wrong_in_others_is_wrong_in_it(start: bytes) -> None:
    payload = start + bytes(LARGE_FRAME_BYTES + (start[:2] == b"\x92\x00"))
    with pytest.raises(ProtocolError):
        decode_requests(payload)
    found, reader = read(framed(payload), [1000, 200_000])
    if reader.error is None:
        assert isinstance(found[0], LargeFrame)
        with pytest.raises(ProtocolError):
            found[0].decode(m.MAX_ITEMS)


def test_what_came_before_is_answered_and_then_the_reason() -> None:
    client = MemoryClient(StoreEngine(b"i" * 16))
    client.open()
    wrong = framed(b"\x92\x00\xd4\x00\x00" + bytes(LARGE_FRAME_BYTES))
    replies = client.replies(client.send(client.frame((m.ADD, b"n", 1)) + wrong[:1000]))
    assert [reply[:2] for reply in replies] == [(1, m.OK), (0, m.PROTOCOL)]
    assert client.session.closing


def test_it_counts_as_received_from_its_first_byte_on() -> None:
    client = MemoryClient(StoreEngine(b"i" * 16))
    client.open()
    frame = client.frame((m.SET, b"k", LARGE), (m.GET, b"k", None))
    for start in range(0, len(frame), 100_000):
        piece = frame[start : start + 100_000]
        said = client.send(piece)
        received = start + len(piece)
        assert client.session.buffered in ((received, received - LENGTH_BYTES) if received < len(frame) else (0,))
    assert client.replies(said) == [(1, m.OK, None), (2, m.OK, LARGE)]


def test_a_hello_may_be_large() -> None:
    """One that retries as much as may be unacknowledged."""
    client = MemoryClient(StoreEngine(b"i" * 16))
    pending = tuple(range(m.MAX_REQUEST_ID - m.MAX_IN_FLIGHT, m.MAX_REQUEST_ID))
    client.prove()
    hello = client.encoder.hello(m.Hello(client.client_id, pending))
    assert len(hello) > LARGE_FRAME_BYTES
    assert client.send(hello[:1000]) == b""
    (payload,) = client.reader.feed(client.send(hello[1000:]))
    assert not m.decode_welcome(payload).resumed
