"""Messages read in the sender's process: when they are, what else happens to them, and that they come in any case."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transport_pair import Pair, Recorder, collective, p2p, receive, send
from zero_copy_pair import LARGE, ZeroCopyPair, post

from asyncdist.arrays.host import Array
from asyncdist.errors import CollectiveTimeoutError, GroupAbortedError, PeerLostError, RemoteProtocolError
from asyncdist.transport.protocol.frame import (
    ZERO_COPY_BYTES,
    Flag,
    Kind,
    pack_exposed,
    pack_fragment,
    pack_header,
    pack_memory,
)
from asyncdist.transport.protocol.operations import Receive, SendOp
from asyncdist.transport.protocol.zero_copy import BULK_BYTES, COPY_BYTES, FOLD_BYTES, MAX_ADDRESS, READ_BYTES
from asyncdist.transport.shared_memory import process_memory
from asyncdist.transport.shared_memory.process_memory import PROCESS, OwnMemory, Unreadable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")


@pytest.fixture
def pair() -> Iterator[ZeroCopyPair]:
    made = ZeroCopyPair(reading=(0, 1))
    made.run()
    yield made
    made.close()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`failing(nbytes)`: nothing beyond can be read from then on."""
    read = process_memory.RemoteBytes.read

    def fail_after(nbytes: int) -> None:
        def reading(source: Any, start: int, target: Any) -> None:
            if start >= nbytes:
                target[: target.size // 2] = 0xEE  # as it may be written all the same
                raise Unreadable("no such memory", gone=False)
            read(source, start, target)

        monkeypatch.setattr(process_memory.RemoteBytes, "read", reading)

    return fail_after


def ordinary(nbytes: int = LARGE) -> memoryview:
    """Memory that is in no segment."""
    return memoryview(np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8))


def moved(pair: ZeroCopyPair, data: memoryview) -> int:
    """Send that from `a` to `b`; how many bytes went over the wire."""
    sink, before = Recorder(), sum(pair.ab.written)
    receive(pair.b, sink, p2p(1), len(data), "got")
    post(pair.a, sink, p2p(1), data, "sent")
    pair.run()
    assert sink.order == ["sent", "got"]
    assert sink.arrays["got"] == data
    assert idle(pair)
    return sum(pair.ab.written) - before


def idle(pair: ZeroCopyPair) -> bool:
    return pair.a.statistics()["streams_out"] == pair.b.statistics()["streams_in"] == 0


