"""Collectives through shared memory, on ranks of one process with real sockets: what goes wrong on one rank.

Nothing is looked at again by time here: a wake-up that got lost is a hang, and fails.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from group_kit import Group, outcome
from lane_kit import lane_of
from mesh_world import open_fds
from socket_world import LIMIT_S, run_ranks
from waiting import eventually

import asyncdist as dist
from asyncdist.arrays.reduce_op import PremulSum
from asyncdist.collectives.arguments import call
from asyncdist.collectives.shared.agreement import Lanes
from asyncdist.collectives.shared.layout import LANE_HEAD_BYTES, SKEW_BYTES
from asyncdist.transport.host_memory import HostMemory
from asyncdist.transport.shared_memory import doorbell

LARGE = 3 << 20
"""Elements of 8 bytes: three times a lane's pool."""


@pytest.fixture(autouse=True)
def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "RECHECK_S", 10 * LIMIT_S)


async def failure(call: Callable[[], Awaitable[Any]]) -> BaseException | Any:
    """What calling and awaiting gives, be it an exception."""
    try:
        return await call()
    except dist.DistError as error:
        return error


def memory_of(group: Group) -> HostMemory:
    memory = group.world.mesh.memory
    assert memory is not None
    return memory


async def total(group: Group, count: int = 10, tag: int = 0) -> None:
    """An all_reduce that must be right."""
    data = np.full(count, group.rank + 1.0)
    await group.all_reduce(data, tag=tag)
    assert (data == group.size * (group.size + 1) / 2).all()


async def test_every_collective_of_every_size_in_a_row() -> None:
    async def main(group: Group) -> None:
        works = []
        for number in range(200):
            data = np.full((1, 100, 5000, 100_000)[number % 4], group.rank + number)
            works.append((number, data, group.all_reduce(data)))
            if number % 3 == 0:
                group.barrier()
            if number % 5 == 0:
                word = np.full(3000, number if group.rank == number % group.size else -1)
                works.append((None, number, group.broadcast(word, number % group.size)))
        for number, data, work in works:
            result = await work
            if number is None:
                assert (result == data).all()
            else:
                assert (data == sum(range(group.size)) + number * group.size).all()
        assert lane_of(group) is not None

    await run_ranks(3, main)


@pytest.mark.parametrize("count", [10, LARGE])
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather"])
async def test_a_refusal_leaves_the_group_usable(collective: str, count: int) -> None:
    async def main(group: Group) -> None:
        await total(group)
        for refuser in range(group.size):
            data: Any = np.zeros(count)
            if group.rank == refuser:
                data = "no array"

            def call(root: int = (refuser + 1) % group.size, data: Any = data) -> Awaitable[Any]:
                if collective == "broadcast":
                    return group.broadcast(data, root)
                if collective == "all_reduce":
                    return group.all_reduce(data)
                return group.all_gather([np.zeros(count) for _ in range(group.size)], data)

            if group.rank == refuser:
                with pytest.raises((TypeError, ValueError)):
                    call()
            else:
                error = await failure(call)
                if isinstance(error, dist.CollectiveMismatchError):
                    assert f"rank {refuser} refused" in str(error)
                else:  # its part was done before the news came
                    assert collective == "broadcast"
            await total(group)
            await total(group, LARGE)
        assert lane_of(group) is not None

    await run_ranks(3, main)


async def test_refusals_while_others_are_under_way() -> None:
    async def main(group: Group) -> None:
        good, bad = [], []
        for number in range(60):
            if number % 7 == 3:
                if group.rank == number % group.size:
                    with pytest.raises(ValueError, match="root"):
                        group.broadcast(np.zeros(3), 99)
                else:
                    bad.append(group.broadcast(np.zeros(100_000), (number + 1) % group.size))
            data = np.full((7, 70_000)[number % 2], number)
            good.append((number, data, group.all_reduce(data)))
        for number, data, work in good:
            await work
            assert (data == number * group.size).all()
        for work in bad:
            await outcome(work)
        await total(group)

    await run_ranks(4, main)


@pytest.mark.parametrize(("here", "there"), [(4, 2), (1000, 10), (300_000, 150_000)])
async def test_a_mismatch_shows_both_sides(here: int, there: int) -> None:
    async def main(group: Group) -> str:
        await total(group)
        if group.rank == 1:
            error = await outcome(group.broadcast(np.zeros(there, "i8"), 1))
        else:
            error = await outcome(group.all_reduce(np.zeros(here, "f4")))
        if not isinstance(error, dist.CollectiveError):  # the root of a broadcast has nothing to wait for
            error = await outcome(group.all_reduce(np.zeros(1)))
        await outcome(group.close())
        return str(error)

    for text in await run_ranks(3, main):
        assert f"runs all_reduce float32[{here}] SUM (" in text
        assert f"rank 1 runs broadcast int64[{there}] root 1 (" in text


async def test_cancelling_a_waiter_ends_only_its_waiting() -> None:
    async def main(group: Group) -> None:
        await total(group)
        data = np.full(LARGE, 1.0)
        work = group.all_reduce(data)
        waiter = asyncio.create_task(work.wait())
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        await total(group)
        await work
        assert (data == group.size).all()

    await run_ranks(3, main)


