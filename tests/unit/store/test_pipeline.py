"""The bookkeeping of requests, without sockets: framing, withdrawal, expiry, and what a new connection means."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest
from punctual import assert_within, punctual

from asyncdist.errors import DistStoreError, StoreLimitError, StoreTimeoutError
from asyncdist.store.pipeline import EXPIRY_GRACE_S, FRAME_REQUESTS, Pipeline
from asyncdist.store.reply import Reply
from asyncdist_server.wire import messages
from asyncdist_server.wire.messages import (
    ADD,
    CANCEL,
    GET,
    KEEP_ALIVE,
    NUM_KEYS,
    OK,
    QUEUE_POP,
    QUEUE_RETURN,
    SET,
    WATCH,
    Limits,
    Welcome,
)

LIMITS = Limits()
FIRST, SECOND = b"1" * 16, b"2" * 16


@pytest.fixture
async def pipeline() -> Pipeline:
    pipeline = Pipeline(asyncio.get_running_loop(), "store test", lambda: None)
    assert pipeline.on_welcome(Welcome(FIRST, False, LIMITS)) is False
    return pipeline


def submit(pipeline: Pipeline, operation: int, *arguments: Any, timeout_s: float | None = 10.0) -> Reply:
    size = sum(len(each) for each in arguments if isinstance(each, bytes))
    return pipeline.submit(operation, arguments, timeout_s, size, Reply)


def sent(pipeline: Pipeline) -> list[list[tuple[Any, ...]]]:
    """Return the requests of each frame that is to be sent now."""
    frames = []
    while (frame := pipeline.next_frame()) is not None:
        frames.append(list(messages.decode_requests(frame[messages.LENGTH_BYTES :])[1:]))
    return frames


def answer(pipeline: Pipeline, *replies: tuple[int, int, Any]) -> None:
    pipeline.on_replies(messages.Encoder().replies(replies)[messages.LENGTH_BYTES :])


def reconnect(pipeline: Pipeline, incarnation: bytes, resumed: bool) -> tuple[tuple[int, ...], bool]:
    """Lose the connection and make a new one; return what the hello names and whether the daemon is another."""
    pipeline.on_lost()
    pending = pipeline.to_retry()
    return pending, pipeline.on_welcome(Welcome(incarnation, resumed, LIMITS))


async def test_requests_of_a_turn_share_a_frame_in_call_order(pipeline: Pipeline) -> None:
    replies = [submit(pipeline, SET, b"k", b"v"), submit(pipeline, GET, b"k"), submit(pipeline, NUM_KEYS)]
    assert sent(pipeline) == [[(1, SET, b"k", b"v"), (2, GET, b"k", 10_000), (3, NUM_KEYS)]]
    answer(pipeline, (3, OK, 1), (1, OK, None), (2, OK, b"v"))
    assert [await reply for reply in replies] == [None, b"v", 1]
    assert pipeline.idle


@pytest.mark.parametrize(("extra", "frames"), [(0, [FRAME_REQUESTS]), (1, [FRAME_REQUESTS, 1])])
async def test_a_frame_holds_so_many_requests(pipeline: Pipeline, extra: int, frames: list[int]) -> None:
    for _ in range(FRAME_REQUESTS + extra):
        submit(pipeline, NUM_KEYS)
    assert [len(frame) for frame in sent(pipeline)] == frames


@pytest.mark.parametrize(("extra", "frames"), [(0, [2]), (1, [1, 1])])
async def test_a_frame_holds_so_many_bytes(pipeline: Pipeline, extra: int, frames: list[int]) -> None:
    half = messages.FRAME_TARGET_BYTES // 2 - 1
    submit(pipeline, SET, b"a", bytes(half))
    submit(pipeline, SET, b"b", bytes(half + extra))
    assert [len(frame) for frame in sent(pipeline)] == frames


async def test_no_more_in_flight_than_the_daemon_allows() -> None:
    pipeline = Pipeline(asyncio.get_running_loop(), "store test", lambda: None)
    pipeline.on_welcome(Welcome(FIRST, False, LIMITS._replace(in_flight=3)))
    for _ in range(5):
        submit(pipeline, NUM_KEYS)
    assert [len(frame) for frame in sent(pipeline)] == [3]
    answer(pipeline, (1, OK, 0))
    assert [len(frame) for frame in sent(pipeline)] == [1]
    answer(pipeline, (2, OK, 0), (3, OK, 0), (4, OK, 0))
    assert [len(frame) for frame in sent(pipeline)] == [1]


async def test_what_no_frame_can_hold_is_refused_at_the_call(pipeline: Pipeline) -> None:
    pipeline.submit(SET, (b"k", b""), None, LIMITS.value_bytes, Reply)
    with pytest.raises(StoreLimitError, match=r"store test: set\('k'\)"):
        pipeline.submit(SET, (b"k", b""), None, LIMITS.value_bytes + 1, Reply)


async def test_cancelled_before_it_is_sent_is_never_sent(pipeline: Pipeline) -> None:
    first, second = submit(pipeline, SET, b"a", b""), submit(pipeline, SET, b"b", b"")
    first.cancel()
    assert sent(pipeline) == [[(2, SET, b"b", b"")]]
    second.cancel()
    assert sent(pipeline) == []
    answer(pipeline, (2, OK, None))
    assert pipeline.idle


@punctual
async def test_many_are_cancelled_in_little_time(pipeline: Pipeline) -> None:
    replies = [submit(pipeline, GET, b"k") for _ in range(10_000)]
    began_s = time.perf_counter()
    for reply in reversed(replies):
        reply.cancel()
    assert_within(1.0, time.perf_counter() - began_s)
    assert not pipeline.has_unsent
    assert pipeline.idle


async def test_what_is_not_cancelled_is_sent_in_call_order(pipeline: Pipeline) -> None:
    replies = [submit(pipeline, GET, b"k") for _ in range(9)]
    for reply in replies[2:5]:
        reply.cancel()
    assert [request[0] for frame in sent(pipeline) for request in frame] == [1, 2, 6, 7, 8, 9]


async def test_cancelled_wait_is_cancelled_at_the_daemon(pipeline: Pipeline) -> None:
    waiting = submit(pipeline, GET, b"k")
    sent(pipeline)
    waiting.cancel()
    assert sent(pipeline) == [[(2, CANCEL, 1)]]
    answer(pipeline, (1, messages.CANCELLED, ""), (2, OK, True))
    assert pipeline.idle


async def test_item_for_a_cancelled_pop_goes_back(pipeline: Pipeline) -> None:
    popping = submit(pipeline, QUEUE_POP, b"q")
    sent(pipeline)
    popping.cancel()
    answer(pipeline, (1, OK, b"item"))
    assert sent(pipeline) == [[(2, CANCEL, 1), (3, QUEUE_RETURN, b"q", b"item")]]


async def test_expiry_without_the_daemon_names_the_keys(pipeline: Pipeline) -> None:
    now = asyncio.get_running_loop().time()
    waiting = submit(pipeline, messages.WAIT, (b"x", b"y"), timeout_s=1.0)
    setting = submit(pipeline, SET, b"k", b"v", timeout_s=5.0)
    forever = submit(pipeline, GET, b"k", timeout_s=None)
    assert pipeline.expire(now + 0.9 + EXPIRY_GRACE_S) == pytest.approx(now + 1 + EXPIRY_GRACE_S, abs=0.5)
    assert pipeline.expire(now + 1.6 + EXPIRY_GRACE_S) == pytest.approx(now + 5, abs=0.5)
    with pytest.raises(StoreTimeoutError, match=r"wait\('x', 'y'\): the store did not answer in time") as caught:
        await waiting
    assert caught.value.keys == ("x", "y")
    assert pipeline.expire(now + 6) == math.inf
    with pytest.raises(StoreTimeoutError, match=r"set\('k'\)"):
        await setting
    assert not forever.done()


async def test_no_message_is_as_long_as_the_keys_or_moves_a_cursor(pipeline: Pipeline) -> None:
    key = b"\x1b[2J\n" + b"\xff" * 60_000
    one = submit(pipeline, GET, key, timeout_s=0.0)
    many = pipeline.submit(messages.WAIT, ((key,) * 100,), 0.0, 0, Reply)
    other = submit(pipeline, SET, key, b"")
    answer(pipeline, (1, messages.TIMEOUT, [key]), (2, messages.TIMEOUT, [key] * 100), (3, messages.LIMIT, "full"))
    for reply, error in ((one, StoreTimeoutError), (many, StoreTimeoutError), (other, StoreLimitError)):
        with pytest.raises(error) as caught:
            await reply
        text = str(caught.value)
        assert text.isprintable()
        assert len(text) < 100_000


async def test_remembered_by_the_daemon_everything_is_sent_again(pipeline: Pipeline) -> None:
    for _ in range(2):
        submit(pipeline, ADD, b"n", 1)
    submit(pipeline, GET, b"k")
    sent(pipeline)
    unsent = submit(pipeline, ADD, b"m", 1)
    answer(pipeline, (1, OK, 1))
    assert reconnect(pipeline, FIRST, True) == ((2,), False)
    [requests] = sent(pipeline)
    assert [request[0] for request in requests] == [2, 3, 4]
    assert not unsent.done()


async def test_a_wait_goes_on_where_it_was(pipeline: Pipeline) -> None:
    loop = asyncio.get_running_loop()
    waiting = submit(pipeline, GET, b"k", timeout_s=10)
    waiting.deadline = loop.time() + 4 + EXPIRY_GRACE_S  # as if 6 s had passed
    sent(pipeline)
    reconnect(pipeline, FIRST, True)
    [[(_, _, _, timeout_ms)]] = sent(pipeline)
    assert 3_000 < timeout_ms <= 4_001


async def test_forgotten_by_the_daemon_only_what_was_sent_fails(pipeline: Pipeline) -> None:
    was_sent, reading = submit(pipeline, ADD, b"n", 1), submit(pipeline, GET, b"k")
    sent(pipeline)
    unsent = submit(pipeline, ADD, b"n", 1)
    assert reconnect(pipeline, FIRST, False) == ((1,), False)
    with pytest.raises(DistStoreError, match=r"longer than the store remembers.*nobody can tell"):
        await was_sent
    [requests] = sent(pipeline)
    assert [request[0] for request in requests] == [2, 3]
    assert not reading.done()
    assert not unsent.done()


async def test_another_incarnation_fails_every_change(pipeline: Pipeline) -> None:
    was_sent, reading = submit(pipeline, ADD, b"n", 1), submit(pipeline, GET, b"k")
    sent(pipeline)
    unsent = submit(pipeline, ADD, b"n", 1)
    assert reconnect(pipeline, SECOND, False) == ((1,), True)
    with pytest.raises(DistStoreError, match="restarted without its data; nobody can tell"):
        await was_sent
    with pytest.raises(DistStoreError, match=r"restarted without its data$"):
        await unsent
    [requests] = sent(pipeline)
    assert [request[0] for request in requests] == [2]
    assert not reading.done()


async def test_pop_cancelled_while_disconnected_is_asked_about(pipeline: Pipeline) -> None:
    popping, getting = submit(pipeline, QUEUE_POP, b"q", timeout_s=None), submit(pipeline, GET, b"k")
    sent(pipeline)
    pipeline.on_lost()
    popping.cancel()
    getting.cancel()
    assert pipeline.to_retry() == (1,)
    pipeline.on_welcome(Welcome(FIRST, True, LIMITS))
    assert sent(pipeline) == [[(1, QUEUE_POP, b"q", None), (3, CANCEL, 1)]]
    answer(pipeline, (1, OK, b"item"), (3, OK, False))
    assert sent(pipeline) == [[(4, QUEUE_RETURN, b"q", b"item")]]


async def test_complaint_of_the_daemon_is_a_protocol_error(pipeline: Pipeline) -> None:
    with pytest.raises(messages.ProtocolError, match="it says: unknown operation"):
        answer(pipeline, (0, messages.PROTOCOL, "unknown operation"))


async def test_reply_to_nothing_is_ignored(pipeline: Pipeline) -> None:
    answer(pipeline, (7, OK, None))
    assert pipeline.idle


async def test_leases_are_kept_alive_across_a_reconnect(pipeline: Pipeline) -> None:
    """Their numbers are no data: to weigh a request is not to trip over them, in a new connection or a long batch."""
    reply = submit(pipeline, KEEP_ALIVE, (1, 2**62))
    submit(pipeline, SET, b"k", bytes(messages.FRAME_TARGET_BYTES))
    assert [len(frame) for frame in sent(pipeline)] == [1, 1]
    reconnect(pipeline, FIRST, resumed=True)
    assert sent(pipeline)[0] == [(1, KEEP_ALIVE, (1, 2**62))]
    answer(pipeline, (1, OK, ()))
    assert await reply == ()


async def test_where_a_watch_begins_is_asked_again_under_its_number(pipeline: Pipeline) -> None:
    submit(pipeline, WATCH, b"k", None)
    submit(pipeline, WATCH, b"k", 7)
    sent(pipeline)
    assert reconnect(pipeline, FIRST, resumed=True) == ((1,), False)
    assert [request[:4] for request in sent(pipeline)[0]] == [(1, WATCH, b"k", None), (2, WATCH, b"k", 7)]
    assert reconnect(pipeline, SECOND, resumed=False) == ((1,), True), "in another store it begins anew"
    assert [request[0] for request in sent(pipeline)[0]] == [1, 2]


def confirmed(frame: bytes | None) -> tuple[int, int]:
    """Return how many frames `frame` says were read, and how many requests it holds."""
    assert frame is not None
    received, *requests = messages.decode_requests(frame[messages.LENGTH_BYTES :])
    return received, len(requests)


async def test_an_item_that_has_come_is_confirmed_at_once(pipeline: Pipeline) -> None:
    """Nobody else gets it then, should this client be lost."""
    pop = submit(pipeline, QUEUE_POP, b"q")
    other = submit(pipeline, GET, b"k")
    sent(pipeline)
    answer(pipeline, (2, OK, b"v"))
    assert not pipeline.has_unsent
    answer(pipeline, (1, OK, b"item"))
    assert pipeline.has_unsent
    assert confirmed(pipeline.next_frame()) == (2, 0)
    assert pipeline.next_frame() is None
    assert not pipeline.has_unsent
    assert [await pop, await other] == [b"item", b"v"]


async def test_what_is_asked_at_once_confirms_an_item_too(pipeline: Pipeline) -> None:
    submit(pipeline, QUEUE_POP, b"q")
    sent(pipeline)
    answer(pipeline, (1, OK, b"item"))
    submit(pipeline, QUEUE_POP, b"q")
    assert confirmed(pipeline.next_frame()) == (1, 1)
    assert pipeline.next_frame() is None


async def test_a_lost_connection_has_nothing_to_confirm(pipeline: Pipeline) -> None:
    submit(pipeline, QUEUE_POP, b"q")
    sent(pipeline)
    answer(pipeline, (1, OK, b"item"))
    assert reconnect(pipeline, FIRST, True) == ((), False)
    assert pipeline.next_frame() is None
