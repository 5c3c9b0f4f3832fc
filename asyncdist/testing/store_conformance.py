"""What every store must do, as checks that run on any store.

    from asyncdist.testing.store_conformance import STORE_CHECKS

    @pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
    async def test_my_store(check):
        await check(open_my_store)

`open_my_store` is an async function that opens one more client of the same store. The store is empty when a check
begins. A check opens a few clients and closes them. It returns, or raises AssertionError or what the store raised.
Checks need no test framework. They wait for conditions, never for fixed times, except where they check a time-out.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any, Final, TypeAlias, TypeVar

from asyncdist.errors import ClosedError, DistStoreError, QueueEmptyError, StoreTimeoutError
from asyncdist.store.base import Store

__all__ = [
    "LONG_S",
    "SHORT_S",
    "STORE_CHECKS",
    "OpenStore",
    "StoreCheck",
    "checks_of",
    "clients",
    "expect",
    "expect_none",
    "expect_pending",
    "expect_raises",
    "expect_refused",
    "task",
]

OpenStore: TypeAlias = Callable[[], Awaitable[Store]]
"""Opens one more client of the store that is checked."""

StoreCheck: TypeAlias = Callable[[OpenStore], Awaitable[None]]


SHORT_S: Final = 0.05
"""A time-out that is meant to expire."""

LONG_S: Final = 20.0
"""A time-out that is reached only if the store hangs."""


T = TypeVar("T")

E = TypeVar("E", bound=BaseException)


def checks_of(module: str, *parameters: str) -> tuple[Any, ...]:
    """The public functions of `module` with exactly these parameters, in the order of lines; called at its end."""
    functions = filter(inspect.isfunction, vars(sys.modules[module]).values())
    return tuple(
        function
        for function in functions
        if function.__module__ == module
        and not function.__name__.startswith("_")
        and tuple(inspect.signature(function).parameters) == parameters
    )


def expect_refused(kind: type[Exception], *calls: Callable[[], object]) -> None:
    """Raise AssertionError unless each of `calls` raises `kind` at the call."""
    for call in calls:
        try:
            call()
        except kind:
            continue
        raise AssertionError(f"expected a {kind.__name__} at the call")


@asynccontextmanager
async def clients(open_store: OpenStore, count: int) -> AsyncIterator[list[Store]]:
    """Open `count` clients of one store and close them at the end. The block may take at most `LONG_S`."""
    async with AsyncExitStack() as stack, asyncio.timeout(LONG_S):
        yield [await stack.enter_async_context(await open_store()) for _ in range(count)]


def expect(actual: object, expected: object) -> None:
    """Raise AssertionError unless both are equal and of one type."""
    if type(actual) is not type(expected) or actual != expected:
        raise AssertionError(f"expected {expected!r}, got {actual!r}")


async def expect_none(awaitable: Awaitable[object]) -> None:
    """Raise AssertionError unless `awaitable` gives None."""
    expect(await awaitable, None)


async def expect_raises(kind: type[E], call: Callable[[], Awaitable[Any]]) -> E:
    """Return the exception of type `kind` that `call()`, or awaiting what it returns, raises."""
    try:
        result = await call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, got the result {result!r}")


def task(awaitable: Awaitable[T]) -> asyncio.Future[T]:
    """Start waiting for `awaitable` without waiting here."""
    return asyncio.ensure_future(awaitable)


async def expect_pending(future: asyncio.Future[Any], store: Store) -> None:
    """Raise AssertionError if `future` is done although the store has had time to answer every earlier request.

    Two round trips: after the first the store has seen every earlier request, after the second its answer would be
    here.
    """
    for _ in range(2):
        await asyncio.sleep(0)
        await store.check([])
        await store.num_keys()
    if future.done():
        raise AssertionError(f"expected to be waiting, got {future!r}")


LARGE_VALUE_BYTES: Final = 3_000_001
"""More than any socket buffer or read takes at once."""


async def set_then_get(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        await expect_none(a.set("key", "text"))
        expect(await b.get("key"), b"text")
        await b.set("key", b"\x00\xff")
        expect(await a.get("key"), b"\x00\xff")
        await a.set("", "")
        expect(await b.get(""), b"")
        await a.set("cl\u00e9", "\u00e9")
        expect(await b.get("cl\u00e9"), "\u00e9".encode())


async def large_value(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        value = bytes(range(256)) * (LARGE_VALUE_BYTES // 256) + b"end"
        await a.set("large", value)
        expect(await b.get("large"), value)


async def add_counts(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        expect(await a.add("n", 5), 5)
        expect(await b.add("n", -7), -2)
        expect(await a.get("n"), b"-2")
        expect(await b.add("n", 0), -2)
        await a.set("n", "41")
        expect(await b.add("n", 1), 42)


async def add_takes_any_int(open_store: OpenStore) -> None:
    class Step(enum.IntEnum):
        TWO = 2

    async with clients(open_store, 1) as (a,):
        expect(await a.add("n", Step.TWO), 2)
        expect(await a.get("n"), b"2")
        await expect_raises(ValueError, lambda: a.add("n", 2**63))
        expect(await a.add("n", Step.TWO), 4)


async def add_refuses_text(open_store: OpenStore) -> None:
    async with clients(open_store, 1) as (a,):
        await a.set("word", "abc")
        await expect_raises(DistStoreError, lambda: a.add("word", 1))
        expect(await a.get("word"), b"abc")


async def check_counts_all_keys(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        await a.set("x", "1")
        expect(await b.check(["x"]), True)
        expect(await b.check(["x", "y"]), False)
        expect(await b.check([]), True)
        expect(await b.check(("x",)), True)
        await a.queue_push("y", "item")
        expect(await b.check(["x", "y"]), True)


async def compare_set_table(open_store: OpenStore) -> None:
    async with clients(open_store, 1) as (a,):
        expect(await a.compare_set("k", "", "a"), b"a")  # missing, expected empty
        expect(await a.compare_set("k", "a", "b"), b"b")  # as expected
        expect(await a.compare_set("k", "zzz", "c"), b"b")  # different
        expect(await a.compare_set("k", "", "d"), b"b")  # different from empty
        expect(await a.compare_set("none", "foo", "bar"), b"foo")  # missing, something expected
        expect(await a.check(["none"]), False)
        await a.set("empty", "")
        expect(await a.compare_set("empty", b"", b"full"), b"full")  # both empty
        expect(await a.get("empty"), b"full")


async def delete_key_says_whether(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        await a.set("k", "v")
        expect(await b.delete_key("k"), True)
        expect(await b.delete_key("k"), False)
        expect(await a.check(["k"]), False)


async def append_concatenates(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        await expect_none(a.append("k", "po"))
        await b.append("k", b"tato")
        expect(await a.get("k"), b"potato")
        await a.append("empty", "")
        expect(await b.get("empty"), b"")


async def multi_set_then_multi_get(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        await expect_none(a.multi_set(["x", "y"], ["1", b"22"]))
        expect(await b.multi_get(["y", "x", "y"]), [b"22", b"1", b"22"])
        expect(await b.multi_get([]), [])
        await expect_raises(ValueError, lambda: a.multi_set(["x", "y"], ["1"]))


async def keys_are_counted_and_listed(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        expect(await a.num_keys(), 0)
        expect(await a.list_keys(), [])
        await a.multi_set(["job/1", "job/2", "jobs", "other"], ["", "", "", ""])
        await a.queue_push("queue", "")
        expect(await b.num_keys(), 4)
        expect(sorted(await b.list_keys()), ["job/1", "job/2", "jobs", "other"])
        expect(sorted(await b.list_keys("job/")), ["job/1", "job/2"])
        expect(await b.list_keys("none"), [])


async def queues_are_fifo(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        for item in ("1", "2", "3"):
            await expect_none(a.queue_push("q", item))
        expect(await b.queue_len("q"), 3)
        expect(await b.queue_pop("q"), b"1")
        expect(await a.queue_pop("q", block=False), b"2")
        expect(await b.queue_pop("q", True), b"3")
        expect(await b.queue_len("q"), 0)
        expect(await b.queue_len("never"), 0)


async def empty_queue_is_said(open_store: OpenStore) -> None:
    async with clients(open_store, 1) as (a,):
        await expect_raises(QueueEmptyError, lambda: a.queue_pop("q", block=False))
        expect(await a.queue_len("q"), 0)


async def queues_are_beside_keys(open_store: OpenStore) -> None:
    async with clients(open_store, 1) as (a,):
        await a.queue_push("name", "item")
        expect(await a.delete_key("name"), False)
        await a.set("name", "value")
        expect(await a.queue_len("name"), 1)
        expect(await a.get("name"), b"value")
        expect(await a.queue_pop("name"), b"item")
        expect(await a.get("name"), b"value")


async def wrong_types_are_refused_at_the_call(open_store: OpenStore) -> None:
    async with clients(open_store, 1) as (store,):
        a: Any = store
        wrong: list[Callable[[], object]] = [
            lambda: a.set(1, "v"),
            lambda: a.set(b"k", "v"),
            lambda: a.set("k", 1),
            lambda: a.set("k", None),
            lambda: a.get(None),
            lambda: a.add("k", "1"),
            lambda: a.add("k", 1.0),
            lambda: a.add("k", True),
            lambda: a.check("k"),
            lambda: a.check([1]),
            lambda: a.wait("k"),
            lambda: a.wait(1),
            lambda: a.compare_set("k", 1, "v"),
            lambda: a.multi_get("k"),
            lambda: a.multi_set(["k"], "v"),
            lambda: a.multi_set(["k"], [1]),
            lambda: a.append("k", 1),
            lambda: a.list_keys(1),
            lambda: a.queue_push("q", 1),
            lambda: a.queue_pop(1),
            lambda: a.queue_len(1),
            lambda: a.get("k", timeout="1"),
        ]
        expect_refused(TypeError, *wrong)
        refusals: list[Callable[[], object]] = [
            lambda: a.add("k", 2**63),
            lambda: a.get("k", timeout=-1),
            lambda: a.set("\ud800", "v"),
        ]
        expect_refused(ValueError, *refusals)
        expect(await store.num_keys(), 0)


async def keys_may_be_any_bytes(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        key = "k\udcff\n\\"  # as os.fsdecode gives what is no UTF-8
        await a.set(key, "v")
        expect(await b.get(key), b"v")
        expect(await b.list_keys("k\udcff"), [key])
        expect(await b.delete_key(key), True)
        error = await expect_raises(StoreTimeoutError, lambda: b.wait([key], 0.0))
        expect(error.keys, (key,))
        expect(str(error).isprintable(), True)


async def closed_store_refuses(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        await a.set("k", "v")
        await a.close()
        await a.close()
        await expect_raises(ClosedError, lambda: a.set("k", "w"))
        await expect_raises(ClosedError, lambda: a.get("k"))
        await expect_raises(ClosedError, lambda: a.num_keys())
        expect(await b.get("k"), b"v")


async def many_at_once_in_order(open_store: OpenStore) -> None:
    async with clients(open_store, 1) as (a,):
        writes = [a.append("log", f"{index},") for index in range(200)]
        for write in writes:
            await write
        expect(await a.get("log"), "".join(f"{index}," for index in range(200)).encode())


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


STORE_CHECKS: Final[tuple[StoreCheck, ...]] = checks_of(__name__, "open_store")
"""Every check; each takes an `OpenStore` of a store that is empty."""
