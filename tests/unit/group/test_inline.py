"""Collectives that go inline through a lane: right in every form, and theirs are the sizes up to a limit."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from differential import choose
from group_kit import Group
from lane_kit import lane_of
from socket_world import LIMIT_S, run_ranks

import asyncdist as dist
from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.collectives.host.backend import HostBackend
from asyncdist.collectives.shared.inline import InlineQueue
from asyncdist.collectives.shared.layout import INLINE_BYTES, RECORDS
from asyncdist.plan.records import PAYLOAD_SHARE, USUAL_LANE
from asyncdist.transport.shared_memory import doorbell

WORLD = 3


@pytest.fixture(autouse=True)
def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wake-up that got lost is a hang here, and fails."""
    monkeypatch.setattr(doorbell, "RECHECK_S", 10 * LIMIT_S)


LARGEST = USUAL_LANE.nbytes // PAYLOAD_SHARE
LENGTHS = (1, INLINE_BYTES // 24, INLINE_BYTES // 24 + 1, LARGEST // 24)
"""Elements of a block, of 8 bytes: three blocks fit a record, or just do not, or fit a payload."""


def went_inline(group: Group, collective: str) -> list[bool]:
    """Of all kinds of one collective so far, in order: whether they went inline."""
    backend = group._core._backend
    assert isinstance(backend, HostBackend)
    recipes = [recipe for (key, lane), recipe in backend._recipes.items() if key[0] == collective and lane.nbytes]
    return [recipe.inline is not None for recipe in recipes]


@functools.cache
def pattern(length: int) -> np.ndarray:
    """What the vectors of all ranks have in common: every rank works out what those of all others are."""
    return np.arange(length) * 7 % 101


def vector(group: Group, length: int, salt: int = 0) -> np.ndarray:
    return of_rank(group.rank, length, salt)


def of_rank(rank: int, length: int, salt: int = 0) -> np.ndarray:
    return pattern(length) + (1000.0 * rank + salt)


def of_all(size: int, length: int, salt: int) -> np.ndarray:
    """The sum of all ranks' vectors."""
    return pattern(length) * size + (1000.0 * sum(range(size)) + size * salt)


async def gathered(group: Group, length: int) -> None:
    own = vector(group, length)
    expected = [of_rank(rank, length) for rank in range(group.size)]
    whole = np.zeros(group.size * length)
    await group.all_gather_into_tensor(whole, own)
    assert (whole == np.concatenate(expected)).all()
    parts = [np.zeros(length) for _ in range(group.size)]
    await group.all_gather(parts, own)
    assert all((part == wanted).all() for part, wanted in zip(parts, expected, strict=True))
    block = whole[group.rank * length : (group.rank + 1) * length]
    whole[:] = -1.0
    block[:] = own
    await group.all_gather_into_tensor(whole, block)
    assert (whole == np.concatenate(expected)).all(), "in place"
    strided = np.zeros((group.size * length, 2))[:, 0]
    await group.all_gather_into_tensor(strided, own)
    assert (strided == np.concatenate(expected)).all()


async def scattered(group: Group, length: int) -> None:
    rows = [vector(group, length, 17 * block) for block in range(group.size)]
    wanted = [of_rank(rank, length, 17 * group.rank) for rank in range(group.size)]
    out = np.zeros(length)
    await group.reduce_scatter_tensor(out, np.concatenate(rows))
    assert (out == sum(wanted)).all()
    await group.reduce_scatter(out, rows, ReduceOp.MAX)
    assert (out == np.maximum.reduce(wanted)).all()
    await group.reduce_scatter_tensor(out, np.stack(rows), ReduceOp.AVG)
    np.testing.assert_allclose(out, sum(wanted) / group.size)
    whole = np.concatenate(rows)
    await group.reduce_scatter_tensor(whole[group.rank * length : (group.rank + 1) * length], whole)
    assert (whole[group.rank * length : (group.rank + 1) * length] == sum(wanted)).all(), "into its own input"


async def exchanged(group: Group, length: int) -> None:
    sent = np.concatenate([vector(group, length, 17 * block) for block in range(group.size)])
    wanted = np.concatenate([of_rank(rank, length, 17 * group.rank) for rank in range(group.size)])
    received = np.zeros_like(sent)
    await group.all_to_all_single(received, sent)
    assert (received == wanted).all()
    assert (sent[:length] == vector(group, length)).all(), "an input stays as it is"


async def reduced(group: Group, length: int) -> None:
    for op, wanted in (
        (ReduceOp.SUM, sum(of_rank(rank, 3 * length) for rank in range(group.size))),
        (ReduceOp.AVG, sum(of_rank(rank, 3 * length) for rank in range(group.size)) / group.size),
        (ReduceOp.MIN, of_rank(0, 3 * length)),
    ):
        data = vector(group, 3 * length)
        await group.all_reduce(data, op)
        np.testing.assert_allclose(data, wanted)


async def spread(group: Group, length: int) -> None:
    for root in range(group.size):
        data = of_rank(root, length) if group.rank == root else np.zeros((length, 2))[:, 0]
        data.flags.writeable = group.rank != root
        await group.broadcast(data, root)
        assert (data == of_rank(root, length)).all()


async def dealt(group: Group, length: int) -> None:
    for root in range(group.size):
        rows = [of_rank(root, length, 17 * block) for block in range(group.size)] if group.rank == root else None
        out = np.zeros(length)
        await group.scatter(out, rows, root)
        assert (out == of_rank(root, length, 17 * group.rank)).all()


async def collected(group: Group, length: int) -> None:
    for root in range(group.size):
        parts = [np.zeros(length) for _ in range(group.size)] if group.rank == root else None
        await group.gather(vector(group, length), parts, root)
        for rank, part in enumerate(parts or ()):
            assert (part == of_rank(rank, length)).all()


async def folded(group: Group, length: int) -> None:
    for root in range(group.size):
        for op, wanted in (
            (ReduceOp.SUM, sum(of_rank(rank, length) for rank in range(group.size))),
            (ReduceOp.AVG, sum(of_rank(rank, length) for rank in range(group.size)) / group.size),
        ):
            data = vector(group, length)
            await group.reduce(data, root, op)
            np.testing.assert_allclose(data, wanted if group.rank == root else vector(group, length))


FORMS: dict[str, Callable[[Group, int], Awaitable[None]]] = {
    "all_gather": gathered,
    "all_reduce": reduced,
    "all_to_all": exchanged,
    "broadcast": spread,
    "gather": collected,
    "reduce": folded,
    "reduce_scatter": scattered,
    "scatter": dealt,
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("collective", FORMS)
async def test_all_forms_are_right(collective: str, length: int) -> None:
    async def main(group: Group) -> None:
        await FORMS[collective](group, length)
        kinds = went_inline(group, collective)
        assert kinds
        assert all(kinds)

    await run_ranks(WORLD, main)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("world", [2, 5])
async def test_vectors_are_reduced_in_parts_of_which_each_rank_has_one(world: int, length: int) -> None:
    """Also where a rank has no element, the first or the last, and where several are in flight."""

    async def main(group: Group) -> None:
        choose(group, "all_reduce", "shared", 1)
        await reduced(group, length)
        strided = np.zeros((length, 2))[:, 0]
        for number in range(3):
            strided[:] = vector(group, length, number)
            await group.all_reduce(strided)
            assert (strided == of_all(group.size, length, number)).all()
        if group.rank == 1:
            await asyncio.sleep(0.05)
        works = [group.all_reduce(vector(group, length, number)) for number in range(2 * RECORDS)]
        for number, work in enumerate(works):
            assert (await work == of_all(group.size, length, number)).all()
        kinds = [recipe.inline for recipe in group._core._backend._recipes.values() if recipe.inline is not None]  # type: ignore[attr-defined]
        assert any(kind.fold for kind in kinds)

    await run_ranks(world, main)


async def test_what_a_rank_reduces_itself_is_not_put_out() -> None:
    issued = asyncio.Event()

    async def main(group: Group) -> None:
        choose(group, "all_reduce", "shared", 1)
        await group.all_reduce(np.ones(9))
        await group.barrier()
        if group.rank:
            await issued.wait()
        work = group.all_reduce(x := np.full(9, group.rank + 1.0))
        if not group.rank:
            lane = lane_of(group)
            assert lane is not None
            operation = lane.inline.queue[0]
            assert operation.recipe.own_part == slice(0, 3)
            assert operation.payloads.own.tolist() == [0.0] * 3 + [1.0] * 6
            issued.set()
        await work
        assert (x == WORLD * (WORLD + 1) / 2).all()

    await run_ranks(WORLD, main)


async def test_who_has_not_put_out_its_result_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has begun, and is busy; the others say whom they wait for, and go on once its result is there."""
    real = InlineQueue._results_ready
    seen = asyncio.Barrier(WORLD)

    async def main(group: Group) -> None:
        choose(group, "all_reduce", "shared", 1)
        await group.all_reduce(vector(group, 9))
        lane = lane_of(group)
        assert lane is not None
        folded = asyncio.Event()
        if group.rank == 2:
            monkeypatch.setattr(
                InlineQueue,
                "_results_ready",
                lambda queue, operation, *more: (
                    (operation.recipe.rank != 2 or folded.is_set()) and real(queue, operation, *more)
                ),
            )
        work = group.all_reduce(vector(group, 9))
        await asyncio.sleep(0.05)
        assert not work.done()
        if group.rank != 2:
            assert lane.not_begun(lane.inline.queue[0].number) == (2,)
        await seen.wait()
        folded.set()
        lane.soon()
        assert (await work == sum(of_rank(rank, 9) for rank in range(group.size))).all()

    await run_ranks(WORLD, main)


@pytest.mark.parametrize("collective", FORMS)
async def test_longer_ones_go_by_items(collective: str) -> None:
    async def main(group: Group) -> None:
        await FORMS[collective](group, LARGEST // 8 + 1)
        assert not any(went_inline(group, collective))
        await FORMS[collective](group, 5)
        assert any(went_inline(group, collective))

    await run_ranks(WORLD, main)


async def test_uneven_blocks_are_reduced_and_others_go_by_items() -> None:
    async def main(group: Group) -> None:
        counts = [5, 0, 300]
        rows = [vector(group, count, 17 * block) for block, count in enumerate(counts)]
        out = np.zeros(counts[group.rank])
        await group.reduce_scatter(out, rows)
        wanted = sum(of_rank(rank, counts[group.rank], 17 * group.rank) for rank in range(group.size))
        assert (out == wanted).all()
        assert went_inline(group, "reduce_scatter") == [True]
        parts = [np.zeros(count) for count in counts]
        await group.all_gather(parts, vector(group, counts[group.rank]))
        assert all((part == of_rank(rank, counts[rank])).all() for rank, part in enumerate(parts))
        assert went_inline(group, "all_gather")[-1] is False

    await run_ranks(WORLD, main)


async def test_reductions_of_ones_own_and_factors_go_by_items() -> None:
    async def main(group: Group) -> None:
        data = vector(group, 10)
        await group.all_reduce(data, ReduceOp.custom(np.add, name="add"))
        assert (data == sum(of_rank(rank, 10) for rank in range(group.size))).all()
        out = np.zeros(4)
        await group.reduce_scatter_tensor(out, np.ones(4 * group.size), ReduceOp.PREMUL_SUM(0.5))
        assert (out == group.size / 2).all()
        assert not any(went_inline(group, "all_reduce") + went_inline(group, "reduce_scatter"))

    await run_ranks(WORLD, main)


async def test_wide_ones_in_flight_wait_for_memory_and_keep_their_order() -> None:
    """More than there is memory for, of lengths that fill it unevenly, while one rank is late."""

    async def main(group: Group) -> None:
        lengths = [LARGEST // 8 // (1 + number % 5) for number in range(40)]
        if group.rank == 1:
            await asyncio.sleep(0.05)
        works = [(length, group.all_reduce(vector(group, length, number))) for number, length in enumerate(lengths)]
        for number, (length, work) in enumerate(works):
            wanted = sum(of_rank(rank, length, number) for rank in range(group.size))
            assert (await work == wanted).all()
        assert all(went_inline(group, "all_reduce"))

    await run_ranks(WORLD, main)


async def test_cancelled_and_refused_ones_leave_the_others_right() -> None:
    async def main(group: Group) -> None:
        works = [group.all_gather_into_tensor(np.zeros(group.size * 900), vector(group, 900)) for _ in range(12)]
        waiter = asyncio.ensure_future(_await(works[3]))
        await asyncio.sleep(0)
        waiter.cancel()
        if group.rank == 2:
            with pytest.raises(TypeError):
                await group.all_gather_into_tensor("no array", vector(group, 900))
        else:
            with pytest.raises(dist.DistError, match="rank 2"):
                await group.all_gather_into_tensor(np.zeros(group.size * 900), vector(group, 900))
        wanted = np.concatenate([of_rank(rank, 900) for rank in range(group.size)])
        for work in works:
            assert (await work == wanted).all()
        lane = lane_of(group)
        assert lane is not None
        assert not lane.inline.queue

    await run_ranks(WORLD, main)


@pytest.mark.parametrize("length", [5, LARGEST // 8])
async def test_a_root_that_gives_waits_for_nobody_and_goes_ahead_until_there_is_no_room(length: int) -> None:
    """The others come late, one after the other, and take what is theirs; then all go on."""

    async def main(group: Group) -> None:
        await group.barrier()
        rounds = 100
        if group.rank == 0:
            first = group.broadcast(np.full(length, 0.0), 0)
            await first
            assert first.is_completed()
            assert went_inline(group, "broadcast") == [True]
        else:
            await asyncio.sleep(0.02 * group.rank)
            data = np.full(length, -1.0)
            await group.broadcast(data, 0)
            assert (data == 0).all()
        works = [group.broadcast(np.full(length, float(number)), 0) for number in range(rounds)]
        for number, work in enumerate(works):
            assert (await work == number).all()
        parts = [np.zeros(length) for _ in range(group.size)] if group.rank == 0 else None
        works = [group.gather(vector(group, length, number), parts, 0) for number in range(rounds)]
        for work in works:
            await work
        for rank, part in enumerate(parts or ()):
            assert (part == of_rank(rank, length, rounds - 1)).all()

    await run_ranks(WORLD, main)


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
async def test_who_is_as_far_ahead_as_may_be_goes_on_as_soon_as_the_others_have_ended_one(collective: str) -> None:
    """They sleep then, for what the one ahead does next."""

    async def main(group: Group) -> None:
        ahead, word = 0 if collective == "broadcast" else 1, np.zeros(1)

        def begin() -> Any:
            return group.broadcast(np.ones(3), 0) if collective == "broadcast" else group.reduce(np.ones(3), 0)

        await group.barrier()
        others = [rank for rank in range(group.size) if rank != ahead]
        if group.rank == ahead:
            for work in [begin() for _ in range(RECORDS)]:
                await work
            for _ in range(4):
                work = begin()
                assert not work.done()
                for rank in others:
                    await group.send(word, rank)
                await work
                for rank in others:
                    await group.send(word, rank, tag=1)
        else:
            for _ in range(4):
                await group.recv(word, ahead)
                await begin()
                await group.recv(word, ahead, tag=1)
            for _ in range(RECORDS):
                await begin()

    await run_ranks(WORLD, main)


async def _await(work: Any) -> Any:
    return await work


@pytest.mark.parametrize("length", [10, 2000])
async def test_ranks_that_differ_are_told(length: int) -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        own = vector(group, length * (1 + (group.rank == 1)))
        with pytest.raises(dist.CollectiveMismatchError, match="rank"):
            await group.all_gather_into_tensor(np.zeros(own.size * group.size), own)

    await run_ranks(WORLD, main)
