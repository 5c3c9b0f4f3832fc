"""A stalled peer goes on being asked, however many receives it was asked for were withdrawn or served otherwise."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from small_limits import ASKS, CREDIT, EAGER, OFFERS, small_limits
from transport_pair import Pair, Recorder, collective, p2p, receive, send

from asyncdist.transport.protocol.frame import Flag, Kind, pack_header, pack_key, unpack_key
from asyncdist.transport.protocol.operations import Receive

LARGE = EAGER + 1
NOBODY_RECEIVES = 9999


@pytest.fixture
def sink() -> Iterator[Recorder]:
    with small_limits():
        yield Recorder()


def stall(pair: Pair, sink: Recorder, key: bytes) -> None:
    """Have `a` hold messages to `b` back."""
    for number in range(OFFERS + 2):
        send(pair.a, sink, key, bytes(LARGE), ("never", number))
    pair.run()


def held_message_comes(pair: Pair, sink: Recorder, key: bytes) -> bool:
    send(pair.a, sink, key, bytes(LARGE), "sent")
    pair.run()
    receive(pair.b, sink, key, LARGE, "held")
    pair.run()
    return "held" in sink.received


@pytest.mark.parametrize("withdrawn", [ASKS - 1, ASKS, ASKS + 1, 3 * ASKS])
def test_asked_for_and_withdrawn(sink: Recorder, withdrawn: int) -> None:
    pair = Pair()
    stall(pair, sink, p2p(NOBODY_RECEIVES))
    for tag in range(withdrawn):
        assert pair.b.withdraw(receive(pair.b, sink, p2p(tag), LARGE, tag))
        pair.run()
    assert held_message_comes(pair, sink, p2p(1000))


def test_asked_for_from_any_source_and_come_from_another(sink: Recorder) -> None:
    pair = Pair()
    stall(pair, sink, p2p(NOBODY_RECEIVES))
    for tag in range(2 * ASKS):
        posted = Receive(p2p(tag), memoryview(bytearray(LARGE)), sink, tag)
        assert not pair.any_source[1].post(posted, [0, 2])
        pair.run()
        assert pair.any_source[1].withdraw(posted)  # as a message of rank 2 does
    assert held_message_comes(pair, sink, p2p(1000))


def test_asked_for_and_pulled_early(sink: Recorder) -> None:
    pair = Pair()
    stall(pair, sink, pack_key(3, 0, 0, 0, 1))
    for number in range(CREDIT // EAGER):
        send(pair.a, sink, pack_key(3, 0, 0, 1, 1), bytes(EAGER), ("never", "eager", number))
    for slot in range(2 * ASKS):
        receive(pair.b, sink, collective(slot), LARGE, slot)
        pair.run()
        send(pair.a, sink, collective(slot), bytes(LARGE), ("sent", slot))
        pair.run()
        assert slot in sink.received
    send(pair.a, sink, collective(1000), bytes(EAGER), "sent")
    pair.run()
    assert "sent" not in sink.sent
    receive(pair.b, sink, collective(1000), EAGER, "held")
    pair.run()
    assert "held" in sink.received


@pytest.mark.parametrize("seed", range(20))
def test_random_receives_of_many_tags(seed: int) -> None:
    rng = random.Random(seed)
    with small_limits():
        pair, sink = Pair(rng), Recorder()
        stall(pair, sink, p2p(NOBODY_RECEIVES))
        posted: dict[int, Receive] = {}
        sent: Counter[int] = Counter()
        for number in range(400):
            tag, action = rng.randrange(60), rng.random()
            if action < 0.25:
                sent[tag] += 1
                send(pair.a, sink, p2p(tag), bytes(rng.choice((1, LARGE))), ("sent", number))
            elif action < 0.6 and len(posted) < ASKS // 2 - 1:
                posted[number] = receive(pair.b, sink, p2p(tag), None, number)
            elif action < 0.75 and posted:
                token = rng.choice(list(posted))
                if pair.b.withdraw(posted[token]):
                    del posted[token]
            else:
                pair.ab.deliver(rng.choice((48, 500, 5000, None)))
                pair.ba.deliver(rng.choice((48, 500, 5000, None)))
            posted = {token: one for token, one in posted.items() if token not in sink.received}
            assert len(pair.b._receiver.windows[0].asked) <= ASKS
        pair.run()
        got = Counter(unpack_key(one.key).tag for one in sink.received.values())
        for token, one in posted.items():
            tag = unpack_key(one.key).tag
            assert token in sink.received or sent[tag] <= got[tag], "a message and a receive of one tag never met"


class TestAnew:
    """What the sender does about a receiver that wants the stall to begin anew."""

    def stalled(self, sink: Recorder, asked: int) -> Pair:
        pair = Pair()
        stall(pair, sink, p2p(NOBODY_RECEIVES))
        for tag in range(asked):
            receive(pair.b, sink, p2p(tag), LARGE, tag)
        pair.run()
        return pair

    def say(self, pair: Pair, number: int) -> None:
        frame = pack_header(Kind.ASK, flags=Flag.END, message_id=number)
        pair.a.get_buffer()[: len(frame)] = frame
        pair.a.buffer_updated(len(frame))

    def test_forgets_all_and_is_asked_for_what_is_waited_for(self, sink: Recorder) -> None:
        pair = self.stalled(sink, ASKS // 4)
        self.say(pair, 1)
        assert pair.a._sender.windows[0].stall == 2
        assert not pair.a._sender.windows[0].asked
        pair.run()
        assert pair.b._receiver.windows[0].stall == 2
        assert len(pair.a._sender.windows[0].asked) == len(pair.b._receiver.windows[0].asked) == ASKS // 4

    def test_not_if_little_is_asked_for(self, sink: Recorder) -> None:
        """So a peer that says it over and over has nothing written for it that it does not read."""
        pair = self.stalled(sink, ASKS // 4 - 1)
        self.say(pair, 1)
        assert pair.a._sender.windows[0].stall == 1

    @pytest.mark.parametrize("number", [0, 2])
    def test_not_for_another_stall(self, sink: Recorder, number: int) -> None:
        pair = self.stalled(sink, ASKS // 4)
        self.say(pair, number)
        assert pair.a._sender.windows[0].stall == 1

    def test_not_without_a_stall(self, sink: Recorder) -> None:
        pair = Pair()
        for tag in range(ASKS):
            pair.a._sender.windows[0].ask(p2p(tag))
        self.say(pair, 0)
        assert not pair.a._sender.windows[0].stall
        assert not pair.ab.bytes
