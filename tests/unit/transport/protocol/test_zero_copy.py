"""Messages that are exposed instead of sent: the receiver copies them from the sender's memory; all else is as ever."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import pytest
from transport_pair import Pair, Recorder, collective, p2p, receive, send
from zero_copy_pair import FDS, LARGE, ZeroCopyPair, post

from asyncdist.errors import CollectiveTimeoutError, GroupAbortedError, PeerLostError, RemoteProtocolError
from asyncdist.transport.protocol.frame import (
    ZERO_COPY_BYTES,
    Flag,
    Kind,
    pack_exposed,
    pack_fragment,
    pack_header,
)
from asyncdist.transport.protocol.zero_copy import MAX_ATTACHED
from asyncdist.transport.shared_memory.arrays import ARENA_BYTES
from asyncdist.transport.shared_memory.segment import ARENA, Parcel, Segment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")


@pytest.fixture
def pair() -> Any:
    made = ZeroCopyPair()
    yield made
    made.close()


@pytest.mark.parametrize("key", [p2p(1), collective(1)])
@pytest.mark.parametrize("receive_first", [True, False])
def test_a_large_message_is_copied_and_not_sent(pair: ZeroCopyPair, key: bytes, receive_first: bool) -> None:
    sink, data = Recorder(), pair.sides[0].array(LARGE)
    pair.mapped(data)
    before = sum(pair.ab.written)
    if receive_first:
        receive(pair.b, sink, key, LARGE, "got")
        pair.run()
    post(pair.a, sink, key, data, "sent", b"meta")
    pair.run()
    if not receive_first:
        assert sink.sent == []
        receive(pair.b, sink, key, LARGE, "got")
    pair.run()
    assert sink.arrays["got"] == data
    assert sink.order == ["sent", "got"]
    assert sink.received["got"].meta == b"meta"
    assert sink.received["got"].nbytes == LARGE
    assert sum(pair.ab.written) - before < 1000
    assert pair.a.statistics()["streams_out"] == pair.b.statistics()["streams_in"] == 0


def test_what_is_not_mapped_yet_is_sent(pair: ZeroCopyPair) -> None:
    sink, data = Recorder(), pair.sides[0].array(LARGE)
    for token in (1, 2):
        before = sum(pair.ab.written)
        receive(pair.b, sink, p2p(1), LARGE, ("got", token))
        post(pair.a, sink, p2p(1), data, token)
        pair.run()
        assert sink.arrays["got", token] == data
        assert (sum(pair.ab.written) - before > LARGE) is (token == 1)


def test_a_peer_that_cannot_map_it_is_sent_everything(pair: ZeroCopyPair) -> None:
    pair.sides[1].deaf = True
    sink, data = Recorder(), pair.sides[0].array(LARGE)
    for token in (1, 2):
        receive(pair.b, sink, p2p(1), LARGE, ("got", token))
        post(pair.a, sink, p2p(1), data, token)
        pair.run()
        assert sink.arrays["got", token] == data
    assert sum(pair.ab.written) > 2 * LARGE


@pytest.mark.parametrize(("length", "exposed"), [(ZERO_COPY_BYTES, True), (ZERO_COPY_BYTES - 1, False)])
def test_short_messages_are_sent(pair: ZeroCopyPair, length: int, exposed: bool) -> None:
    sink, data = Recorder(), pair.sides[0].array(ZERO_COPY_BYTES)
    pair.mapped(data)
    before = sum(pair.ab.written)
    receive(pair.b, sink, p2p(1), length, "got")
    post(pair.a, sink, p2p(1), data[:length], "sent")
    pair.run()
    assert sink.arrays["got"] == data[:length]
    assert (sum(pair.ab.written) - before < 1000) is exposed


def test_ordinary_arrays_are_sent(pair: ZeroCopyPair) -> None:
    sink, data = Recorder(), pair.sides[0].array(100)
    other = memoryview(bytearray(LARGE))
    receive(pair.b, sink, p2p(1), LARGE, "got")
    post(pair.a, sink, p2p(1), other, "sent")
    pair.run()
    assert sink.arrays["got"] == other
    assert len(data) == 100


def start(pair: ZeroCopyPair, sink: Recorder) -> memoryview:
    """A message from a to b of which a part is copied."""
    data = pair.sides[0].array(LARGE)
    pair.mapped(data)
    receive(pair.b, sink, p2p(1), LARGE, "got")
    post(pair.a, sink, p2p(1), data, "sent")
    Pair.run(pair)
    assert pair.copy()
    assert 0 < sum(map(bool, sink.arrays["got"])) < LARGE
    return data


def test_a_receiver_that_drops_it_writes_nothing_any_more(pair: ZeroCopyPair) -> None:
    sink = Recorder()
    start(pair, sink)
    pair.drop_group(1)
    so_far = bytes(sink.arrays["got"])
    pair.run()
    assert bytes(sink.arrays["got"]) == so_far
    assert sink.order == ["sent"]
    assert pair.a.statistics()["streams_out"] == pair.b.statistics()["streams_in"] == 0


def test_a_sender_that_drops_it_fails_the_receiver_even_if_all_is_copied(pair: ZeroCopyPair) -> None:
    sink = Recorder()
    data = start(pair, sink)
    while pair.sides[1].zero_copy.copies:
        pair.sides[1].zero_copy.advance()
    pair.drop_group(0)
    data[:] = bytes(LARGE)  # its owner may
    pair.run()
    assert isinstance(sink.failed["got"], GroupAbortedError)
    assert sink.order == ["got"]
    assert pair.a.statistics()["streams_out"] == pair.b.statistics()["streams_in"] == 0


def test_an_exposed_frame_that_was_not_written_yet_never_is(pair: ZeroCopyPair) -> None:
    sink, data = Recorder(), pair.sides[0].array(LARGE)
    pair.mapped(data)
    receive(pair.b, sink, p2p(1), LARGE, "got")
    post(pair.a, sink, p2p(1), data, "sent")
    pair.ab.deliver()  # the offer
    pair.ab.capacity = 0
    pair.ba.deliver()  # the pull
    pair.drop_group(0)
    pair.ab.capacity = 1 << 60
    pair.run()
    assert isinstance(sink.failed["got"], GroupAbortedError)
    assert not pair.sides[1].zero_copy.copies


@pytest.mark.parametrize("copied", [False, True])
def test_a_sender_that_gives_it_up_fails_that_receive_only(pair: ZeroCopyPair, copied: bool) -> None:
    sink, data = Recorder(), pair.sides[0].array(LARGE)
    pair.mapped(data)
    receive(pair.b, sink, p2p(1), LARGE, "got")
    op = send(pair.a, sink, p2p(1), data, "sent")  # type: ignore[arg-type]
    Pair.run(pair)
    while copied and pair.sides[1].zero_copy.copies:
        pair.sides[1].zero_copy.advance()
    pair.a.give_up(op)
    data[:] = bytes(LARGE)  # its owner may
    pair.run()
    assert isinstance(sink.failed["got"], CollectiveTimeoutError)
    assert sink.order == ["got"]
    receive(pair.b, sink, p2p(1), LARGE, "next")
    post(pair.a, sink, p2p(1), data, "next sent")
    pair.run()
    assert bytes(sink.arrays["next"]) == bytes(LARGE)
    assert pair.a.statistics()["streams_out"] == pair.b.statistics()["streams_in"] == 0


def test_a_receiver_that_gives_it_up_writes_nothing_any_more(pair: ZeroCopyPair) -> None:
    sink, data = Recorder(), pair.sides[0].array(LARGE)
    pair.mapped(data)
    posted = receive(pair.b, sink, p2p(1), LARGE, "got")
    post(pair.a, sink, p2p(1), data, "sent")
    Pair.run(pair)
    assert pair.copy()
    pair.b.give_up(posted)
    so_far = bytes(sink.arrays["got"])
    pair.run()
    assert bytes(sink.arrays["got"]) == so_far
    assert sink.order == ["sent"]
    assert pair.a.statistics()["streams_out"] == pair.b.statistics()["streams_in"] == 0


def test_loss_fails_both_ends(pair: ZeroCopyPair) -> None:
    sink = Recorder()
    start(pair, sink)
    error = PeerLostError("gone", 1)
    pair.a.fail(error)
    pair.b.fail(error)
    assert sink.failed == {"sent": error, "got": error}
    so_far = bytes(sink.arrays["got"])
    pair.copy()
    assert bytes(sink.arrays["got"]) == so_far


def test_goodbye_waits_for_what_is_exposed(pair: ZeroCopyPair) -> None:
    sink = Recorder()
    start(pair, sink)
    pair.a.goodbye()
    Pair.run(pair)
    assert not pair.a.goodbye_sent
    pair.run()
    assert sink.order == ["sent", "got"]
    assert pair.a.goodbye_sent
    assert pair.b.left


def test_several_messages_are_copied_in_turns(pair: ZeroCopyPair) -> None:
    sink = Recorder()
    arrays = [pair.sides[0].array(LARGE + index) for index in range(3)]
    for array in arrays:
        pair.sides[0].zero_copy.expose(array)
    pair.run()
    for index, array in enumerate(arrays):
        receive(pair.b, sink, p2p(index), len(array), index)
        post(pair.a, sink, p2p(index), array, ("sent", index))
    Pair.run(pair)
    pair.copy()
    pair.copy()
    assert sum(1 for index in range(3) if any(sink.arrays[index])) == 3
    pair.run()
    assert all(sink.arrays[index] == array for index, array in enumerate(arrays))


def test_a_segment_that_is_gone_is_unmapped(pair: ZeroCopyPair) -> None:
    data = pair.sides[0].array(ARENA_BYTES + 1)
    pair.mapped(data)
    assert len(pair.sides[1].zero_copy._attached) == 1
    del data
    pair.run()
    assert not pair.sides[1].zero_copy._attached
    assert not len(pair.sides[0].arrays)


@pytest.mark.parametrize("seed", range(10))
def test_random_sizes_and_deliveries(seed: int) -> None:
    rng = random.Random(seed)
    pair = ZeroCopyPair(rng)
    sink = Recorder()
    sent = {}
    for token in range(12):
        length = rng.choice((10, 70_000, ZERO_COPY_BYTES, LARGE))
        side = rng.randrange(2)
        data = pair.sides[side].array(length) if rng.random() < 0.7 else memoryview(rng.randbytes(length))
        target = (pair.b, pair.a)[side]
        key = rng.choice((p2p, collective))(token)
        if rng.random() < 0.5:
            receive(target, sink, key, length, token)
            post((pair.a, pair.b)[side], sink, key, data, ("sent", token))
        else:
            post((pair.a, pair.b)[side], sink, key, data, ("sent", token))
            receive(target, sink, key, length, token)
        sent[token] = data
        if rng.random() < 0.5:
            pair.ab.deliver(rng.randrange(1, 1 << 18))
            pair.ba.deliver(rng.randrange(1, 1 << 18))
            pair.copy()
    pair.run()
    assert all(sink.arrays[token] == data for token, data in sent.items())
    assert not sink.failed
    pair.close()


class TestHostile:
    """`b` is the victim; `a` writes what it likes."""

    def victim(self, pair: ZeroCopyPair) -> Recorder:
        sink, data = Recorder(), pair.sides[0].array(LARGE)
        pair.mapped(data)
        receive(pair.b, sink, collective(1), LARGE, "got")  # pulled early, as 1 << 31
        return sink

    def feed(self, pair: ZeroCopyPair, frame: bytes) -> None:
        view = pair.b.get_buffer()
        view[: len(frame)] = frame
        pair.b.buffer_updated(len(frame))

    @pytest.mark.parametrize(
        "frame",
        [
            pack_exposed(1 << 31, 2, 0, LARGE),
            pack_exposed(1 << 31, 1, 1 << 26, LARGE),
            pack_exposed(1 << 31, 1, (1 << 64) - 1, LARGE),
            pack_exposed(1 << 31, 1, 0, LARGE - 1),
            pack_exposed(1 << 31, 1, 0, LARGE + 1),
            pack_exposed(7, 1, 0, LARGE),
            pack_fragment(1 << 31, 0, 0, flags=Flag.END),
            pack_exposed(1 << 31, 1, 0, LARGE) + pack_fragment(1 << 31, 0, 0, flags=Flag.END),
            pack_exposed(1 << 31, 1, 0, LARGE) + pack_fragment(1 << 31, 0, 100) + bytes(100),
            pack_exposed(1 << 31, 1, 0, LARGE) * 2,
            pack_fragment(1 << 31, 0, 10) + bytes(10) + pack_exposed(1 << 31, 1, 0, LARGE),
            pack_header(Kind.UNMAP, length=1) + pack_exposed(1 << 31, 1, 0, LARGE),
        ],
    )
    def test_frames_that_make_no_sense(self, pair: ZeroCopyPair, frame: bytes) -> None:
        self.victim(pair)
        with pytest.raises(RemoteProtocolError):
            self.feed(pair, frame)

    def test_returning_what_was_not_exposed(self, pair: ZeroCopyPair) -> None:
        sink = Recorder()
        send(pair.b, sink, p2p(1), bytes(LARGE), "sent")
        pair.ba.capacity = 0
        self.feed(pair, pack_header(Kind.PULL, message_id=1))
        self.feed(pair, pack_header(Kind.RELEASED, message_id=99))
        with pytest.raises(RemoteProtocolError, match="not exposed"):
            self.feed(pair, pack_header(Kind.RELEASED, message_id=1))

    def test_news_of_unknown_segments_is_harmless(self, pair: ZeroCopyPair) -> None:
        self.feed(pair, pack_header(Kind.MAPPED, length=99))
        self.feed(pair, pack_header(Kind.UNMAP, length=99))
        assert pair.sides[1].forsaken == [99]
        data = pair.sides[1].array(LARGE)
        assert pair.sides[1].zero_copy.expose(data) is None

    def test_over_a_stream_there_is_nothing_to_lend(self) -> None:
        for kind in (Kind.EXPOSED, Kind.RELEASED, Kind.MAPPED, Kind.UNMAP, Kind.MEMORY):
            plain = Pair()
            view = plain.b.get_buffer()
            frame = pack_header(kind)
            view[: len(frame)] = frame
            with pytest.raises(RemoteProtocolError, match="unknown kind"):
                plain.b.buffer_updated(len(frame))

    def test_offering_too_much_or_again(self, pair: ZeroCopyPair) -> None:
        zero_copy = pair.sides[1].zero_copy
        segment = Segment(4096, FDS)
        dup = os.dup
        for number in range(MAX_ATTACHED):
            zero_copy._attached[number] = zero_copy._attached.get(0)  # type: ignore[assignment]
        del zero_copy._attached[5]
        zero_copy.attach(Parcel(ARENA, 5, 4096, (dup(segment.fd),)))
        with pytest.raises(RemoteProtocolError):
            zero_copy.attach(Parcel(ARENA, MAX_ATTACHED, 4096, (dup(segment.fd),)))
        del zero_copy._attached[6]
        with pytest.raises(RemoteProtocolError):
            zero_copy.attach(Parcel(ARENA, 5, 4096, (dup(segment.fd),)))
        segment.release()
