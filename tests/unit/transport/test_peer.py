"""PeerCore: what a message costs, how it may end at each stage of its life, and every bound."""

from __future__ import annotations

import pytest
from transport_pair import GROUP_BYTES, Pair, Recorder, collective, p2p, receive, send

from asyncdist.errors import (
    ClosedError,
    CollectiveMismatchError,
    GroupAbortedError,
    PeerLostError,
    RemoteProtocolError,
)
from asyncdist.transport.frame import (
    CREDIT_BYTES,
    EAGER_BYTES,
    FRAGMENT_BYTES,
    HEADER_BYTES,
    MAX_CALL_BYTES,
    MAX_CONTROL_BYTES,
    MAX_META_BYTES,
    MAX_READ_BYTES,
    MESSAGE_OVERHEAD_BYTES,
    Kind,
)
from asyncdist.transport.matching import SendOp
from asyncdist.transport.reader import SCRATCH_BYTES

MIB = 1 << 20


def make(opened: bool = True) -> tuple[Pair, Recorder, Recorder]:
    return Pair(opened=opened), Recorder(), Recorder()


def kinds(data: bytes | bytearray) -> list[int]:
    """The kinds of the frames in a stream of header-only frames, or up to the first with payload."""
    return [data[start] for start in range(0, len(data), HEADER_BYTES)]


# -- the usual ways


def test_small_message_is_one_write_and_complete_at_once() -> None:
    pair, sink, _ = make()
    op = SendOp(collective(0), memoryview(b"abcd"), b"", sink, "s")
    assert pair.a.post_send(op)
    assert pair.ab.written == [HEADER_BYTES + 4]
    assert not sink.order


def test_send_and_receive_tell_what_travelled() -> None:
    pair, sa, sb = make()
    op = SendOp(p2p(1), memoryview(b"abcd"), b"int32 1", sa, "s", fingerprint=77)
    assert pair.a.post_send(op)
    got = receive(pair.b, sb, p2p(1), None, "r")
    assert got.source == 0
    pair.run()
    assert (bytes(sb.arrays["r"]), got.nbytes, got.meta, got.fingerprint) == (b"abcd", 4, b"int32 1", 77)


@pytest.mark.parametrize("key", [p2p(1), collective(1)], ids=["p2p", "collective"])
@pytest.mark.parametrize("meta", [b"", b"float32"])
@pytest.mark.parametrize("nbytes", [4, EAGER_BYTES, EAGER_BYTES + 1, MIB])
@pytest.mark.parametrize("receive_first", [True, False])
def test_meta_and_fingerprint_travel_with_every_kind(key: bytes, meta: bytes, nbytes: int, receive_first: bool) -> None:
    pair, sa, sb = make()
    op = SendOp(key, memoryview(bytes(nbytes)), meta, sa, "s", fingerprint=5)
    if not receive_first:
        pair.a.post_send(op)
        pair.run()
    got = receive(pair.b, sb, key, nbytes, "r")
    if receive_first:
        pair.run()
        pair.a.post_send(op)
    pair.run()
    assert (got.meta, got.fingerprint, got.nbytes) == (meta, 5, nbytes)


def test_a_large_collective_posted_first_is_pulled_without_an_offer() -> None:
    pair, sa, sb = make()
    receive(pair.b, sb, collective(1), MIB, "r")
    assert kinds(pair.ba.bytes) == [Kind.PULL]
    pair.run()
    send(pair.a, sa, collective(1), bytes(MIB), "s")
    assert pair.ab.bytes[0] == Kind.FRAGMENT
    pair.run()
    assert sb.order == ["r"]
    assert len(sa.order) == 1


def test_an_offer_that_crosses_its_early_pull() -> None:
    pair, sa, sb = make()
    send(pair.a, sa, collective(1), bytes(MIB), "s")
    receive(pair.b, sb, collective(1), MIB, "r")
    assert kinds(pair.ab.bytes) == [Kind.OFFER]
    assert kinds(pair.ba.bytes) == [Kind.PULL]
    pair.run()
    assert sb.order == ["r"]
    assert sa.order == ["s"]
    assert pair.a.statistics()["offered"] == 0


