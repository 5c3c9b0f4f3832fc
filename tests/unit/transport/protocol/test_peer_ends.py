"""PeerCore: how a message may end before it is received, at each stage of its life."""

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
from asyncdist.transport.protocol.frame import (
    EAGER_BYTES,
    HEADER_BYTES,
)
from asyncdist.transport.protocol.operations import SendOp

MIB = 1 << 20


def make() -> tuple[Pair, Recorder, Recorder]:
    return Pair(), Recorder(), Recorder()


def test_what_is_here_whole_outlives_its_sender_whatever_was_before_it() -> None:
    pair, sa, sb = make()
    for number, data in enumerate([b"one", bytes(MIB), b"two", bytes(MIB)]):
        send(pair.a, sa, p2p(1), data, number)
    pair.run()
    pair.b.fail(PeerLostError("lost", 0))
    assert pair.b.statistics()["unexpected_messages"] == 3, "what is not followed by anything is gone"
    for expected in (b"one", b"", b"two", b""):
        if expected:
            receive(pair.b, sb, p2p(1), 3, expected)
            assert bytes(sb.arrays[expected]) == expected
        else:
            with pytest.raises(PeerLostError):
                receive(pair.b, sb, p2p(1), None, "lost")


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
        assert pair.b.statistics()["unexpected_messages"] == 0


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
    too_early = pair.a.goodbye_sent
    receive(pair.b, sb, p2p(1), None, "r")
    pair.run()
    assert sb.order == ["r"]
    assert (too_early, pair.a.goodbye_sent) == (False, True)
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
            held[name] for name in ("streams_in", "streams_out", "early_pulls", "offered", "unexpected_messages")
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
    assert pair.b.statistics()["unexpected_messages"] == 0
    assert GROUP_BYTES in pair.dropped[1]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("nbytes", [4, MIB])
def test_what_a_dropped_group_throws_away_is_told_of(nbytes: int, late: bool) -> None:
    pair, sa, _ = make()
    heard: list[tuple[int, bytes]] = []

    def drop() -> None:
        pair.dropped[1].add(GROUP_BYTES, lambda source, meta: heard.append((source, meta)))
        pair.b.drop_group(GROUP_BYTES)

    if late:
        drop()
    send(pair.a, sa, p2p(1), bytes(nbytes), "s", b"what it is")
    pair.run()
    if not late:
        assert not heard
        drop()
    pair.run()
    assert heard == [(0, b"what it is")]
    assert sa.order == ["s"]


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
