"""Checks of what comes and goes: leases, held prefixes, watches, locks, memberships. For stores that offer them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from asyncdist.errors import (
    ClosedError,
    DistStoreError,
    LeaseLostError,
    StoreTimeoutError,
    WatchCompactedError,
)
from asyncdist.store.watch import Watch
from asyncdist.testing.store_conformance import (
    SHORT_S,
    OpenStore,
    StoreCheck,
    checks_of,
    clients,
    expect,
    expect_pending,
    expect_raises,
    expect_refused,
    task,
)

__all__ = ["COORDINATION_CHECKS"]


async def _next(watch: Watch) -> tuple[str, str, bytes]:
    event = await anext(watch)
    return event.kind, event.key, event.value


async def a_lease_takes_its_keys_along(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        lease = await a.lease(60.0)
        await a.set("x", "1", lease=lease)
        await a.set("y", "2", lease=lease)
        await b.set("y", "3")  # an ordinary key from here on
        await a.add("x", 4)
        expect(await b.get("x"), b"5")
        await lease.revoke()
        await lease.revoke()
        expect(await b.check(["x"]), False)
        expect(await b.get("y"), b"3")
        await expect_raises(LeaseLostError, lambda: a.set("x", "1", lease=lease))


async def a_lease_is_kept_alive(open_store: OpenStore) -> None:
    async with clients(open_store, 1) as (a,):
        async with await a.lease(6 * SHORT_S) as lease:  # a busy machine stops us for longer than a SHORT_S at times
            await a.set("k", "v", lease=lease)
            await expect_raises(StoreTimeoutError, lambda: a.get("never", timeout=9 * SHORT_S))
            expect(lease.lost, False)
            expect(await a.get("k", timeout=0), b"v")
        expect(lease.lost, True)
        expect(await a.check(["k"]), False)


async def closing_ends_what_is_bound_to_the_connection(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        watch = await b.watch("k").__aenter__()
        await a.set("k", "v", lease=await a.lease(60.0, bound=True))
        expect(await _next(watch), ("set", "k", b"v"))
        await a.close()
        expect(await _next(watch), ("delete", "k", b""))
        await watch.close()


async def an_unattended_lease_expires(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        watch = await b.watch("k").__aenter__()
        await a.set("k", "v", lease=await a.lease(4 * SHORT_S))
        await a.close()  # nothing keeps it alive any more
        expect(await _next(watch), ("set", "k", b"v"))
        expect(await _next(watch), ("expire", "k", b""))
        await watch.close()


async def held_prefixes_go_with_the_last_lease(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        leases = [await store.lease(60.0, bound=True) for store in (a, b)]
        for store, lease in zip((a, b), leases, strict=True):
            await store.hold("job/", lease)
        await a.multi_set(["job/1", "jobs"], ["", ""])
        await a.queue_push("job/q", "item")
        await leases[0].revoke()
        expect(await b.check(["job/1", "job/q"]), True)
        watch = await b.watch("job/").__aenter__()
        await leases[1].revoke()
        expect(await _next(watch), ("delete", "job/1", b""))
        expect(await b.list_keys(), ["jobs"])
        expect(await b.queue_len("job/q"), 0)
        await watch.close()


async def a_watch_sees_everything_in_order(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        await b.set("p/before", "")
        async with a.watch("p/") as watch:
            expect(await a.list_keys("p/"), ["p/before"])
            await b.set("p/x", "1")
            await b.set("other", "1")
            await b.add("p/n", 3)
            await b.append("p/x", "2")
            await b.compare_set("p/c", "", "3")
            await b.compare_set("p/c", "no", "4")
            await b.multi_set(["p/m", "other", "p/l"], ["5", "6", "7"])
            await b.delete_key("p/x")
            await b.delete_key("p/none")
            wanted = [
                ("set", "p/x", b"1"),
                ("set", "p/n", b"3"),
                ("set", "p/x", b"12"),
                ("set", "p/c", b"3"),
                ("set", "p/m", b"5"),
                ("set", "p/l", b"7"),
                ("delete", "p/x", b""),
            ]
            expect([await _next(watch) for _ in wanted], wanted)
            waiting = task(anext(watch))
            await expect_pending(waiting, a)
            await b.set("p/late", "8")
            expect((await waiting).value, b"8")


async def a_watch_goes_on_from_a_revision(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        watch = await a.watch().__aenter__()
        await b.set("x", "1")
        await b.set("y", "2")
        first = await anext(watch)
        revision = watch.revision
        await watch.close()
        await expect_raises(StopAsyncIteration, lambda: anext(watch))
        await b.set("z", "3")
        async with b.watch(from_revision=revision) as later:
            expect([await _next(later), await _next(later)], [("set", "y", b"2"), ("set", "z", b"3")])
        async with b.watch(from_revision=first.revision) as later:
            expect(await anext(later), first)


async def an_unknown_revision_is_said(open_store: OpenStore) -> None:
    async with clients(open_store, 1) as (a,):
        watch = await a.watch().__aenter__()
        await a.set("x", "1")
        event = await anext(watch)
        await watch.close()
        for revision in (event.revision - 1, event.revision + 100):
            async with a.watch(from_revision=revision) as unknown:
                await expect_raises(WatchCompactedError, lambda unknown=unknown: anext(unknown))  # type: ignore[misc]


async def cancelled_reading_loses_no_event(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b), a.watch("k") as watch:
        seen = []
        for turn in range(12):
            reading = task(anext(watch))
            writing = task(b.set("k", str(turn)))
            for _ in range(turn % 4):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
            await writing
            if not reading.cancelled():
                seen.append(reading.result().value)
        while len(seen) < 12:
            seen.append((await anext(watch)).value)
        expect(seen, [str(turn).encode() for turn in range(12)])


async def closing_ends_watches(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        watch, other = a.watch("k"), a.watch("k")
        reading, reading_other = task(anext(watch)), task(anext(other))
        await expect_pending(reading, b)
        await watch.close()
        await expect_raises(StopAsyncIteration, lambda: reading)
        await a.close()
        await expect_raises(ClosedError, lambda: reading_other)


async def locks_exclude_and_count_up(open_store: OpenStore) -> None:
    async with clients(open_store, 3) as stores:
        tokens: list[int] = []
        inside = 0

        async def work(index: int) -> None:
            nonlocal inside
            async with stores[index % 3].lock("leader") as token:
                inside += 1
                expect(inside, 1)
                tokens.append(token)
                await asyncio.sleep(0)
                inside -= 1

        await asyncio.gather(*(work(index) for index in range(12)))
        expect(sorted(set(tokens)), tokens)
        expect(len(tokens), 12)


async def numbers_that_no_message_can_hold_disturb_nobody(open_store: OpenStore) -> None:
    async with clients(open_store, 1) as (a,):
        others = task(a.set("key", "value"))
        expect_refused(ValueError, lambda: a.watch("", 2**64))
        await others
        async with await a.lease(1e300) as lease:
            others = task(a.append("key", "s"))
            await a.hold("held/", lease, linger=1e300)
            await others
            async with await a.join("job", 1, settle=1e300) as member:
                expect(member.rank, 0)
        expect(await a.get("key"), b"values")


async def a_lock_passes_on_when_its_holder_goes(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        lock = a.lock("leader")
        token = await lock.acquire()
        waiting = task(b.lock("leader").acquire())
        await expect_pending(waiting, b)
        await a.close()
        expect(await waiting > token, True)
        expect(lock.lost, True)
        await expect_raises(LeaseLostError, lock.release)


async def a_lock_not_had_is_not_taken(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        async with a.lock("leader"):
            error = await expect_raises(StoreTimeoutError, lambda: b.lock("leader", timeout=SHORT_S).acquire())
            expect(len(error.keys), 1)
            for turns in range(6):
                waiting = task(b.lock("leader").acquire())
                for _ in range(turns):
                    await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait([waiting])
                expect(waiting.cancelled(), True)
        async with b.lock("leader", timeout=0):
            pass


async def members_get_ranks_and_epochs(open_store: OpenStore) -> None:
    async with clients(open_store, 3) as (a, b, c):
        joins = [task(a.join("j", 2, name="n10")), task(b.join("j", 2, name="n9"))]
        first, second = await asyncio.gather(*joins)
        expect((first.rank, second.rank, first.epoch, second.epoch), (1, 0, 1, 1))
        expect(first.members, ("n9", "n10"))
        await first.store.set("k", "v")
        expect(await second.store.get("k"), b"v")
        newcomer = task(c.join("j", 2, name="n1"))
        event = await anext(first)
        expect((event.kind, event.member), ("joined", "n1"))
        await second.leave()
        event = await anext(first)
        expect((event.kind, event.member), ("left", "n9"))
        await first.rejoin()
        third = await newcomer
        expect((first.rank, third.rank, third.epoch), (0, 1, 2))  # members that know the job stay first
        expect(await third.store.get("k"), b"v")
        await first.leave()
        await third.leave()


async def a_round_settles_before_it_is_full(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        joins = [task(store.join("j", 1, 5, settle=6 * SHORT_S, name=name)) for store, name in ((a, "x"), (b, "y"))]
        first, second = await asyncio.gather(*joins)
        expect((first.members, second.members), (("x", "y"), ("x", "y")))
        await first.leave()
        await second.leave()


async def a_silent_member_is_lost(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        joins = [task(a.join("j", 1, 2, name="x")), task(b.join("j", 1, 2, name="y", grace=6 * SHORT_S, bound=False))]
        first, second = await asyncio.gather(*joins)
        await b.close()  # which ends what is bound to its connection, and is no goodbye of anything else
        event = await anext(first)
        expect((event.kind, event.member), ("lost", "y"))
        expect(await second.wait_lost(), "the store was closed")
        await first.leave()


async def a_member_can_be_expelled(open_store: OpenStore) -> None:
    async with clients(open_store, 3) as (a, b, c):
        first, second = await asyncio.gather(a.join("j", 1, 2, name="x"), b.join("j", 1, 2, name="y"))
        await c.expel("j", "y")
        event = await anext(first)
        expect((event.kind, event.member), ("left", "y"))
        await expect_raises(LeaseLostError, lambda: anext(second))
        await c.expel("j", "y")  # a member that is no longer there
        await expect_raises(DistStoreError, lambda: second.rejoin())
        await first.leave()


async def joining_says_who_is_missing(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        error = await expect_raises(StoreTimeoutError, lambda: a.join("j", 3, timeout=SHORT_S))
        expect(error.keys, ("2 more members",))
        first, second = await asyncio.gather(a.join("j", 2, name="x"), b.join("j", 2, name="y"))
        error = await expect_raises(StoreTimeoutError, lambda: first.rejoin(SHORT_S))
        expect(error.keys, ("y",))
        event = await anext(second)
        expect((event.kind, event.member), ("left", "x"))
        await expect_raises(DistStoreError, lambda: a.join("j", 3))
        error = await expect_raises(StoreTimeoutError, lambda: a.join("j", 2, name="y", timeout=SHORT_S))
        expect("is the member y" in str(error), True)
        await second.leave()


async def a_cancelled_join_leaves_nobody_behind(open_store: OpenStore) -> None:
    async with clients(open_store, 2) as (a, b):
        for turns in range(8):
            waiting = task(a.join("j", 2, name="x"))
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            expect(waiting.cancelled(), True)
        await a.num_keys()  # behind whatever was still under way
        await expect_raises(StoreTimeoutError, lambda: b.join("j", 2, name="x", timeout=SHORT_S))
        lease = task(a.lease(60.0))
        await asyncio.sleep(0)
        lease.cancel()
        await asyncio.wait([lease])
        async with await a.lease(60.0) as other:
            await a.set("k", "v", lease=other)
        expect(await b.check(["k"]), False)


async def wrong_coordination_is_refused_at_the_call(open_store: OpenStore) -> None:
    async with clients(open_store, 1) as (store,):
        a: Any = store
        types: list[Callable[[], object]] = [
            lambda: a.set("k", "v", lease=1),
            lambda: a.hold("k", 1),
            lambda: a.watch(1),
            lambda: a.watch("k", "1"),
            lambda: a.lock(1),
            lambda: a.join(1, 1),
            lambda: a.join("j", "1"),
            lambda: a.lease("1"),
        ]
        values: list[Callable[[], object]] = [
            lambda: a.lease(0),
            lambda: a.lease(None),
            lambda: a.join("j", 0),
            lambda: a.join("j", 2, 1),
            lambda: a.lock("k", grace=-1),
        ]
        expect_refused(TypeError, *types)
        expect_refused(ValueError, *values)


COORDINATION_CHECKS: Final[tuple[StoreCheck, ...]] = checks_of(__name__, "open_store")
"""Each takes an `OpenStore`, as those of `STORE_CHECKS`."""