def test_payload_goes_straight_into_the_array() -> None:
    """Between fragments only a header is read, so all of a large message but its first piece is read in place."""
    pair, sa, sb = make()
    receive(pair.b, sb, collective(1), 4 * MIB, "r")
    pair.run()
    send(pair.a, sa, collective(1), bytes(4 * MIB), "s")
    lent: list[int] = []
    get_buffer = pair.b.get_buffer

    def watch() -> memoryview:
        buffer = get_buffer()
        assert len(buffer) <= max(MAX_READ_BYTES, SCRATCH_BYTES)
        if not lent or lent[-1] != len(buffer):
            lent.append(len(buffer))
        return buffer

    pair.b.get_buffer = watch
    pair.run()
    assert sb.order == ["r"]
    assert lent.count(SCRATCH_BYTES) <= 2
    assert HEADER_BYTES in lent


def test_large_messages_take_turns() -> None:
    pair, sa, sb = make()
    for slot in range(2):
        receive(pair.b, sb, collective(slot), 2 * MIB, slot)
    pair.run()
    pair.ab.capacity = 0
    for slot in range(2):
        send(pair.a, sa, collective(slot), bytes(2 * MIB), slot)
    pair.ab.capacity = 1 << 60
    pair.a.flush()
    heads = pair.ab.bytes[0 :: HEADER_BYTES + FRAGMENT_BYTES][:4]
    assert list(heads) == [Kind.FRAGMENT] * 4
    ids = [pair.ab.bytes[i * (HEADER_BYTES + FRAGMENT_BYTES) + 44] for i in range(4)]
    assert ids[0] == ids[2] != ids[1] == ids[3]


def test_one_flush_hands_over_a_mebibyte() -> None:
    pair, sa, sb = make()
    receive(pair.b, sb, collective(1), 8 * MIB, "r")
    pair.run()
    pair.ab.written.clear()
    send(pair.a, sa, collective(1), bytes(8 * MIB), "s")
    assert sum(pair.ab.written) <= MAX_CALL_BYTES + HEADER_BYTES * 5
    assert pair.ab.armed


def test_control_goes_before_everything_queued() -> None:
    pair, sa, sb = make()
    receive(pair.b, sb, collective(1), 2 * MIB, "r")
    pair.run()
    pair.ab.capacity = 0
    send(pair.a, sa, collective(1), bytes(2 * MIB), "bulk")
    send(pair.a, sa, collective(2), bytes(10), "small")
    pair.a.send_control(b"stop")
    pair.ab.capacity = 1 << 60
    pair.a.flush()
    assert pair.ab.bytes[0] == Kind.CONTROL
    pair.run()
    assert pair.controls == [(1, 0, b"stop")]
    assert sb.order == ["r"]


def test_small_frames_share_a_write() -> None:
    pair, sa, _ = make()
    pair.ab.capacity = 0
    for slot in range(50):
        send(pair.a, sa, collective(slot), b"abcd", slot)
    pair.ab.written.clear()
    pair.ab.capacity = 1 << 60
    assert pair.a.flush()
    assert len(pair.ab.written) == 1 or sum(pair.ab.written) == 50 * (HEADER_BYTES + 4)


def test_what_is_posted_before_open_flows_after() -> None:
    pair, sa, sb = make(opened=False)
    for nbytes in (4, MIB):
        send(pair.a, sa, collective(nbytes), bytes(nbytes), nbytes)
        receive(pair.b, sb, collective(nbytes), nbytes, nbytes)
    pair.a.send_control(b"first")
    assert pair.a.has_output
    assert not sa.order
    pair.open()
    pair.run()
    assert sa.order == sb.order == [4, MIB]
    assert not pair.a.has_output


def test_a_write_in_part_finishes_later() -> None:
    for capacity in (0, 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 9_999):
        pair, sa, sb = make()
        pair.ab.capacity = capacity
        data = bytes(range(250)) * 40
        send(pair.a, sa, collective(1), data, "s")
        assert not sa.order
        pair.ab.capacity = 1 << 60
        receive(pair.b, sb, collective(1), len(data), "r")
        pair.run()
        assert sa.order == ["s"]
        assert bytes(sb.arrays["r"]) == data


