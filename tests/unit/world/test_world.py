"""World: control messages are hostile input, bounded, and reach groups that come later."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncdist as dist
from asyncdist.concurrency.integers import derive_group_id
from asyncdist.testing import run_world
from asyncdist.transport.addresses import MAX_ADDRESS_BYTES
from asyncdist.world import world
from asyncdist.world.control import MAX_RANKS_NAMED, Abort, decode

SIZE = 8
JUNK = [
    b"",
    b"\xc1",
    b"\x91",
    msgpack.packb(None),
    msgpack.packb([]),
    msgpack.packb(["abort"]),
    msgpack.packb(["abort", "id", "abort", "text", None, []]),
    msgpack.packb(["abort", 1, "abort", "text", None, ["x"]]),
    msgpack.packb(["probe", 1, 0]),
    msgpack.packb(["status", 1, 0, 0, 1]),
    msgpack.packb(["status", 1, 0, 0, "issued", 1]),
    msgpack.packb(["mismatch", 1, 0, 0, "text"]),
    msgpack.packb(["mismatch", 1, 0, 0, "text", 1]),
    msgpack.packb(["mismatch", 1, 0, 0, None, True]),
    msgpack.packb(["check", 1, 0, 0, "terms"]),
    msgpack.packb(["check", 1, "0", 0, "terms", "shown"]),
    msgpack.packb(["ran", 1, [[0, 1, "x", "y"], [0, 1, "x"]]]),
    msgpack.packb(["ran", 1, [[0, -1, "x", "y"]]]),
    msgpack.packb(["ran", 1, [[1 << 32, 1, "x", "y"]]]),
    msgpack.packb(["ran", 1, [[0, 1, b"x", "y"]]]),
    msgpack.packb(["ran", 1, "x"]),
    msgpack.packb(["made", 1, 1, 2, "0, 1"]),
    msgpack.packb(["made", 1, 1, "2", "0, 1", True]),
    msgpack.packb(["made", 1, 1 << 63, 2, "0, 1", True]),
    msgpack.packb(["closed", 1, 0]),
    msgpack.packb(["closed", 1, "0", True]),
    msgpack.packb(["clock", 1, None]),
    msgpack.packb(["clock", 1.0]),
    msgpack.packb(["clock", 1.0, float("nan")]),
    msgpack.packb([3, 1]),
    msgpack.packb({"abort": 1}),
    msgpack.packb(["abort", 1, "abort", "text", None, [0] * (MAX_RANKS_NAMED + 1)]),
    msgpack.packb(["abort", 1, "lost", "text", SIZE, []]),
    msgpack.packb(["abort", 1, "lost", "text", -1, []]),
    msgpack.packb(["abort", 1, "timeout", "text", 0, [SIZE]]),
    msgpack.packb(["refused", 1, 0, 0, SIZE, "text"]),
    msgpack.packb(["refused", 1, 1 << 32, 0, 0, "text"]),
    msgpack.packb(["refused", 1, 0, 1 << 63, 0, "text"]),
    msgpack.packb(["probe", 1, -1, 0]),
    msgpack.packb(["status", 1, 0, -1, "issued"]),
    msgpack.packb(["mismatch", 1, 1 << 32, 0, "text", True]),
    msgpack.packb(["check", 1, 0, 1 << 63, "terms", "shown"]),
    msgpack.packb(["addresses", 0]),
    msgpack.packb(["addresses", -1, [b"x"]]),
    msgpack.packb(["addresses", SIZE - 1, [b"x", b"x"]]),
    msgpack.packb(["addresses", 0, ["x"]]),
    msgpack.packb(["addresses", 0, [b""]]),
    msgpack.packb(["addresses", 0, [bytes(MAX_ADDRESS_BYTES + 1)]]),
]
LARGEST = [
    ["abort", 1, "lost", "text", SIZE - 1, [0, SIZE - 1]],
    ["refused", 1, (1 << 32) - 1, (1 << 63) - 1, SIZE - 1, "text"],
    ["probe", 1, (1 << 32) - 1, (1 << 63) - 1],
    ["ran", 1, [[(1 << 32) - 1, (1 << 63) - 1, "x", "y"]]],
    ["made", 1, (1 << 63) - 1, (1 << 64) - 1, "0, 1", True],
    ["closed", (1 << 64) - 1, (1 << 64) - 1, True],
    ["clock", 1e300, 1e300],
    ["addresses", 0, [b"x"] * SIZE],
    ["addresses", SIZE - 1, [bytes(MAX_ADDRESS_BYTES)]],
]


@pytest.mark.parametrize("payload", JUNK)
def test_malformed_control_messages_are_protocol_errors(payload: bytes) -> None:
    with pytest.raises(dist.RemoteProtocolError, match="rank 3 sent"):
        decode(3, payload, SIZE)


@pytest.mark.parametrize("message", LARGEST)
def test_ranks_tags_and_numbers_at_their_limits(message: list[Any]) -> None:
    assert msgpack.unpackb(decode(3, msgpack.packb(message), SIZE).encode()) == message


@given(st.binary(max_size=64))
def test_any_bytes_are_understood_or_refused(payload: bytes) -> None:
    try:
        message = decode(0, payload, SIZE)
    except dist.RemoteProtocolError:
        return
    assert decode(0, message.encode(), SIZE) == message


@pytest.mark.parametrize("letter", ["x", "\U0001f642", "\udc80"], ids=["letter", "wide", "surrogate"])
def test_messages_fit_a_frame_whatever_they_say(letter: str) -> None:
    async def main(group: dist.ProcessGroup) -> None:
        await group.barrier()
        if group.rank == 0:
            group.abort(letter * 1_000_000)
        with pytest.raises(dist.GroupAbortedError):
            await group.barrier()

    run_world(2, main)


def test_news_of_a_group_that_comes_later_is_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "EARLY_GROUPS", 3)

    async def main(group: dist.ProcessGroup) -> Any:
        await group.barrier()
        if group.rank == 0:
            for _ in range(5):
                early = dist.new_group()
                assert isinstance(early, dist.ProcessGroup)
                early.abort("before you knew it")
            await asyncio.sleep(1)
            return None
        await asyncio.sleep(1)
        states = []
        for _ in range(5):
            late = dist.new_group(timeout=5)
            assert isinstance(late, dist.ProcessGroup)
            states.append("aborted" in repr(late))
        assert len(group.world._early) == 0
        return states

    assert run_world(2, main)[1] == [True, True, True, False, False]


def test_news_of_a_group_that_was_closed_is_not_kept() -> None:
    async def main(group: dist.ProcessGroup) -> None:
        await group.barrier()
        sub = dist.new_group()
        assert isinstance(sub, dist.ProcessGroup)
        if group.rank == 0:
            await asyncio.sleep(1)
            sub.abort("late")
            await group.barrier()
        else:
            await sub.close()
            await group.barrier()
            assert not group.world._early

    run_world(2, main)


def test_a_stranger_to_a_group_cannot_speak_for_it() -> None:
    async def main(group: dist.ProcessGroup) -> None:
        pair = dist.new_group([0, 1])
        await group.barrier()
        if group.rank == 2:
            group.world.tell((0,), Abort(0, "abort", "x", None, []), dial=False)
        if group.rank == 0:
            assert isinstance(pair, dist.ProcessGroup)
            with pytest.raises(dist.RemoteProtocolError, match="does not belong"):
                group.world.control_received(2, msgpack.packb(["abort", pair.group_id, "abort", "x", None, []]))
            x = np.ones(1)
            await pair.all_reduce(x)
        if group.rank == 1:
            assert isinstance(pair, dist.ProcessGroup)
            await pair.all_reduce(np.ones(1))
        await group.barrier()

    run_world(3, main)


def test_addresses_come_along_the_tree_and_from_nobody_else() -> None:
    async def main(group: dist.ProcessGroup) -> None:
        await group.barrier()
        decider = group.world._decider
        for rank in {0, 1, 2} - {decider, group.rank}:
            with pytest.raises(dist.RemoteProtocolError, match=f"rank {rank} sent addresses"):
                group.world.control_received(rank, msgpack.packb(["addresses", 0, [b"x"]]))
        await group.barrier()

    run_world(3, main)


def test_a_stranger_cannot_speak_for_a_group_that_is_still_to_come() -> None:
    async def main(group: dist.ProcessGroup) -> None:
        await group.barrier()
        if group.rank == 0:
            group_id = derive_group_id(group.group_id, 1, (0, 1))
            group.world.control_received(2, msgpack.packb(["abort", group_id, "abort", "x", None, []]))
            assert group_id in group.world._early
        pair = dist.new_group([0, 1])
        if isinstance(pair, dist.ProcessGroup):
            await pair.all_reduce(np.ones(1))

    run_world(3, main)


@pytest.mark.parametrize("past", [0, 1])
def test_reports_leave_room_for_other_news_of_a_group_that_comes_later(past: int) -> None:
    async def main(group: dist.ProcessGroup) -> bool | None:
        await group.barrier()
        if group.rank == 1:
            early = dist.new_group()
            assert isinstance(early, dist.ProcessGroup)
            early._core._mismatches.check_fully(True)
            for _ in range(world.EARLY_MESSAGES // 2 + past):
                await early.broadcast(np.zeros(0), 0)
            early.abort("before you knew it")
            await asyncio.sleep(1)
            return None
        await asyncio.sleep(0.5)
        (parked,) = group.world._early.values()
        assert len(parked) == world.EARLY_MESSAGES // 2 + 1
        late = dist.new_group()
        return "aborted" in repr(late)

    assert run_world(2, main) == [True, None]


@pytest.mark.parametrize("over", [0, 1])
def test_last_words_at_their_limit(over: int) -> None:
    whole = world.MAX_WORDS_BYTES - 4 * world.WORDS_HEAD_BYTES
    payloads = [b"old" * 10, bytes(whole // 2), bytes(whole - whole // 2 - 30 + over)]
    words = world._join_words(payloads)
    assert len(words) <= world.MAX_WORDS_BYTES
    assert world._split_words(3, words) == payloads[over:]


@pytest.mark.parametrize(
    "words",
    [
        b"\xc1",
        b"\x91",
        msgpack.packb(None),
        msgpack.packb(["text"]),
        msgpack.packb({"a": b""}),
        msgpack.packb([b""] * (world.ABORTS_KEPT + 1)),
        msgpack.packb([bytes(world.MAX_WORDS_BYTES)]),
    ],
)
def test_malformed_last_words_are_protocol_errors(words: bytes) -> None:
    with pytest.raises(dist.RemoteProtocolError, match="rank 3 left malformed words"):
        world._split_words(3, words)


def test_as_many_last_words_as_aborts_are_kept() -> None:
    payloads = [b"%d" % number for number in range(world.ABORTS_KEPT)]
    assert world._split_words(3, world._join_words(payloads)) == payloads
    assert world._split_words(3, b"") == []


@pytest.mark.parametrize("words", [None, b"\xc1", msgpack.packb([msgpack.packb(["abort"])])])
def test_a_rank_that_is_gone_is_asked_why(words: bytes | None) -> None:
    """Nobody but the rank that is gone could tell, and nobody met it; and it may have left nonsense."""

    async def main(group: dist.ProcessGroup, made: Any) -> None:
        if group.rank == 1:
            group.abort("the disk is full")
            if words is not None:
                await asyncio.sleep(2)
            return
        await asyncio.sleep(1)
        if words is not None:
            made.network.cut(1, made.world_id)
            await made.store.set("world/default/1/words/1", words)
        if group.rank == 2:
            with pytest.raises(dist.DistError) as caught:
                await group.recv(np.zeros(4), 1)
            assert isinstance(caught.value, dist.PeerLostError if words else dist.GroupAbortedError)
            assert ("the disk is full" in str(caught.value)) == (words is None)
            assert caught.value.rank == 1

    run_world(3, main, pass_world=True)
