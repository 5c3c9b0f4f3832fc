"""Groups: order, deadlines, failures and the end, with whole worlds in virtual time."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncdist as dist
from asyncdist import expiry
from asyncdist.group import REFUSALS_KEPT
from asyncdist.testing.world import SimulatedWorld, run_world

Group = dist.ProcessGroup


async def outcome(awaitable: Awaitable[Any]) -> BaseException | Any:
    """What awaiting gives, be it an exception."""
    try:
        return await awaitable
    except dist.DistError as error:
        return error


def test_every_collective_gives_what_numpy_gives() -> None:
    async def main(group: Group) -> None:
        size, rank = group.size, group.rank
        mine = np.arange(6, dtype=np.int64).reshape(2, 3) + 10 * rank
        everyone = [np.arange(6).reshape(2, 3) + 10 * other for other in range(size)]

        x = mine.copy()
        assert await dist.all_reduce(x) is x
        assert np.array_equal(x, sum(everyone))

        x = mine.copy()
        await dist.broadcast(x, src=size - 1)
        assert np.array_equal(x, everyone[-1])

        x = mine.copy()
        await dist.reduce(x, dst=1, op=dist.ReduceOp.MAX)
        assert np.array_equal(x, everyone[-1] if rank == 1 else mine)

        gathered = [np.zeros_like(mine) for _ in range(size)]
        assert await dist.all_gather(gathered, mine) is gathered
        assert np.array_equal(gathered, everyone)

        flat = np.zeros((size, 2, 3), np.int64)
        await dist.all_gather_into_tensor(flat, mine)
        assert np.array_equal(flat, everyone)

        gathered = [np.zeros_like(mine) for _ in range(size)] if rank == 0 else []
        await dist.gather(mine, gathered, dst=0)
        assert rank != 0 or np.array_equal(gathered, everyone)

        x = np.zeros_like(mine)
        await dist.scatter(x, everyone if rank == 1 else None, src=1)
        assert np.array_equal(x, everyone[rank])

        x = np.zeros_like(mine)
        await dist.reduce_scatter(x, [everyone[rank] * (other + 1) for other in range(size)])
        assert np.array_equal(x, sum(everyone) * (rank + 1))

        x = np.zeros(2, np.int64)
        await dist.reduce_scatter_tensor(x, np.arange(2 * size) + rank)
        assert np.array_equal(x, size * np.arange(2 * rank, 2 * rank + 2) + sum(range(size)))

        await dist.barrier()

    for size in (2, 3, 5):
        run_world(size, main)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reductions_of_every_kind(size: int) -> None:
    async def main(group: Group) -> None:
        values = [np.array([3, 5, 6], np.int32) + rank for rank in range(group.size)]
        for op, expected in {
            dist.ReduceOp.SUM: np.sum(values, axis=0),
            dist.ReduceOp.AVG: np.sum(values, axis=0) // group.size,
            dist.ReduceOp.PRODUCT: np.prod(values, axis=0),
            dist.ReduceOp.MIN: np.min(values, axis=0),
            dist.ReduceOp.MAX: np.max(values, axis=0),
            dist.ReduceOp.BAND: np.bitwise_and.reduce(values),
            dist.ReduceOp.BOR: np.bitwise_or.reduce(values),
            dist.ReduceOp.BXOR: np.bitwise_xor.reduce(values),
        }.items():
            x = values[group.rank].copy()
            await group.all_reduce(x, op)
            assert np.array_equal(x, expected), op
        x = np.array([1.5, 2.0])
        untouched = x.copy()
        await group.all_reduce(x, dist.ReduceOp.PREMUL_SUM(0.5))
        assert np.array_equal(x, untouched * 0.5 * group.size)
        x = untouched.copy()
        await group.reduce(x, 0, dist.ReduceOp.PREMUL_SUM(2.0))
        assert np.array_equal(x, untouched * 2 * group.size if group.rank == 0 else untouched)
        x = untouched.copy()
        await group.reduce(x, 0, dist.ReduceOp.AVG)
        assert np.array_equal(x, untouched)

    run_world(size, main)


def test_strided_arrays_are_handled() -> None:
    async def main(group: Group) -> None:
        base = np.zeros((4, 4))
        base[:, 1] = group.rank + 1
        await group.all_reduce(base[:, 1])
        assert base[:, 1].tolist() == [3.0] * 4
        assert base[:, 0].tolist() == [0.0] * 4
        transposed = (np.arange(6.0).reshape(2, 3) + group.rank).T
        await group.all_reduce(transposed)
        assert np.array_equal(transposed, (2 * np.arange(6.0).reshape(2, 3) + 1).T)

    run_world(2, main)


def test_empty_arrays_take_part() -> None:
    async def main(group: Group) -> None:
        await group.all_reduce(np.zeros((0, 3)))
        await group.broadcast(np.zeros(0), 1)
        await group.all_gather([np.zeros(0) for _ in range(group.size)], np.zeros(0))

    run_world(3, main)


def test_many_in_flight_in_any_await_order() -> None:
    async def main(group: Group) -> None:
        arrays = [np.full(size, float(group.rank + 1)) for size in (1, 50_000, 3, 300_000, 7) * 20]
        works = [group.all_reduce(array) for array in arrays]
        for work in reversed(works):
            await work
        assert all((array == 6.0).all() for array in arrays)

    run_world(3, main, seed=1)


def test_a_forgotten_work_still_completes() -> None:
    async def main(group: Group) -> None:
        x = np.ones(4)
        group.all_reduce(x)
        await group.barrier()
        await group.close()
        assert x.tolist() == [2.0] * 4

    run_world(2, main)


def test_tags_keep_concurrent_tasks_apart() -> None:
    async def main(group: Group) -> None:
        async def one(tag: int) -> float:
            total = 0.0
            for turn in range(20):
                await asyncio.sleep((tag * 7 + group.rank * 3 + turn) % 5 * 0.001)
                x = np.full(3, float(tag))
                await group.all_reduce(x, tag=tag)
                total += x[0]
            return total

        assert await asyncio.gather(*map(one, range(4))) == [tag * 60.0 for tag in range(4)]

    run_world(3, main, seed=5)


def test_overlap_of_one_tag_from_two_tasks_warns_once_with_the_place() -> None:
    async def main(group: Group) -> None:
        async def one() -> None:
            await group.barrier()

        with pytest.warns(RuntimeWarning, match=r"overlaps a collective of the same tag 0 .*test_group.py:\d+") as seen:
            await asyncio.gather(*(asyncio.ensure_future(one()) for _ in range(3)))
        assert len(seen) == 1

    run_world(2, lambda group: main(group) if group.rank == 0 else three(group))


async def three(group: Group) -> None:
    for work in [group.barrier() for _ in range(3)]:
        await work


# Arguments.


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: g.all_reduce([1]), TypeError, "tensor must be a numpy array"),
        (lambda g: g.all_reduce(np.zeros(2), "sum"), TypeError, "ReduceOp"),
        (lambda g: g.all_reduce(np.zeros(2), dist.ReduceOp.BAND), TypeError, "BAND"),
        (lambda g: g.broadcast(np.zeros(2), 2), ValueError, "root=2 is not in this group"),
        (lambda g: g.reduce(np.zeros(2), True), TypeError, "root must be a rank"),
        (lambda g: g.all_gather([np.zeros(2)], np.zeros(2)), ValueError, "one array per rank: 2, but holds 1"),
        (lambda g: g.all_gather(np.zeros((2, 2)), np.zeros(2)), TypeError, "must be a list"),
        (lambda g: g.all_gather([np.zeros(2), np.zeros(3)], np.zeros(2)), ValueError, r"float64\[3\]"),
        (lambda g: g.all_gather_into_tensor(np.zeros(3), np.zeros(2)), ValueError, "2 times the 2 elements"),
        (lambda g: g.all_gather_into_tensor(np.zeros(4, "f4"), np.zeros(2)), ValueError, "dtype"),
        (lambda g: g.reduce_scatter_tensor(np.zeros(2), np.zeros(3)), ValueError, "2 times the 2 elements"),
        (lambda g: g.all_reduce(np.zeros(2), tag=-1), ValueError, "tag"),
        (lambda g: g.all_reduce(np.zeros(2), timeout=-1), ValueError, "timeout"),
        (lambda g: g.isend(np.zeros(2), 2), ValueError, "dst=2 is not in this group"),
        (lambda g: g.irecv(np.zeros(2), -1), ValueError, "src=-1"),
        (lambda g: g.irecv("text"), TypeError, "tensor"),
        (lambda g: g.recv_array(max_bytes=-1), ValueError, "max_bytes"),
        (lambda g: dist.isend(np.zeros(2)), ValueError, "give dst="),
        (lambda g: dist.isend(np.zeros(2), 1, group_dst=1), ValueError, "not both"),
        (lambda g: dist.all_reduce(np.zeros(2), group="x"), TypeError, "group must be"),
        (lambda g: dist.new_group([0, 5]), ValueError, "rank 5 is not in group"),
        (lambda g: dist.new_group([0, 0]), ValueError, "twice"),
        (lambda g: dist.new_group([]), ValueError, "empty"),
        (lambda g: dist.batch_isend_irecv([]), ValueError, "empty"),
        (lambda g: dist.P2POp(dist.barrier, np.zeros(1), 0), ValueError, "op must be"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(
    call: Callable[[Group], object], error: type[Exception], message: str
) -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(error, match=message):
                call(group)

    run_world(2, main)


def test_a_refused_collective_keeps_its_place_and_tells_the_others() -> None:
    async def main(group: Group) -> BaseException | None:
        if group.rank == 1:
            with pytest.raises(TypeError):
                group.all_reduce("not an array")
            error = None
        else:
            error = await outcome(group.all_reduce(np.zeros(200_000)))
        x = np.ones(3)
        await group.all_reduce(x)
        assert x.tolist() == [3.0] * 3
        return error

    for seed in range(5):
        errors = run_world(3, main, seed=seed)
        for rank in (0, 2):
            assert isinstance(errors[rank], dist.CollectiveMismatchError)
            assert "rank 1 refused" in str(errors[rank])
            assert f"rank {rank}, all_reduce #0" in str(errors[rank])


def test_a_refusal_is_heard_of_before_the_leaving_of_those_who_heard_of_it() -> None:
    async def main(group: Group) -> None:
        await group.all_gather_into_tensor(np.zeros(6), np.zeros(1))
        if group.rank == 1:
            with pytest.raises(TypeError):
                group.all_reduce("not an array")
            await asyncio.sleep(1)
        else:
            with pytest.raises(dist.CollectiveMismatchError, match="rank 1 refused"):
                await group.all_gather_into_tensor(np.zeros(6), np.zeros(1))

    for seed in range(40):
        run_world(6, main, seed=seed)


@pytest.mark.parametrize("past", [0, 1])
def test_a_rank_can_be_ahead_by_so_many_refusals_and_no_more(past: int) -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        if group.rank == 1:
            for _ in range(REFUSALS_KEPT + past):
                with pytest.raises(TypeError):
                    group.all_reduce("not an array")
            await asyncio.sleep(2)
            if past:
                with pytest.raises(dist.GroupAbortedError, match="64 refusals"):
                    group.barrier()
            else:
                await group.barrier()
            return
        await asyncio.sleep(1)
        if past:
            with pytest.raises(dist.GroupAbortedError, match="rank 1 refused the operation"):
                group.barrier()
            return
        for number in range(REFUSALS_KEPT):
            with pytest.raises(dist.CollectiveMismatchError, match=f"barrier #{number + 1}: rank 1 refused"):
                await group.barrier()
        await group.barrier()

    run_world(3, main)


def test_what_was_sent_for_a_refused_collective_is_not_kept() -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        await asyncio.sleep(group.rank * 0.1)  # rank 0's messages come before the refusal, rank 2's after it
        for size in (3, 100_000):
            if group.rank == 1:
                with pytest.raises(TypeError):
                    group.all_reduce("not an array")
            else:
                assert isinstance(await outcome(group.all_reduce(np.zeros(size))), dist.CollectiveMismatchError)
        await asyncio.sleep(1)
        for core in group.world.mesh.cores:
            kept = {} if core is None else core.statistics()
            assert not [name for name, count in kept.items() if count and name != "credit"], kept

    for seed in (None, 1, 2):
        run_world(3, main, seed=seed)


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.broadcast(np.zeros(2), 7),
        lambda g: g.reduce(np.zeros(2), None),
        lambda g: dist.broadcast(np.zeros(2)),
        lambda g: dist.gather(np.zeros(2), dst=9),
        lambda g: dist.scatter(np.zeros(2), src=0, group_src=1),
        lambda g: g.barrier(timeout="soon"),
    ],
)
def test_a_wrong_root_or_time_out_is_told_to_the_others_too(call: Callable[[Group], object]) -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises((TypeError, ValueError)):
                call(group)
        else:
            with pytest.raises(dist.CollectiveMismatchError, match="rank 0 refused"):
                await group.barrier()
        await group.barrier()

    run_world(3, main)


def test_different_shapes_end_the_group_everywhere() -> None:
    async def main(group: Group) -> tuple[Any, Any]:
        first = await outcome(group.all_reduce(np.zeros(100 + group.rank)))
        with pytest.raises(dist.GroupAbortedError) as later:
            group.barrier()
        return first, later.value

    outcomes = run_world(2, main)
    assert any(isinstance(first, dist.CollectiveMismatchError) for first, _ in outcomes)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda g: g.all_reduce(np.ones(4)), lambda g: g.all_reduce(np.ones(4), dist.ReduceOp.MAX)),
        (lambda g: g.all_reduce(np.ones(4, "f4")), lambda g: g.all_reduce(np.ones(4, "i4"))),
        (lambda g: g.all_reduce(np.ones(4)), lambda g: g.broadcast(np.ones(4), 0)),
        (lambda g: g.all_reduce(np.ones(200_000)), lambda g: g.all_reduce(np.ones(200_000), dist.ReduceOp.MIN)),
        (lambda g: g.all_gather([np.ones(1), np.ones(1)], np.ones(1)), lambda g: g.all_reduce(np.ones(1))),
    ],
)
def test_different_calls_of_equal_size_are_told_apart(
    one: Callable[[Group], Any], other: Callable[[Group], Any]
) -> None:
    async def main(group: Group) -> Any:
        first = await outcome((one if group.rank == 0 else other)(group))
        await asyncio.sleep(1)
        with pytest.raises(dist.GroupAbortedError):
            group.barrier()
        return first

    for seed in (None, 1, 2):
        outcomes = run_world(2, main, seed=seed)
        assert any(isinstance(first, dist.CollectiveMismatchError) for first in outcomes), outcomes


def test_factors_of_a_weighted_sum_may_differ() -> None:
    async def main(group: Group) -> None:
        x = np.ones(3)
        await group.all_reduce(x, dist.ReduceOp.PREMUL_SUM(group.rank + 1.0))
        assert x.tolist() == [6.0] * 3

    run_world(3, main)


# Failures.


def test_a_lost_rank_is_named_by_everybody() -> None:
    async def main(group: Group, world: SimulatedWorld) -> None:
        await group.barrier()
        await asyncio.sleep(2 if group.rank == 2 else 1)
        if group.rank == 2:
            work = group.all_reduce(np.zeros(10))
            world.kill(2)
            with pytest.raises(dist.DistError):
                await work
            return
        with pytest.raises(dist.PeerLostError, match=rf"rank {group.rank}, all_reduce #1: .*rank 2") as lost:
            await group.all_reduce(np.zeros(100_000))
        assert lost.value.rank == 2
        with pytest.raises(dist.GroupAbortedError, match="rank 2") as aborted:
            group.barrier()
        assert aborted.value.rank == 2
        other = {0: 1, 1: 3, 3: 0}[group.rank]
        sent = group.isend(np.full(3, group.rank), other)
        got = np.zeros(3, int)
        await group.recv(got)
        await sent
        assert got[0] == {1: 0, 3: 1, 0: 3}[group.rank]
        with pytest.raises(dist.PeerLostError):
            await group.isend(np.zeros(1), 2)

    for seed in (None, 1, 2):
        run_world(4, main, seed=seed, pass_world=True)


def test_a_loss_reaches_ranks_that_were_not_connected_to_the_lost_one() -> None:
    async def main(group: Group, world: SimulatedWorld) -> None:
        token = np.zeros(1)
        if group.rank > 0:
            await group.recv(token, group.rank - 1)
        if group.rank < group.size - 1:
            await group.isend(token, group.rank + 1)
        await asyncio.sleep(1)
        if group.rank == 0:
            world.kill(0)
            return
        with pytest.raises(dist.PeerLostError) as lost:
            await group.barrier()
        assert lost.value.rank == 0

    run_world(5, main, pass_world=True)


def test_an_expired_collective_names_the_missing_ranks_everywhere() -> None:
    async def main(group: Group) -> None:
        if group.rank in (1, 3):
            await asyncio.sleep(20)
            with pytest.raises(dist.GroupAbortedError, match="missing: rank 1, 3"):
                group.barrier()
            return
        start_s = asyncio.get_running_loop().time()
        with pytest.raises(dist.CollectiveTimeoutError, match="missing: rank 1, 3") as expired:
            await group.barrier(timeout=5)
        assert expired.value.missing == (1, 3)
        assert isinstance(expired.value, TimeoutError)
        assert 5 <= asyncio.get_running_loop().time() - start_s <= 6

    async def connected(group: Group) -> None:
        await group.all_gather([np.zeros(1) for _ in range(group.size)], np.zeros(1))
        await main(group)

    run_world(5, main)
    run_world(5, connected)


@pytest.mark.parametrize(("dials", "connected"), [(6, True), (5, False)])
def test_who_issued_but_is_not_connected_is_not_missing(
    monkeypatch: pytest.MonkeyPatch, dials: int, connected: bool
) -> None:
    """In a ring of six, rank 0's neighbors are 1 and 5; it expires first, and only rank 3 is to blame."""
    monkeypatch.setattr(expiry, "MAX_PROBE_DIALS", dials)

    async def main(group: Group) -> tuple[int, ...]:
        group._backend._overrides["all_reduce"] = "ring"  # type: ignore[attr-defined]
        if group.rank == 3:
            await asyncio.sleep(7)
        with pytest.raises(dist.CollectiveError, match="all_reduce #0 timed out on rank 0") as expired:
            await group.all_reduce(np.zeros(60_000), timeout=5 if group.rank == 0 else 50)
        if group.rank == 0:
            connections = group.world.mesh.statistics()["peers"].get("memory", 0)
            assert connections == (5 if connected else 2)
        return getattr(expired.value, "missing", ())

    for missing in run_world(6, main)[:3]:
        assert missing == (3,) if connected else 3 not in missing


