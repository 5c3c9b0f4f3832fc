"""Ends of calls, of callers and of callees, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import numpy as np
import pytest
from rpc_kit import (
    LARGE,
    NOTHING,
    Group,
    on_rank_0,
    seen,
)

import asyncdist as dist
from asyncdist import rpc
from asyncdist.testing import SimulatedWorld, run_world
from asyncdist.work import Work


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("how", ["cancelled", "timed out", "work.cancel"])
def test_a_call_that_is_given_up_is_cancelled_there(how: str, seed: int | None) -> None:
    async def body(_group: Group) -> None:
        work = rpc.call(1, "sleep", 1000.0, timeout=2 if how == "timed out" else None)
        if how == "timed out":
            with pytest.raises(dist.CollectiveTimeoutError, match=r"'sleep' \(rank 1\).* 2 s") as caught:
                await work
            assert caught.value.missing == (1,)
        elif how == "cancelled":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2):
                    await work
        else:
            await asyncio.sleep(2)
            assert work.cancel()
            assert not work.cancel()
            with pytest.raises(dist.ClosedError, match="was cancelled here"):
                await work
        await asyncio.sleep(1)
        assert seen == {"begun": 1, "cancelled": 1}

    on_rank_0(2, body, seed=seed)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["echo", "sleep"])
def test_a_call_cancelled_at_any_time_leaves_nothing(seed: int, name: str) -> None:
    """Its array is on the way, or its answer; the next call of the same rank is right."""
    large = np.arange(LARGE, dtype=np.uint8)

    async def body(_group: Group) -> None:
        for turns in range(12):
            work = rpc.call(1, name, *([0.0, large] if name == "sleep" else [large, large]))
            for _ in range(turns):
                await asyncio.sleep(0 if seed < 6 else 1e-5)
            work.cancel()
            large[:] = turns  # it is ours again
            _, named = await rpc.call(1, "echo", again=large)
            assert (named["again"] == turns).all()

    on_rank_0(2, body, seed=seed)


def test_a_call_that_waits_for_its_turn_may_be_cancelled() -> None:
    async def body(_group: Group) -> None:
        first, second, third = (rpc.call(1, "sleep", 5.0) for _ in range(3))
        await asyncio.sleep(1)
        assert second.cancel()
        await first
        await third
        assert seen == {"begun": 2, "slept": 2}

    on_rank_0(2, body, max_calls=1)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_every_call_to_a_rank_that_dies_ends_at_once_and_others_go_on(seed: int | None) -> None:
    async def main(group: Group, world: SimulatedWorld) -> None:
        async with rpc.serve(max_calls=4):
            if group.rank != 0:
                await asyncio.sleep(5)
                if group.rank == 1:
                    world.kill(1)
                return
            loop = asyncio.get_running_loop()
            lost = [rpc.call(1, "sleep", 1000.0) for _ in range(3000)]
            kept = rpc.call(2, "sleep", 4.0, "kept")
            outcomes = await asyncio.gather(*lost, return_exceptions=True)
            assert 5 <= loop.time() <= 6
            assert {type(one) for one in outcomes} == {dist.PeerLostError}
            assert {one.rank for one in outcomes if isinstance(one, dist.PeerLostError)} == {1}
            assert "'sleep' (rank 1): " in str(outcomes[0])
            assert await kept == "kept"
            assert await rpc.call(2, "echo") == [[], {}]
            with pytest.raises(dist.PeerLostError):
                await rpc.call(1, "echo")
            assert rpc.statistics() == NOTHING

    run_world(3, main, seed=seed, pass_world=True)


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("how", ["killed", "raises", "leaves"])
def test_the_calls_and_objects_of_a_caller_end_with_it(how: str, seed: int | None) -> None:
    async def main(group: Group, world: SimulatedWorld) -> None:
        with contextlib.suppress(ZeroDivisionError):
            async with rpc.serve():
                if group.rank == 0:
                    account = await rpc.create(1, "Account", 5)
                    works = [rpc.call(1, "sleep", 500.0), account.call("wait")]
                    items = rpc.stream(1, "count", 1000)
                    assert await anext(items) == 0
                    await asyncio.sleep(5)
                    if how == "killed":
                        world.kill(0)
                    if how == "raises":
                        raise ZeroDivisionError
                    for work in works:
                        work.cancel()
                    await items.aclose()
                else:
                    await asyncio.sleep(4)
                    assert rpc.statistics() == NOTHING | {"calls running": 3, "objects": 1, "tasks": 3}
                    await asyncio.sleep(4)
                    gc.collect()
                    assert rpc.statistics() | {"objects": 0} == NOTHING
                    assert seen["cancelled"] == seen["ended"] == 1
        gc.collect()
        assert seen["accounts dropped"] == 1 or group.rank == 0

    run_world(2, main, seed=seed, pass_world=True)


def test_a_rank_that_stops_serving_says_so() -> None:
    """To those whose calls are under way there, and to those that call later."""

    async def main(group: Group) -> None:
        if group.rank == 1:
            with contextlib.suppress(ZeroDivisionError):
                async with rpc.serve():
                    await asyncio.sleep(5)
                    raise ZeroDivisionError
            await asyncio.sleep(20)
        else:
            with contextlib.suppress(dist.DistError):
                async with rpc.serve():
                    for pause in (1, 10):
                        works = [rpc.call(1, "sleep", 100.0), rpc.call(1, "echo", np.zeros(LARGE))]
                        if pause == 1:
                            await works[1]
                        for work in works if pause == 10 else works[:1]:
                            with pytest.raises(dist.PeerLostError, match="does not serve calls any more") as caught:
                                await work
                            assert caught.value.left
                        await asyncio.sleep(pause)
                    raise dist.ClosedError

    run_world(2, main)


def test_a_call_waits_until_its_rank_serves() -> None:
    async def main(group: Group) -> Any:
        for turn in range(3):
            if group.rank == 1:
                await asyncio.sleep(5)
            async with rpc.serve():
                if group.rank == 0:
                    assert await rpc.call(1, "echo", turn) == [[turn], {}]
                else:
                    assert await rpc.call(0, "echo", turn) == [[turn], {}]

    run_world(2, main)


def test_ranks_serve_until_the_last_has_done_its_calls() -> None:
    """A rank that is lost, even while others wait in vain for it, does not end the service of those that are left."""

    async def main(group: Group, world: SimulatedWorld) -> Any:
        async with rpc.serve():
            if group.rank == 2:
                await asyncio.sleep(2)
                world.kill(2)
            if group.rank == 1:
                await asyncio.sleep(10)
                return await rpc.call(0, "echo", "late")
        return None

    assert run_world(4, main, pass_world=True) == [None, [["late"], {}], None, None]


def test_own_calls_are_waited_for() -> None:
    async def main(group: Group) -> Any:
        async with rpc.serve():
            if group.rank == 0:
                work: Work[Any] = rpc.call(1, "sleep", 5.0, "done")
        return work.result() if group.rank == 0 else None

    assert run_world(2, main)[0] == "done"


def test_a_stream_that_nobody_goes_on_with_does_not_hold_up_the_end() -> None:
    async def main(group: Group) -> Any:
        async with rpc.serve():
            items = rpc.stream(1 - group.rank, "count", 1000)
            assert await anext(items) == 0
        await items.aclose()

    run_world(2, main)
    assert seen["ended"] == 2


@pytest.mark.parametrize("seed", range(4))
def test_the_end_of_a_callee_is_told_to_all_that_call_meanwhile(seed: int) -> None:
    """Its coroutine takes its time over being cancelled."""

    async def main(group: Group) -> None:
        with contextlib.suppress(ZeroDivisionError):
            async with rpc.serve():
                if group.rank == 0:
                    await asyncio.sleep(5)
                    raise ZeroDivisionError
                held, longer = rpc.call(0, "stubborn", 3.0), rpc.call(0, "stubborn", 100.0)
                for _ in range(20):
                    await asyncio.sleep(0.5)
                    with contextlib.suppress(dist.PeerLostError):
                        await rpc.call(0, "echo", timeout=1)
                assert await held == "at last"
                with pytest.raises(dist.PeerLostError, match="does not serve"):
                    await longer
                with pytest.raises(dist.PeerLostError, match="does not serve"):
                    await rpc.call(0, "echo", timeout=1)
                raise ZeroDivisionError
        await asyncio.sleep(20)

    run_world(4, main, seed=seed)


def test_smaller_groups_have_calls_of_their_own() -> None:
    async def main(group: Group) -> Any:
        odd = dist.new_group([1, 3])
        async with rpc.serve():
            if group.rank in (1, 3):
                async with rpc.serve(group=odd):
                    if group.rank == 1:
                        with pytest.raises(ValueError, match="rank=2"):
                            rpc.call(2, "echo", group=odd)
                        return await rpc.call(3, "echo", 1, group=odd), await rpc.call(2, "echo", 2)
        return None

    assert run_world(4, main)[1] == ([[1], {}], [[2], {}])
