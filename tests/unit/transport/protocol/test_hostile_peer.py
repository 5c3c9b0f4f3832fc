"""What no honest peer does costs it its connection, and nothing else: each limit at its value and one past it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from transport_pair import Pair, Recorder, collective, p2p, receive, send

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.protocol.frame import (
    CREDIT_BYTES,
    EAGER_BYTES,
    EARLY_ID,
    EARLY_PULL_BYTES,
    FRAGMENT_BYTES,
    MAX_ASKS,
    MAX_CONTROL_BYTES,
    MAX_EARLY_PULLS,
    MAX_LENGTH,
    MAX_META_BYTES,
    MAX_OFFERS,
    MAX_REPLIES,
    MESSAGE_OVERHEAD_BYTES,
    Flag,
    Kind,
    pack_fragment,
    pack_header,
    pack_key,
)

MIB = 1 << 20


def data(key: bytes, payload: bytes, flags: int = 0, meta: bytes = b"") -> bytes:
    head = pack_header(Kind.DATA, key=key, length=len(payload), flags=flags, meta_bytes=len(meta))
    return head + meta + payload


def offer(message_id: int, key: bytes | None = None, length: int = 10, flags: int = 0) -> bytes:
    return pack_header(Kind.OFFER, key=key or p2p(message_id), length=length, message_id=message_id, flags=flags)


def stalled(on: int, number: int, channel: int = 0) -> bytes:
    return pack_header(Kind.STALLED, key=pack_key(0, 0, 0, 0, channel), length=on, message_id=number)


class Victim:
    """Core `b` of a pair, fed by hand."""

    def __init__(self) -> None:
        self.pair = Pair()
        self.sink = Recorder()

    def feed(self, *frames: bytes) -> None:
        self.pair.ab.bytes += b"".join(frames)
        self.pair.ab.deliver()

    def refuses(self, *frames: bytes, match: str = "") -> None:
        with pytest.raises(RemoteProtocolError, match=match):
            self.feed(*frames)


@pytest.fixture
def victim() -> Victim:
    return Victim()


def test_unknown_kinds(victim: Victim) -> None:
    victim.refuses(pack_header(0), match="unknown kind 0")
    Victim().refuses(pack_header(11), match="unknown kind 11")


def test_meta_where_there_is_none(victim: Victim) -> None:
    for kind in (Kind.PULL, Kind.CREDIT, Kind.CONTROL, Kind.FRAGMENT, Kind.GOODBYE):
        Victim().refuses(pack_header(kind, meta_bytes=1), match="meta")


def test_meta_limit(victim: Victim) -> None:
    victim.feed(data(p2p(1), b"x", meta=bytes(MAX_META_BYTES)))
    for kind in (Kind.DATA, Kind.OFFER):
        Victim().refuses(pack_header(kind, key=p2p(1), meta_bytes=MAX_META_BYTES + 1), match="1025 bytes of meta")


def test_eager_limit(victim: Victim) -> None:
    victim.feed(data(p2p(1), bytes(EAGER_BYTES)))
    victim.refuses(data(p2p(1), bytes(EAGER_BYTES + 1)), match="without having offered")


def test_eager_limit_holds_for_a_receive_that_large(victim: Victim) -> None:
    receive(victim.pair.b, victim.sink, collective(1), EAGER_BYTES + 1, "r")
    victim.refuses(data(collective(1), bytes(EAGER_BYTES + 1)), match="without having offered")


def test_control_limit(victim: Victim) -> None:
    victim.feed(pack_header(Kind.CONTROL, length=MAX_CONTROL_BYTES) + bytes(MAX_CONTROL_BYTES))
    victim.refuses(pack_header(Kind.CONTROL, length=MAX_CONTROL_BYTES + 1), match="bytes of control")


def test_malformed_keys() -> None:
    for key in (pack_key(1, 0, 0, 0, 2), p2p(1)[:21] + b"\1\0\0"):
        Victim().refuses(data(key, b""), match="malformed key")
        Victim().refuses(offer(1, key), match="malformed key")


def test_credit_limit(victim: Victim) -> None:
    fits = CREDIT_BYTES // MESSAGE_OVERHEAD_BYTES
    victim.feed(*(data(p2p(1), b"") for _ in range(fits)))
    assert victim.pair.b.statistics()["unexpected_messages"] == fits
    victim.feed(data(collective(1), b""))  # the other channel has credit of its own
    victim.refuses(data(p2p(1), b""), match="exceeds its credit")


def test_credit_is_not_given_back_twice(victim: Victim) -> None:
    victim.feed(pack_header(Kind.CREDIT, credit=0))
    victim.refuses(pack_header(Kind.CREDIT, credit=1), match="gave back 1 bytes")


def test_offer_limit(victim: Victim) -> None:
    victim.feed(*(offer(index) for index in range(1, MAX_OFFERS + 1)))
    victim.feed(offer(MAX_OFFERS + 1, collective(1)))
    victim.refuses(offer(MAX_OFFERS + 2), match="more than 1024 offers")


def test_message_length_limit(victim: Victim) -> None:
    victim.feed(offer(1, length=MAX_LENGTH))
    victim.refuses(offer(2, length=MAX_LENGTH + 1), match="offered")


def test_offers_named_twice(victim: Victim) -> None:
    victim.feed(offer(1))
    victim.refuses(offer(1), match="twice")
    other = Victim()
    receive(other.pair.b, other.sink, p2p(1), None, "r")
    other.feed(offer(1))
    other.refuses(offer(1), match="offered")
    Victim().refuses(offer(EARLY_ID), match="offered")


def test_pulls_of_what_is_not_on_offer(victim: Victim) -> None:
    victim.refuses(pack_header(Kind.PULL, message_id=1), match="not on offer")


def test_a_pull_twice(victim: Victim) -> None:
    send(victim.pair.b, victim.sink, p2p(1), bytes(MIB), "s")
    victim.feed(pack_header(Kind.PULL, message_id=1))
    victim.refuses(pack_header(Kind.PULL, message_id=1), match="not on offer")


def early(index: int, key: bytes | None = None, length: int = EARLY_PULL_BYTES + 1) -> bytes:
    return pack_header(Kind.PULL, key=key or collective(index), length=length, message_id=EARLY_ID + index)


def test_early_pull_limit(victim: Victim) -> None:
    victim.feed(*(early(index) for index in range(MAX_EARLY_PULLS)))
    assert victim.pair.b.statistics()["early_pulls"] == MAX_EARLY_PULLS
    victim.refuses(early(MAX_EARLY_PULLS), match="more than 1024 early pulls")


def test_early_pulls_that_must_not_be() -> None:
    Victim().refuses(early(0, p2p(0)), match="must not")
    Victim().refuses(early(0, length=EARLY_PULL_BYTES), match="must not")
    Victim().refuses(early(0), early(0), match="twice")
    Victim().refuses(early(0), early(1, collective(0)), match="twice")


def test_fragments_never_pulled(victim: Victim) -> None:
    victim.refuses(pack_fragment(1, 0, 1) + b"x", match="never pulled")


@pytest.mark.parametrize(
    ("offset", "length"),
    [(1, 1), (0, FRAGMENT_BYTES + 1), (0, 0), (MIB, 1), ((1 << 64) - 1, 1), (0, (1 << 64) - 1)],
)
def test_fragments_out_of_place(victim: Victim, offset: int, length: int) -> None:
    receive(victim.pair.b, victim.sink, p2p(1), None, "r")
    victim.feed(offer(1, length=MIB))
    victim.refuses(pack_fragment(1, offset, length), match="fragment|sent bytes")


def test_fragments_to_the_end_and_past_it(victim: Victim) -> None:
    receive(victim.pair.b, victim.sink, p2p(1), None, "r")
    victim.feed(offer(1, length=10), pack_fragment(1, 0, 6) + b"abcdef", pack_fragment(1, 6, 4) + b"ghij")
    assert bytes(victim.sink.arrays["r"]) == b"abcdefghij"
    victim.refuses(pack_fragment(1, 10, 1), match="never pulled")
    other = Victim()
    receive(other.pair.b, other.sink, p2p(1), None, "r")
    other.refuses(offer(1, length=10), pack_fragment(1, 0, 11), match="sent bytes 0 to 11")


def test_stalls_must_alternate() -> None:
    Victim().refuses(stalled(0, 1), match="twice")
    Victim().refuses(stalled(1, 1), stalled(1, 2), match="twice")
    Victim().refuses(stalled(1, 1), stalled(0, 2), match="twice")
    for malformed in (stalled(2, 1), stalled(1, 0), stalled(1, 1, channel=2)):
        Victim().refuses(malformed, match="malformed STALLED")
    Victim().feed(stalled(1, 1), stalled(0, 1), stalled(1, 2))


def test_answers_nobody_asked_for(victim: Victim) -> None:
    victim.refuses(data(p2p(1), b"", Flag.ASKED), match="not asked")
    Victim().refuses(offer(1, flags=Flag.ASKED), match="not asked")


def hold_back(victim: Victim) -> int:
    """Make `b` stall; returns the stall's number."""
    for index in range(MAX_OFFERS + 1):
        send(victim.pair.b, victim.sink, p2p(1), bytes(EAGER_BYTES + 1), index)
    return victim.pair.b._sender.windows[0].stall