def test_who_issued_and_closed_the_group_is_not_missing() -> None:
    async def main(group: Group) -> None:
        group._backend._overrides["broadcast"] = "chain"  # type: ignore[attr-defined]
        sub = dist.new_group([0, 1, 2])
        assert isinstance(sub, Group)
        sub._backend._overrides["broadcast"] = "chain"  # type: ignore[attr-defined]
        if group.rank == 0:
            await sub.broadcast(np.zeros(3), 0)
            await sub.close()
            await asyncio.sleep(10)
        elif group.rank == 1:
            await asyncio.sleep(10)
        else:
            with pytest.raises(dist.CollectiveTimeoutError) as expired:
                await sub.broadcast(np.zeros(3), 0, timeout=5)
            assert expired.value.missing == (1,)

    run_world(3, main)


def test_asyncio_timeout_ends_the_waiting_not_the_operation() -> None:
    async def main(group: Group) -> None:
        x = np.ones(1)
        if group.rank == 0:
            work = group.all_reduce(x)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await work
            await work
        else:
            await asyncio.sleep(3)
            await group.all_reduce(x)
        assert x[0] == 2

    run_world(2, main)


def test_abort_is_heard_by_all_and_raises_everything() -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        pending = group.irecv(np.zeros(1), tag=7)
        work = group.all_reduce(np.zeros(10)) if group.rank != 1 else None
        await asyncio.sleep(0.01)
        if group.rank == 1:
            group.abort("enough")
        for waiting in (work, pending):
            if waiting is not None:
                with pytest.raises(dist.GroupAbortedError, match="enough") as aborted:
                    await waiting
        assert aborted.value.rank == 1
        with pytest.raises(dist.GroupAbortedError):
            group.barrier()

    run_world(3, main)