class TestAgreeing:
    @pytest.mark.parametrize("key", [p2p(1), collective(1)])
    @pytest.mark.parametrize("receive_first", [True, False])
    def test_a_long_message_is_read(self, pair: ZeroCopyPair, key: bytes, receive_first: bool) -> None:
        sink, data, before = Recorder(), ordinary(), sum(pair.ab.written)
        for receives in (receive_first, not receive_first):
            if receives:
                receive(pair.b, sink, key, LARGE, "got")
            else:
                post(pair.a, sink, key, data, "sent", b"meta")
            pair.run()
        assert sink.arrays["got"] == data
        assert sink.order == ["sent", "got"]
        assert sink.received["got"].meta == b"meta"
        assert sum(pair.ab.written) - before < 1000
        assert idle(pair)

    @pytest.mark.parametrize(("length", "read"), [(READ_BYTES, True), (READ_BYTES - 1, False)])
    def test_shorter_ones_travel(self, pair: ZeroCopyPair, length: int, read: bool) -> None:
        assert (moved(pair, ordinary(length)) < 1000) is read

    def test_what_lies_in_a_segment_is_copied_there(self, pair: ZeroCopyPair) -> None:
        data = pair.sides[0].array(ZERO_COPY_BYTES)
        pair.mapped(data)
        assert moved(pair, data) < 1000
        place = pair.sides[0].zero_copy.expose(data)
        assert place is not None
        assert place[0] != PROCESS

    def test_until_a_segment_is_mapped_its_process_is_read(self, pair: ZeroCopyPair) -> None:
        data = pair.sides[0].array(LARGE)
        assert moved(pair, data) < 1000

    @pytest.mark.parametrize("reading", [(), (0,), (1,)])
    def test_both_must_allow_it(self, reading: tuple[int, ...]) -> None:
        pair = ZeroCopyPair(reading=reading)
        pair.run()
        assert not any(side.zero_copy.reads for side in pair.sides)
        assert moved(pair, ordinary()) > LARGE
        pair.close()

    def test_memory_that_cannot_be_read_is_said_nothing_to(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(process_memory, "_readv", process_memory._missing)
            pair = ZeroCopyPair(reading=(0, 1))
            pair.run()
        assert not any(side.zero_copy.reads or side.zero_copy.exposed(PROCESS) for side in pair.sides)
        assert moved(pair, ordinary()) > LARGE
        pair.close()

    def test_memory_that_the_kernel_reads_for_nobody_is_not_exposed(
        self, pair: ZeroCopyPair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(OwnMemory, "readable", lambda *_place: False)
        assert moved(pair, ordinary()) > LARGE
        assert pair.sides[0].zero_copy.exposed(PROCESS), "other memory still is"

    def test_what_is_exposed_may_move_to_huge_pages_before(
        self, pair: ZeroCopyPair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        used: list[tuple[int, int]] = []
        monkeypatch.setattr(OwnMemory, "use", lambda _own, *place: used.append(place))
        place = pair.sides[0].zero_copy.expose(ordinary())
        assert place is not None
        assert used == [(place[1], LARGE)]
        assert pair.sides[0].zero_copy.expose(ordinary(1000)) is None
        assert len(used) == 1

    def test_it_is_known_before_what_is_posted_to_an_open_connection(self) -> None:
        pair = ZeroCopyPair(reading=(0, 1))
        sink = Recorder()
        receive(pair.b, sink, p2p(1), 1, "got")
        post(pair.a, sink, p2p(1), memoryview(b"x"), "sent")
        while "got" not in sink.received:
            pair.ab.deliver(limit=1)
        assert pair.sides[1].zero_copy.reads
        pair.close()

    def test_nothing_is_exposed_once_the_connection_is_closed(self, pair: ZeroCopyPair) -> None:
        zero_copy = pair.sides[1].zero_copy
        zero_copy.close()
        assert not zero_copy.reads
        with pytest.raises(RemoteProtocolError, match="not mapped"):
            zero_copy.remote(PROCESS, 0, 1)


@pytest.mark.parametrize("seed", range(10))
def test_both_directions_at_once(seed: int) -> None:
    rng = random.Random(seed)
    pair = ZeroCopyPair(rng, reading=(0, 1))
    sink, cores, sent = Recorder(), (pair.a, pair.b), {}
    for token in range(8):
        side = rng.randrange(2)
        data = ordinary(rng.choice((10, ZERO_COPY_BYTES, READ_BYTES, LARGE)))
        if rng.random() < 0.3:
            data = pair.sides[side].array(LARGE)
        key = rng.choice((p2p, collective))(token)
        receive(cores[1 - side], sink, key, len(data), token)
        post(cores[side], sink, key, data, ("sent", token))
        sent[token] = data
        if rng.random() < 0.3:
            break_reading(pair, side)
        if rng.random() < 0.5:
            pair.ab.deliver(rng.randrange(1, 1 << 18))
            pair.ba.deliver(rng.randrange(1, 1 << 18))
            pair.copy()
    pair.run()
    assert all(sink.arrays[token] == data for token, data in sent.items())
    assert not sink.failed
    assert idle(pair)
    pair.close()


def break_reading(pair: ZeroCopyPair, side: int) -> None:
    """Nothing of that side can be read from now on."""
    own = pair.sides[side].own
    assert own is not None
    own._octets.raw = bytes(len(own.token.octets))


def folded(pair: ZeroCopyPair, data: memoryview) -> tuple[bytes, bytes]:
    """Send that as a part of what is much, to a receive that folds: what was folded, and its target."""
    sink, target, parts = Recorder(), bytearray(len(data)), []

    def fold(octets: Array, start: int) -> None:
        assert start == sum(map(len, parts))
        parts.append(octets.tobytes())

    pair.b.post_receive(Receive(collective(1), memoryview(target), sink, "got", bulk=True, fold=fold))
    pair.a.post_send(SendOp(collective(1), data, b"", sink, "sent", bulk=True))
    pair.run()
    assert sink.order[-1] == "got"
    assert idle(pair)
    return b"".join(parts), bytes(target)


class TestFolding:
    """Receives that reduce take a message of much part by part, where it lies."""

    @pytest.mark.parametrize("length", [BULK_BYTES, LARGE])
    def test_all_of_it_once_and_in_order(self, pair: ZeroCopyPair, length: int) -> None:
        data = ordinary(length)
        assert folded(pair, data)[0] == data

    def test_out_of_a_segment(self, pair: ZeroCopyPair) -> None:
        data = pair.sides[0].array(ZERO_COPY_BYTES)
        pair.mapped(data)
        assert folded(pair, data) == (bytes(data), bytes(ZERO_COPY_BYTES)), "nothing is copied to the target"

    def test_of_an_operation_that_fails_meanwhile_nothing_more_is_folded(self, pair: ZeroCopyPair) -> None:
        folds: list[int] = []

        def fold(_octets: Array, start: int) -> None:
            folds.append(start)
            pair.b.drop_group(collective(1)[:8])

        sink, target = Recorder(), memoryview(bytearray(LARGE))
        pair.b.post_receive(Receive(collective(1), target, sink, "got", bulk=True, fold=fold))
        pair.a.post_send(SendOp(collective(1), ordinary(), b"", sink, "sent", bulk=True))
        pair.run()
        assert folds == [0]
        assert idle(pair)

    def test_shorter_ones_travel(self, pair: ZeroCopyPair) -> None:
        data = ordinary(BULK_BYTES - 1)
        assert folded(pair, data) == (b"", bytes(data))

    @pytest.mark.parametrize("beyond", [0, FOLD_BYTES, COPY_BYTES])
    def test_what_can_be_read_in_part_travels_to_the_target(
        self, pair: ZeroCopyPair, failing: Any, beyond: int
    ) -> None:
        failing(beyond)
        data = ordinary()
        part, whole = folded(pair, data)
        assert part == data[: len(part)]
        assert (len(part), whole) == (beyond // FOLD_BYTES * FOLD_BYTES, bytes(data))


class TestUnreadable:
    """What was exposed, and then cannot be read, travels."""

    def test_it_travels(self, pair: ZeroCopyPair) -> None:
        break_reading(pair, 0)
        data = ordinary()
        assert moved(pair, data) > LARGE
        assert not pair.sides[0].zero_copy.exposed(PROCESS), "once is enough"
        assert moved(pair, data) > LARGE

    @pytest.mark.parametrize("beyond", [0, 1, COPY_BYTES, LARGE - 1000])
    def test_so_does_what_could_be_read_in_part(self, pair: ZeroCopyPair, failing: Any, beyond: int) -> None:
        failing(beyond)
        assert moved(pair, ordinary()) > LARGE

    def test_the_other_direction_goes_on(self, pair: ZeroCopyPair) -> None:
        break_reading(pair, 0)
        sink, data, before = Recorder(), ordinary(), sum(pair.ba.written)
        moved(pair, data)
        receive(pair.a, sink, p2p(2), LARGE, "got")
        post(pair.b, sink, p2p(2), data, "sent")
        pair.run()
        assert sink.arrays["got"] == data
        assert sum(pair.ba.written) - before < 1000

    def test_several_at_once(self, pair: ZeroCopyPair, failing: Any) -> None:
        failing(COPY_BYTES)
        sink, data = Recorder(), [ordinary(LARGE + index) for index in range(3)]
        for index, each in enumerate(data):
            receive(pair.b, sink, p2p(index), len(each), index)
            post(pair.a, sink, p2p(index), each, ("sent", index))
        pair.run()
        assert [sink.arrays[index] for index in range(3)] == data
        assert idle(pair)

    def returned(self, pair: ZeroCopyPair, sink: Recorder) -> Any:
        """A message from a to b that b could not read and has said so, but a has not heard it yet."""
        break_reading(pair, 0)
        receive(pair.b, sink, p2p(1), LARGE, "got")
        op = send(pair.a, sink, p2p(1), ordinary(), "sent")  # type: ignore[arg-type]
        Pair.run(pair)
        assert pair.copy()
        assert not pair.copy()
        assert pair.ba.bytes
        return op

    def test_a_sender_drops_it_meanwhile(self, pair: ZeroCopyPair) -> None:
        """Its memory may have gone since, which says nothing about other memory."""
        sink = Recorder()
        self.returned(pair, sink)
        pair.drop_group(0)
        pair.run()
        assert sink.order == ["got"]
        assert isinstance(sink.failed["got"], GroupAbortedError)
        assert idle(pair)
        assert pair.sides[0].zero_copy.exposed(PROCESS)

    def test_a_sender_gives_it_up_meanwhile(self, pair: ZeroCopyPair) -> None:
        sink = Recorder()
        pair.a.give_up(self.returned(pair, sink))
        pair.run()
        assert sink.order == ["got"]
        assert isinstance(sink.failed["got"], CollectiveTimeoutError)
        assert idle(pair)
        assert pair.sides[0].zero_copy.exposed(PROCESS)

    def test_a_receiver_drops_it_meanwhile(self, pair: ZeroCopyPair) -> None:
        sink = Recorder()
        self.returned(pair, sink)
        pair.drop_group(1)
        so_far = bytes(sink.arrays["got"])
        pair.run()
        assert bytes(sink.arrays["got"]) == so_far
        assert sink.order == ["sent"]
        assert idle(pair)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_either_drops_it_while_it_travels(self, pair: ZeroCopyPair, rank: int) -> None:
        sink = Recorder()
        self.returned(pair, sink)
        pair.ab.capacity = 1 << 20
        pair.ba.deliver()
        pair.ab.deliver(limit=1 << 19)
        pair.drop_group(rank)
        pair.ab.capacity = 1 << 60
        so_far = bytes(sink.arrays["got"])
        pair.run()
        assert list(sink.failed) == ([] if rank else ["got"])
        assert sink.sent == (["sent"] if rank else [])
        assert not rank or bytes(sink.arrays["got"]) == so_far
        assert idle(pair)

    @pytest.mark.parametrize("heard", [False, True])
    def test_the_connection_is_lost_meanwhile(self, pair: ZeroCopyPair, heard: bool) -> None:
        sink = Recorder()
        self.returned(pair, sink)
        if heard:
            pair.ab.capacity = 1 << 20
            pair.ba.deliver()
        error = PeerLostError("gone", 1)
        pair.a.fail(error)
        pair.b.fail(error)
        assert sink.failed == {"sent": error, "got": error}

    def test_goodbye_waits_for_it(self, pair: ZeroCopyPair) -> None:
        sink = Recorder()
        self.returned(pair, sink)
        pair.a.goodbye()
        Pair.run(pair)
        assert sink.order == ["sent", "got"]
        assert pair.a.goodbye_sent
        assert pair.b.left


def start(pair: ZeroCopyPair, sink: Recorder) -> memoryview:
    """A message from a to b of which a part is read."""
    data = ordinary()
    receive(pair.b, sink, p2p(1), LARGE, "got")
    post(pair.a, sink, p2p(1), data, "sent")
    Pair.run(pair)
    assert pair.copy()
    assert bytes(sink.arrays["got"][:1000]) == data[:1000]
    assert not any(sink.arrays["got"][-1000:])
    return data


class TestEnds:
    """It is given up while it is read."""

    def test_a_receiver_that_drops_it_writes_nothing_any_more(self, pair: ZeroCopyPair) -> None:
        sink = Recorder()
        start(pair, sink)
        pair.drop_group(1)
        so_far = bytes(sink.arrays["got"])
        pair.run()
        assert bytes(sink.arrays["got"]) == so_far
        assert sink.order == ["sent"]
        assert idle(pair)

    @pytest.mark.parametrize("all_is_read", [False, True])
    def test_a_sender_that_drops_it_fails_the_receiver(self, pair: ZeroCopyPair, all_is_read: bool) -> None:
        sink = Recorder()
        data = start(pair, sink)
        while all_is_read and pair.sides[1].zero_copy.copies:
            pair.sides[1].zero_copy.advance()
        pair.drop_group(0)
        data[:] = bytes(LARGE)  # its owner may
        pair.run()
        assert isinstance(sink.failed["got"], GroupAbortedError)
        assert sink.order == ["got"]
        assert idle(pair)

    def test_loss_fails_both_ends(self, pair: ZeroCopyPair) -> None:
        sink = Recorder()
        start(pair, sink)
        error = PeerLostError("gone", 1)
        pair.a.fail(error)
        pair.b.fail(error)
        assert sink.failed == {"sent": error, "got": error}
        so_far = bytes(sink.arrays["got"])
        pair.copy()
        assert bytes(sink.arrays["got"]) == so_far


class TestHostile:
    """`b` is the victim; `a` writes what it likes."""

    def feed(self, pair: ZeroCopyPair, frame: bytes) -> None:
        pair.ab.bytes += frame
        pair.ab.deliver()

    def test_it_says_where_its_memory_is_twice(self, pair: ZeroCopyPair) -> None:
        own = pair.sides[0].own
        assert own is not None
        with pytest.raises(RemoteProtocolError, match="twice"):
            self.feed(pair, pack_memory(*own.token))

    @pytest.mark.parametrize("reading", [(), (1,)])
    def test_nor_may_it_guess_until_there_is_something(self, reading: tuple[int, ...]) -> None:
        pair = ZeroCopyPair(reading=reading)
        pair.run()
        self.feed(pair, pack_memory(0, bytes(16)))
        with pytest.raises(RemoteProtocolError, match="twice"):
            self.feed(pair, pack_memory(0, bytes(16)))
        pair.close()

    @pytest.mark.parametrize("address", [0, 1, 1 << 47, MAX_ADDRESS, (1 << 64) - 1])
    def test_its_token_lies_anywhere(self, address: int) -> None:
        pair = ZeroCopyPair(reading=(1,))
        pair.run()
        before = sum(pair.ba.written)
        self.feed(pair, pack_memory(address, bytes(16)))
        assert not pair.sides[1].zero_copy.reads
        assert sum(pair.ba.written) == before
        with pytest.raises(RemoteProtocolError, match="not mapped"):
            self.lend(pair, 0)
        pair.close()

    def lend(self, pair: ZeroCopyPair, address: int, length: int = LARGE) -> Recorder:
        sink = Recorder()
        receive(pair.b, sink, collective(1), LARGE, "got")  # pulled early, as 1 << 31
        self.feed(pair, pack_exposed(1 << 31, PROCESS, address, length))
        return sink

    @pytest.mark.parametrize("reading", [(), (0,)])
    def test_it_lends_what_we_do_not_read(self, reading: tuple[int, ...]) -> None:
        pair = ZeroCopyPair(reading=reading)
        pair.run()
        with pytest.raises(RemoteProtocolError, match="not mapped"):
            self.lend(pair, 0)
        pair.close()

    @pytest.mark.parametrize("address", [MAX_ADDRESS - LARGE + 1, MAX_ADDRESS, (1 << 64) - 1, (1 << 64) - LARGE])
    def test_it_lends_where_no_process_has_memory(self, pair: ZeroCopyPair, address: int) -> None:
        with pytest.raises(RemoteProtocolError, match="of its process"):
            self.lend(pair, address)

    @pytest.mark.parametrize("length", [LARGE - 1, LARGE + 1, (1 << 64) - 1])
    def test_it_lends_more_or_less_than_it_should(self, pair: ZeroCopyPair, length: int) -> None:
        with pytest.raises(RemoteProtocolError, match="as message"):
            self.lend(pair, 0, length)

    def test_no_item_is_longer_than_memory(self, pair: ZeroCopyPair) -> None:
        """Its length is another rank's word."""
        zero_copy = pair.sides[1].zero_copy
        for length in (1 << 63, (1 << 64) - 2):  # the first is one more than `len` can say
            with pytest.raises(RemoteProtocolError, match="of its process"):
                zero_copy.remote(PROCESS, 0, length)
        assert zero_copy.remote(PROCESS, 1, MAX_ADDRESS - 1).nbytes == MAX_ADDRESS - 1

    @pytest.mark.parametrize("address", [0, 1, 1 << 47, MAX_ADDRESS - LARGE])
    def test_it_lends_what_is_not_there(self, pair: ZeroCopyPair, address: int) -> None:
        sink = self.lend(pair, address)
        pair.copy()
        assert pair.ba.bytes[-48:] == pack_header(Kind.RELEASED, flags=Flag.ABORT, message_id=1 << 31)
        assert sink.order == []

    @pytest.mark.parametrize(
        "frame",
        [
            pack_exposed(1 << 31, PROCESS, 0, LARGE),
            pack_fragment(1 << 31, 0, 0, flags=Flag.END),
            pack_fragment(1 << 31, 10, 10) + bytes(10),
        ],
    )
    def test_what_must_travel_does(self, pair: ZeroCopyPair, frame: bytes) -> None:
        self.lend(pair, 0)
        pair.copy()
        with pytest.raises(RemoteProtocolError):
            self.feed(pair, frame)

    def test_it_says_that_what_it_was_not_exposed_cannot_be_read(self, pair: ZeroCopyPair) -> None:
        send(pair.b, Recorder(), p2p(1), bytes(ZERO_COPY_BYTES), "sent")
        pair.ba.capacity = 0
        self.feed(pair, pack_header(Kind.PULL, message_id=1))
        self.feed(pair, pack_header(Kind.RELEASED, flags=Flag.ABORT, message_id=99))
        with pytest.raises(RemoteProtocolError, match="not exposed"):
            self.feed(pair, pack_header(Kind.RELEASED, flags=Flag.ABORT, message_id=1))

    def test_it_can_read_nothing_however_often_it_says_it_can(self, pair: ZeroCopyPair) -> None:
        """Each message travels once."""
        for index in range(1, 5):
            self.feed(pair, pack_header(Kind.MAPPED, length=PROCESS))
            sink, data = Recorder(), ordinary()
            assert pair.sides[1].zero_copy.expose(data)
            post(pair.b, sink, p2p(1), data, "sent")
            unread = pack_header(Kind.RELEASED, flags=Flag.ABORT, message_id=index)
            self.feed(pair, pack_header(Kind.PULL, message_id=index) + unread)
            while pair.ba.armed:
                pair.ba.armed = not pair.b.flush()
            assert sink.order == ["sent"]
            assert LARGE < len(pair.ba.bytes) < LARGE + 10_000
            pair.ba.bytes.clear()
            self.feed(pair, unread)  # of a message that has ended

    def test_it_says_so_again_of_one_that_travels(self, pair: ZeroCopyPair) -> None:
        send(pair.b, Recorder(), p2p(1), ordinary(), "sent")  # type: ignore[arg-type]
        pair.ba.capacity = 0
        unread = pack_header(Kind.RELEASED, flags=Flag.ABORT, message_id=1)
        self.feed(pair, pack_header(Kind.PULL, message_id=1) + unread)
        with pytest.raises(RemoteProtocolError, match="not exposed"):
            self.feed(pair, unread)

    def test_kinds_there_are_not(self, pair: ZeroCopyPair) -> None:
        with pytest.raises(RemoteProtocolError, match=f"unknown kind {Kind.WITHDRAW + 1}"):
            self.feed(pair, pack_header(Kind.WITHDRAW + 1))

    @pytest.mark.parametrize("kind", [Kind.EXPOSED, Kind.RELEASED, Kind.MAPPED, Kind.UNMAP, Kind.MEMORY])
    def test_none_has_meta(self, pair: ZeroCopyPair, kind: int) -> None:
        with pytest.raises(RemoteProtocolError, match="meta"):
            self.feed(pair, pack_header(kind, meta_bytes=1))

    def test_it_takes_back_what_is_no_segment(self, pair: ZeroCopyPair) -> None:
        self.feed(pair, pack_header(Kind.UNMAP, length=PROCESS))
        assert pair.sides[1].zero_copy.reads
