"""PeerCore.put_back: a message whose receive was given up too late is nobody's loss."""

from __future__ import annotations

import pytest
from transport_pair import GROUP_BYTES, Pair, Recorder, p2p, receive, send

from asyncdist.transport.protocol.frame import CREDIT_BYTES, EAGER_BYTES
from asyncdist.transport.protocol.operations import Receive


def taken(pair: Pair, sink: Recorder, data: bytes) -> Receive:
    """A message of `data` from a to b, received."""
    posted = receive(pair.b, sink, p2p(1), None, "first")
    send(pair.a, Recorder(), p2p(1), data, meta=b"what")
    pair.run()
    assert bytes(sink.arrays["first"]) == data
    return posted


@pytest.mark.parametrize("nbytes", [0, 5, EAGER_BYTES, EAGER_BYTES + 1])
@pytest.mark.parametrize("any_source", [False, True])
def test_it_is_the_next_one_of_its_key_again(nbytes: int, any_source: bool) -> None:
    pair, sink = Pair(), Recorder()
    data = bytes(index & 255 for index in range(nbytes))
    posted = taken(pair, sink, data)
    send(pair.a, Recorder(), p2p(1), b"later")
    pair.run()
    pair.b.put_back(posted, data)
    if any_source:
        again = Receive(p2p(1), None, sink, "again")
        assert pair.any_source[1].post(again, (0,))
    else:
        again = receive(pair.b, sink, p2p(1), None, "again")
    assert (bytes(sink.arrays["again"]), again.source, again.nbytes, again.meta) == (data, 0, nbytes, b"what")
    receive(pair.b, sink, p2p(1), None, "later")
    assert bytes(sink.arrays["later"]) == b"later"


@pytest.mark.parametrize("any_source", [False, True])
def test_it_goes_to_a_receive_that_waits_already(any_source: bool) -> None:
    pair, sink = Pair(), Recorder()
    posted = taken(pair, sink, b"data")
    heir = Receive(p2p(1), None, sink, "heir")
    assert not (pair.any_source[1].post(heir, (0,)) if any_source else pair.b.post_receive(heir))
    pair.b.put_back(posted, b"data")
    assert sink.received["heir"] is heir
    assert (bytes(sink.arrays["heir"]), heir.source, heir.nbytes, heir.meta) == (b"data", 0, 4, b"what")


def test_the_sender_gets_its_credit_back_once() -> None:
    pair, sink = Pair(), Recorder()
    for number in range(3 * CREDIT_BYTES // EAGER_BYTES):
        posted = receive(pair.b, sink, p2p(1), None, ("lost", number))
        send(pair.a, Recorder(), p2p(1), bytes(EAGER_BYTES))
        pair.run()  # raises for credit that was never had
        pair.b.put_back(posted, bytes(EAGER_BYTES))
        receive(pair.b, sink, p2p(1), None, ("found", number))
        assert len(sink.arrays["found", number]) == EAGER_BYTES
    assert not sink.failed


def test_it_outlives_its_sender_but_not_its_group() -> None:
    pair, sink = Pair(), Recorder()
    posted = taken(pair, sink, b"data")
    pair.b.put_back(posted, b"data")
    pair.b.fail(RuntimeError("gone"))
    receive(pair.b, sink, p2p(1), None, "again")
    assert bytes(sink.arrays["again"]) == b"data"
    pair = Pair()
    posted = taken(pair, sink := Recorder(), b"data")
    pair.b.put_back(posted, b"data")
    pair.drop_group(1, GROUP_BYTES)
    receive(pair.b, sink, p2p(1), None, "again")
    assert "again" not in sink.received
    pair.b.put_back(posted, b"data")  # nor is it kept when it comes back after the end
    assert "again" not in sink.received
