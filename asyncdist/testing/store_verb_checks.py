"""Checks of what each verb of a store does when nobody has to wait."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final

from asyncdist.errors import ClosedError, DistStoreError, QueueEmptyError, StoreTimeoutError
from asyncdist.testing.checks import checks_of, expect_refused
from asyncdist.testing.store_check_tools import OpenStore, StoreCheck, clients, expect, expect_none, expect_raises

__all__ = ["VERB_CHECKS"]

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


VERB_CHECKS: Final[tuple[StoreCheck, ...]] = checks_of(__name__)
