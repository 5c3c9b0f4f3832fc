"""PeerCore.withdraw of sends, and give_up: what ends before its time ends nothing else, and its array is free."""

from __future__ import annotations

import random

import pytest
from transport_pair import Pair, Recorder, p2p, receive, send

from asyncdist.errors import CollectiveTimeoutError
from asyncdist.transport.protocol.frame import CREDIT_BYTES, EAGER_BYTES, FRAGMENT_BYTES, MAX_OFFERS
from asyncdist.transport.protocol.operations import Receive, SendOp
from asyncdist.transport.protocol.peer import PeerCore

MIB = 1 << 20
QUIET = {"offered": 0, "held": 0, "streams_out": 0, "receives_posted": 0, "streams_in": 0, "unexpected_messages": 0}


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


def end(core: PeerCore, op: SendOp) -> bool:
    """End a send as an expired one does: False if it is complete, whatever is left of it."""
    return core.withdraw(op) or core.give_up(op)


def is_given_up(error: BaseException | None) -> bool:
    return isinstance(error, CollectiveTimeoutError) and error.missing == (0,) and "rank 0 gave this" in str(error)


@pytest.mark.parametrize(
    ("nbytes", "stage"),
    [
        *((nbytes, "connecting") for nbytes in (0, 9, EAGER_BYTES, MIB)),
        *((MIB, at) for at in ("queued", "begun", "offered")),
    ],
)
def test_a_send_that_nobody_received_is_as_if_it_had_never_been(nbytes: int, stage: str) -> None:
    pair, sink = Pair(opened=stage != "connecting"), Recorder()
    pair.ab.capacity = {"queued": 0, "begun": 30}.get(stage, 1 << 60)
    data = bytearray(b"x" * nbytes)
    op = send(pair.a, sink, p2p(1), data, "s")  # type: ignore[arg-type]
    send(pair.a, Recorder(), p2p(1), b"next")
    if stage == "offered":
        pair.run()
    assert pair.a.withdraw(op)
    data[:] = b"y" * nbytes
    if stage == "connecting":
        pair.open()
    pair.ab.capacity = 1 << 60
    pair.run()
    receive(pair.b, sink, p2p(1), 4, "next")
    assert bytes(sink.arrays["next"]) == b"next"
    pair.run()
    assert not sink.sent
    assert not sink.failed
    goes_on(pair)


@pytest.mark.parametrize("dropped", [False, True])
def test_a_withdrawal_that_crosses_what_the_receiver_does(dropped: bool) -> None:
    """Its pull, or that it wants nothing of the group."""
    pair, sink = Pair(), Recorder()
    op = send(pair.a, sink, p2p(1), bytes(MIB), "s")
    send(pair.a, sink, p2p(1), b"next", "next")
    pair.run()
    if dropped:
        pair.drop_group(1)
    else:
        receive(pair.b, sink, p2p(1), MIB, "r")
        receive(pair.b, sink, p2p(1), 4, "got")
        assert bytes(sink.arrays["got"]) == b"next"
    assert pair.a.withdraw(op)
    pair.run()
    assert sink.sent == ["next"]
    if dropped:
        assert QUIET.items() <= pair.a.statistics().items()
        return
    assert is_given_up(sink.failed["r"])
    goes_on(pair)


def test_an_answer_to_the_receiver_goes_whatever_becomes_of_its_send() -> None:
    """It has asked for a message of that key, and asks for no other before it has one."""
    for nbytes in (9, MIB):
        pair, sink = Pair(), Recorder()
        for _ in range(MAX_OFFERS):
            send(pair.a, Recorder(), p2p(1), bytes(EAGER_BYTES + 1))
        send(pair.a, Recorder(), p2p(1), bytes(EAGER_BYTES + 1))  # from now on what is to go must be asked for
        pair.run()
        receive(pair.b, sink, p2p(2), nbytes, "r")
        pair.run()
        pair.ab.capacity = 0
        data = bytearray(b"x" * nbytes)
        op = send(pair.a, sink, p2p(2), data, "s")  # type: ignore[arg-type]
        ended = end(pair.a, op)
        data[:] = b"y" * nbytes
        pair.ab.capacity = 1 << 60
        pair.run()
        if nbytes == 9:
            assert not ended
            assert bytes(sink.arrays["r"]) == b"x" * nbytes
        else:
            assert ended
            assert is_given_up(sink.failed["r"])
        send(pair.a, sink, p2p(2), b"next", "next")
        receive(pair.b, sink, p2p(2), 4, "got")
        pair.run()
        assert bytes(sink.arrays["got"]) == b"next"