@pytest.mark.parametrize("count", [3, 100_000, LARGE])
@pytest.mark.parametrize("first", [True, False])
async def test_a_time_out_names_who_is_missing(count: int, first: bool) -> None:
    """Also where the missing one has not even taken part in agreeing on a lane."""

    async def main(group: Group) -> None:
        if not first:
            await total(group)
        await group.barrier(tag=9)
        if group.rank == 2:
            with pytest.raises(dist.CollectiveError):
                await group.barrier(tag=9)
            return
        error = await outcome(group.all_reduce(np.zeros(count), timeout=0.05))
        assert isinstance(error, dist.CollectiveTimeoutError)
        assert error.missing == (2,)

    await run_ranks(3, main)


@pytest.mark.parametrize("count", [3, 100_000])
async def test_a_rank_that_leaves_fails_what_it_never_began(count: int) -> None:
    async def main(group: Group) -> None:
        await total(group)
        word = np.full(count, 7.0 if group.rank == 2 else 0.0)
        work = group.broadcast(word, 2)
        if group.rank == 2:
            await work
            return
        await asyncio.sleep(0.05 * group.rank)
        await work
        assert (word == 7).all()
        error = await failure(lambda: group.all_reduce(np.zeros(count)))
        assert isinstance(error, dist.PeerLostError | dist.GroupAbortedError)
        assert error.rank == 2

    await run_ranks(3, main)


async def test_a_rank_that_leaves_before_the_others_know_that_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was the first to have everybody's word."""
    real = Lanes._mapped
    held: list[Any] = []

    def late(self: Lanes, tag: int, gathered: Any) -> None:
        if self._mesh.rank == 1:
            held.append((self, tag, gathered))
        else:
            real(self, tag, gathered)

    monkeypatch.setattr(Lanes, "_mapped", late)

    async def main(group: Group) -> None:
        word = np.full(3, 7.0 if group.rank == 0 else 0.0)
        work = group.broadcast(word, 0)
        if group.rank == 1:
            await eventually(lambda: held and group.world.mesh.is_gone(0))
            real(*held[0])
        await work
        assert (word == 7).all()
        if group.rank == 1:
            assert lane_of(group) is not None
            async with asyncio.timeout(LIMIT_S / 4):
                error = await failure(group.barrier)
            assert isinstance(error, dist.PeerLostError)
            assert error.left

    await run_ranks(2, main)


async def test_memory_that_says_what_cannot_be_loses_its_rank() -> None:
    async def main(group: Group) -> None:
        await total(group)
        lane = lane_of(group)
        assert lane is not None
        await group.barrier(tag=9)
        if group.rank == 1:
            lane.lane.turns.own_words[0] = 1 << 40
            for ringer in lane.others:
                ringer.ring()
            await eventually(lambda: group._core._aborted)
            return
        works = [group.all_reduce(np.zeros(3)), group.all_reduce(np.zeros(100_000))]
        errors = [await outcome(work) for work in works]
        assert all(isinstance(error, dist.PeerLostError) and error.rank == 1 for error in errors), errors
        assert "operations were begun" in str(errors[0])

    await run_ranks(3, main)


async def test_tags_without_a_lane_when_memory_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_SHM_BYTES", str(24 << 20))

    async def main(group: Group) -> list[bool]:
        for count in (1, 10_000):
            for tag in range(12):
                await total(group, count, tag)
        return [lane_of(group, tag) is not None for tag in range(12)]

    shared = await run_ranks(3, main)
    assert shared[0] == shared[1] == shared[2]
    assert 1 <= sum(shared[0]) < 12


async def test_no_memory_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_SHM_BYTES", "0")

    async def main(group: Group) -> None:
        await total(group)
        await total(group, 100_000)
        assert lane_of(group) is None
        assert "unix" in group.world.mesh.describe((group.rank + 1) % group.size)

    await run_ranks(3, main)


async def test_what_ranks_agree_by_chooses_for_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """They exchange numbers, as an all_gather of one does: that took over the algorithm named for them alone."""
    monkeypatch.setenv("ASYNCDIST_SHM_BYTES", "0")
    monkeypatch.setenv("ASYNCDIST_ALGO", "all_gather:ring")

    async def main(group: Group) -> list[str]:
        numbers = []
        for count in (1, 2, 3):
            own, everyone = np.zeros(count, np.uint64), np.zeros(3 * count, np.uint64)
            await group.all_gather_into_tensor(everyone, own)
            key = call.all_gather_into_tensor(everyone, own, group.size).recipe_key
            numbers.append(group._core._backend.algorithm_of(key))
        return numbers

    assert await run_ranks(3, main) == [["ring"] * 3] * 3


