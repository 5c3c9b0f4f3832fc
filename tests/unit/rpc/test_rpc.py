"""Calls between ranks in virtual time: values, errors, ends of every kind, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest

import asyncdist as dist
from asyncdist import rpc
from asyncdist.arrays.objects import encode
from asyncdist.rpc.calls import AHEAD
from asyncdist.rpc.messages import CALL, HEAD, Keys
from asyncdist.rpc.registry import look_up
from asyncdist.testing import SimulatedWorld, run_world
from asyncdist.transport.protocol.operations import SendOp
from asyncdist.work import Work

Group = dist.ProcessGroup

LARGE = 300_000
"""Bytes of an array that travels apart."""
NOTHING = {"calls issued": 0, "calls waiting": 0, "calls running": 0, "objects": 0, "tasks": 0, "sends": 0}

seen: Counter[str] = Counter()
"""What happened on callees, which share this process."""


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    seen.clear()


@rpc.register
def echo(*values: Any, **named: Any) -> list[Any]:
    return [list(values), named]


@rpc.register
async def sleep(seconds: float, value: Any = None) -> Any:
    seen["begun"] += 1
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        seen["cancelled"] += 1
        raise
    seen["slept"] += 1
    return value


@rpc.register
def fail(text: str) -> None:
    raise KeyError(text)


@rpc.register
async def fail_later() -> None:
    await asyncio.sleep(1)
    raise UnprintableError


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


@rpc.register
async def count(limit: int, fails_at: int = -1, nbytes: int = 0) -> AsyncIterator[Any]:
    try:
        for number in range(limit):
            seen["made"] += 1
            if number == fails_at:
                raise ValueError(f"no {number}")
            yield np.full(nbytes, number, np.uint8) if nbytes else number
    finally:
        seen["ended"] += 1


@rpc.register
async def stubborn(seconds: float) -> str:
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        await asyncio.sleep(seconds)
    return "at last"


@rpc.register
def unsendable() -> object:
    return object()


@rpc.register
class Account:
    def __init__(self, balance: int = 0) -> None:
        self.balance = balance

    def add(self, amount: int) -> int:
        self.balance += amount
        return self.balance

    async def wait(self) -> None:
        await asyncio.sleep(1000)

    async def wait_for(self, values: np.ndarray[Any, Any]) -> int:
        await asyncio.sleep(1)
        return int(values.sum())

    async def days(self) -> AsyncIterator[int]:
        for day in range(3):
            yield self.balance + day

    def __del__(self) -> None:
        seen["accounts dropped"] += 1


async def settled(group: Group) -> None:
    """Give what is on the way the time to come."""
    await asyncio.sleep(1)
    gc.collect()
    await asyncio.sleep(1)


def on_rank_0(size: int, body: Any, **options: Any) -> Any:
    """What `body(group)` returns on rank 0, while the others serve; nothing is left anywhere."""
    seed = options.pop("seed", None)

    async def main(group: Group) -> Any:
        result = None
        async with rpc.serve(**options):
            if group.rank == 0:
                result = await body(group)
            await settled(group)
            await group.barrier()
            assert rpc.statistics() == NOTHING
        return result

    return run_world(size, main, seed=seed)[0]


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_values_come_back_as_they_went(seed: int | None, rank: int) -> None:
    small, large = np.arange(10.0), np.arange(LARGE, dtype=np.uint8)
    strided = np.arange(2 * LARGE, dtype=np.int16).reshape(-1, 2)[:, 1]

    async def body(_group: Group) -> Any:
        return await rpc.call(rank, "echo", 1, (2, "x"), small, large, strided, key={"y": None, "z": large})

    values, named = on_rank_0(2, body, seed=seed)
    assert values[:2] == [1, (2, "x")]
    for sent, came in zip((small, large, strided), values[2:], strict=True):
        assert came.dtype == sent.dtype
        assert np.array_equal(came, sent)
        assert came.flags.writeable
    assert np.array_equal(named["key"]["z"], large)


def test_calls_are_issued_at_the_call_and_may_be_many() -> None:
    async def body(_group: Group) -> Any:
        works = [rpc.call(1, "sleep", 1.0 - number / 1000, number) for number in range(200)]
        return [await work for work in works]

    assert on_rank_0(2, body, max_calls=7) == list(range(200))


def test_no_more_calls_are_under_way_than_allowed() -> None:
    async def body(_group: Group) -> Any:
        works = [rpc.call(1, "sleep", 5.0) for _ in range(20)]
        await asyncio.sleep(1)
        assert seen["begun"] == 7
        assert rpc.statistics()["calls waiting"] == 13
        for work in works:
            await work

    on_rank_0(2, body, max_calls=7)


def test_a_caller_that_exceeds_the_limit_is_told() -> None:
    async def main(group: Group) -> None:
        async with rpc.serve(max_calls=5 if group.rank == 0 else 2):
            if group.rank == 0:
                works = [rpc.call(1, "sleep", 1.0) for _ in range(3)]
                with pytest.raises(dist.RemoteError, match="max_calls=2"):
                    await works[2]
                await works[0]

    run_world(2, main)


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("fail", "KeyError", "'why'"),
        ("nowhere", "LookupError", "nothing is registered as 'nowhere'"),
        ("unsendable", "TypeError", "object"),
        ("fail_later", "UnprintableError", "its text raises ValueError"),
        ("count", "TypeError", "use rpc.stream"),
    ],
)
def test_errors_come_with_their_traceback(name: str, kind: str, text: str) -> None:
    async def body(_group: Group) -> None:
        arguments = {"fail": ["why"], "count": [3]}.get(name, [])
        with pytest.raises(dist.RemoteError, match=rf"rank 0, rpc '{name}' \(rank 1\): raised {kind}") as caught:
            await rpc.call(1, name, *arguments)
        assert (caught.value.rank, caught.value.kind) == (1, kind)
        assert text in str(caught.value)
        assert "Traceback (most recent call last)" in caught.value.traceback or not name.startswith("fail")
        if name == "fail":
            assert "raise KeyError(text)" in caught.value.traceback
            assert "serving.py" not in caught.value.traceback

    on_rank_0(2, body)


def test_wrong_calls_raise_here() -> None:
    async def body(_group: Group) -> None:
        with pytest.raises(TypeError, match="cannot be encoded"):
            rpc.call(1, "echo", object())
        with pytest.raises(ValueError, match="rank"):
            rpc.call(2, "echo")
        with pytest.raises(ValueError, match="timeout"):
            rpc.call(1, "echo", timeout=-1)
        with pytest.raises(RuntimeError, match="serves the group already"):
            async with rpc.serve():
                pass
        with ThreadPoolExecutor() as threads, pytest.raises(RuntimeError, match="another thread"):
            threads.submit(copy_context().run, rpc.call, 1, "echo").result()

    on_rank_0(2, body)


async def test_calls_need_a_server() -> None:
    async with dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1):
        with pytest.raises(RuntimeError, match=r"async with rpc.serve\(\)"):
            rpc.call(0, "echo")
        with pytest.raises(ValueError, match="max_calls"):
            async with rpc.serve(max_calls=0):
                pass


def test_names_are_taken_once() -> None:
    def other() -> None:
        pass

    with pytest.raises(ValueError, match="'echo' is registered already"):
        rpc.register("echo")(other)
    with pytest.raises(ValueError, match="'timeout'"):
        rpc.register(lambda timeout: timeout)
    with pytest.raises(LookupError):
        look_up("other")
    assert rpc.register("echo")(echo) is echo


# Ends


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


# Streams


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("nbytes", [0, 10, LARGE])
def test_a_stream_yields_in_order_and_runs_little_ahead(seed: int | None, nbytes: int) -> None:
    async def body(_group: Group) -> Any:
        items = []
        async for item in rpc.stream(1, "count", 40, nbytes=nbytes):
            items.append(int(item[-1]) if nbytes else item)
            await asyncio.sleep(1)
            assert seen["made"] - len(items) <= AHEAD
        return items

    assert on_rank_0(2, body, seed=seed) == list(range(40))
    assert seen["ended"] == 1


def test_an_error_comes_behind_the_items_before_it() -> None:
    async def body(_group: Group) -> Any:
        items = rpc.stream(1, "count", 10, fails_at=5)
        taken = [await anext(items) for _ in range(5)]
        with pytest.raises(dist.RemoteError, match="raised ValueError: no 5"):
            await anext(items)
        with pytest.raises(dist.RemoteError, match=r"use rpc\.call"):
            await anext(rpc.stream(1, "sleep", 1.0))
        return taken

    assert on_rank_0(2, body) == list(range(5))


@pytest.mark.parametrize("how", ["break", "aclose", "cancel"])
@pytest.mark.parametrize("taken", [1, 3, 20])
def test_a_stream_ended_early_ends_its_generator(how: str, taken: int) -> None:
    async def body(_group: Group) -> None:
        items = rpc.stream(1, "count", 1000, nbytes=LARGE)

        async def take() -> None:
            for _ in range(taken):
                await anext(items)
            if how == "cancel":
                async for _item in items:
                    await asyncio.sleep(0)

        task = asyncio.create_task(take())
        if how == "cancel":
            await asyncio.sleep(1e-4)
            task.cancel()
            await asyncio.wait([task])
        else:
            await task
        if how == "break":
            async for _item in rpc.stream(1, "count", 1000):
                break
        await items.aclose()
        await settled(_group)
        assert seen["ended"] == (2 if how == "break" else 1)

    on_rank_0(2, body)


def test_a_stream_of_a_rank_that_dies_ends() -> None:
    async def main(group: Group, world: SimulatedWorld) -> None:
        async with rpc.serve():
            if group.rank == 1:
                await asyncio.sleep(5)
                world.kill(1)
            else:
                last = -1
                with contextlib.suppress(dist.PeerLostError):
                    async for item in rpc.stream(1, "count", 10**9):
                        last = item
                        await asyncio.sleep(1)
                assert last >= 4
                await settled(group)
                assert rpc.statistics() == NOTHING

    run_world(2, main, pass_world=True)


# References


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_objects_stay_until_they_are_released(seed: int | None) -> None:
    async def body(_group: Group) -> None:
        with await rpc.create(1, "Account", 10) as account:
            other = await rpc.create(1, "Account")
            assert await account.call("add", 5) == 15
            assert await other.call("add", 1) == 1
            assert [day async for day in account.stream("days")] == [15, 16, 17]
            with pytest.raises(dist.RemoteError, match="private"):
                await account.call("__init__")
            with pytest.raises(dist.RemoteError, match="no attribute 'burn'"):
                await account.call("burn")
            last = account.call("add", 1)
        assert await last == 16
        with pytest.raises(RuntimeError, match="released"):
            account.call("add", 1)
        account.release()
        await settled(_group)
        assert seen["accounts dropped"] == 1
        assert await other.call("add", 1) == 2
        del other
        await settled(_group)
        assert seen["accounts dropped"] == 2

    on_rank_0(2, body, seed=seed)


def test_calls_of_an_object_keep_it() -> None:
    """Also those that wait for their turn, or whose arrays are on the way; and a stream."""

    async def body(group: Group) -> None:
        works = []
        with await rpc.create(1, "Account", 1) as account:
            works = [account.call("wait_for", np.ones(LARGE)) for _ in range(5)]
            days = account.stream("days")
        for work in works:
            assert await work == LARGE
        assert [day async for day in days] == [1, 2, 3]
        assert await (await rpc.create(1, "Account", 1)).call("wait_for", np.ones(3)) == 3
        del work, works, days, account
        await settled(group)
        assert seen["accounts dropped"] == 2

    on_rank_0(2, body, max_calls=2)


@pytest.mark.parametrize("seed", range(8))
def test_an_object_whose_creation_is_cancelled_is_dropped(seed: int) -> None:
    async def body(_group: Group) -> None:
        for turns in range(8):
            work = rpc.create(1, "Account")
            for _ in range(turns):
                await asyncio.sleep(0 if seed < 4 else 1e-5)
            work.cancel()
            del work
        await settled(_group)

    on_rank_0(2, body, seed=seed)


def test_a_reference_does_not_outlive_its_service() -> None:
    async def main(group: Group) -> None:
        async with rpc.serve():
            account = await rpc.create(1 - group.rank, "Account")
        with pytest.raises(RuntimeError, match="has ended"):
            account.call("add", 1)
        gc.collect()

    run_world(2, main)
    gc.collect()
    assert seen["accounts dropped"] == 2


# What a rank sends that does not keep to the rules


@pytest.mark.parametrize(
    ("head", "payload"),
    [
        (b"", b""),
        (HEAD.pack(77, 1, 0), b""),
        (HEAD.pack(CALL, 1, 0), b"nonsense"),
        (HEAD.pack(CALL, 1, 0), bytes(encode([1, 2]))),
    ],
)
def test_nonsense_breaks_the_pair_and_nothing_else(head: bytes, payload: bytes) -> None:
    async def main(group: Group) -> Any:
        with contextlib.suppress(dist.PeerLostError):
            async with rpc.serve():
                await asyncio.sleep(1)
                if group.rank == 0:
                    keys = Keys(group.group_id, 0)
                    group.world.mesh.post_send(1, SendOp(keys.requests, memoryview(payload), head, Work, None))  # type: ignore[arg-type]
                    await asyncio.sleep(1)
                    with pytest.raises(dist.PeerLostError):
                        await rpc.call(1, "echo")
                elif group.rank == 2:
                    await asyncio.sleep(2)
                    return await rpc.call(1, "echo", "still")
        return None

    assert run_world(3, main)[2] == [["still"], {}]
