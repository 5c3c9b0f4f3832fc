"""What becomes of operations when ranks die, leave, are late or abort."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from group_kit import Group, outcome
from socket_world import run_ranks

import asyncdist as dist
from asyncdist.group import deadlines as expiry
from asyncdist.group.deadlines import ASK_S
from asyncdist.testing import SimulatedWorld, run_world
from asyncdist.world.world import World


def test_a_lost_rank_is_named_by_everybody() -> None:
    async def main(group: Group, world: SimulatedWorld) -> None:
        await group.barrier()
        await asyncio.sleep(2 if group.rank == 2 else 1)
        if group.rank == 2:
            work = group.all_reduce(np.zeros(10))
            world.kill(2)
            await work
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


def test_a_deadline_before_the_first_question_is_kept() -> None:
    """Those that are late are asked from ASK_S on; a deadline is not looked at only then."""
    timeout_s = ASK_S / 5

    async def main(group: Group) -> float:
        await group.barrier()
        loop = asyncio.get_running_loop()
        if group.rank == 1:
            await asyncio.sleep(2 * ASK_S)
            return timeout_s
        issued_s = loop.time()
        with pytest.raises(dist.CollectiveTimeoutError, match="missing: rank 1"):
            await group.barrier(timeout=timeout_s)
        return loop.time() - issued_s

    for passed_s in run_world(2, main):
        assert timeout_s <= passed_s < 2 * timeout_s


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


@pytest.mark.parametrize(
    ("takes_s", "silent", "passed_s", "said"),
    [(0.2, False, 5.2, True), (0.2, True, 5.5, True), (9, False, 5.5, False), (9, True, 5.5, False)],
)
def test_the_error_says_why_where_that_is_known_in_time(
    monkeypatch: pytest.MonkeyPatch, takes_s: float, silent: bool, passed_s: float, said: bool
) -> None:
    asked = []

    async def why(self: World, ranks: Sequence[int], about: Mapping[str, Any]) -> str:
        asked.append((self.rank, *ranks, about["tag"], about["sequence"]))
        await asyncio.sleep(takes_s)
        return "Rank 1 sleeps."

    monkeypatch.setattr(World, "asks", property(lambda self: self.rank == 0))
    monkeypatch.setattr(World, "why", why)

    async def main(group: Group) -> None:
        if group.rank == 1:
            if silent:
                monkeypatch.setattr(group._core._deadlines, "answer_probe", lambda *question: None)
            await asyncio.sleep(20)
            return
        begun_s = asyncio.get_running_loop().time()
        works = [group.barrier(timeout=5), group.barrier(timeout=5), group.barrier(tag=3, timeout=5)]
        for work in works:
            with pytest.raises(dist.CollectiveTimeoutError, match="timed out on rank 0") as expired:
                await work
            assert str(expired.value).endswith(". Rank 1 sleeps." if said else "there)" if not silent else "answer)")
        assert asyncio.get_running_loop().time() - begun_s == pytest.approx(passed_s, abs=0.05)
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if "asks why" in task.get_name()]

    run_world(2, main)
    assert asked == [(0, 1, 0, 0)]


def test_an_operation_that_ends_while_others_are_asked_why_has_ended_well(monkeypatch: pytest.MonkeyPatch) -> None:
    async def why(self: World, ranks: Sequence[int], about: Mapping[str, Any]) -> str:
        await asyncio.sleep(0.4)
        return "Rank 1 sleeps."

    monkeypatch.setattr(World, "asks", True)
    monkeypatch.setattr(World, "why", why)

    async def main(group: Group) -> None:
        for _ in range(2):
            await asyncio.sleep(5.2 if group.rank == 1 else 0)
            await group.barrier(timeout=5)

    run_world(2, main)


@pytest.mark.parametrize(("dials", "connected"), [(6, True), (5, False)])
def test_who_issued_but_is_not_connected_is_not_missing(
    monkeypatch: pytest.MonkeyPatch, dials: int, connected: bool
) -> None:
    """In a ring of six, rank 0's neighbors are 1 and 5; it expires first, and only rank 3 is to blame."""
    monkeypatch.setattr(expiry, "MAX_PROBE_DIALS", dials)

    async def main(group: Group) -> tuple[int, ...]:
        group._core._backend._overrides["all_reduce"] = "ring"  # type: ignore[attr-defined]
        if group.rank == 3:
            await asyncio.sleep(7)
        with pytest.raises(dist.CollectiveError, match=r"all_reduce #0:? timed out on rank 0") as expired:
            await group.all_reduce(np.zeros(60_000), timeout=5 if group.rank == 0 else 50)
        if group.rank == 0:
            connections = group.world.mesh.statistics()["peers"].get("memory", 0)
            assert connections == (5 if connected else 2)
        return getattr(expired.value, "missing", ())

    for missing in run_world(6, main)[:3]:
        assert missing == (3,) if connected else 3 not in missing


def test_who_issued_and_closed_the_group_is_not_missing() -> None:
    async def main(group: Group) -> None:
        group._core._backend._overrides["broadcast"] = "chain"  # type: ignore[attr-defined]
        sub = dist.new_group([0, 1, 2])
        assert isinstance(sub, Group)
        sub._core._backend._overrides["broadcast"] = "chain"  # type: ignore[attr-defined]
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