def test_an_exception_in_the_block_is_told_to_the_others() -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        if group.rank == 0:
            raise KeyError("mine")
        with pytest.raises(dist.GroupAbortedError, match="rank 0 left with KeyError: 'mine'"):
            await group.barrier()

    with pytest.raises(KeyError, match="mine"):
        run_world(3, main)


def test_a_rank_that_was_cut_off_says_so_and_closes() -> None:
    async def main(group: Group, world: SimulatedWorld) -> None:
        if group.rank == 1:
            work = group.all_reduce(np.zeros(100_000))
            world.kill(1)
            with pytest.raises(dist.ClosedError, match=r"rank 1, all_reduce #0: .*cut off"):
                await work
            sub = dist.new_group([1, 0])
            assert isinstance(sub, Group)
            with pytest.raises(dist.DistError):
                sub.barrier()
        with pytest.raises(dist.DistError):
            await group.barrier()
        await asyncio.wait_for(group.close(), 40)

    run_world(2, main, pass_world=True)


class ShortPool:
    """Lends `spare` buffers and no more."""

    def __init__(self, group: Group, spare: int) -> None:
        self._pool = group.world.pool
        self._spare = spare
        self.give = self._pool.give

    def take(self, nbytes: int) -> np.ndarray:
        self._spare -= 1
        if self._spare < 0:
            raise MemoryError("no scratch")
        return self._pool.take(nbytes)


