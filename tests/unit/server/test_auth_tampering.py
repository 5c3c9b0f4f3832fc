"""What the handshake's proofs cover: every byte that passes, both roles, the job, and the use a key was made for."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Callable

import pytest

from asyncdist.transport.protocol.hello import DialerHello, Identity, ListenerHello, Verdict
from asyncdist_server.wire import auth
from asyncdist_server.wire.auth import AuthenticationError, ClientHandshake, ServerHandshake

TOKEN = "the-token-of-these-tests-and-43-characters-"
MESSAGES = ("hello", "challenge", "proof", "accepted")


def meet(client: ClientHandshake, server: ServerHandshake, change: Callable[[str, bytes], bytes]) -> None:
    """Carry the four messages through somebody who may change them."""
    challenge = server.receive(change("hello", client.start()))
    proof = client.receive(change("challenge", challenge))
    client.receive(change("accepted", server.receive(change("proof", proof))))


def lengths() -> dict[str, int]:
    seen: dict[str, int] = {}

    def note(name: str, message: bytes) -> bytes:
        seen[name] = len(message)
        return message

    meet(ClientHandshake(TOKEN, auth.store_context("job-1", 3)), ServerHandshake(TOKEN), note)
    return seen


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("name", MESSAGES)
def test_any_changed_byte_is_noticed(name: str, optional: bool) -> None:
    for position in range(lengths()[name]):
        for flip in (1, 2, 0x80):
            client = ClientHandshake(TOKEN, auth.store_context("job-1", 3), optional=optional)
            server = ServerHandshake(TOKEN)

            def change(message: str, data: bytes, position: int = position, flip: int = flip) -> bytes:
                if message != name:
                    return data
                return data[:position] + bytes([data[position] ^ flip]) + data[position + 1 :]

            with contextlib.suppress(AuthenticationError):
                meet(client, server, change)
            assert not client.done, (name, position, flip)
            assert not server.done or name == "accepted", (name, position, flip)


@pytest.mark.parametrize("name", MESSAGES[1:3])
def test_messages_of_one_handshake_are_worth_nothing_in_another(name: str) -> None:
    """The same token, job and rank: only the nonces differ."""
    recorded: dict[str, bytes] = {}

    def record(message: str, data: bytes) -> bytes:
        recorded[message] = data
        return data

    def replay(message: str, data: bytes) -> bytes:
        return recorded[message] if message == name else data

    context = auth.store_context("job-1", 3)
    meet(ClientHandshake(TOKEN, context), ServerHandshake(TOKEN), record)
    client, server = ClientHandshake(TOKEN, context), ServerHandshake(TOKEN)
    with pytest.raises(AuthenticationError, match="tokens of client and server differ"):
        meet(client, server, replay)
    assert not client.done
    assert not server.done


def test_another_job_or_rank_cannot_be_slipped_in() -> None:
    mine, other = auth.store_context("job-1", 3), auth.store_context("job-2", 3)
    assert len(mine) == len(other)
    server = ServerHandshake(TOKEN)
    with pytest.raises(AuthenticationError):
        meet(ClientHandshake(TOKEN, mine), server, lambda _, data: data.replace(mine, other))
    assert server.context == b""


def test_a_key_made_for_one_use_opens_no_other() -> None:
    """The token of a run, the key of a world's peers and the key of the store: none stands for another."""
    run_token = auth.derive_token(TOKEN, "run", b"job-1")
    peer_key = auth.derive_key(TOKEN, "peer", b"w" * 16)
    keys = [
        auth.derive_key(TOKEN, auth.STORE_PURPOSE),
        auth.derive_key(run_token, auth.STORE_PURPOSE),
        peer_key,
        auth.derive_key(run_token, "peer", b"w" * 16),
        auth.derive_key(TOKEN, "peer", b"v" * 16),
        auth.derive_key(TOKEN, "run", b"job-1"),
    ]
    assert len(set(keys)) == len(keys)
    for token in (run_token, peer_key.hex()):
        client, server = ClientHandshake(token, b"/"), ServerHandshake(TOKEN)
        with pytest.raises(AuthenticationError, match="tokens of client and server differ"):
            meet(client, server, lambda _, data: data)
    client, server = ClientHandshake(TOKEN, b"/", purpose="peer"), ServerHandshake(TOKEN)
    with pytest.raises(AuthenticationError, match="tokens of client and server differ"):
        meet(client, server, lambda _, data: data)


def test_a_runs_token_does_not_give_the_token_away() -> None:
    run_token = auth.derive_token(TOKEN, "run", b"job-1")
    assert TOKEN not in run_token
    assert auth.derive_token(run_token, "run", b"job-1") not in (TOKEN, run_token)


def test_proofs_are_compared_in_constant_time_on_every_side(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(ours: bytes, theirs: bytes) -> bool:
        compared.append((len(ours), len(theirs)))
        return genuine(ours, theirs)

    genuine = hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    meet(ClientHandshake(TOKEN, b"/"), ServerHandshake(TOKEN), lambda _, data: data)
    assert compared == [(32, 32)] * 2
    dialer, listener = DialerHello(who(0), 1), ListenerHello(who(1))
    hello = feed(dialer, listener.opening())
    feed(listener, hello)
    dialer.feed(listener.answer(Verdict.OK))
    assert compared == [(32, 32)] * 4


def who(rank: int) -> Identity:
    return Identity(b"w" * 16, rank, 2, auth.derive_key(TOKEN, "peer", b"w" * 16))


def feed(side: DialerHello | ListenerHello, data: bytes) -> bytes:
    """Give a side the bytes it wants, piece by piece; returns what it says."""
    said = b""
    while data and side.wanted:
        piece, data = data[: side.wanted], data[side.wanted :]
        said += side.feed(piece)
    return said