# -- limits


def test_a_sender_keeps_within_its_credit() -> None:
    pair, sa, sb = make()
    message = bytes(EAGER_BYTES)
    fits = CREDIT_BYTES // (EAGER_BYTES + MESSAGE_OVERHEAD_BYTES)
    for index in range(fits + 1):
        send(pair.a, sa, p2p(1), message, index)
    pair.run()
    assert len(sa.order) == fits
    assert pair.a.statistics()["offered"] == 1
    assert pair.b.statistics()["parked_offers"] == 1
    assert pair.b.statistics()["parked_bytes"] <= CREDIT_BYTES
    for index in range(fits + 1):
        receive(pair.b, sb, p2p(1), None, index)
    pair.run()
    assert sb.order == list(range(fits + 1))


def test_hundred_thousand_unreceived_messages_stay_with_their_sender() -> None:
    pair, sa, sb = make()
    for index in range(100_000):
        send(pair.a, sa, p2p(1), b"abcd", index)
    pair.run()
    held = pair.b.statistics()
    assert held["parked_bytes"] <= CREDIT_BYTES
    assert held["parked_offers"] <= 1024
    assert pair.a.statistics()["held"] > 90_000
    send(pair.a, sa, p2p(2), b"other", "other")
    receive(pair.b, sb, p2p(2), None, "other")
    pair.run()
    assert sb.order == ["other"]
    send(pair.a, sa, collective(2), b"other", "collective")
    receive(pair.b, sb, collective(2), 5, "collective")
    pair.run()
    assert sb.order == ["other", "collective"]


def test_meta_and_control_limits() -> None:
    pair, sa, sb = make()
    send(pair.a, sa, p2p(1), b"", "s", meta=bytes(MAX_META_BYTES))
    got = receive(pair.b, sb, p2p(1), None, "r")
    pair.a.send_control(bytes(MAX_CONTROL_BYTES))
    pair.run()
    assert got.meta == bytes(MAX_META_BYTES)
    assert pair.controls == [(1, 0, bytes(MAX_CONTROL_BYTES))]
    with pytest.raises(ValueError, match="1025 bytes"):
        send(pair.a, sa, p2p(1), b"", "x", meta=bytes(MAX_META_BYTES + 1))
    with pytest.raises(ValueError, match="65537 bytes"):
        pair.a.send_control(bytes(MAX_CONTROL_BYTES + 1))


# -- wrong messages


def test_a_message_here_already_that_does_not_suit_raises_at_the_post() -> None:
    for nbytes in (4, MIB):
        pair, sa, sb = make()
        send(pair.a, sa, collective(1), bytes(nbytes), "s")
        pair.run()
        with pytest.raises(CollectiveMismatchError, match=f"rank 0 sent {nbytes} bytes where 5 are expected"):
            receive(pair.b, sb, collective(1), 5, "r")
        pair.run()
        assert sa.order == ["s"]
        assert not sb.order
        assert pair.b.statistics()["parked_messages"] == 0


def test_allocate_must_return_what_was_asked_for() -> None:
    pair, sa, sb = make()
    sb.allocate = lambda *_: memoryview(bytearray(3))  # type: ignore[method-assign]
    receive(pair.b, sb, p2p(1), None, "r")
    send(pair.a, sa, p2p(1), b"abcd", "s")
    pair.run()
    assert isinstance(sb.failed["r"], ValueError)


# -- ends