def test_an_operation_that_cannot_start_is_told_to_the_others() -> None:
    async def main(group: Group) -> None:
        x = np.ones(200_000)
        if group.rank == 1:
            backend: Any = group._backend
            backend.pool = ShortPool(group, 0)
            with pytest.raises(MemoryError):
                group.reduce(x, 0)
            backend.pool = group.world.pool
        else:
            refused = await outcome(group.reduce(x, 0))
            assert group.rank != 0 or isinstance(refused, dist.CollectiveMismatchError)
            assert group.rank != 0 or "rank 1 refused the operation: no scratch" in str(refused)
        await group.barrier()

    run_world(3, main)


def test_an_operation_that_fails_on_the_way_ends_the_group_and_no_connection() -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        if group.rank == 1:
            backend: Any = group._backend
            backend.pool = ShortPool(group, 1)
        with pytest.raises(dist.DistError, match="no scratch") as failed:
            await group.all_reduce(np.zeros(3_000_000))
        if group.rank == 1:
            assert isinstance(failed.value.__cause__, MemoryError)
        else:
            assert isinstance(failed.value, dist.GroupAbortedError)
            assert failed.value.rank == 1
        other = 1 - group.rank
        sent = group.isend(np.zeros(1), other)
        await group.recv(np.zeros(1), other)
        await sent

    run_world(2, main)


