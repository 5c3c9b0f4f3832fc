"""Tokens, derived keys and the handshake, byte for byte and with wrong, missing and hostile sides."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdist_server.wire import auth
from asyncdist_server.wire.auth import AuthenticationError, ClientHandshake, Refusal, ServerHandshake

TOKEN = "the-token-of-these-tests-and-43-characters-"
OTHER_TOKEN = "one-more-token-of-these-tests-of-43-symbols"
CONTEXT = auth.store_context("job-1", 3)


def exchange(client: ClientHandshake, server: ServerHandshake, chunk_bytes: int = 4096) -> None:
    """Carry bytes both ways in chunks until both sides are done."""
    to_server, to_client = client.start(), b""
    while to_server or to_client:
        answer = b""
        for start in range(0, len(to_server), chunk_bytes):
            answer += server.receive(to_server[start : start + chunk_bytes])
        to_server, to_client = b"", to_client + answer
        for start in range(0, len(to_client), chunk_bytes):
            to_server += client.receive(to_client[start : start + chunk_bytes])
        to_client = b""


@pytest.mark.parametrize("chunk_bytes", [1, 7, 4096])
@pytest.mark.parametrize("token", [TOKEN, None])
def test_both_sides_finish_and_the_server_knows_the_context(token: str | None, chunk_bytes: int) -> None:
    client, server = ClientHandshake(token, CONTEXT), ServerHandshake(token)
    exchange(client, server, chunk_bytes)
    assert client.done
    assert server.done
    assert auth.parse_store_context(server.context) == ("job-1", 3)
    assert client.leftover == server.leftover == b""


@pytest.mark.parametrize("chunk_bytes", [1, 4096])
@pytest.mark.parametrize("token", [TOKEN, OTHER_TOKEN])
def test_a_server_whose_token_is_being_changed_takes_the_former_too(token: str, chunk_bytes: int) -> None:
    client, server = ClientHandshake(token, CONTEXT), ServerHandshake(TOKEN, OTHER_TOKEN)
    exchange(client, server, chunk_bytes)
    assert client.done
    assert server.done


def test_a_former_token_lets_nobody_else_in() -> None:
    client, server = (
        ClientHandshake("wrong-token-of-these-tests-with-its-43-char", CONTEXT),
        ServerHandshake(TOKEN, OTHER_TOKEN),
    )
    challenge = server.receive(client.start())
    with pytest.raises(AuthenticationError, match="tokens of client and server differ"):
        client.receive(challenge)
    # One that gives itself out for somebody with the former token cannot prove it.
    impostor, server = ClientHandshake(OTHER_TOKEN, CONTEXT), ServerHandshake(TOKEN, OTHER_TOKEN)
    answer = bytearray(impostor.receive(server.receive(impostor.start())))
    answer[-1] ^= 1
    with pytest.raises(AuthenticationError) as refused:
        server.receive(bytes(answer))
    assert refused.value.refusal is Refusal.WRONG_TOKEN


def test_a_client_of_before_is_taken_to_have_the_newest_token() -> None:
    """Its nonce is random to the end."""
    client = ClientHandshake(TOKEN, CONTEXT)
    hello = bytearray(client.start())
    start = len(hello) - len(CONTEXT) - 2 - auth.HINT_BYTES
    hello[start : start + auth.HINT_BYTES] = bytes(auth.HINT_BYTES)
    client._hello = bytes(hello)
    server = ServerHandshake(TOKEN, OTHER_TOKEN)
    exchange(client, server)
    assert server.done


def test_the_client_notices_a_wrong_token_and_the_server_hears_why() -> None:
    client, server = ClientHandshake(TOKEN, CONTEXT), ServerHandshake(OTHER_TOKEN)
    challenge = server.receive(client.start())
    with pytest.raises(AuthenticationError, match="tokens of client and server differ") as refused:
        client.receive(challenge)
    assert not refused.value.by_peer
    with pytest.raises(AuthenticationError, match="tokens of client and server differ") as heard:
        server.receive(refused.value.farewell)
    assert heard.value.by_peer
    assert heard.value.farewell == b""


def test_the_server_refuses_a_client_that_ignores_the_challenge() -> None:
    client, server = ClientHandshake(TOKEN, CONTEXT), ServerHandshake(TOKEN)
    challenge = server.receive(client.start())
    answer = bytearray(client.receive(challenge))
    answer[-1] ^= 1
    with pytest.raises(AuthenticationError) as refused:
        server.receive(bytes(answer))
    assert refused.value.refusal is Refusal.WRONG_TOKEN
    with pytest.raises(AuthenticationError, match="tokens of client and server differ"):
        client.receive(refused.value.farewell)
    assert not server.done


def test_a_proof_of_the_server_is_no_proof_of_the_client() -> None:
    client, server = ClientHandshake(TOKEN, CONTEXT), ServerHandshake(TOKEN)
    challenge = server.receive(client.start())
    honest = client.receive(challenge)
    reflected = honest[:8] + challenge[-32:]
    with pytest.raises(AuthenticationError):
        server.receive(reflected)


def test_a_replayed_handshake_fails_because_the_server_chose_another_nonce() -> None:
    client, server = ClientHandshake(TOKEN, CONTEXT), ServerHandshake(TOKEN)
    answer = client.receive(server.receive(client.start()))
    second = ServerHandshake(TOKEN)
    second.receive(client.start())
    with pytest.raises(AuthenticationError):
        second.receive(answer)


@pytest.mark.parametrize(
    ("client_token", "server_token", "refusal"),
    [(None, TOKEN, Refusal.TOKEN_REQUIRED), (TOKEN, None, Refusal.NO_TOKEN)],
)
def test_a_token_on_one_side_only_is_named_on_both(
    client_token: str | None, server_token: str | None, refusal: Refusal
) -> None:
    client, server = ClientHandshake(client_token, CONTEXT), ServerHandshake(server_token)
    with pytest.raises(AuthenticationError) as at_server:
        server.receive(client.start())
    assert at_server.value.refusal is refusal
    with pytest.raises(AuthenticationError) as at_client:
        client.receive(at_server.value.farewell)
    assert at_client.value.refusal is refusal
    assert at_client.value.by_peer


def test_a_client_with_a_token_does_not_trust_a_server_that_says_it_needs_none() -> None:
    client = ClientHandshake(TOKEN, CONTEXT)
    rogue = ServerHandshake(None)
    without_token = bytearray(client.start())
    without_token[7] = 0
    with pytest.raises(AuthenticationError) as refused:
        client.receive(rogue.receive(bytes(without_token)))
    assert refused.value.refusal is Refusal.NO_TOKEN


@pytest.mark.parametrize("chunk_bytes", [1, 4096])
@pytest.mark.parametrize("server_token", [None, TOKEN])
def test_a_client_with_an_optional_token_takes_a_server_without_one(server_token: str | None, chunk_bytes: int) -> None:
    client, server = ClientHandshake(TOKEN, CONTEXT, optional=True), ServerHandshake(server_token)
    exchange(client, server, chunk_bytes)
    assert client.done
    assert server.done
    assert client.token == server_token
    assert auth.parse_store_context(server.context) == ("job-1", 3)


def test_an_optional_token_that_is_wrong_is_refused() -> None:
    client, server = ClientHandshake(OTHER_TOKEN, CONTEXT, optional=True), ServerHandshake(TOKEN)
    with pytest.raises(AuthenticationError, match="tokens of client and server differ"):
        exchange(client, server)


def test_a_server_cannot_claim_for_another_that_it_has_no_token() -> None:
    client, server = ClientHandshake(TOKEN, CONTEXT, optional=True), ServerHandshake(TOKEN)
    challenge = bytearray(server.receive(client.start()))
    challenge[7] = 0
    with pytest.raises(AuthenticationError, match="tokens of client and server differ"):
        client.receive(bytes(challenge))


def test_another_version_is_named() -> None:
    server = ServerHandshake(TOKEN)
    hello = bytearray(ClientHandshake(TOKEN, CONTEXT).start())
    hello[5] = 9
    with pytest.raises(AuthenticationError, match="speaks 9, this one 1"):
        server.receive(bytes(hello))


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\xce\xf7\x85\x3c", b"\xadDSx", b"\0"])
def test_a_stranger_is_refused_at_its_first_wrong_byte_without_an_answer(junk: bytes) -> None:
    for side in (ServerHandshake(TOKEN), ClientHandshake(TOKEN, CONTEXT)):
        with pytest.raises(AuthenticationError) as refused:
            side.receive(junk)
        assert refused.value.refusal is Refusal.NOT_A_STORE
        assert refused.value.farewell == b""


def test_bytes_behind_the_proof_are_kept_for_the_session() -> None:
    client, server = ClientHandshake(TOKEN, CONTEXT), ServerHandshake(TOKEN)
    answer = client.receive(server.receive(client.start()))
    server.receive(answer + b"next")
    assert server.done
    assert server.leftover == b"next"


def test_at_most_one_kibibyte_is_taken_before_the_proof() -> None:
    at_limit, beyond = ServerHandshake(TOKEN), ServerHandshake(TOKEN)
    context = bytes(auth.MAX_CONTEXT_BYTES)
    hello = ClientHandshake(TOKEN, context).start()
    rest = auth.MAX_HANDSHAKE_BYTES - len(hello)
    proof = b"\xadDST\x00\x01\x03\x00" + bytes(rest - 8)
    with pytest.raises(AuthenticationError) as refused:
        at_limit.receive(hello + proof)
    assert refused.value.refusal is Refusal.WRONG_TOKEN
    with pytest.raises(AuthenticationError, match="more than 1024 bytes"):
        beyond.receive(hello + proof + b"\0")


def test_a_context_may_have_512_bytes_and_not_one_more() -> None:
    server = ServerHandshake(None)
    exchange(ClientHandshake(None, bytes(auth.MAX_CONTEXT_BYTES)), server)
    assert server.done
    with pytest.raises(ValueError, match="513 bytes"):
        ClientHandshake(None, bytes(auth.MAX_CONTEXT_BYTES + 1))
    hello = bytearray(ClientHandshake(None, bytes(auth.MAX_CONTEXT_BYTES)).start())
    hello[41] += 1
    with pytest.raises(AuthenticationError, match="513 bytes"):
        ServerHandshake(None).receive(bytes(hello))


@given(st.lists(st.binary(max_size=200), max_size=10), st.booleans())
def test_any_bytes_are_taken_or_refused(chunks: list[bytes], with_magic: bool) -> None:
    for side in (ServerHandshake(TOKEN), ClientHandshake(TOKEN, CONTEXT)):
        if with_magic:
            side.receive(auth.MAGIC)
        try:
            for chunk in chunks:
                side.receive(chunk)
        except AuthenticationError:
            pass
        assert not side.done


def test_keys_follow_rfc_5869_and_differ_by_purpose_context_and_token() -> None:
    extracted = hmac.digest(b"asyncdist key derivation v1", TOKEN.encode(), hashlib.sha256)
    info = b"\0\0\0\x05store\0\0\0\x03run"
    assert auth.derive_key(TOKEN, "store", b"run") == hmac.digest(extracted, info + b"\x01", hashlib.sha256)
    keys = {
        auth.derive_key(token, purpose, context)
        for token in (TOKEN, OTHER_TOKEN, None)
        for purpose, context in (("store", b""), ("peer", b""), ("store", b"x"), ("storex", b""))
    }
    assert len(keys) == 12


def test_a_derived_token_is_a_good_token() -> None:
    child = auth.derive_token(TOKEN, "run", b"job-1")
    assert auth.check_token(child) == child
    assert child == auth.derive_token(TOKEN, "run", b"job-1") != auth.derive_token(TOKEN, "run", b"job-2")


def test_proofs_cover_role_and_the_cut_between_parts() -> None:
    key = auth.derive_key(TOKEN, "peer")
    made = auth.proof(key, "dialer", b"ab", b"c")
    assert auth.verify_proof(key, made, "dialer", b"ab", b"c")
    assert not auth.verify_proof(key, made, "listener", b"ab", b"c")
    assert not auth.verify_proof(key, made, "dialer", b"a", b"bc")
    assert not auth.verify_proof(key, b"", "dialer", b"ab", b"c")


def test_new_tokens_have_256_bits_and_differ() -> None:
    assert len(auth.new_token()) == 43
    assert auth.new_token() != auth.new_token()


def test_a_token_of_128_bits_is_the_shortest() -> None:
    token = secrets.token_urlsafe(16)
    assert auth.check_token(token) == token
    with pytest.raises(ValueError, match="21 characters"):
        auth.check_token(token[:21])


@pytest.mark.parametrize(
    "token",
    ["a" * 22, "a" * 500, "ab" * 20, "0123456789" * 4, "password" * 5, "7" * 21 + "8", "0123456789012345678901234567"],
)
def test_a_token_that_repeats_itself_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match=r"repeats itself .* `asyncdist token` makes a good one") as refused:
        auth.check_token(token)
    assert token not in str(refused.value)


def test_a_token_of_a_hundred_bits_is_the_weakest() -> None:
    """22 letters of 26, all runs of three different: 103 bits; one run twice: 98."""
    assert auth.check_token("abcdefghijklmnopqrstuv")
    with pytest.raises(ValueError, match="repeats itself"):
        auth.check_token("abcdefghijklmnopqrsabc")


@pytest.mark.parametrize("make", [auth.new_token, lambda: secrets.token_urlsafe(16), lambda: secrets.token_hex(16)])
def test_random_tokens_are_never_refused(make: Callable[[], str]) -> None:
    for _ in range(2000):
        auth.check_token(make())


def test_tokens_come_from_the_variable_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(OTHER_TOKEN + "\n")
    assert auth.load_token({}) is None
    assert auth.load_token({"ASYNCDIST_TOKEN": TOKEN + " ", "ASYNCDIST_TOKEN_FILE": str(path)}) == TOKEN
    assert auth.load_token({"ASYNCDIST_TOKEN": "", "ASYNCDIST_TOKEN_FILE": str(path)}) == OTHER_TOKEN
    with pytest.raises(ValueError, match="characters") as refused:
        auth.load_token({"ASYNCDIST_TOKEN": "hunter2"})
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (f"{TOKEN}", (TOKEN, None)),
        (f"{TOKEN}\n{OTHER_TOKEN}\n", (TOKEN, OTHER_TOKEN)),
        (f"\n {TOKEN} \r\n\n{OTHER_TOKEN}", (TOKEN, OTHER_TOKEN)),
    ],
)
def test_a_file_may_hold_the_token_before_as_well(tmp_path: Path, content: str, found: tuple[str, str | None]) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    assert auth.read_tokens(path) == found
    assert auth.read_token_file(path) == found[0]


@pytest.mark.parametrize(("third", "reason"), [(TOKEN, "it has 3 tokens"), ("short", "5 characters")])
def test_a_file_holds_no_third_token(tmp_path: Path, third: str, reason: str) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n{OTHER_TOKEN}\n{third}\n")
    with pytest.raises(ValueError, match=f"{path}: .*{reason}"):
        auth.read_tokens(path)


def test_a_file_that_is_no_token_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(FileNotFoundError, match=rf"ASYNCDIST_TOKEN_FILE: No such file or directory: '{path}'"):
        auth.load_token({"ASYNCDIST_TOKEN_FILE": str(path)})
    with pytest.raises(IsADirectoryError, match=r"ASYNCDIST_TOKEN_FILE: "):
        auth.load_token({"ASYNCDIST_TOKEN_FILE": str(tmp_path)})
    for content in (b"", b"\xff" * 40, b"short"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=str(path)):
            auth.read_token_file(path)
    path.write_bytes(b" " * (auth.MAX_TOKEN_FILE_BYTES - 43) + TOKEN.encode())
    assert auth.read_token_file(path) == TOKEN
    path.write_bytes(b" " * (auth.MAX_TOKEN_FILE_BYTES - 42) + TOKEN.encode())
    with pytest.raises(ValueError, match="4096"):
        auth.read_token_file(path)


@given(st.text(max_size=100), st.none() | st.integers(0, 2**31 - 1))
def test_store_contexts_survive_the_trip(namespace: str, rank: int | None) -> None:
    try:
        fits = len(namespace.encode()) <= 255
    except UnicodeEncodeError:
        fits = False
    if fits:
        assert auth.parse_store_context(auth.store_context(namespace, rank)) == (namespace, rank)
    else:
        with pytest.raises(ValueError):  # noqa: PT011  too long or not text
            auth.store_context(namespace, rank)


@pytest.mark.parametrize(
    "context", [b"", b"1", b"-1/x", b"01/x", b"1/\xff", b"99999999999/x", b"2147483648/", b"\xb2/x"]
)
def test_contexts_nobody_makes_are_refused(context: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  any ValueError
        auth.parse_store_context(context)


def test_a_namespace_may_have_255_bytes_and_not_one_more() -> None:
    assert auth.parse_store_context(auth.store_context("n" * 255)) == ("n" * 255, None)
    with pytest.raises(ValueError, match="256 bytes"):
        auth.store_context("n" * 256)
    with pytest.raises(ValueError, match="not the context"):
        auth.parse_store_context(b"/" + b"n" * 256)