def ask(keys: Iterable[int], number: int) -> bytes:
    return b"".join(pack_header(Kind.ASK, key=p2p(tag), message_id=number) for tag in keys)


def test_ask_limit(victim: Victim) -> None:
    number = hold_back(victim)
    victim.feed(ask(range(10, MAX_ASKS + 10), number))
    victim.feed(ask([10], number))  # once more for a key costs nothing
    victim.feed(ask([5], number + 1))  # of another stall: ignored
    victim.refuses(ask([5], number), match="asked for more")


def test_ask_on_no_channel(victim: Victim) -> None:
    victim.refuses(pack_header(Kind.ASK, key=pack_key(1, 0, 0, 0, 2)), match="asked on channel 2")


def test_a_peer_that_causes_answers_and_does_not_read(victim: Victim) -> None:
    victim.pair.ba.capacity = 0
    victim.pair.drop_group(1)
    victim.feed(*(offer(index) for index in range(1, MAX_REPLIES + 1)))
    victim.refuses(offer(MAX_REPLIES + 1), match="does not read")


def test_a_peer_that_reads_may_cause_any_number_of_answers(victim: Victim) -> None:
    victim.pair.drop_group(1)
    for start in range(0, 4 * MAX_REPLIES, 1000):
        victim.feed(*(offer(start + index) for index in range(1, 1000)))


