"""The hello: who gets in, and what everybody else is told."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.protocol import hello as hello_module
from asyncdist.transport.protocol.hello import HELLO_BYTES, DialerHello, Hello, Identity, ListenerHello, Verdict

WORLD = bytes(range(16))


def identity(own: int, **changes: object) -> Identity:
    return dataclasses.replace(Identity(WORLD, own, 4, b"secret"), **changes)  # type: ignore[arg-type]


def feed(hello: Hello, data: bytes) -> tuple[bytes, bytes]:
    """Give `hello` all it wants of `data`; returns what it says and what it left."""
    said = b""
    while hello.wanted and len(data) >= hello.wanted:
        message, data = data[: hello.wanted], data[hello.wanted :]
        said += hello.feed(message)
        if isinstance(hello, ListenerHello) and hello.authenticated and not hello.confirmed:
            break
    return said, data


def meet(dialer: DialerHello, listener: ListenerHello, verdict: Verdict = Verdict.OK) -> None:
    said, rest = feed(dialer, listener.opening())
    assert not rest
    _, rest = feed(listener, said)
    assert not rest
    assert listener.authenticated
    feed(dialer, listener.answer(verdict))


@pytest.mark.parametrize("verdict", [Verdict.OK, Verdict.CROSSED, Verdict.LEAVING, Verdict.LOST])
def test_verdict_arrives(verdict: Verdict) -> None:
    dialer, listener = DialerHello(identity(1), 2), ListenerHello(identity(2))
    meet(dialer, listener, verdict)
    assert dialer.verdict is verdict
    assert listener.peer_rank == 1
    assert dialer.wanted == 0


def test_confirmation_opens_the_listener() -> None:
    dialer, listener = DialerHello(identity(1), 2), ListenerHello(identity(2))
    meet(dialer, listener)
    assert not listener.confirmed
    listener.feed(dialer.confirm())
    assert listener.confirmed


def test_confirmation_before_the_answer_is_refused() -> None:
    dialer, listener = DialerHello(identity(1), 2), ListenerHello(identity(2))
    feed(listener, feed(dialer, listener.opening())[0])
    with pytest.raises(RemoteProtocolError, match="only a confirmation"):
        listener.feed(dialer.confirm())


@pytest.mark.parametrize(
    ("changes", "peer_rank", "heard", "told"),
    [
        ({"world_id": bytes(16)}, 2, "another world", "another world"),
        ({"secret": b"other"}, 2, "does not hold this world's token", "tokens differ"),
        ({}, 3, "wants rank 3, but this is rank 2 of 4", "does not have that rank"),
        ({"rank": 2}, 2, "wants rank 2, but this is rank 2", "does not have that rank"),
        ({"rank": 7, "world_size": 8}, 2, "rank 7 wants rank 2", "does not have that rank"),
    ],
)
def test_stranger_is_told_why(changes: dict[str, object], peer_rank: int, heard: str, told: str) -> None:
    dialer, listener = DialerHello(identity(1, **changes), peer_rank), ListenerHello(identity(2))
    said, _ = feed(dialer, listener.opening())
    with pytest.raises(RemoteProtocolError, match=heard):
        feed(listener, said)
    with pytest.raises(RemoteProtocolError, match=told):
        feed(dialer, listener.refusal)


def test_listener_without_the_token_is_refused() -> None:
    dialer, listener = DialerHello(identity(1), 2), ListenerHello(identity(2))
    feed(listener, feed(dialer, listener.opening())[0])
    forged = bytearray(listener.answer(Verdict.OK))
    forged[-1] ^= 1
    with pytest.raises(RemoteProtocolError, match="could not prove"):
        dialer.feed(bytes(forged))


def test_verdict_cannot_be_changed_under_way() -> None:
    dialer, listener = DialerHello(identity(1), 2), ListenerHello(identity(2))
    feed(listener, feed(dialer, listener.opening())[0])
    ack = bytearray(listener.answer(Verdict.OK))
    ack[10] = Verdict.LEAVING
    with pytest.raises(RemoteProtocolError, match="could not prove"):
        dialer.feed(bytes(ack))


def test_unknown_verdict() -> None:
    dialer, listener = DialerHello(identity(1), 2), ListenerHello(identity(2))
    feed(listener, feed(dialer, listener.opening())[0])
    ack = bytearray(listener.answer(Verdict.OK))
    ack[10] = 99
    with pytest.raises(RemoteProtocolError, match="unknown verdict 99"):
        dialer.feed(bytes(ack))


def test_other_version_is_named_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    greeting = ListenerHello(identity(2)).opening()
    monkeypatch.setattr(hello_module, "PROTOCOL_VERSION", 2)
    dialer = DialerHello(identity(1), 2)
    with pytest.raises(RemoteProtocolError, match="speaks transport protocol 1, this side 2"):
        feed(dialer, greeting)
    farewell = dialer.refusal
    monkeypatch.setattr(hello_module, "PROTOCOL_VERSION", 1)
    with pytest.raises(RemoteProtocolError, match="speaks transport protocol 2, this side 1"):
        feed(ListenerHello(identity(2)), farewell)


def test_replayed_hello_is_refused() -> None:
    dialer, first, second = DialerHello(identity(1), 2), ListenerHello(identity(2)), ListenerHello(identity(2))
    said, _ = feed(dialer, first.opening())
    with pytest.raises(RemoteProtocolError, match="does not hold this world's token"):
        feed(second, said)


def test_reflected_hello_is_refused() -> None:
    """What a rank says as a dialer is worthless when said back to it."""
    victim, listener = DialerHello(identity(1), 2), ListenerHello(identity(1))
    said, _ = feed(victim, listener.opening())
    with pytest.raises(RemoteProtocolError):
        feed(listener, said)


def test_unknown_channel() -> None:
    dialer, listener = DialerHello(identity(1), 2, transport=9), ListenerHello(identity(2))
    said, _ = feed(dialer, listener.opening())
    with pytest.raises(RemoteProtocolError, match="unknown channel 9"):
        feed(listener, said)
    with pytest.raises(RemoteProtocolError, match="kind of channel"):
        feed(dialer, listener.refusal)


@given(st.binary(max_size=2 * HELLO_BYTES))
def test_garbage_to_the_listener(data: bytes) -> None:
    listener = ListenerHello(identity(2))
    with contextlib.suppress(RemoteProtocolError):
        feed(listener, data)
    assert not listener.authenticated


@given(st.integers(0, HELLO_BYTES - 1), st.integers(1, 255))
def test_any_changed_byte_of_a_hello_is_noticed(position: int, flip: int) -> None:
    dialer, listener = DialerHello(identity(1), 2), ListenerHello(identity(2))
    said = bytearray(feed(dialer, listener.opening())[0])
    said[position] ^= flip
    with contextlib.suppress(RemoteProtocolError):
        feed(listener, bytes(said))
    assert not listener.authenticated or position == 11  # the reserved byte


@given(st.binary(max_size=200))
def test_garbage_to_the_dialer(data: bytes) -> None:
    dialer = DialerHello(identity(1), 2)
    with contextlib.suppress(RemoteProtocolError):
        feed(dialer, data)
    assert dialer.verdict is None


def test_hello_stays_under_a_kilobyte() -> None:
    assert HELLO_BYTES <= 1024


@pytest.mark.parametrize(("world_id", "rank"), [(bytes(15), 0), (bytes(16), 4), (bytes(16), -1)])
def test_identity_is_checked(world_id: bytes, rank: int) -> None:
    with pytest.raises(ValueError, match=r"world"):
        Identity(world_id, rank, 4, b"")