def test_a_rank_that_leaves_ends_the_collectives_of_those_not_connected_to_it() -> None:
    """In a ring of six, ranks 0, 1 and 5 have nothing to do with rank 3, and its neighbors can only fail."""

    async def main(group: Group) -> None:
        group._backend._overrides["all_reduce"] = "ring"  # type: ignore[attr-defined]
        x = np.zeros(60_000)
        await group.all_reduce(x)
        if group.rank == 3:
            return
        start_s = asyncio.get_running_loop().time()
        with pytest.raises(dist.PeerLostError, match=r"rank 3 (has )?left") as lost:
            await group.all_reduce(x)
        assert lost.value.rank == 3
        assert lost.value.left
        assert asyncio.get_running_loop().time() < start_s + 1
        with pytest.raises(dist.GroupAbortedError, match=r"rank 3 (has )?left"):
            group.barrier()
        other = {0: 1, 1: 0, 2: 4, 4: 2, 5: 5}[group.rank]
        sent = group.isend(np.zeros(1), other)
        await group.recv(np.zeros(1), other)
        await sent

    for seed in (None, 1, 2, 3):
        run_world(6, main, seed=seed)


@pytest.mark.parametrize("op", [dist.ReduceOp.PREMUL_SUM(2.0), dist.ReduceOp.AVG])
def test_an_aborted_reduction_leaves_its_array_alone(op: Any) -> None:
    """Whatever the moment, also between the slices in which large arrays are scaled and divided."""

    async def main(group: Group) -> None:
        x = np.ones(1_500_000, np.float32)
        y = np.ones(100_000, np.float32)
        ended_well = set()
        for turn in range(40):
            sub = dist.new_group()
            assert isinstance(sub, Group)
            works = [sub.all_reduce(x, op), sub.reduce(y, 0, op)]
            for _ in range(turn):
                await asyncio.sleep(0)
            sub.abort("now")
            ended_well.update(work.is_success() for work in works)
            x.fill(5)
            y.fill(5)
            for work in works:
                await outcome(work)
            await asyncio.sleep(0.1)
            assert (x == 5).all()
            assert (y == 5).all()
            await sub.close()
        assert ended_well == {True, False}
        assert not group.world.pool.lent

    run_world(2, main)


def test_an_abort_ends_point_to_point_where_collectives_have_ended_before() -> None:
    async def main(group: Group, world: SimulatedWorld) -> None:
        await group.barrier()
        if group.rank == 2:
            world.kill(2)
            return
        with pytest.raises(dist.PeerLostError):
            await group.barrier()
        if group.rank == 0:
            await asyncio.sleep(1)
            group.abort("enough")
        else:
            with pytest.raises(dist.GroupAbortedError, match=r"rank 1, recv \(rank 0\): rank 0 aborted .*enough"):
                await group.recv(np.zeros(1), 0)
        with pytest.raises(dist.GroupAbortedError, match=rf"rank {group.rank}, isend: .*enough") as aborted:
            group.isend(np.zeros(1), 1 - group.rank)
        assert aborted.value.rank == 0

    run_world(3, main, pass_world=True)


def test_an_abort_reaches_those_who_connect_later() -> None:
    """In a ring of six, rank 0 gives up before anybody is connected; only 1 and 5 are ever connected to it."""

    async def main(group: Group) -> None:
        group._backend._overrides["all_reduce"] = "ring"  # type: ignore[attr-defined]
        x = np.zeros(60_000)
        if group.rank == 0:
            group.abort("no more")
        else:
            await asyncio.sleep(0.01)
            with pytest.raises(dist.GroupAbortedError, match="no more") as aborted:
                await group.all_reduce(x)
            assert aborted.value.rank == 0
            assert asyncio.get_running_loop().time() < 1
        await asyncio.sleep(2)

    for seed in (None, 1, 2, 3):
        run_world(6, main, seed=seed)


# Point to point.


