"""One client's bytes through handshake, hello and requests, whole, in pieces, too many and wrong."""

from __future__ import annotations

import tracemalloc

import pytest
from server_kit import CLIENT_ID, MemoryClient, everything

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.replies import PIECE_BYTES
from asyncdist_server.engine.session import TURN_BYTES, TURN_REQUESTS
from asyncdist_server.wire import messages as m
from asyncdist_server.wire.auth import AuthenticationError, ClientHandshake
from asyncdist_server.wire.messages import FrameReader, Hello, HelloRefused, Limits, decode_replies, decode_welcome

TOKEN = "the-token-of-these-tests-and-43-characters-"


@pytest.fixture
def engine() -> StoreEngine:
    return StoreEngine(b"i" * 16)


def test_the_welcome_tells_incarnation_and_limits() -> None:
    limits = Limits(key_bytes=17)
    welcome = MemoryClient(StoreEngine(b"n" * 16, limits), TOKEN).open()
    assert welcome == (b"n" * 16, False, limits)


@pytest.mark.parametrize(
    "request_", [(m.GET, b"k", None), (m.SET, b"k", b"v"), (m.CHECK, [b"k"]), (m.WATCH, b"", None, 0), ([],), (19.5,)]
)
def test_who_only_looks_may_ask_for_nothing_else(engine: StoreEngine, request_: tuple[object, ...]) -> None:
    """What it is told waits for no commit."""
    client = MemoryClient(engine, client_id=m.OBSERVER_ID)
    client.open()
    assert client.ask((m.PING,)) == [(1, m.OK, None)]
    assert client.ask(request_) == [(0, m.PROTOCOL, "a client that only looks may ask for nothing else")]
    assert client.session.closing
    assert engine.statistics()["keys"] == 0


def test_many_may_look_and_none_is_remembered(engine: StoreEngine) -> None:
    clients = [MemoryClient(engine, client_id=m.OBSERVER_ID) for _ in range(2)]
    for client in clients:
        assert not client.open().resumed
    for client in clients:
        assert client.ask((m.WAITS, True)) == [(1, m.OK, (0,))]
        assert client.ask((m.STATUS,))[0][2]["clients"] > 0
        client.session.close(0.0)
    assert engine.statistics()["clients_away"] == 0


def test_all_requests_of_one_read_are_answered_with_one_frame(engine: StoreEngine) -> None:
    client = MemoryClient(engine)
    client.open()
    data = client.frame((m.SET, b"k", b"v"), (m.GET, b"k", None)) + client.frame((m.ADD, b"n", 2))
    client.session.receive(data, 0.0)
    assert not client.session.busy
    (frame,) = client.session.take_output()
    assert client.replies(frame) == [(1, m.OK, None), (2, m.OK, b"v"), (3, m.OK, 2)]
    assert client.session.take_output() == []


def test_the_same_bytes_one_by_one_give_the_same_replies(engine: StoreEngine) -> None:
    client = MemoryClient(engine, TOKEN)
    said = b""
    for byte in client.handshake.start():
        said += client.send(bytes([byte]))
    answer = client.handshake.receive(said)
    said = b"".join(client.send(bytes([byte])) for byte in answer)
    client.handshake.receive(said)
    said = b"".join(client.send(bytes([byte])) for byte in client.encoder.hello(Hello(CLIENT_ID)))
    (payload,) = client.reader.feed(said)
    assert not decode_welcome(payload).resumed
    said = b"".join(client.send(bytes([byte])) for byte in client.frame((m.SET, b"k", b"v"), (m.GET, b"k", None)))
    assert client.replies(said) == [(1, m.OK, None), (2, m.OK, b"v")]


def test_blocked_requests_are_overtaken_and_answered_later(engine: StoreEngine) -> None:
    waiting, setting = MemoryClient(engine), MemoryClient(engine, client_id=b"another-client-x")
    waiting.open()
    setting.open()
    assert waiting.ask((m.GET, b"k", None), (m.PING,), (m.GET, b"k", None)) == [(2, m.OK, None)]
    assert setting.ask((m.SET, b"k", b"v")) == [(1, m.OK, None)]
    assert waiting.outputs == 1
    output = waiting.session.take_output()
    assert len(output) == 1
    assert waiting.replies(output[0]) == [(1, m.OK, b"v"), (3, m.OK, b"v")]