def test_a_peer_that_stalls_again_and_again_and_does_not_read(victim: Victim) -> None:
    """What it is asked for in one stall is not kept for the next, and other frames are."""
    for tag in range(500):
        receive(victim.pair.b, victim.sink, p2p(tag), None, ("r", tag))
    victim.pair.b.send_control(b"x")
    victim.pair.ba.capacity = 0
    for number in range(1, 40):
        victim.feed(stalled(1, number), stalled(1, number, channel=1))
        assert len(victim.pair.b._sender.queue._control) <= 501
        victim.feed(stalled(0, number), stalled(0, number, channel=1))
    victim.feed(stalled(1, 40), stalled(1, 40, channel=1), stalled(0, 40, channel=1))
    victim.pair.ba.capacity = 1 << 60
    victim.pair.b._sender.queue.blocked = False
    victim.pair.b.kick()
    victim.pair.ba.deliver()
    assert victim.pair.a._sender.windows[0].asked == {}, "it is in no stall"
    assert len(victim.pair.b._sender.queue._control) == 0


def question() -> bytes:
    return pack_header(Kind.CONTROL, length=1) + b"?"


def test_questions_of_a_peer_that_does_not_read_the_answers(victim: Victim) -> None:
    core = victim.pair.b
    core.reader._on_control = lambda _rank, payload: core.send_control(payload)
    for _ in range(4 * MAX_REPLIES // 1000):
        victim.feed(question() * 1000)
        while victim.pair.ba.deliver():
            pass
    victim.pair.ba.capacity = 0
    core.send_control(b"what it did not cause does not count")
    victim.feed(question() * MAX_REPLIES)
    victim.refuses(question(), match="does not read")


def test_an_aborted_message_fails_its_receive(victim: Victim) -> None:
    receive(victim.pair.b, victim.sink, p2p(1), None, "r")
    victim.feed(offer(1, length=MIB), pack_fragment(1, 0, 3) + b"abc", pack_fragment(1, 0, 0, flags=Flag.ABORT))
    assert "rank 0 aborted" in str(victim.sink.failed["r"])
    assert victim.pair.b.statistics()["streams_in"] == 0


def test_withdrawals_of_what_is_under_way(victim: Victim) -> None:
    receive(victim.pair.b, victim.sink, p2p(1), 10, "r")
    begun = pack_fragment(1, 0, 4) + b"abcd"
    withdrawal = pack_header(Kind.WITHDRAW, message_id=1)
    victim.refuses(offer(1), begun, withdrawal, match="withdrew message 1, which is under way")
    early = Victim()
    receive(early.pair.b, early.sink, collective(1), MIB, "r")
    early.refuses(pack_header(Kind.WITHDRAW, message_id=EARLY_ID), match="under way")


def test_withdrawals_of_the_unknown_are_harmless(victim: Victim) -> None:
    """One that was discarded here may be withdrawn at the same time."""
    withdrawal = pack_header(Kind.WITHDRAW, message_id=1)
    victim.feed(withdrawal, offer(1), withdrawal, withdrawal, offer(1))
    assert victim.pair.b.statistics()["unexpected_offers"] == 1


def test_discards_of_the_unknown_are_harmless(victim: Victim) -> None:
    victim.feed(pack_header(Kind.DISCARD, message_id=5), pack_header(Kind.DISCARD, message_id=EARLY_ID + 5))
