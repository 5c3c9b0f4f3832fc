"""Checks of waiting: wake-ups, time-outs, cancellation, and several clients at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Final

from asyncdist.errors import ClosedError, StoreTimeoutError
from asyncdist.testing.checks import checks_of, expect_refused
from asyncdist.testing.store_check_tools import (
    LONG_S,
    SHORT_S,
    OpenStore,
    StoreCheck,
    clients,
    expect,
    expect_none,
    expect_pending,
    expect_raises,
    task,
)

__all__ = ["WAIT_CHECKS"]


async def every_write_wakes_a_get(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        writes: dict[str, Callable[[str], Awaitable[object]]] = {
            "set": lambda key: b.set(key, "7"),
            "add": lambda key: b.add(key, 7),
            "append": lambda key: b.append(key, "7"),
            "compare_set": lambda key: b.compare_set(key, "", "7"),
            "multi_set": lambda key: b.multi_set([key], ["7"]),
        }
        for key, write in writes.items():
            waiting = task(a.get(key))
            await expect_pending(waiting, a)
            await write(key)
            expect(await waiting, b"7")


async def wait_needs_all_keys(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        waiting, values = task(a.wait(["x", "y"])), task(a.multi_get(["y", "x"]))
        await b.set("x", "1")
        await expect_pending(waiting, a)
        await expect_pending(values, a)
        await b.set("y", "2")
        await expect_none(waiting)
        expect(await values, [b"2", b"1"])
        await expect_none(a.wait([]))


async def wait_needs_all_keys_at_one_moment(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        waiting = task(a.wait(["x", "y"]))
        await expect_pending(waiting, a)
        await b.set("x", "1")
        await b.delete_key("x")
        await b.set("y", "1")
        await expect_pending(waiting, a)
        await b.set("x", "2")
        await waiting


async def wait_sees_queues(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        waiting = task(a.wait(["q"]))
        await expect_pending(waiting, a)
        await b.queue_push("q", "item")
        await waiting
        expect(await b.queue_len("q"), 1)


async def one_write_wakes_everybody(open_store: OpenStore) -> None:
    async with clients(open_store, 3) as (a, b, c):
        waiting = [task(store.get("k")) for store in (a, b, c) for _ in range(10)]
        await expect_pending(waiting[0], a)
        await a.set("k", "v")
        expect(await asyncio.gather(*waiting), [b"v"] * len(waiting))


async def expiry_names_the_missing_keys(open_store: OpenStore) -> None:
    async with clients(open_store, 1) as (a,):
        await a.set("here", "1")
        error = await expect_raises(StoreTimeoutError, lambda: a.wait(["here", "x", "y"], SHORT_S))
        expect(sorted(error.keys), ["x", "y"])
        for text in ("wait", "x", "y"):
            expect(text in str(error), True)
        error = await expect_raises(StoreTimeoutError, lambda: a.get("z", timeout=timedelta(seconds=SHORT_S)))
        expect(error.keys, ("z",))
        error = await expect_raises(StoreTimeoutError, lambda: a.multi_get(["here", "z"], timeout=SHORT_S))
        expect(error.keys, ("z",))
        error = await expect_raises(StoreTimeoutError, lambda: a.queue_pop("q", timeout=SHORT_S))
        expect(error.keys, ("q",))
        expect(isinstance(error, TimeoutError), True)


async def zero_timeout_returns_what_is_there(open_store: OpenStore) -> None:
    async with clients(open_store, 1) as (a,):
        await a.set("k", "v")
        await a.queue_push("q", "item")
        expect(await a.get("k", timeout=0), b"v")
        await a.wait(["k"], 0)
        expect(await a.multi_get(["k"], timeout=0), [b"v"])
        expect(await a.queue_pop("q", timeout=0), b"item")
        await expect_raises(StoreTimeoutError, lambda: a.get("none", timeout=0))
        await expect_raises(StoreTimeoutError, lambda: a.queue_pop("q", timeout=0))


async def store_timeout_is_inherited(open_store: OpenStore) -> None:
    async with clients(open_store, 1) as (a,):
        a.set_timeout(LONG_S)
        expect(a.timeout, LONG_S)
        a.set_timeout(timedelta(seconds=SHORT_S))
        expect(a.timeout, SHORT_S)
        await expect_raises(StoreTimeoutError, lambda: a.get("none"))
        await expect_raises(StoreTimeoutError, lambda: a.queue_pop("none"))
        a.set_timeout(None)
        expect(a.timeout, None)
        waiting = task(a.get("k"))
        await expect_pending(waiting, a)
        await a.set("k", "v")
        expect(await waiting, b"v")


async def expiry_leaves_the_store_usable(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        await expect_raises(StoreTimeoutError, lambda: a.get("k", timeout=SHORT_S))
        await expect_raises(StoreTimeoutError, lambda: a.queue_pop("q", timeout=SHORT_S))
        await b.set("k", "v")
        await b.queue_push("q", "item")
        expect(await b.queue_len("q"), 1)  # the expired pop took nothing
        expect(await a.get("k"), b"v")
        expect(await a.queue_pop("q"), b"item")


async def cancelled_get_is_withdrawn(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        waiting: list[asyncio.Future[Any]] = [task(a.get("k")), task(a.wait(["k"])), task(a.multi_get(["k"]))]
        await expect_pending(waiting[0], a)
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        expect([each.cancelled() for each in waiting], [True] * 3)
        await b.set("k", "v")
        expect(await a.get("k"), b"v")


async def cancelled_pop_takes_nothing(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        for turns in range(6):  # before it is issued, in the middle of being sent, while it waits
            waiting = task(a.queue_pop("q"))
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            expect(waiting.cancelled(), True)
            await b.queue_push("q", f"item {turns}")
            expect(await a.queue_pop("q"), f"item {turns}".encode())


async def pushes_are_all_popped_once(open_store: OpenStore) -> None:
    async with clients(open_store, 3) as (a, b, c):
        waiting = [task(store.queue_pop("q")) for _ in range(10) for store in (a, b)]
        await expect_pending(waiting[0], a)
        await asyncio.gather(*(task(c.queue_push("q", f"{index:02}")) for index in range(len(waiting))))
        popped = await asyncio.gather(*waiting)
        expect(sorted(popped), [f"{index:02}".encode() for index in range(len(waiting))])
        expect(await c.queue_len("q"), 0)


async def racing_pop_and_cancel_lose_nothing(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        popped: list[bytes] = []
        count = 30
        for index in range(count):
            waiting = task(a.queue_pop("race"))
            pushing = task(b.queue_push("race", str(index)))
            for _ in range(index % 5):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            await pushing
            if not waiting.cancelled():
                popped.append(waiting.result())
        while await b.queue_len("race"):
            popped.append(await b.queue_pop("race", block=False))
        expect(sorted(map(int, popped)), list(range(count)))


async def racing_adds_count_exactly(open_store: OpenStore) -> None:
    async with clients(open_store, 3) as stores:
        sums = await asyncio.gather(*(task(store.add("n", 1)) for _ in range(40) for store in stores))
        expect(sorted(sums), list(range(1, 121)))
        expect(await stores[0].add("n", 0), 120)


async def racing_compare_sets_have_one_winner(open_store: OpenStore) -> None:
    async with clients(open_store, 3) as stores:
        for turn in range(5):
            names = [f"{turn}-{index}".encode() for index in range(len(stores))]
            calls = [
                task(store.compare_set(f"leader{turn}", b"", name)) for store, name in zip(stores, names, strict=True)
            ]
            seen = set(await asyncio.gather(*calls))
            expect(len(seen), 1)
            expect(await stores[0].get(f"leader{turn}"), seen.pop())


async def barrier_waits_for_everybody(open_store: OpenStore) -> None:
    async with clients(open_store, 3) as stores:
        for _ in range(2):  # one key serves again
            early = [task(store.barrier("b", 3)) for store in stores[:2]]
            await expect_pending(early[0], stores[2])
            await expect_none(stores[2].barrier("b", 3))
            await asyncio.gather(*early)
        await expect_none(stores[0].barrier("alone", 1, timeout=0))


async def barrier_says_how_many_came(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        waiting = task(a.barrier("b", 3))
        await expect_pending(waiting, a)
        error = await expect_raises(StoreTimeoutError, lambda: b.barrier("b", 3, SHORT_S))
        expect(f"2 of 3 came within {SHORT_S:g} s" in str(error), True)
        waiting.cancel()
        untyped: Any = a
        expect_refused(
            TypeError,
            lambda: untyped.barrier("b", "2"),
            lambda: untyped.barrier("b", True),
            lambda: untyped.barrier(1, 2),
        )
        await expect_raises(ValueError, lambda: a.barrier("b", 0))


async def close_ends_waiting(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        waiting: list[asyncio.Future[Any]] = [task(a.get("k")), task(a.queue_pop("q")), task(a.wait(["k", "l"]))]
        await expect_pending(waiting[0], b)
        await a.close()
        for each in waiting:
            await expect_raises(ClosedError, lambda each=each: each)  # type: ignore[misc]
        await b.queue_push("q", "item")
        expect(await b.queue_pop("q"), b"item")  # not in vain, though a daemon may hear of the push before the end


WAIT_CHECKS: Final[tuple[StoreCheck, ...]] = checks_of(__name__)