async def test_groups_that_come_and_go_leave_nothing() -> None:
    async def main(group: Group) -> None:
        await total(group)
        before: tuple[int, int] | None = None
        for round_number in range(30):
            other = dist.new_group([0, 1, 2], timeout=LIMIT_S)
            assert isinstance(other, dist.ProcessGroup)
            await total(other, 5000)
            await total(other, 5000, tag=1)
            assert lane_of(other) is not None, "what closed groups had is free again"
            await other.close()
            del other
            await group.barrier()
            if round_number == 4:
                gc.collect()
                before = mapped(), len(open_fds())
            await group.barrier()
        gc.collect()
        await group.barrier()
        assert before is not None
        assert mapped() <= before[0]
        assert len(open_fds()) <= before[1]

    await run_ranks(3, main)


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:asyncdist-items")


async def test_items_streams_and_objects_share_the_order_of_a_tag() -> None:
    async def main(group: Group) -> None:
        for number in range(10):
            data = np.full(100, group.rank)
            works = [group.all_reduce(data), group.all_gather_array(np.full(group.rank + 1, number))]
            objects: list[Any] = [None] * group.size
            works.append(group.all_gather_object(objects, {"rank": group.rank}))
            large = np.full(50_000, group.rank)
            works.append(group.all_reduce(large))
            for work in works:
                await work
            assert (data == sum(range(group.size))).all()
            assert (large == sum(range(group.size))).all()
            assert [entry["rank"] for entry in objects] == list(range(group.size))

    await run_ranks(3, main)


async def test_factors_and_averages_of_large_arrays() -> None:
    """Scaled in slices first, so that what is published is so outside of the call."""

    async def main(group: Group) -> None:
        for count in (10, 600_000):
            data = np.full(count, 2.0)
            await group.all_reduce(data, PremulSum(0.5))
            assert (data == group.size).all()
            await group.all_reduce(data, dist.ReduceOp.AVG)
            assert (data == group.size).all()

    await run_ranks(3, main)


async def test_an_abort_in_the_middle_frees_all_arrays() -> None:
    async def main(group: Group) -> None:
        await total(group)
        works = [group.all_reduce(np.ones(LARGE)) for _ in range(3)]
        if group.rank == 0:
            await asyncio.sleep(0)
            group.abort("enough")
        for work in works:
            error = await outcome(work)
            assert isinstance(error, dist.GroupAbortedError)
        with pytest.raises(dist.GroupAbortedError):
            group.barrier()

    await run_ranks(3, main)


async def test_the_full_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_CHECK", "full")

    async def main(group: Group) -> None:
        await total(group)
        await total(group, 10_000)
        error = await failure(lambda: group.broadcast(np.zeros(5), group.rank))
        if not isinstance(error, dist.CollectiveError):
            await asyncio.sleep(0.01)
            error = await failure(lambda: group.all_reduce(np.zeros(5)))
        assert isinstance(error, dist.CollectiveError)
        assert "rank 0 runs broadcast float64[5] root 0 at test_lanes.py" in str(error)
        await outcome(group.close())

    await run_ranks(2, main)


async def test_a_lane_that_not_all_can_map_is_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncdist.transport.connections.shm import ShmConnection

    real = ShmConnection.take_segment
    calls: list[int] = []

    def sometimes(self: ShmConnection, number: int) -> Any:
        calls.append(number)
        if len(calls) == 4:
            raise OSError(24, "Too many open files")
        return real(self, number)

    monkeypatch.setattr(ShmConnection, "take_segment", sometimes)

    async def main(group: Group) -> None:
        await total(group)
        assert lane_of(group) is None
        await total(group, 10_000)
        await total(group, tag=1)
        await total(group, tag=1)
        assert lane_of(group, 1) is not None

    await run_ranks(3, main)


@pytest.mark.parametrize("wrong", ["too short", "never passed"])
async def test_who_shares_no_segment_that_makes_a_lane_is_lost_to_all(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    new_segment, share = HostMemory.new_segment, HostMemory.share

    async def main(group: Group) -> None:
        memory = memory_of(group)
        if group.rank == 1 and wrong == "too short":
            monkeypatch.setattr(
                HostMemory,
                "new_segment",
                lambda self, size: new_segment(self, LANE_HEAD_BYTES - SKEW_BYTES if self is memory else size),
            )
        elif group.rank == 1:
            monkeypatch.setattr(
                HostMemory,
                "share",
                lambda self, number, ranks: self is memory or share(self, number, ranks),
            )
        error = await outcome(group.barrier())
        assert isinstance(error, dist.PeerLostError | dist.GroupAbortedError)
        if group.rank != 1:
            assert error.rank == 1

    await run_ranks(3, main)


async def test_tags_that_are_used_once_cost_no_memory_and_no_agreement() -> None:
    async def main(group: Group) -> None:
        await total(group)
        lanes = group._core._backend._lanes  # type: ignore[attr-defined]
        for tag in range(1, 30):
            await total(group, tag=tag)
        assert list(lanes._tags) == [0]
        for _ in range(2):
            await total(group, tag=29)
        assert lane_of(group, 29) is not None
        works = [group.all_reduce(np.ones(1000), tag=30) for _ in range(6)]  # the first of them by messages
        for work in works:
            await work
        assert lane_of(group, 30) is not None

    await run_ranks(2, main)