def test_fail_ends_everything_once() -> None:
    pair, sa, sb = make()
    receive(pair.a, sa, p2p(9), None, "posted")
    receive(pair.a, sa, collective(9), MIB, "pulled early")
    send(pair.b, sb, collective(8), bytes(2 * MIB), "out")
    receive(pair.a, sa, collective(8), 2 * MIB, "half here")
    pair.ba.deliver()
    pair.ab.deliver()
    pair.ba.deliver(limit=400_000)
    for index in range(40):
        send(pair.a, sa, p2p(1), bytes(EAGER_BYTES), index)
    pair.ab.capacity = len(pair.ab.bytes) + 100
    send(pair.a, sa, collective(1), bytes(10_000), "begun")
    send(pair.a, sa, p2p(2), b"queued", "queued")
    told = len(sa.order)
    error = PeerLostError("lost", 1)
    pair.a.fail(error)
    pair.a.fail(RuntimeError("again"))
    assert pair.a.error is error
    assert set(sa.failed.values()) == {error}
    assert {"posted", "pulled early", "half here", "begun", "queued", 39} <= set(sa.failed)
    assert told + len(sa.failed) == len(sa.order) == 40 + 5
    with pytest.raises(PeerLostError):
        send(pair.a, sa, p2p(1), b"", "late")
    with pytest.raises(PeerLostError):
        receive(pair.a, sa, p2p(1), None, "late")
    with pytest.raises(PeerLostError):
        pair.a.send_control(b"")


def test_messages_that_arrived_before_the_end_can_be_received_after_it() -> None:
    pair, sa, sb = make()
    for index in range(3):
        send(pair.a, sa, p2p(1), bytes(5 if index != 1 else MIB), index)
    pair.run()
    pair.b.fail(PeerLostError("lost", 0))
    receive(pair.b, sb, p2p(1), None, "first")
    assert sb.order == ["first"]
    with pytest.raises(PeerLostError):  # the second was only on offer, and the third must not overtake it
        receive(pair.b, sb, p2p(1), None, "second")


def test_goodbye_follows_everything_posted() -> None:
    pair, sa, sb = make()
    send(pair.a, sa, p2p(1), bytes(MIB), "large")
    pair.a.goodbye()
    with pytest.raises(ClosedError):
        send(pair.a, sa, p2p(1), b"", "late")
    pair.run()
    assert not pair.a.goodbye_sent
    receive(pair.b, sb, p2p(1), None, "r")
    pair.run()
    assert sb.order == ["r"]
    assert pair.a.goodbye_sent
    assert pair.b.left
    assert not pair.a.left
    receive(pair.b, sb, collective(5), MIB, "never")  # its pull may still be written, and is ignored
    pair.run()


def test_goodbye_of_the_other_frees_what_it_will_never_pull() -> None:
    pair, sa, _ = make()
    send(pair.a, sa, p2p(1), bytes(MIB), "offered")
    pair.a.goodbye()
    pair.b.goodbye()
    pair.run()
    assert isinstance(sa.failed["offered"], PeerLostError)
    assert pair.a.goodbye_sent
    assert pair.b.goodbye_sent
    assert pair.a.left
    assert pair.b.left


def test_nothing_may_follow_goodbye() -> None:
    for rest in (b"x", bytes(HEADER_BYTES)):
        for apart in (True, False):
            pair, _, _ = make()
            pair.a.goodbye()
            if apart:
                pair.run()
            pair.ab.bytes += rest
            with pytest.raises(RemoteProtocolError, match="after its goodbye"):
                pair.run()


# -- withdrawing


def test_withdraw_of_an_early_pull_is_understood_by_the_sender() -> None:
    for sender_first in (True, False):
        pair, sa, sb = make()
        if sender_first:
            send(pair.a, sa, collective(1), bytes(MIB), "s")
        got = receive(pair.b, sb, collective(1), MIB, "r")
        assert pair.b.withdraw(got)
        pair.run()
        if not sender_first:
            assert pair.a.statistics()["early_pulls"] == 0
        assert pair.b.statistics()["streams_in"] == 0
        assert not sb.order


# -- dropping a group, at every stage of a message


def resize(array: bytearray) -> None:
    """Raises BufferError while anybody holds a view."""
    array.append(0)


