"""Eager messages too long to wait in the reader's scratch: what becomes of them when no receive is posted yet."""

from __future__ import annotations

import random

import pytest
from transport_pair import GROUP_BYTES, Pair, Recorder, collective, p2p, receive, send

from asyncdist.errors import CollectiveMismatchError, PeerLostError, RemoteProtocolError
from asyncdist.transport.protocol.frame import (
    CREDIT_BYTES,
    EAGER_BYTES,
    EARLY_PULL_BYTES,
    HEADER_BYTES,
    MESSAGE_OVERHEAD_BYTES,
    Kind,
    pack_header,
)
from asyncdist.transport.protocol.operations import Receive, SendOp
from asyncdist.transport.protocol.reader import GATHER_BYTES, SCRATCH_BYTES

LENGTHS = (GATHER_BYTES, GATHER_BYTES + 1, SCRATCH_BYTES, EAGER_BYTES)


def pattern(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@pytest.mark.parametrize("key", [p2p(1), collective(1)], ids=["p2p", "collective"])
@pytest.mark.parametrize("nbytes", LENGTHS)
@pytest.mark.parametrize("seed", range(3))
def test_one_write_and_no_question(key: bytes, nbytes: int, seed: int) -> None:
    pair, sa, sb = Pair(random.Random(seed)), Recorder(), Recorder()
    for number in range(3):
        send(pair.a, sa, key, pattern(nbytes, number), number)
    pair.run()
    assert not pair.ba.written, "nothing was asked for"
    for number in range(3):
        receive(pair.b, sb, key, nbytes, number)
    pair.run()
    assert [bytes(sb.arrays[number]) for number in range(3)] == [pattern(nbytes, number) for number in range(3)]
    assert pair.b.statistics()["unexpected_bytes"] == 0


@pytest.mark.parametrize("nbytes", LENGTHS[1:])
@pytest.mark.parametrize("any_source", [False, True])
def test_a_receive_posted_while_it_comes_gets_it(nbytes: int, any_source: bool) -> None:
    pair, sa, sb = Pair(), Recorder(), Recorder()
    send(pair.a, sa, p2p(1), pattern(nbytes), "s")
    pair.ab.deliver(limit=nbytes // 2, step=10_000)
    if any_source:
        posted = Receive(p2p(1), None, sb, "r")
        assert not pair.any_source[1].post(posted, range(2))
    else:
        receive(pair.b, sb, p2p(1), nbytes, "r")
    assert not sb.order
    pair.run()
    assert bytes(sb.arrays["r"]) == pattern(nbytes)
    assert sb.received["r"].source == 0


def test_of_several_lengths_in_the_order_sent() -> None:
    pair, sa, sb = Pair(random.Random(5)), Recorder(), Recorder()
    sizes = [5, EAGER_BYTES, 0, GATHER_BYTES + 1, EAGER_BYTES + 1, 100, SCRATCH_BYTES]
    for number, nbytes in enumerate(sizes):
        send(pair.a, sa, p2p(1), pattern(nbytes, number), number)
    pair.run()
    for number in range(len(sizes)):
        receive(pair.b, sb, p2p(1), None, number)
    pair.run()
    assert [bytes(sb.arrays[number]) for number in range(len(sizes))] == [
        pattern(nbytes, number) for number, nbytes in enumerate(sizes)
    ]


def test_the_wrong_length_is_a_mismatch() -> None:
    pair, sa, sb = Pair(), Recorder(), Recorder()
    send(pair.a, sa, collective(1), bytes(EAGER_BYTES), "s")
    pair.ab.deliver(limit=SCRATCH_BYTES)
    receive(pair.b, sb, collective(1), EAGER_BYTES - 1, "r")
    pair.run()
    assert isinstance(sb.failed["r"], CollectiveMismatchError)


def test_its_group_is_dropped_while_it_comes() -> None:
    pair, sa, sb = Pair(), Recorder(), Recorder()
    send(pair.a, sa, p2p(1), bytes(EAGER_BYTES), "s")
    pair.ab.deliver(limit=SCRATCH_BYTES)
    pair.drop_group(1, GROUP_BYTES)
    pair.run()
    assert pair.b.statistics()["unexpected_messages"] == 0
    send(pair.a, sa, p2p(1, group=8), b"next", "next")
    receive(pair.b, sb, p2p(1, group=8), 4, "r")
    pair.run()
    assert bytes(sb.arrays["r"]) == b"next"
    due = pair.b._sender.queue._credit_due[0]
    assert pair.a._sender.windows[0].credit + pair.b._receiver.windows[0].owed + due == CREDIT_BYTES


def test_the_connection_ends_while_it_comes() -> None:
    pair, sa, sb = Pair(), Recorder(), Recorder()
    send(pair.a, sa, p2p(1), bytes(EAGER_BYTES), "s")
    pair.ab.deliver(limit=SCRATCH_BYTES)
    receive(pair.b, sb, p2p(1), EAGER_BYTES, "r")
    pair.b.fail(PeerLostError("rank 0 is gone", 0))
    assert isinstance(sb.failed["r"], PeerLostError)
    assert pair.b.statistics()["unexpected_messages"] == 0


def test_credit_bounds_them_too() -> None:
    pair = Pair()
    head = pack_header(Kind.DATA, key=p2p(1), length=EAGER_BYTES)
    fits = CREDIT_BYTES // (EAGER_BYTES + MESSAGE_OVERHEAD_BYTES)
    feed(pair, (head + bytes(EAGER_BYTES)) * fits)
    assert pair.b.statistics()["unexpected_messages"] == fits
    with pytest.raises(RemoteProtocolError, match="exceeds its credit"):
        feed(pair, head + bytes(EAGER_BYTES))


def feed(pair: Pair, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        buffer = pair.b.get_buffer()
        count = min(len(buffer), len(rest))
        buffer[:count] = rest[:count]
        pair.b.buffer_updated(count)
        rest = rest[count:]


@pytest.mark.parametrize(
    ("bulk", "nbytes", "asks"),
    [
        (False, EAGER_BYTES, False),
        (False, EAGER_BYTES + 1, True),
        (True, EARLY_PULL_BYTES, False),
        (True, EARLY_PULL_BYTES + 1, True),
    ],
)
def test_what_a_receive_of_a_collective_asks_for(bulk: bool, nbytes: int, asks: bool) -> None:
    pair, sa, sb = Pair(), Recorder(), Recorder()
    sb.arrays["r"] = bytearray(nbytes)
    assert not pair.b.post_receive(Receive(collective(1), memoryview(sb.arrays["r"]), sb, "r", bulk=bulk))
    assert bool(pair.ba.bytes) == asks
    if asks:
        assert (pair.ba.bytes[0], len(pair.ba.bytes)) == (Kind.PULL, HEADER_BYTES)
    op = SendOp(collective(1), memoryview(pattern(nbytes)), b"", sa, "s", bulk=bulk)
    sent = pair.a.post_send(op)
    assert sent == (not asks)
    pair.run()
    assert bytes(sb.arrays["r"]) == pattern(nbytes)


@pytest.mark.parametrize("receive_first", [False, True])
@pytest.mark.parametrize(("sender", "receiver"), [(False, True), (True, False)])
def test_ends_that_differ_still_meet(sender: bool, receiver: bool, receive_first: bool) -> None:
    pair, sa, sb = Pair(), Recorder(), Recorder()
    nbytes = EARLY_PULL_BYTES + 1
    sb.arrays["r"] = bytearray(nbytes)
    op = SendOp(collective(1), memoryview(pattern(nbytes)), b"", sa, "s", bulk=sender)
    posted = Receive(collective(1), memoryview(sb.arrays["r"]), sb, "r", bulk=receiver)
    posts = [lambda: pair.a.post_send(op), lambda: pair.b.post_receive(posted)]
    posts[receive_first]()
    done = posts[not receive_first]()
    pair.run()
    assert bytes(sb.arrays["r"]) == pattern(nbytes)
    assert done or "r" in sb.received
    assert pair.a.statistics()["early_pulls"] == 0
    assert pair.b.statistics()["streams_in"] == 0