def test_messages_of_all_sizes_and_tags_arrive_in_order() -> None:
    async def main(group: Group) -> None:
        other = 1 - group.rank
        sizes = [0, 1, 16_384, 16_385, 1_000_000]
        sends = [group.isend(np.full(n, n, np.int32), other, tag) for tag in (2, 1) for n in sizes]
        for tag in (1, 2):
            for n in sizes:
                got = np.zeros(max(n, 1), np.int32)
                assert await group.recv(got, other, tag) == other
                assert (got[:n] == n).all()
        for work in sends:
            await work

    for seed in (None, 3):
        run_world(2, main, seed=seed)


def test_self_send_any_source_and_recv_array() -> None:
    async def main(group: Group) -> None:
        await group.isend(np.arange(3), group.rank, 9)
        got = np.zeros(3, int)
        assert await group.recv(got, group.rank, 9) == group.rank
        if group.rank == 0:
            sources = set()
            for _ in range(group.size - 1):
                work = group.recv_array()
                array = await work
                assert array.shape == (2, work.source_rank())
                assert array.dtype == np.float16
                sources.add(work.source_rank())
            assert sources == set(range(1, group.size))
        else:
            await group.isend(np.ones((2, group.rank), np.float16), 0)

    run_world(4, main)


def test_a_receive_that_does_not_fit_is_an_error_and_the_pair_stays_usable() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            for n in (10, 100_000):
                await group.isend(np.zeros(n, np.float32), 1)
                await group.isend(np.zeros(n, np.float32), 1)
                await group.isend(np.zeros(n, np.float32), 1)
            await group.isend(np.arange(3), 1)
            return
        for n in (10, 100_000):
            with pytest.raises(dist.CollectiveMismatchError, match=rf"rank 0 sent float32\[{n}\].*float32\[5\]"):
                await group.recv(np.zeros(5, np.float32), 0)
            with pytest.raises(dist.CollectiveMismatchError, match="float64"):
                await group.recv(np.zeros(n, np.float64), 0)
            with pytest.raises(dist.CollectiveMismatchError, match="max_bytes"):
                await group.recv_array(0, max_bytes=4 * n - 1)
        got = np.zeros(3, int)
        await group.recv(got, 0)
        assert got.tolist() == [0, 1, 2]

    run_world(2, main)


def test_a_cancelled_or_expired_recv_loses_no_message() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            await asyncio.sleep(2)
            await group.isend(np.array([1, 2]), 1)
            return
        with pytest.raises(dist.CollectiveTimeoutError, match=r"recv \(rank 0\): recv did not end within 0.5 s"):
            await group.recv(np.zeros(2, int), 0, timeout=0.5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await group.recv_array(0)
        posted = group.irecv(np.zeros(2, int), 0)
        assert posted.cancel()
        with pytest.raises(dist.ClosedError, match="withdrawn"):
            await posted
        got = np.zeros(2, int)
        await group.recv(got, 0)
        assert got.tolist() == [1, 2]

    run_world(2, main)


def test_an_irecv_outlives_its_waiter() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            await asyncio.sleep(2)
            await group.isend(np.array([5]), 1)
            return
        got = np.zeros(1, int)
        work = group.irecv(got, 0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await work
        assert await work == 0
        assert not work.cancel()
        assert got[0] == 5

    run_world(2, main)


def test_a_rank_that_leaves_fails_only_what_waits_for_it() -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        if group.rank == 0:
            return
        with pytest.raises(dist.PeerLostError, match="has left") as left:
            await group.recv(np.zeros(1), 0)
        assert left.value.rank == 0
        sent = group.isend(np.ones(1), 3 - group.rank)
        await group.recv(np.zeros(1), 3 - group.rank)
        await sent

    run_world(3, main)


def test_a_receive_from_any_source_ends_when_all_others_have_left() -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        if group.rank:
            await asyncio.sleep(group.rank)
            await group.isend(np.full(1, group.rank), 0, 1)
            return
        with pytest.raises(dist.PeerLostError, match="has left") as left:
            await group.recv_array()
        assert left.value.left
        assert asyncio.get_running_loop().time() >= 2
        assert [(await group.recv_array(tag=1))[0] for _ in range(2)] == [1, 2]
        with pytest.raises(dist.PeerLostError, match="nobody can send this any more: rank 1, 2"):
            await group.recv_array(tag=1)

    run_world(3, main)


def test_batch() -> None:
    async def main(group: Group) -> None:
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        got = np.zeros(4)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, np.full(4, group.rank), right), dist.P2POp(dist.irecv, got, left)]
        )
        with pytest.raises(dist.CollectiveMismatchError, match="int64"):
            await works[1]
        await works[0]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, np.full(4, float(group.rank)), right), dist.P2POp(dist.irecv, got, left)]
        )
        assert await works[1] == left
        assert got.tolist() == [left] * 4

    run_world(3, main)


# Groups of groups.


