"""PeerCore.give_up: a message that ends before its time ends nothing else, and its array is free at once."""

from __future__ import annotations

import random

import pytest
from transport_pair import Pair, Recorder, p2p, receive, send

from asyncdist.errors import CollectiveTimeoutError
from asyncdist.transport.protocol.frame import CREDIT_BYTES, EAGER_BYTES, FRAGMENT_BYTES, MAX_OFFERS
from asyncdist.transport.protocol.matching import Receive, SendOp

MIB = 1 << 20
QUIET = {"offered": 0, "held": 0, "streams_out": 0, "receives_posted": 0, "streams_in": 0, "parked_messages": 0}


def pattern(number: int, nbytes: int) -> bytes:
    return bytes((number * 7 + index) & 255 for index in range(min(nbytes, 256))) * (nbytes // 256 + 1)


def goes_on(pair: Pair) -> None:
    """Both directions work, and nothing is left of what was before."""
    sinks = Recorder(), Recorder()
    for core, other, sink in ((pair.a, pair.b, sinks[0]), (pair.b, pair.a, sinks[1])):
        for nbytes in (0, 9, EAGER_BYTES, MIB):
            send(core, sink, p2p(77), bytes([nbytes % 251]) * nbytes, ("s", nbytes))
            receive(other, sink, p2p(77), nbytes, ("r", nbytes))
    pair.run()
    for sink in sinks:
        assert not sink.failed
        assert all(bytes(sink.arrays["r", nbytes]) == bytes([nbytes % 251]) * nbytes for nbytes in (0, 9, EAGER_BYTES))
        assert len(sink.received) == len(sink.sent) == 4
    for core in (pair.a, pair.b):
        assert QUIET.items() <= core.statistics().items()


def is_given_up(error: BaseException | None) -> bool:
    return isinstance(error, CollectiveTimeoutError) and error.missing == (0,) and "rank 0 gave this" in str(error)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("delivered", [None, 0, 1000, FRAGMENT_BYTES + 1000, 3 * FRAGMENT_BYTES])
def test_a_large_send_at_each_stage(delivered: int | None, early: bool) -> None:
    pair, sink = Pair(), Recorder()
    nbytes = 4 * MIB
    data = bytearray(b"x" * nbytes)
    op = send(pair.a, sink, p2p(1), data, "s")  # type: ignore[arg-type]
    send(pair.a, Recorder(), p2p(1), b"next")
    pair.run()
    if early:
        pair.a.give_up(op)
    receive(pair.b, sink, p2p(1), nbytes, "r")
    receive(pair.b, sink, p2p(1), 4, "next")
    pair.ab.capacity = FRAGMENT_BYTES + 500  # a second fragment is begun
    pair.ba.deliver()
    if delivered is not None:
        pair.ab.deliver(limit=delivered)
    if not early:
        pair.a.give_up(op)
    pair.ab.capacity = 1 << 60
    data[:] = b"y" * nbytes
    pair.run()
    assert is_given_up(sink.failed["r"])
    assert bytes(sink.arrays["next"]) == b"next"
    assert b"y" not in sink.arrays["r"]
    assert not sink.sent
    goes_on(pair)


@pytest.mark.parametrize("room", [0, 20, 60, 1000])
def test_a_small_send_that_waits_for_the_socket_goes_from_a_copy(room: int) -> None:
    pair, sink = Pair(), Recorder()
    data = bytearray(b"x" * 30_000)
    pair.ab.capacity = room
    op = send(pair.a, sink, p2p(1), data, "s")  # type: ignore[arg-type]
    pair.a.give_up(op)
    data[:] = b"y" * 30_000
    pair.ab.capacity = 1 << 60
    receive(pair.b, sink, p2p(1), 30_000, "r")
    pair.run()
    assert bytes(sink.arrays["r"]) == b"x" * 30_000
    assert not sink.sent
    goes_on(pair)


def test_sends_that_are_held_back_keep_their_place() -> None:
    pair, sink = Pair(), Recorder()
    for _ in range(MAX_OFFERS):
        send(pair.a, Recorder(), p2p(1), bytes(EAGER_BYTES + 1))
    arrays = {nbytes: bytearray(b"x" * nbytes) for nbytes in (5, EAGER_BYTES, EAGER_BYTES + 1)}
    ops = []
    for _ in range(2):
        for nbytes, array in arrays.items():
            ops.append(send(pair.a, sink, p2p(2), array, (len(ops), nbytes)))  # type: ignore[arg-type]
    assert pair.a.statistics()["held"]
    for op in ops[:3]:
        pair.a.give_up(op)
    for number, (nbytes, array) in enumerate(arrays.items()):
        array[:] = b"y" * nbytes
        receive(pair.b, sink, p2p(2), nbytes, ("given up", number))
    for nbytes in arrays:
        receive(pair.b, sink, p2p(2), nbytes, ("r", nbytes))
    pair.run()
    assert bytes(sink.arrays["given up", 0]) == b"x" * 5
    assert bytes(sink.arrays["given up", 1]) == b"x" * EAGER_BYTES
    assert is_given_up(sink.failed["given up", 2])
    assert all(bytes(sink.arrays["r", nbytes]) == b"y" * nbytes for nbytes in arrays)
    for number in range(MAX_OFFERS):
        receive(pair.b, sink, p2p(1), EAGER_BYTES + 1, number)
    pair.run()
    goes_on(pair)


@pytest.mark.parametrize("nbytes", [EAGER_BYTES, MIB])
def test_a_receive_in_the_middle_of_its_message(nbytes: int) -> None:
    pair, sink = Pair(), Recorder()
    posted = receive(pair.b, sink, p2p(1), nbytes, "r")
    send(pair.a, sink, p2p(1), b"x" * nbytes, "s")
    send(pair.a, Recorder(), p2p(1), b"next")
    receive(pair.b, sink, p2p(1), 4, "next")
    if nbytes > EAGER_BYTES:
        pair.ab.deliver()
        pair.ba.deliver()
    pair.ab.deliver(limit=20_000, step=20_000)
    assert not pair.b.withdraw(posted)
    pair.b.give_up(posted)
    sink.arrays["r"][:] = b"y" * nbytes
    pair.run()
    assert "r" not in sink.failed.keys() | sink.received.keys()
    assert bytes(sink.arrays["r"]) == b"y" * nbytes
    assert bytes(sink.arrays["next"]) == b"next"
    assert "s" in sink.sent
    goes_on(pair)


@pytest.mark.parametrize("seed", range(40))
def test_messages_come_in_order_whatever_is_given_up(seed: int) -> None:
    rng = random.Random(seed)
    pair, out, into = Pair(rng), Recorder(), Recorder()
    sizes = [rng.choice((0, 3, 4000, 1 << 16, EAGER_BYTES + 1, CREDIT_BYTES)) for _ in range(60)]
    arrays = [bytearray(pattern(number, nbytes)[:nbytes]) for number, nbytes in enumerate(sizes)]
    sends: dict[int, SendOp] = {}
    receives: dict[int, Receive] = {}
    gone: set[int] = set()
    while len(receives) < len(sizes):
        what = rng.randrange(6)
        if what == 0 and len(sends) < len(sizes):
            number = len(sends)
            sends[number] = send(pair.a, out, p2p(1), arrays[number], number)  # type: ignore[arg-type]
        elif what == 1 and len(receives) < len(sizes):
            number = len(receives)
            receives[number] = receive(pair.b, into, p2p(1), sizes[number], number)
        elif what == 2 and (open_ := [number for number in sends if number not in [*out.sent, *gone]]):
            number = rng.choice(open_)
            pair.a.give_up(sends[number])
            gone.add(number)
            arrays[number][:] = bytes(sizes[number])
        else:
            rng.choice((pair.ab, pair.ba)).deliver(limit=rng.choice((1, 100, 100_000)))
    for number in range(len(sends), len(sizes)):
        send(pair.a, out, p2p(1), arrays[number], number)  # type: ignore[arg-type]
    pair.run()
    assert set(into.order) == set(range(len(sizes)))
    for number, nbytes in enumerate(sizes):
        if number in into.failed:
            assert number in gone
            assert nbytes > EAGER_BYTES
        else:
            assert bytes(into.arrays[number]) == pattern(number, nbytes)[:nbytes]
    goes_on(pair)
