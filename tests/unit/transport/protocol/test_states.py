"""The states of sends, receives and streams: every transition of the tables occurs, and no other is possible."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import message_states
import pytest
from message_states import RECEIVE_TRANSITIONS, SEND_TRANSITIONS
from small_limits import EAGER, EXPOSE, OFFERS, small_limits
from transport_pair import Pair, Recorder, collective, p2p, receive, send
from zero_copy_pair import ZeroCopyPair, post

from asyncdist.errors import PeerLostError
from asyncdist.transport.protocol import receiver, sender
from asyncdist.transport.protocol.operations import (
    Receive,
    ReceiveState,
    SendOp,
    SendState,
    Stream,
    StreamState,
)
from asyncdist.transport.shared_memory.process_memory import RemoteBytes, Unreadable

MIB = 1 << 20
LONG = 4 * EXPOSE
LOST = PeerLostError("rank 1 is lost", 1)
STATES = {"send": (SendOp, SendState), "receive": (Receive, ReceiveState), "stream": (Stream, StreamState)}

Scenario = Callable[[], None]
scenarios: list[tuple[tuple[str, ...], Scenario]] = []


def shows(*chains: str) -> Callable[[Scenario], Scenario]:
    """A scenario in which an operation goes through each chain of states, such as "send: POSTED EAGER SENT"."""

    def keep(scenario: Scenario) -> Scenario:
        scenarios.append((chains, scenario))
        return scenario

    return keep


def transitions(chain: str) -> Iterator[tuple[type, Any, Any]]:
    kind, names = chain.split(": ")
    owner, states = STATES[kind]
    for before, after in pairwise(names.split()):
        yield owner, states[before], states[after]


def mib(core: Any, key: bytes = p2p(1)) -> SendOp:
    return send(core, Recorder(), key, bytes(MIB))


@shows("send: POSTED SENT", "receive: POSTED RECEIVED")
def whole_at_once() -> None:
    pair = Pair()
    receive(pair.b, Recorder(), p2p(1), 4)
    send(pair.a, Recorder(), p2p(1), b"four")
    pair.run()


@shows("send: POSTED EAGER SENT")
def written_in_part() -> None:
    pair = Pair()
    pair.ab.capacity = 100
    send(pair.a, Recorder(), p2p(1), bytes(EAGER))
    pair.run()


@shows("send: EAGER FAILED", "send: OFFERED FAILED", "receive: POSTED FAILED", "receive: PULLED_EARLY FAILED")
def lost_before_anything_went() -> None:
    pair = Pair(opened=False)
    send(pair.a, Recorder(), p2p(1), b"four")
    mib(pair.a)
    receive(pair.a, Recorder(), p2p(2), 4)
    receive(pair.a, Recorder(), collective(1), MIB)
    pair.a.fail(LOST)


@shows("send: EAGER WITHDRAWN", "send: OFFERED WITHDRAWN", "receive: POSTED WITHDRAWN")
def taken_back() -> None:
    pair = Pair(opened=False)
    for posted in (
        send(pair.a, Recorder(), p2p(1), b"four"),
        mib(pair.a),
        receive(pair.a, Recorder(), p2p(2), 4),
    ):
        assert pair.a.withdraw(posted)


@shows("send: EAGER DROPPED", "send: OFFERED DROPPED", "receive: POSTED DROPPED", "receive: PULLED_EARLY DROPPED")
def dropped_before_anything_went() -> None:
    pair = Pair(opened=False)
    send(pair.a, Recorder(), p2p(1), b"four")
    mib(pair.a)
    receive(pair.a, Recorder(), p2p(2), 4)
    receive(pair.a, Recorder(), collective(1), MIB)
    pair.drop_group(0)


@shows("send: POSTED OFFERED STREAMING SENT", "receive: POSTED STREAMING RECEIVED")
def offered_and_pulled() -> None:
    pair = Pair()
    receive(pair.b, Recorder(), p2p(1), MIB)
    mib(pair.a)
    pair.run()


@shows("send: POSTED STREAMING SENT", "receive: POSTED PULLED_EARLY STREAMING RECEIVED")
def pulled_early() -> None:
    pair = Pair()
    receive(pair.b, Recorder(), collective(1), MIB)
    pair.run()
    mib(pair.a, collective(1))
    pair.run()


@shows("receive: PULLED_EARLY POSTED WITHDRAWN")
def early_pull_taken_back() -> None:
    pair = Pair()
    assert pair.b.withdraw(receive(pair.b, Recorder(), collective(1), MIB))


@shows("send: OFFERED SENT", "receive: POSTED FAILED")
def offered_to_a_receive_that_is_too_short() -> None:
    pair = Pair()
    receive(pair.b, Recorder(), p2p(1), 4)
    mib(pair.a)
    pair.run()


def in_the_middle() -> Pair:
    pair = Pair()
    receive(pair.b, Recorder(), p2p(1), MIB)
    mib(pair.a)
    pair.ab.deliver()
    pair.ba.deliver()
    pair.ab.deliver(MIB // 4)
    return pair


@shows("send: STREAMING FAILED", "receive: STREAMING FAILED")
def lost_in_the_middle() -> None:
    pair = in_the_middle()
    pair.a.fail(LOST)
    pair.b.fail(LOST)


@shows("send: STREAMING DROPPED", "receive: STREAMING DROPPED")
def dropped_in_the_middle() -> None:
    pair = in_the_middle()
    pair.drop_group(0)
    pair.drop_group(1)


def held(pair: Pair, key: bytes, nbytes: int = EAGER + 1) -> SendOp:
    """A send for which there is no room, as too many are offered."""
    for slot in range(OFFERS):
        send(pair.a, Recorder(), collective(slot) if key[20] else p2p(1), bytes(EAGER + 1))
    op = send(pair.a, Recorder(), key, bytes(nbytes))
    assert op.state is SendState.HELD
    return op


@shows("send: POSTED HELD OFFERED")
def held_until_there_is_room() -> None:
    pair = Pair()
    held(pair, p2p(1))
    receive(pair.b, Recorder(), p2p(1), EAGER + 1)
    pair.run()


@shows("send: HELD EAGER SENT")
def short_behind_a_held_one() -> None:
    pair = Pair()
    held(pair, p2p(1))
    assert send(pair.a, Recorder(), p2p(1), b"four").state is SendState.HELD
    receive(pair.b, Recorder(), p2p(1), EAGER + 1)
    receive(pair.b, Recorder(), p2p(1), EAGER + 1)
    pair.run()


@shows("send: HELD STREAMING")
def held_and_pulled_early() -> None:
    pair = Pair()
    held(pair, collective(OFFERS))
    receive(pair.b, Recorder(), collective(OFFERS), EAGER + 1)
    pair.run()


@shows("send: HELD FAILED")
def lost_while_held() -> None:
    pair = Pair()
    held(pair, p2p(1))
    pair.a.fail(LOST)


@shows("send: HELD WITHDRAWN")
def taken_back_while_held() -> None:
    pair = Pair()
    assert pair.a.withdraw(held(pair, p2p(1)))


@shows("send: HELD DROPPED")
def dropped_while_held() -> None:
    pair = Pair()
    held(pair, p2p(1))
    pair.drop_group(0)


def lending(key: bytes = p2p(1), *, early: bool = False, hold: bool = False) -> ZeroCopyPair:
    """A send whose payload the receiver copies."""
    pair = ZeroCopyPair()
    data = pair.sides[0].array(LONG)
    pair.mapped(data)
    if hold:
        for slot in range(2, OFFERS + 2):
            send(pair.a, Recorder(), collective(slot), bytes(EAGER + 1))
    if early:
        receive(pair.b, Recorder(), key, LONG)
        Pair.run(pair)
    post(pair.a, Recorder(), key, data)
    if not early:
        receive(pair.b, Recorder(), key, LONG)
        Pair.run(pair)
    return pair


@shows("send: OFFERED EXPOSED SENT", "stream: TRAVELS COPYING COPIED", "receive: STREAMING RECEIVED")
def exposed() -> None:
    lending().run()


@shows("send: POSTED EXPOSED SENT")
def exposed_to_an_early_pull() -> None:
    lending(collective(1), early=True).run()


@shows("send: HELD EXPOSED SENT")
def held_and_exposed() -> None:
    lending(collective(1), hold=True).run()


@shows("send: EXPOSED FAILED")
def lost_while_exposed() -> None:
    lending().a.fail(LOST)


@shows("send: EXPOSED DROPPED")
def dropped_while_exposed() -> None:
    lending().drop_group(0)


@shows("send: EXPOSED STREAMING SENT", "stream: COPYING REFUSED")
def exposed_and_unreadable() -> None:
    with mock.patch.object(RemoteBytes, "read", side_effect=Unreadable("no", gone=False)):
        pair = ZeroCopyPair(reading=(0, 1))
        pair.run()
        receive(pair.b, Recorder(), p2p(1), LONG)
        post(pair.a, Recorder(), p2p(1), memoryview(bytearray(LONG)))
        pair.run()


def happened(scenario: Scenario) -> set[tuple[type, Any, Any]]:
    with mock.patch.object(message_states, "seen", set()), small_limits():
        scenario()
        return message_states.seen


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
@pytest.mark.parametrize(("chains", "scenario"), scenarios, ids=[scenario.__name__ for _, scenario in scenarios])
def test_a_transition_occurs(chains: tuple[str, ...], scenario: Scenario) -> None:
    expected = {step for chain in chains for step in transitions(chain)}
    assert expected <= happened(scenario)


def test_every_transition_of_the_tables_is_shown() -> None:
    shown = {step for chains, _ in scenarios for chain in chains for step in transitions(chain)}
    assert shown == {
        (owner, before, after)
        for owner, table in message_states.TABLES.items()
        for before, following in table.items()
        for after in following
    }


@pytest.mark.parametrize(("kind", "owner"), [(kind, owner) for kind, (owner, _) in STATES.items()])
def test_an_illegal_transition_fails(kind: str, owner: type) -> None:
    states: Any = STATES[kind][1]
    table = message_states.TABLES[owner]
    for before in states:
        for after in states:
            operation: Any = owner.__new__(owner)
            operation.state = before
            if after in table.get(before, ()):
                operation.state = after
                continue
            with pytest.raises(AssertionError, match=f"{owner.__name__} goes from .*{before.name}.* to .*{after.name}"):
                operation.state = after
            assert operation.state is before


@pytest.mark.parametrize(
    ("module", "states", "table"),
    [(sender, SendState, SEND_TRANSITIONS), (receiver, ReceiveState, RECEIVE_TRANSITIONS)],
)
def test_the_table_at_the_top_of_the_file_is_the_table(module: Any, states: Any, table: Any) -> None:
    rows = re.findall(r"^    ([A-Z_]+) +.*\n((?: +-> .*\n)?(?:      +.*\n)*)", module.__doc__, re.M)
    told = {states[name]: {states[word] for word in re.findall(r"[A-Z_]{4,}", after)} for name, after in rows}
    assert told == {state: set(table.get(state, ())) for state in states}