def test_subgroups_number_their_ranks_and_keep_apart() -> None:
    async def main(group: Group) -> None:
        evens = dist.new_group([2, 0, 4])
        odds = dist.new_group([1, 3])
        reverse = dist.new_group([4, 2, 0], sort_ranks=False)
        mine = evens if group.rank % 2 == 0 else odds
        x = np.array([group.rank])
        await dist.all_reduce(x, group=mine)
        assert x[0] == (6 if group.rank % 2 == 0 else 4)
        if group.rank % 2 == 0:
            assert isinstance(odds, dist.NonMember)
            assert dist.get_rank(odds) == dist.get_world_size(odds) == -1
            for refused in (odds.all_reduce, lambda y: dist.all_reduce(y, group=odds)):
                with pytest.raises(ValueError, match="not a member"):
                    refused(x)
            assert dist.get_process_group_ranks(reverse) == [4, 2, 0]
            assert dist.get_group_rank(reverse, 2) == 1
            assert dist.get_global_rank(reverse, 0) == 4
            with pytest.raises(ValueError, match="src=1 is not in group"):
                dist.recv(x, src=1, group=evens)
            y = np.array([float(group.rank)])
            await dist.broadcast(y, src=4, group=reverse)
            assert y[0] == 4
            if group.rank == 2:
                await dist.isend(np.array([7]), 4, group=evens)
            if group.rank == 4:
                assert await dist.recv(x, src=2, group=evens) == 2
                await evens.isend(x, 0)
            if group.rank == 0:
                assert await evens.recv(x) == 2
        async with mine if isinstance(mine, Group) else odds as entered:
            assert entered is mine

    run_world(5, main)


def test_a_lost_rank_ends_only_the_groups_it_belongs_to() -> None:
    async def main(group: Group, world: SimulatedWorld) -> None:
        low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
        await group.barrier()
        if group.rank == 3:
            world.kill(3)
            return
        with pytest.raises(dist.PeerLostError):
            await group.barrier()
        if group.rank == 2:
            assert isinstance(high, Group)
            with pytest.raises(dist.DistError):
                await high.barrier()
        else:
            assert isinstance(low, Group)
            await low.barrier()

    run_world(4, main, pass_world=True)


# Life.


def test_a_failed_work_nobody_asked_about_is_raised_at_the_end() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            await group.isend(np.zeros(2), 1)
        else:
            work = group.irecv(np.zeros(1), 0)
            work.add_done_callback(lambda _: None)
            await asyncio.sleep(1)

    with pytest.raises(dist.CollectiveMismatchError, match="receive buffer"):
        run_world(2, main)


