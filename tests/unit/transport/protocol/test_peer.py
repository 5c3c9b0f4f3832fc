"""PeerCore: how messages travel, and within which bounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transport_pair import Pair, Recorder, collective, p2p, receive, send

from asyncdist.transport.base_mesh import BaseMesh
from asyncdist.transport.protocol.frame import (
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
from asyncdist.transport.protocol.operations import SendOp
from asyncdist.transport.protocol.reader import SCRATCH_BYTES

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


@pytest.mark.parametrize(("nbytes", "most"), [(FRAGMENT_BYTES, MAX_READ_BYTES), (4 * MIB, FRAGMENT_BYTES)])
def test_payload_goes_straight_into_the_array(nbytes: int, most: int) -> None:
    """Between fragments only a header is read, so all of a large message but its first piece is read in place."""
    pair, sa, sb = make()
    receive(pair.b, sb, collective(1), nbytes, "r")
    pair.run()
    send(pair.a, sa, collective(1), bytes(nbytes), "s")
    lent: list[int] = []
    get_buffer = pair.b.get_buffer

    def watch() -> memoryview:
        buffer = get_buffer()
        if not lent or lent[-1] != len(buffer):
            lent.append(len(buffer))
        return buffer

    pair.b.get_buffer = watch
    pair.run()
    assert sb.order == ["r"]
    assert lent.count(SCRATCH_BYTES) <= 2
    assert (HEADER_BYTES in lent) is (nbytes > FRAGMENT_BYTES)
    assert max(set(lent) - {SCRATCH_BYTES}) == most


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
    assert max(pair.ab.written) <= FRAGMENT_BYTES + HEADER_BYTES, "the receiver reads while we write"
    assert pair.ab.armed


@pytest.mark.parametrize("crowded", [False, True])
def test_where_ranks_share_cores_more_is_handed_over_at_a_time(crowded: bool) -> None:
    owner: Any = SimpleNamespace(control_received=None)
    mesh = BaseMesh(0, 2, owner)
    mesh.crowded = crowded
    pair, sa, sb = make()
    pair.a._sender.queue.write_bytes = mesh._new_core(1)._sender.queue.write_bytes
    receive(pair.b, sb, collective(1), 8 * MIB, "r")
    pair.run()
    pair.ab.written.clear()
    send(pair.a, sa, collective(1), bytes(8 * MIB), "s")
    assert len(pair.ab.written) == (1 if crowded else MAX_CALL_BYTES // FRAGMENT_BYTES)


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
    assert pair.b.statistics()["unexpected_offers"] == 1
    assert pair.b.statistics()["unexpected_bytes"] <= CREDIT_BYTES
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
    assert held["unexpected_bytes"] <= CREDIT_BYTES
    assert held["unexpected_offers"] <= 1024
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