def test_an_expired_collective_says_why_ranks_are_missing() -> None:
    async def main(group: Group, world: SimulatedWorld) -> None:
        await group.barrier()
        if group.rank == 3:  # makes no group
            await asyncio.sleep(10)
            return
        sub = dist.new_group([0, 1, 2, 3, 4], group_desc="sub")
        assert isinstance(sub, Group)
        if group.rank == 1:
            await sub.close()
        elif group.rank == 4:
            sub._core.control = lambda *_: None  # type: ignore[method-assign]  # as a loop that does not run
        elif group.rank == 0:
            with pytest.raises(dist.CollectiveTimeoutError) as expired:
                await sub.barrier(timeout=ASK_S / 2)  # else who has closed the group is named at once
            assert expired.value.missing == (1, 2, 3, 4)
            assert str(expired.value) == (
                "group sub, rank 0, barrier #0: timed out on rank 0; "
                "missing: rank 1 (group closed there), 2 (not called there), 3 (group not made there), 4 (no answer)"
            )
        await asyncio.sleep(10)

    run_world(5, main, pass_world=True)


def test_no_operation_or_rank_is_named_twice() -> None:
    async def main(group: Group) -> None:
        where = f"group default, rank {group.rank}, all_reduce"
        work = group.all_reduce(np.zeros(1))
        if group.rank == 0:
            await work
            group.abort("enough")
        else:
            await work
            with pytest.raises(dist.GroupAbortedError) as first:
                await group.all_reduce(np.zeros(1))
            assert str(first.value) == f"{where} #1: rank 0 aborted the group: enough"
            assert first.value.reason == "enough"
        with pytest.raises(dist.GroupAbortedError) as later:
            group.all_reduce(np.zeros(1))
        assert str(later.value) == f"{where}: rank 0 aborted the group: enough"
        assert later.value.reason == "enough"

    run_world(2, main)


def test_a_rank_that_fails_is_named_to_the_others_with_its_failure() -> None:
    def spoiled(*_arguments: Any) -> None:
        raise MemoryError

    async def main(group: Group) -> None:
        function = spoiled if group.rank == 0 else np.add
        group._core._backend._overrides["all_reduce"] = "linear"  # type: ignore[attr-defined]  # where rank 0 reduces for all
        op = dist.ReduceOp.custom(function, name="sum")
        with pytest.raises(dist.DistError) as failed:
            await group.all_reduce(np.ones(4), op)
        where = f"group default, rank {group.rank}, all_reduce"
        if group.rank == 0:
            assert str(failed.value).startswith(f"{where} #0: ")
            assert "MemoryError" in str(failed.value)
        else:
            assert str(failed.value).startswith(f"{where} #0: rank 0 failed in all_reduce #0: ")
            assert isinstance(failed.value, dist.GroupAbortedError)
        with pytest.raises(
            dist.GroupAbortedError, match=r"aborted: rank 0 failed in all_reduce #0: .*MemoryError"
        ) as later:
            group.all_reduce(np.ones(4))
        assert later.value.rank == 0
        assert str(later.value).count("group default") == 1

    run_world(2, main)


@pytest.mark.parametrize("progress", ["loop", "thread"])
async def test_whoever_waits_too_long_is_told_for_whom(progress: Any) -> None:
    async def main(group: Any) -> None:
        if group.rank == 0:
            work = group.all_reduce(np.zeros(3))
            with pytest.raises(dist.WaitTimeoutError) as late:
                await work.wait(0.05)
            assert str(late.value) == (
                "group default, rank 0, all_reduce #0: did not end within 0.05 s (the operation goes on); it waits for "
                "rank 1"
            )
            receive = group.irecv(np.zeros(3), 1, tag=7)
            with pytest.raises(
                dist.WaitTimeoutError, match=r"^group default, rank 0, irecv \(rank 1\): did not end within 0.05 s"
            ):
                await receive.wait(0.05)
            await group.isend(np.zeros(1), 1)
            await work
            receive.cancel()
        else:
            await group.recv(np.zeros(1), 0)
            await group.all_reduce(np.zeros(3))

    await run_ranks(2, main, progress=progress)


def test_operations_that_wait_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all of them when any of them is due to be asked about: that was a turn of a thousand looks for each."""
    looks: list[int] = []
    check = expiry.Deadlines._check

    def counted(self: expiry.Deadlines) -> None:
        looks.append(len(self._works))
        check(self)

    monkeypatch.setattr(expiry.Deadlines, "_check", counted)

    async def main(group: Group) -> None:
        works = []
        for tag in range(2):
            for _ in range(50):
                works.append(group.all_reduce(np.zeros(1), tag=tag) if group.rank == 0 else None)
                await asyncio.sleep(0.003)
        await asyncio.sleep(4)
        group.abort()
        for work in filter(None, works):
            await outcome(work)

    run_world(2, main)
    assert len([looked for looked in looks if looked > 50]) <= 5 / expiry.LOOK_S


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
            world.network.cut(1, world.world_id)
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
            backend: Any = group._core._backend
            backend.resources = backend.resources._replace(pool=ShortPool(group, 0))
            with pytest.raises(MemoryError):
                group.reduce(x, 0)
            backend.resources = backend.resources._replace(pool=group.world.pool)
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
            backend: Any = group._core._backend
            backend.resources = backend.resources._replace(pool=ShortPool(group, 1))
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
        group._core._backend._overrides["all_reduce"] = "ring"  # type: ignore[attr-defined]
        x = np.zeros(60_000)
        await group.all_reduce(x)
        if group.rank == 3:
            return
        # All have ended the first, and begin the second together: who fails it ends for all what is under way.
        start_s = 10.0
        await asyncio.sleep(start_s - asyncio.get_running_loop().time())
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
        group._core._backend._overrides["all_reduce"] = "ring"  # type: ignore[attr-defined]
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