def test_a_failure_while_closing_is_raised_once() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            await asyncio.sleep(1)
            await group.isend(np.zeros(2), 1)
            await group.isend(np.zeros(200_000), 1)
            return
        group.irecv(np.zeros(1), 0)
        sub = dist.new_group([1])
        await asyncio.sleep(1)
        large = np.zeros(200_000)
        group.irecv(large, 0)
        while not group.world.mesh.cores[0].statistics()["streams_in"]:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.0001)
        closers = [asyncio.create_task(group.close()) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(dist.ClosedError, match="is being closed"):
            group.barrier()
        results = await asyncio.gather(*closers, return_exceptions=True)
        assert [type(result) for result in results] == [dist.CollectiveMismatchError, type(None), type(None)]
        assert sub.closed
        await group.close()

    run_world(2, main, seed=3, latency_s=0.01)


def test_closing_waits_for_a_forgotten_collective_and_raises_what_became_of_it() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            group.barrier()
            with pytest.raises(dist.CollectiveMismatchError, match="rank 1 refused"):
                await group.close()
        else:
            await asyncio.sleep(1)
            with pytest.raises(TypeError):
                group.all_reduce("not an array")

    run_world(2, main)


def test_a_failure_somebody_is_about_to_hear_of_is_not_raised_by_close() -> None:
    async def main(group: Group) -> None:
        sub = dist.new_group()
        assert isinstance(sub, Group)
        if group.rank == 1:
            return
        waiter = asyncio.create_task(outcome(sub.barrier(tag=1)))
        await asyncio.sleep(0)
        closer = asyncio.create_task(sub.close())
        sub.abort("now")  # the closer runs before the waiter does
        await closer
        assert isinstance(await waiter, dist.GroupAbortedError)

    run_world(2, main)


def test_the_world_closes_its_groups_well_and_tells_nobody() -> None:
    """Rank 0 is done with its part long before the others are with theirs."""

    async def main(group: Group) -> None:
        sub = dist.new_group()
        assert isinstance(sub, Group)
        x = np.full(30_000, group.rank)
        if group.rank == 0:
            sub.broadcast(x, 0)
            sub.isend(x, 2, 5)
            return
        await asyncio.sleep(group.rank)
        await sub.broadcast(x, 0)
        assert not x.any()
        if group.rank == 2:
            await sub.recv(x, 0, 5)

    run_world(3, main)


def test_an_exception_ends_the_groups_within_too() -> None:
    async def main(group: Group) -> None:
        sub = dist.new_group([0, 1])
        if group.rank == 0:
            assert isinstance(sub, Group)
            sub.irecv(np.zeros(1), 1)
            sub.barrier(tag=1)
            await asyncio.sleep(0.1)
            raise KeyError("mine")
        if group.rank == 1:
            assert isinstance(sub, Group)
            with pytest.raises(dist.GroupAbortedError, match="rank 0 left with KeyError"):
                await sub.barrier(tag=2)
            assert asyncio.get_running_loop().time() < 1

    with pytest.raises(KeyError, match="mine"):
        run_world(3, main)


def test_what_is_closed_says_so() -> None:
    async def main(group: Group) -> None:
        sub = dist.new_group()
        assert isinstance(sub, Group)
        await dist.destroy_process_group(sub)
        with pytest.raises(dist.ClosedError, match="is closed"):
            sub.barrier()
        assert dist.is_initialized()
        await dist.destroy_process_group()
        assert not dist.is_initialized()
        with pytest.raises(ValueError, match="not been initialized"):
            dist.barrier()
        with pytest.raises(dist.ClosedError):
            group.barrier()
        await group.close()

    run_world(2, main)


def test_status_lines() -> None:
    async def main(group: Group) -> None:
        assert repr(group) == f"<ProcessGroup default rank {group.rank} of 2 backend aio open>"
        assert dist.get_backend() == "aio"
        assert dist.get_backend() == dist.Backend("GLOO")
        assert dist.get_default_group() is group
        await group.close()
        assert "closed" in repr(group)

    run_world(2, main)


def test_the_same_seed_gives_the_same_run() -> None:
    async def main(group: Group) -> float:
        for size in (3, 100_000):
            await group.all_reduce(np.zeros(size))
        return asyncio.get_running_loop().time()

    assert run_world(4, main, seed=11) == run_world(4, main, seed=11)
    assert run_world(4, main, seed=11) != run_world(4, main, seed=12)


# Backends, loops, pairs.


def test_backends_have_names_and_can_be_registered() -> None:
    from asyncdist.backend.aio import AioBackend
    from asyncdist.backend.base import GroupBackend, parse_backend

    assert parse_backend(None) == parse_backend("Gloo") == parse_backend("cpu:aio") == {"cpu": "aio"}
    for text, message in {
        "foo": "unknown or unavailable backend 'foo'",
        "nccl": "unavailable",
        "cpu:": "malformed",
        "cpu:aio,cpu:aio": "malformed",
        "cuda:aio": "none for the cpu",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse_backend(text)
    with pytest.raises(TypeError):
        dist.Backend(3)  # type: ignore[arg-type]
    started: list[str] = []

    def factory(mesh: Any, group_id: int, ranks: tuple[int, ...], rank: int) -> GroupBackend:
        class Counting(AioBackend):
            def start(self, call: Any, *arguments: Any) -> None:
                started.append(call.collective)
                super().start(call, *arguments)

        from asyncdist.executor.scratch import ScratchPool

        return Counting(mesh, group_id, ranks, rank, loop=asyncio.get_running_loop(), pool=ScratchPool(), overrides={})

    dist.Backend.register_backend("counting", factory)
    try:
        with pytest.raises(ValueError, match="registered already"):
            dist.Backend.register_backend("COUNTING", factory)
        assert dist.is_backend_available("counting")

        async def main(group: Group) -> None:
            sub = dist.new_group(backend="Counting")
            assert dist.get_backend(sub) == "counting" == dist.Backend.COUNTING  # type: ignore[attr-defined]
            await dist.barrier(sub)

        run_world(2, main)
        assert started == ["barrier", "barrier"]
    finally:
        del dist.Backend._factories["counting"]
        del dist.Backend.COUNTING  # type: ignore[attr-defined]
    assert not dist.is_nccl_available()
    assert not dist.is_mpi_available()
    assert dist.is_gloo_available()


def test_calls_from_another_loop_are_refused() -> None:
    async def main(group: Group) -> None:
        errors: list[BaseException] = []

        async def elsewhere() -> None:
            try:
                group.barrier()
            except RuntimeError as error:
                errors.append(error)

        import threading

        thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
        thread.start()
        thread.join()
        assert "another event loop" in str(errors[0])

    run_world(1, main)


def test_a_send_that_expires_breaks_its_pair() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(dist.CollectiveTimeoutError, match=r"isend \(rank 1\): isend did not end within 2 s"):
                await group.isend(np.zeros(1_000_000), 1, timeout=2)
            with pytest.raises(dist.PeerLostError):
                await group.isend(np.zeros(1), 1)
            await group.isend(np.ones(1), 2)
        elif group.rank == 1:
            with pytest.raises(dist.PeerLostError) as lost:
                await group.recv(np.zeros(1), 0, tag=1)
            assert lost.value.rank == 0
        else:
            await group.recv(np.zeros(1), 0)
        with pytest.raises(dist.DistError):
            await group.barrier()

    run_world(3, main)


def test_a_send_to_oneself_that_expires_frees_its_array() -> None:
    async def main(group: Group) -> None:
        x = np.zeros(1_000_000)
        with pytest.raises(dist.CollectiveTimeoutError):
            await group.isend(x, 0, timeout=2)
        with pytest.raises(dist.PeerLostError) as lost:
            await group.recv(np.zeros(1_000_000), 0)
        assert lost.value.rank == 0
        await group.barrier()

    run_world(1, main)
    run_world(2, lambda group: main(group) if group.rank == 0 else group.barrier())


def test_without_a_group_there_is_none() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="not been initialized"):
        dist.get_rank()

    async def main() -> None:
        with pytest.raises(ValueError, match="not been initialized"):
            dist.all_reduce(np.zeros(1))

    dist.run(main())


def test_a_world_cannot_be_initialized_twice_in_one_context() -> None:
    async def main(group: Group) -> None:
        with pytest.raises(ValueError, match="initialized already"):
            await dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)

    run_world(1, main)


async def test_several_worlds_of_one_process_and_who_finds_which() -> None:
    async def default_name() -> str:
        return dist.get_default_group().name

    def elsewhere() -> asyncio.Task[str]:
        return asyncio.get_running_loop().create_task(default_name(), context=contextvars.Context())

    store = dist.HashStore()
    async with dist.init_process_group(store=store, rank=0, world_size=1, group_name="one"):
        assert await elsewhere() == "one"
        async with dist.init_process_group(store=store, rank=0, world_size=1, group_name="two") as two:
            assert dist.get_default_group() is two
            with pytest.raises(ValueError, match="one, two"):
                await elsewhere()
            x = np.ones(1)
            await dist.all_reduce(x)
        assert dist.get_default_group().name == "one"
        assert await elsewhere() == "one"
    assert not dist.is_initialized()
    await store.close()