def test_requests_that_wake_their_own_client_are_answered_in_the_same_frame(engine: StoreEngine) -> None:
    client = MemoryClient(engine)
    client.open()
    assert client.ask((m.GET, b"k", None), (m.SET, b"k", b"v")) == [(1, m.OK, b"v"), (2, m.OK, None)]
    assert client.outputs == 0


def test_a_long_frame_is_run_in_turns(engine: StoreEngine) -> None:
    client = MemoryClient(engine)
    client.open()
    frame = client.frame(*[(m.ADD, b"n", 1)] * (TURN_REQUESTS + 1))
    client.session.receive(frame, 0.0)
    assert client.session.busy
    assert client.session.buffered > len(frame)
    assert len(client.replies(b"".join(client.session.take_output()))) == TURN_REQUESTS
    client.session.resume(0.0)
    assert not client.session.busy
    assert client.session.buffered == 0
    assert client.replies(b"".join(client.session.take_output())) == [(TURN_REQUESTS + 1, m.OK, TURN_REQUESTS + 1)]


def test_a_turn_ends_when_its_replies_are_large(engine: StoreEngine) -> None:
    client = MemoryClient(engine)
    client.open()
    client.ask((m.SET, b"k", bytes(TURN_BYTES // 4)))
    client.session.receive(client.frame(*[(m.GET, b"k", None)] * 6), 0.0)
    assert client.session.busy
    assert [reply[0] for reply in client.replies(everything(client.session))] == [2, 3, 4, 5]
    client.session.resume(0.0)
    assert not client.session.busy
    assert [reply[0] for reply in client.replies(everything(client.session))] == [6, 7]


@pytest.mark.parametrize("past", [0, 1])
def test_a_reply_of_more_than_a_piece_is_said_in_pieces(engine: StoreEngine, past: int) -> None:
    client = MemoryClient(engine)
    client.open()
    value = bytes(range(256)) * (PIECE_BYTES // 256) + bytes(100 * past)  # one byte more goes with the first piece
    client.ask((m.SET, b"k", value))
    client.session.receive(client.frame((m.GET, b"k", None)), 0.0)
    first = b"".join(client.session.take_output())
    assert client.session.busy is bool(past)
    assert len(client.session.waiting_values()) == past  # all of it counts until the last piece is taken
    rest = b"".join(client.session.take_output())
    assert bool(rest) is bool(past)
    assert client.replies(first + rest) == [(2, m.OK, value)]
    assert client.session.reply_bytes == 0


def test_what_others_cause_meanwhile_is_said_behind_it(engine: StoreEngine) -> None:
    client, other = MemoryClient(engine), MemoryClient(engine, client_id=b"another-client-x")
    client.open()
    other.open()
    value = bytes(5 * PIECE_BYTES)
    client.ask((m.SET, b"k", value), *[(m.WAIT, [b"other"], None)] * 3)
    client.session.receive(client.frame((m.GET, b"k", None), (m.GET, b"k", None)), 0.0)
    said = b"".join(client.session.take_output())
    other.ask((m.DELETE_NAMESPACE,), (m.SET, b"other", b""))
    found = client.replies(said + everything(client.session))
    assert [reply[0] for reply in found] == [5, 6, 2, 3, 4]
    assert found[0][2] == found[1][2] == value
    assert client.ask((m.PING,)) == [(7, m.OK, None)]  # and confirms what has arrived


def test_more_replies_than_a_frame_may_hold_are_cut() -> None:
    engine = StoreEngine(b"i" * 16, Limits(items=3))
    client, other = MemoryClient(engine), MemoryClient(engine, client_id=b"another-client-x")
    client.open()
    other.open()
    for _ in range(4):
        client.ask((m.GET, b"k", None))
    other.ask((m.SET, b"k", bytes(1)))
    assert [len(client.replies(b"".join(client.session.take_output()))) for _ in range(2)] == [3, 1]


def test_a_retry_on_a_new_connection_is_answered_from_memory(engine: StoreEngine) -> None:
    first = MemoryClient(engine)
    first.open()
    lost = first.send(first.frame((m.ADD, b"n", 1), (m.ADD, b"n", 1)))
    assert lost
    first.session.close(0.0)
    again = MemoryClient(engine)
    assert again.open(pending=(1, 2)).resumed
    assert again.ask((m.ADD, b"n", 1), (m.ADD, b"n", 1)) == [(1, m.OK, 1), (2, m.OK, 2)]
    assert again.ask((m.GET, b"n", 0)) == [(3, m.OK, b"2")]


def test_an_older_connection_is_told_and_closed(engine: StoreEngine) -> None:
    old = MemoryClient(engine)
    old.open()
    old.ask((m.GET, b"k", None))
    MemoryClient(engine).open()
    assert old.session.closing
    assert old.outputs == 1
    ((request_id, code, _),) = old.replies(b"".join(old.session.take_output()))
    assert (request_id, code) == (0, m.REFUSED)
    assert engine.waiter_count == 0
    assert old.send(old.frame((m.SET, b"k", b"v"))) == b""


def test_goodbye_answers_and_closes(engine: StoreEngine) -> None:
    client = MemoryClient(engine)
    client.open()
    assert client.ask((m.SET, b"k", b"v"), (m.GOODBYE,), (m.SET, b"k", b"w")) == [(1, m.OK, None), (2, m.OK, None)]
    assert client.session.closing
    assert client.session.error == ""
    client.session.close(0.0)
    assert engine.statistics()["clients_away"] == 0
    assert MemoryClient(engine).open().resumed is False


def test_what_was_run_before_a_broken_request_is_answered(engine: StoreEngine) -> None:
    client = MemoryClient(engine)
    client.open()
    replies = client.ask((m.SET, b"k", b"v"), (m.SET, b"k"), (m.SET, b"k", b"w"))
    assert replies == [(1, m.OK, None), (0, m.PROTOCOL, "malformed arguments of set")]
    assert client.session.closing
    other = MemoryClient(engine, client_id=b"another-client-x")
    other.open()
    assert other.ask((m.GET, b"k", 0)) == [(1, m.OK, b"v")]


def test_a_frame_at_the_limit_and_one_past_it() -> None:
    engine = StoreEngine(b"i" * 16, Limits(frame_bytes=100, value_bytes=100))
    client = MemoryClient(engine)
    client.open()
    overhead = len(client.frame((m.SET, b"k", b""))) - 4
    assert client.ask((m.SET, b"k", bytes(100 - overhead))) == [(2, m.OK, None)]
    ((request_id, code, text),) = client.ask((m.SET, b"k", bytes(101 - overhead)))
    assert (request_id, code) == (0, m.PROTOCOL)
    assert "frame of 101 bytes" in text


@pytest.mark.parametrize("received", [1, 5])
def test_acknowledging_frames_never_sent_closes(engine: StoreEngine, received: int) -> None:
    client = MemoryClient(engine)
    client.open()
    client.received = received
    ((request_id, code, _),) = client.ask((m.PING,))
    assert (request_id, code) == (0, m.PROTOCOL)


def test_a_broken_hello_is_refused_in_the_form_of_a_hello(engine: StoreEngine) -> None:
    for data in (b"\0\0\0\x01\xc1", b"\0\0\0\0", b"\0\0\0\x02\x91\x09"):
        client = MemoryClient(engine)
        client.prove()
        (payload,) = client.reader.feed(client.send(data))
        with pytest.raises(HelloRefused):
            decode_welcome(payload)
        assert client.session.closing
    assert engine.statistics()["clients"] == 0


def test_a_context_that_is_not_a_store_clients_is_refused(engine: StoreEngine) -> None:
    client = MemoryClient(engine)
    client.handshake = ClientHandshake(None, b"no slash")
    client.handshake.receive(client.send(client.handshake.start()))
    client = MemoryClient(engine)
    client.handshake = ClientHandshake(None, b"no slash")
    proof = client.handshake.receive(client.send(client.handshake.start()))
    said = client.send(proof)
    (payload,) = FrameReader().feed(said[8:])
    with pytest.raises(HelloRefused, match="not the context"):
        decode_welcome(payload)


def test_a_hello_may_follow_the_proof_in_the_same_bytes(engine: StoreEngine) -> None:
    client = MemoryClient(engine, TOKEN)
    proof = client.handshake.receive(client.send(client.handshake.start()))
    said = client.send(proof + client.encoder.hello(Hello(CLIENT_ID)) + client.frame((m.PING,)))
    welcome, replies = FrameReader().feed(said[8:])
    assert decode_welcome(welcome).incarnation == b"i" * 16
    assert decode_replies(replies) == ((1, m.OK, None),)


def test_a_wrong_token_closes_before_anything_is_parsed(engine: StoreEngine) -> None:
    client = MemoryClient(engine, TOKEN)
    client.handshake = ClientHandshake("one-more-token-of-these-tests-of-43-symbols", b"/job")
    challenge = client.send(client.handshake.start())
    with pytest.raises(AuthenticationError) as refused:
        client.handshake.receive(challenge)
    assert client.send(refused.value.farewell) == b""
    assert client.session.closing
    assert "tokens of client and server differ" in client.session.error


def test_closing_withdraws_the_client_and_can_be_repeated(engine: StoreEngine) -> None:
    client = MemoryClient(engine)
    client.open()
    client.ask((m.GET, b"k", None))
    client.session.close(0.0)
    client.session.close(0.0)
    assert engine.waiter_count == 0
    assert engine.statistics()["clients"] == 0
    MemoryClient(engine).session.close(0.0)


@pytest.mark.parametrize("asked", [1, 3])
def test_what_is_left_for_the_next_turn_is_kept_for_a_retry_until_it_arrived(engine: StoreEngine, asked: int) -> None:
    """A client may wait many times for what is large; each piece of the answers is confirmed by itself."""
    client, other = MemoryClient(engine), MemoryClient(engine, client_id=b"another-client-x")
    client.open()
    other.open()
    client.ask(*[(m.GET, b"k", None)] * 3, *[(m.QUEUE_POP, b"q", None)] * 3)
    item = bytes(TURN_BYTES)
    other.ask((m.SET, b"k", item), *[(m.QUEUE_PUSH, b"q", item)] * 3)
    found = []
    while len(found) < 6:
        before = len(found)
        while len(found) == before:
            said = b"".join(client.session.take_output())
            assert len(said) < PIECE_BYTES + 100
            found += client.replies(said)
        assert len(found) == before + 1
        assert client.session.busy == (before < 5)
        if before == asked:
            found += client.ask((m.PING,))[1:]  # and confirms what has arrived
            break
        client.session.resume(0.0)
    # The connection breaks; what was not read is asked for again.
    client.session.close(1.0)
    pending = tuple(range(len(found) + 1, 7))
    again = MemoryClient(engine)
    assert again.open(pending).resumed
    retried = [(number, *((m.GET, b"k", None) if number < 4 else (m.QUEUE_POP, b"q", 0))) for number in pending]
    answers = again.replies(again.send(again.encoder.requests(0, retried)))
    assert [reply[:2] for reply in answers] == [(number, m.OK) for number in pending]
    assert all(reply[2] == item for reply in answers)


def test_a_connection_that_closes_says_all_and_why(engine: StoreEngine) -> None:
    client, other = MemoryClient(engine), MemoryClient(engine, client_id=b"another-client-x")
    client.open()
    other.open()
    client.ask(*[(m.GET, b"k", None)] * 3, (m.WAIT, [b"k"], None))
    other.ask((m.SET, b"k", bytes(TURN_BYTES)))
    said = client.send(bytes(4) + b"nonsense")
    answered = [(number, m.OK) for number in range(1, 5)]
    assert [reply[:2] for reply in client.replies(said)] == [*answered, (0, m.PROTOCOL)]
    assert client.session.closing


def test_what_is_received_counts_for_what_it_takes(engine: StoreEngine) -> None:
    """Many tiny frames take far more than their bytes."""
    client = MemoryClient(engine)
    client.open()
    frames = b"".join(client.frame((m.PING,)) for _ in range(20 * TURN_REQUESTS))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        client.session.receive(frames, 0.0)
        client.session.take_output()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1.2 * client.session.buffered
    assert len(client.send(b"")) > 0
    assert client.session.buffered == 0


def test_what_is_decoded_and_not_yet_run_counts_for_what_it_takes(engine: StoreEngine) -> None:
    client = MemoryClient(engine)
    client.open()
    for ballast in ([[[]]] * 1000, [[1000]] * 1000, [[b"ab"]] * 1000, [[1.5] * 100] * 100, [[[[[[]]]]]] * 1000):
        frame = client.frame(*[(m.PING,)] * TURN_REQUESTS, *ballast)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            client.session.receive(frame, 0.0)
            client.session.take_output()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert after - before < 1.1 * client.session.buffered
        client.session.close(0.0)
        client = MemoryClient(engine)
        client.open()


def test_one_that_was_begun_is_there_to_its_end(engine: StoreEngine) -> None:
    client = MemoryClient(engine)
    client.open()
    one = client.frame(*[(m.PING,)] * 2 * TURN_REQUESTS)
    client.session.receive(one, 0.0)
    assert client.session.busy
    assert client.session.buffered >= len(one) - m.LENGTH_BYTES
    assert len(client.send(b"")) > 0
    assert client.session.buffered == 0