@pytest.mark.parametrize("key", [p2p(1), collective(1)], ids=["p2p", "collective"])
@pytest.mark.parametrize("nbytes", [10_000, EAGER_BYTES + 1, 4 * MIB])
@pytest.mark.parametrize("deliveries", range(9))
@pytest.mark.parametrize("rank", [0, 1])
def test_drop_group_at_every_stage(key: bytes, nbytes: int, deliveries: int, rank: int) -> None:
    pair, sa, sb = make()
    pair.ab.capacity = 3000
    data = bytearray(nbytes)
    view = memoryview(data)
    if pair.a.post_send(SendOp(key, view, b"", sa, "s")):
        sa.message_sent("s")
    receive(pair.b, sb, key, nbytes, "r")
    for _ in range(deliveries):
        pair.ba.deliver()
        pair.ab.deliver(limit=2000)
        pair.ab.capacity = 200_000
    told = list(sa.order), list(sb.order)
    pair.drop_group(rank)
    array = sb.arrays["r"]
    image = bytes(array)
    if rank == 0:
        view.release()
        resize(data)
    pair.ab.capacity = 1 << 60
    pair.run()
    if rank == 0:
        assert sa.order == told[0]
        assert sb.order == told[1] or sb.order == ["r"]
        if "r" in sb.failed:
            assert isinstance(sb.failed["r"], GroupAbortedError)
    else:
        assert sb.order == told[1]
        assert bytes(array) == image
        assert sa.order == ["s"]
    other = key[8:]
    send(pair.a, sa, b"\x63" + bytes(7) + other, b"goes on", "s2")
    receive(pair.b, sb, b"\x63" + bytes(7) + other, 7, "r2")
    pair.run()
    assert "r2" in sb.received
    pair.drop_group(1 - rank)
    pair.run()
    for core in (pair.a, pair.b):
        held = core.statistics()
        assert not any(
            held[name] for name in ("streams_in", "streams_out", "early_pulls", "offered", "parked_messages")
        )


def test_dropping_a_held_group_ends_the_stall() -> None:
    pair, sa, sb = make()
    other = p2p(1, group=8)
    for index in range(5000):
        send(pair.a, sa, p2p(1), b"abcd", index)
    send(pair.a, sa, other, b"behind", "behind")
    pair.run()
    pair.drop_group(1)
    pair.drop_group(0)
    receive(pair.b, sb, other, None, "r")
    pair.run()
    assert sb.order == ["r"]
    assert pair.a.statistics()["held"] == 0


def test_late_messages_of_a_dropped_group_are_drained() -> None:
    pair, sa, _ = make()
    pair.drop_group(1)
    for index in range(5000):
        send(pair.a, sa, p2p(1), bytes(1000), index)
    send(pair.a, sa, p2p(1), bytes(MIB), "large")
    pair.run()
    assert len(sa.order) == 5001
    assert pair.b.statistics()["parked_messages"] == 0
    assert GROUP_BYTES in pair.dropped[1]


def test_dropping_what_was_never_written_makes_room() -> None:
    """Nobody will answer for messages the peer has not heard of, so the drop itself must let held ones go."""
    pair, sa, sb = make()
    pair.ab.capacity = 0
    for index in range(5000):
        send(pair.a, sa, p2p(1), b"abcd", index)
    other = p2p(1, group=8)
    send(pair.a, sa, other, b"behind", "behind")
    assert pair.a.statistics()["held"]
    pair.drop_group(0)
    assert pair.a.statistics()["held"] == 0
    pair.ab.capacity = 1 << 60
    receive(pair.b, sb, other, None, "r")
    pair.run()
    assert sb.order == ["r"]
    assert sa.order == [0, "behind"]  # the first was small enough to be copied when it met the full socket


def test_a_message_discarded_in_the_middle_of_a_fragment_is_complete_when_that_is_written() -> None:
    pair, sa, sb = make()
    send(pair.a, sa, p2p(1), bytes(4 * MIB), "s")
    receive(pair.b, sb, p2p(1), None, "r")
    pair.ab.deliver()
    pair.ab.capacity = 100_000
    pair.ba.deliver()
    pair.drop_group(1)
    pair.ba.deliver()
    assert not sa.order
    pair.ab.capacity = 1 << 60
    pair.run()
    assert sa.order == ["s"]
    assert not sb.order
    assert pair.b.statistics()["streams_in"] == 0
