"""Frames and the messages in them: what is accepted, what is refused, at each limit and one past it."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdist_server.wire import messages
from asyncdist_server.wire.messages import (
    Encoder,
    FrameReader,
    Hello,
    HelloRefused,
    Limits,
    ProtocolError,
    Welcome,
    decode_hello,
    decode_replies,
    decode_requests,
    decode_welcome,
    more_elements_than,
)

CLIENT = bytes(range(16))


def payload(frame: bytes) -> memoryview:
    (only,) = FrameReader().feed(frame)
    return only


FIRST = [
    b"\xcd\1\1",
    b"\xce\1\1\1\1",
    b"\xca\1\1\1\1",
    b"\xcb" + bytes(8),
    b"\xd1\1\1",
    b"\xcf" + bytes(8),
    b"\xd3" + bytes(8),
]
ELEMENTS = [
    *FIRST,
    b"\1",
    b"\xff",
    b"\xc0",
    b"\xcc\xff",
    b"\xc4\2ab",
    b"\xc5\0\3abc",
    b"\xc6\0\0\0\1a",
    b"\x90",
    b"\xdc\0\0",
]


@pytest.mark.parametrize("past", [0, 1])
@pytest.mark.parametrize("element", ELEMENTS, ids=bytes.hex)
def test_a_frame_has_so_many_elements(element: bytes, past: int) -> None:
    """A small frame of them takes no gigabytes."""
    per_array = 1000
    arrays, rest = divmod(messages.MAX_ELEMENTS - 2 + past, per_array + 1)
    inner = b"\xdc" + per_array.to_bytes(2, "big") + element * per_array
    filler = bytes(messages.MAX_ELEMENTS)  # a value, and so one element: a frame of fewer bytes is not looked at
    body = b"\0" + b"\xc6" + len(filler).to_bytes(4, "big") + filler + inner * arrays + b"\xc0" * (rest - 1)
    frame = b"\xdc" + (2 + arrays + rest - 1).to_bytes(2, "big") + body
    if past:
        with pytest.raises(ProtocolError, match="more than 524288 elements"):
            decode_requests(frame)
    else:
        assert len(decode_requests(frame)) == 1 + arrays + rest


@given(
    st.recursive(st.none() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(), st.lists), st.integers(0, 50)
)
def test_elements_are_counted(message: object, limit: int) -> None:
    def count(element: object) -> int:
        return 1 + sum(map(count, element)) if isinstance(element, list) else 1

    assert more_elements_than(limit, msgpack.packb(message)) == (count(message) > limit)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_have_a_number_of_elements(payload: bytes, limit: int) -> None:
    assert more_elements_than(limit, payload) <= (len(payload) > limit)


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=20), st.data())
def test_frames_survive_any_segmentation(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(len(p).to_bytes(4, "big") + p for p in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    reader = FrameReader()
    found: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += [bytes(view) for view in reader.feed(stream[start:end])]
    assert found == payloads
    assert reader.buffered == 0


def test_a_payload_keeps_its_bytes_when_more_arrive() -> None:
    reader = FrameReader()
    assert reader.feed(b"\0\0\0\x03ab") == []
    assert reader.buffered == 6
    (first,) = reader.feed(b"c\0\0\0\x01")
    reader.feed(b"z" * 1)
    assert bytes(first) == b"abc"


def test_a_frame_may_be_as_long_as_the_limit_and_not_longer() -> None:
    assert len(FrameReader(10).feed(b"\0\0\0\x0a" + bytes(10))) == 1
    with pytest.raises(ProtocolError, match="frame of 11 bytes"):
        FrameReader(10).feed(b"\0\0\0\x0b")
    with pytest.raises(ProtocolError, match="frame of 0 bytes"):
        FrameReader(10).feed(b"\0\0\0\0")


def test_what_came_before_a_bad_length_is_returned_first() -> None:
    reader = FrameReader(10)
    assert [bytes(view) for view in reader.feed(b"\0\0\0\1a\0\0\0\1b\0\0\0\x0bmore")] == [b"a", b"b"]
    assert str(reader.error) == "frame of 11 bytes, allowed are 1 to 10"
    assert reader.buffered == 0
    with pytest.raises(ProtocolError, match="frame of 11 bytes"):
        reader.feed(b"\0\0\0\1c")
    assert reader.buffered == 0


def test_requests_and_replies_survive_the_trip() -> None:
    encoder = Encoder()
    requests = [(1, messages.SET, b"k", b"v"), (2, messages.MULTI_GET, (b"a", b"b"), None)]
    assert decode_requests(payload(encoder.requests(7, requests))) == (7, *requests)
    replies = [(1, messages.OK, None), (2, messages.TIMEOUT, (b"a",)), (0, messages.PROTOCOL, "why")]
    assert decode_replies(payload(encoder.replies(replies))) == tuple(replies)


def test_a_frame_may_carry_as_many_requests_as_the_limit_and_not_more() -> None:
    encoder = Encoder()
    request = (1, messages.PING)
    assert len(decode_requests(payload(encoder.requests(0, [request] * 5)), max_items=5)) == 6
    with pytest.raises(ProtocolError, match="exceeds max_array_len"):
        decode_requests(payload(encoder.requests(0, [request] * 6)), max_items=5)


def test_nested_arrays_cannot_ask_for_much_memory() -> None:
    deepest = b"\xdd" + (messages.MAX_ITEMS + 2).to_bytes(4, "big")
    with pytest.raises(ProtocolError, match="max_array_len"):
        decode_requests(deepest + bytes(messages.MAX_ITEMS + 2))
    with pytest.raises(ProtocolError, match="max_array_len"):
        decode_requests(b"\xdd\x00\x00\x10\x00")  # 4,096 elements claimed in a frame of five bytes


@pytest.mark.parametrize(
    "message",
    [{}, {1: 2}, "text", 5, None, [], ["x"], [-1], [True], [1.0], [0, "text"], [0, msgpack.ExtType(5, b"x")]],
)
def test_request_frames_of_the_wrong_form_are_refused(message: object) -> None:
    with pytest.raises(ProtocolError):
        decode_requests(msgpack.packb(message))


@pytest.mark.parametrize("message", [{}, "text", [1], [[1]], [[1, 2]], [[b"1", 0, 0]], [[1, None, 0]], [{1: 2}]])
def test_reply_frames_of_the_wrong_form_are_refused(message: object) -> None:
    with pytest.raises(ProtocolError):
        decode_replies(msgpack.packb(message))


def test_hello_and_welcome_survive_the_trip() -> None:
    encoder = Encoder()
    assert decode_hello(payload(encoder.hello(Hello(CLIENT, (3, 9))))) == Hello(CLIENT, (3, 9))
    limits = Limits(frame_bytes=100, key_bytes=2, value_bytes=3, items=4, in_flight=5)
    welcome = Welcome(CLIENT, True, limits)
    assert decode_welcome(payload(encoder.welcome(welcome))) == welcome


def test_another_version_is_refused_whatever_else_the_hello_says() -> None:
    with pytest.raises(HelloRefused, match="speaks store protocol 2, this server 1"):
        decode_hello(msgpack.packb([2, b"new", b"things", 5]))


def test_a_refusal_reaches_the_client_as_an_error() -> None:
    with pytest.raises(HelloRefused, match="no room") as refused:
        decode_welcome(payload(Encoder().refusal(messages.REFUSED, "no room")))
    assert refused.value.code == messages.REFUSED


@pytest.mark.parametrize(
    "message",
    [
        [],
        [1],
        [1, CLIENT],
        [1, CLIENT, [], 0],
        [1, b"short", []],
        [1, "x" * 16, []],
        [1, CLIENT, b""],
        [1, CLIENT, [0]],
        [1, CLIENT, [2**63]],
        [1, CLIENT, [True]],
        [1, CLIENT, ["1"]],
        [b"1", CLIENT, []],
        [1.0, CLIENT, []],
    ],
)
def test_hellos_of_the_wrong_form_are_refused(message: object) -> None:
    with pytest.raises(ProtocolError):
        decode_hello(msgpack.packb(message))


@pytest.mark.parametrize(
    "message",
    [
        [0, 1],
        [0, 2, CLIENT, False, {}],
        [1, 1, CLIENT, False, {}],
        [0, 1, b"short", False, {}],
        [0, 1, CLIENT, 0, {}],
        [0, 1, CLIENT, False, []],
        [0, 1, CLIENT, False, {}],
        [0, 1, CLIENT, False, dict.fromkeys(Limits._fields[:5], 0)],
        [0, 1, CLIENT, False, dict.fromkeys(Limits._fields[:5], "1")],
    ],
)
def test_welcomes_of_the_wrong_form_are_refused(message: object) -> None:
    with pytest.raises(ProtocolError):
        decode_welcome(msgpack.packb(message))


def test_a_welcome_may_tell_limits_that_this_version_does_not_know() -> None:
    told = {**dict.fromkeys(Limits._fields[:5], 1), "later": 7}
    assert decode_welcome(msgpack.packb([0, 1, CLIENT, False, told])).limits.key_bytes == 1


@given(st.binary(max_size=200))
def test_any_payload_is_decoded_or_refused(data: bytes) -> None:
    for decode in (decode_requests, decode_replies, decode_hello, decode_welcome):
        with contextlib.suppress(ProtocolError, HelloRefused):
            decode(data)


def test_a_large_frame_does_not_keep_its_buffer_in_the_encoder() -> None:
    encoder = Encoder()
    before = encoder.pack
    encoder.frame(bytes(messages.RECYCLE_PACKER_BYTES - 5))
    assert encoder.pack == before
    encoder.frame(bytes(messages.RECYCLE_PACKER_BYTES))
    assert encoder.pack != before


def test_every_operation_has_a_name_and_a_code_of_its_own() -> None:
    assert sorted(messages.OPERATION_NAMES) == list(range(1, 35))
    assert len(set(messages.OPERATION_NAMES.values())) == 34