@pytest.mark.parametrize("delivered", [None, 0, 1000, FRAGMENT_BYTES + 1000, 3 * FRAGMENT_BYTES])
def test_a_large_send_at_each_stage(delivered: int | None) -> None:
    pair, sink = Pair(), Recorder()
    nbytes = 4 * MIB
    data = bytearray(b"x" * nbytes)
    op = send(pair.a, sink, p2p(1), data, "s")  # type: ignore[arg-type]
    send(pair.a, Recorder(), p2p(1), b"next")
    pair.run()
    receive(pair.b, sink, p2p(1), nbytes, "r")
    receive(pair.b, sink, p2p(1), 4, "next")
    pair.ab.capacity = FRAGMENT_BYTES + 500  # a second fragment is begun
    pair.ba.deliver()
    if delivered is not None:
        pair.ab.deliver(limit=delivered)
    assert not pair.a.withdraw(op)
    assert pair.a.give_up(op)
    pair.ab.capacity = 1 << 60
    data[:] = b"y" * nbytes
    pair.run()
    assert is_given_up(sink.failed["r"])
    assert bytes(sink.arrays["next"]) == b"next"
    assert b"y" not in sink.arrays["r"]
    assert not sink.sent
    goes_on(pair)


@pytest.mark.parametrize("room", [1, 20, 60, 1000])
def test_a_small_send_that_is_begun_goes_from_a_copy(room: int) -> None:
    pair, sink = Pair(), Recorder()
    data = bytearray(b"x" * 30_000)
    pair.ab.capacity = room
    op = send(pair.a, sink, p2p(1), data, "s")  # type: ignore[arg-type]
    assert not end(pair.a, op)
    data[:] = b"y" * 30_000
    pair.ab.capacity = 1 << 60
    receive(pair.b, sink, p2p(1), 30_000, "r")
    pair.run()
    assert bytes(sink.arrays["r"]) == b"x" * 30_000
    assert not sink.sent
    goes_on(pair)


def test_a_large_send_whose_last_fragment_is_begun_goes_from_a_copy() -> None:
    pair, sink = Pair(), Recorder()
    data = bytearray(b"x" * (2 * FRAGMENT_BYTES))
    op = send(pair.a, sink, p2p(1), data, "s")  # type: ignore[arg-type]
    pair.run()
    receive(pair.b, sink, p2p(1), len(data), "r")
    pair.ab.capacity = FRAGMENT_BYTES + 1000
    pair.ba.deliver()
    assert not end(pair.a, op)
    data[:] = b"y" * len(data)
    pair.ab.capacity = 1 << 60
    pair.run()
    assert bytes(sink.arrays["r"]) == b"x" * len(data)
    goes_on(pair)


def test_a_send_that_is_held_back_is_withdrawn_and_those_behind_it_go() -> None:
    pair, sink = Pair(), Recorder()
    for _ in range(MAX_OFFERS):
        send(pair.a, Recorder(), p2p(1), bytes(EAGER_BYTES + 1))
    sizes = [5, EAGER_BYTES + 1, EAGER_BYTES, EAGER_BYTES + 1, EAGER_BYTES + 1, 5]
    ops = [send(pair.a, sink, p2p(2), pattern(number, nbytes)[:nbytes], number) for number, nbytes in enumerate(sizes)]
    assert pair.a.statistics()["held"] == 5
    assert [pair.a.withdraw(ops[number]) for number in (0, 1, 4)] == [False, True, True]
    assert pair.a.statistics()["held"] == 2
    left = [0, 2, 3, 5]
    for number in left:
        receive(pair.b, sink, p2p(2), sizes[number], ("r", number))
    pair.run()
    assert sorted(sink.sent) == left
    assert all(bytes(sink.arrays["r", number]) == pattern(number, sizes[number])[: sizes[number]] for number in left)
    for number in range(MAX_OFFERS):
        receive(pair.b, Recorder(), p2p(1), EAGER_BYTES + 1, number)
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
            receives[number] = receive(pair.b, into, p2p(1), None, number)
        elif what == 2 and (open_ := [number for number in sends if number not in [*out.sent, *gone]]):
            number = rng.choice(open_)
            if end(pair.a, sends[number]):
                gone.add(number)
            else:
                out.message_sent(number)
            arrays[number][:] = bytes(sizes[number])
        else:
            rng.choice((pair.ab, pair.ba)).deliver(limit=rng.choice((1, 100, 100_000)))
    for number in range(len(sends), len(sizes)):
        send(pair.a, out, p2p(1), arrays[number], number)  # type: ignore[arg-type]
    for number in range(len(sizes)):
        receive(pair.b, into, p2p(1), None, len(sizes) + number)
    pair.run()
    assert all(is_given_up(error) for error in into.failed.values())
    got = [bytes(into.arrays[number]) for number in receives if number in into.received]
    got += [bytes(into.arrays[number]) for number in range(len(sizes), 2 * len(sizes)) if number in into.received]
    assert got == [pattern(number, nbytes)[:nbytes] for number, nbytes in enumerate(sizes) if number not in gone]
    assert len(into.failed) <= len(gone)
