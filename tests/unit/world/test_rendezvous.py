"""Rendezvous: ranks that agree meet, and every contradiction is an error on every rank."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from cancel_sweep import Cut, cancelling_at
from distant_store import DistantStore

from asyncdist.concurrency.deadline import Deadline
from asyncdist.concurrency.tasks import PATIENCE_S
from asyncdist.errors import ConnectTimeoutError, DistError, DistStoreError
from asyncdist.store import HashStore, PrefixStore, Store
from asyncdist.testing.loop import VirtualTimeLoop
from asyncdist.transport.addresses import PeerAddress
from asyncdist.transport.context import Absence
from asyncdist.world.attempts import WORDS_LIMIT_S, WORLD_LINGER_S
from asyncdist.world.rendezvous import (
    AWAY_LIMIT_S,
    GOODBYE_LIMIT_S,
    PUBLISH_LIMIT_S,
    STAY_NOTICE_S,
    WORLD_ID_BYTES,
    Met,
    Rendezvous,
)


def virtually(main: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run an asynchronous test in virtual time."""

    def test() -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(main())

    test.__name__ = main.__name__
    test.__doc__ = main.__doc__
    return test


def join(
    rendezvous: Rendezvous, timeout_s: float = 10.0, *, host: str = "a", loopback: bool = True
) -> asyncio.Task[Met]:
    loop = asyncio.get_running_loop()
    options = {"rank": rendezvous.rank}
    deadline = Deadline.after(timeout_s, loop.time())
    return loop.create_task(rendezvous.join(host, loopback, options, nowhere, deadline))


@virtually
async def test_ranks_learn_who_shares_a_host() -> None:
    for hosts, placement in (
        ("aaaa", None),
        ("aabb", [2, []]),
        ("abab", [1, [0, 1, 0, 1]]),
        ("aaab", [1, [0, 0, 0, 1]]),
        ("dcba", [1, []]),
    ):
        async with HashStore() as store:
            options, deadline = {"rank": 0}, Deadline.after(10.0, asyncio.get_running_loop().time())

            def listening(host: str) -> Callable[[bytes], Awaitable[PeerAddress]]:
                async def listen(world_id: bytes) -> PeerAddress:
                    return PeerAddress(host)

                return listen

            joins = [
                Rendezvous(store, rank, 4).join(host, False, options, listening(host), deadline)
                for rank, host in enumerate(hosts)
            ]
            assert [met.placement for met in await asyncio.gather(*joins)] == [placement] * 4


async def nowhere(world_id: bytes) -> PeerAddress:
    """Listens, as far as a rendezvous knows."""
    assert len(world_id) == WORLD_ID_BYTES
    return PeerAddress("here")


async def failures(*tasks: asyncio.Task[Met]) -> list[str]:
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, DistError), outcome
    return list(map(str, outcomes))


@virtually
async def test_all_ranks_get_one_world_id_and_rank_zeros_options() -> None:
    async with HashStore() as store:
        worlds = await asyncio.gather(*(join(Rendezvous(store, rank, 5)) for rank in range(5)))
        assert len({met.world_id for met in worlds}) == 1
        assert len(worlds[0].world_id) == 16
        assert {met.epoch for met in worlds} == {1}
        assert all(met.options == {"rank": 0} for met in worlds)


@virtually
async def test_a_clean_world_is_followed_by_another_and_leaves_little_behind() -> None:
    async with HashStore() as store:
        ids, counts = set(), []
        for _ in range(3):
            ranks = [Rendezvous(store, rank, 3) for rank in range(3)]
            worlds = await asyncio.gather(*map(join, ranks))
            ids |= {met.world_id for met in worlds}
            assert set(await ranks[0].addresses([1, 2])) == {1, 2}
            await asyncio.gather(*(rank.leave() for rank in ranks))
            assert await ranks[0].presence.has_left(2)
            counts.append(await store.num_keys())
        assert len(ids) == 3
        assert counts[2] - counts[1] <= 6


@virtually
async def test_worlds_of_other_names_and_namespaces_do_not_meet() -> None:
    async with HashStore() as store:
        places = [(store, ""), (store, "other"), (PrefixStore("job", store), "")]
        worlds = await asyncio.gather(
            *(join(Rendezvous(place, rank, 2, name)) for place, name in places for rank in range(2))
        )
        assert len({met.world_id for met in worlds}) == 3


@virtually
async def test_a_rank_that_never_comes_is_named_to_everybody() -> None:
    async with HashStore() as store:
        start_s = asyncio.get_running_loop().time()
        texts = await failures(*(join(Rendezvous(store, rank, 5), 3 + 0.001 * rank) for rank in (0, 2, 3)))
        assert all("3 of 5 ranks joined in time; missing: rank 1, 4" in text for text in texts)
        assert asyncio.get_running_loop().time() - start_s < 4
        late = join(Rendezvous(store, 1, 5))  # it may be the first of those that are started again
        with pytest.raises(ConnectTimeoutError, match=r"missing: rank 0, 2, 3, 4; the attempt before .* 1, 4"):
            await late


def test_long_waits_say_whom_they_wait_for_and_short_ones_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main(late_s: float, timeout_s: float | None) -> None:
        async with HashStore() as store:
            deadline = Deadline.after(timeout_s, asyncio.get_running_loop().time())
            ranks = [Rendezvous(store, rank, 4) for rank in range(4)]
            early = [asyncio.create_task(rank.join("a", True, {}, nowhere, deadline)) for rank in ranks[:3]]
            await asyncio.sleep(late_s)
            await ranks[3].join("a", True, {}, nowhere, deadline)
            await asyncio.gather(*early)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main(PATIENCE_S - 1, 60))
        assert caplog.messages == []
        runner.run(main(PATIENCE_S + 1, 60))
        said = [message.partition(": ")[2] for message in caplog.messages]
        assert said == ["3 of 4 ranks are here; waiting for rank 3, for up to 60 s in all"] * 2
        assert [message[:6] for message in caplog.messages] == ["rank 0", "rank 1"]
        caplog.clear()
        runner.run(main(PATIENCE_S + 1, None))
        assert caplog.messages[0].endswith("waiting for rank 3")


@virtually
async def test_the_one_who_gives_up_raises_a_timeout() -> None:
    async with HashStore() as store:
        with pytest.raises(ConnectTimeoutError, match=r"rank 0 \(.* pid \d+\): 1 of 2"):
            await join(Rendezvous(store, 0, 2), 1)


@virtually
async def test_the_same_rank_twice_is_an_error_on_every_rank() -> None:
    async with HashStore() as store:
        tasks = [join(Rendezvous(store, rank, 3)) for rank in (0, 1, 1)]
        texts = await failures(*tasks)
        assert all("claims a rank that rank 1" in text for text in texts)
        assert asyncio.get_running_loop().time() < 1


@virtually
async def test_the_same_rank_twice_does_not_disturb_a_world_that_runs() -> None:
    async with HashStore() as store:
        await asyncio.gather(*(join(Rendezvous(store, rank, 2)) for rank in range(2)))
        with pytest.raises(DistError, match="ASYNCDIST_JOB_ID"):
            await join(Rendezvous(store, 1, 2))


@virtually
async def test_after_a_failure_the_ranks_can_try_again() -> None:
    async with HashStore() as store:
        await failures(join(Rendezvous(store, 0, 2)), join(Rendezvous(store, 1, 3)))
        worlds = await asyncio.gather(*(join(Rendezvous(store, rank, 2)) for rank in range(2)))
        assert worlds[0].world_id == worlds[1].world_id


@virtually
async def test_a_rank_that_gives_up_is_named_to_those_who_wait_at_once() -> None:
    async with HashStore() as store:
        one, two = (join(Rendezvous(store, rank, 3)) for rank in range(2))
        await asyncio.sleep(1)
        one.cancel()
        (text,) = await failures(two)
        assert "rank 0 (" in text
        assert "gave up joining: it was cancelled" in text
        assert asyncio.get_running_loop().time() < 1.1
        assert one.cancelled()


async def persist(store: Store, rank: int, size: int) -> bytes:
    """Join until everybody is there; who resigned from a world that was formed is not."""
    for _ in range(4):
        rendezvous = Rendezvous(store, rank, size)
        with contextlib.suppress(DistError):
            met = await join(rendezvous)
            with contextlib.suppress(DistError):  # as they do that never hear from one that has resigned
                await store.barrier(met.world_id.hex(), size, 1.0)
                return met.world_id
            await rendezvous.leave()
    raise AssertionError(f"rank {rank} never got in")


@virtually
async def test_a_rank_cancelled_at_any_await_can_join_again() -> None:
    async def interrupted(cut: Cut, store: Store, size: int) -> None:
        first = Rendezvous(store, 0, size)
        attempt = first._join
        cut.whom = asyncio.current_task()
        first._join = lambda *given: cut_short(cut, attempt(*given))  # type: ignore[method-assign]
        deadline = Deadline.after(10.0, asyncio.get_running_loop().time())
        await first.join("a", True, {"rank": 0}, nowhere, deadline)

    async def cut_short(cut: Cut, attempt: Awaitable[Met]) -> Met:
        met: Met = await cancelling_at(cut, attempt)
        return met

    for size in (1, 2):
        cut = Cut(0)
        while not cut.at or cut.reached:
            cut = Cut(cut.at + 1)
            async with HashStore() as near:
                store = DistantStore(near)  # type: ignore[abstract] # its verbs are made there
                others = [asyncio.create_task(persist(store, rank, size)) for rank in range(1, size)]
                task = asyncio.create_task(interrupted(cut, store, size))
                await asyncio.wait([task])
                assert task.cancelled() == cut.reached
                if cut.reached:
                    met = await asyncio.gather(persist(store, 0, size), *others)
                    assert len(set(met)) == 1
                for other in others:
                    other.cancel()
                await asyncio.gather(*others, return_exceptions=True)
        assert cut.at > 5


@virtually
async def test_a_rank_cancelled_at_any_time_can_join_again() -> None:
    """Also while requests are on their way there, and their answers on their way back."""
    for size in (1, 2):
        at, ended = 0.0, False
        while not ended:
            at += 0.0004
            async with HashStore() as near:
                store = DistantStore(near, random.Random(at))  # type: ignore[abstract] # its verbs are made there
                others = [asyncio.create_task(persist(store, rank, size)) for rank in range(1, size)]
                task = join(Rendezvous(store, 0, size))
                await asyncio.wait([task], timeout=at)
                ended = task.done()
                task.cancel()
                await asyncio.wait([task])
                if task.cancelled():
                    met = await asyncio.gather(persist(store, 0, size), *others)
                    assert len(set(met)) == 1
                for other in others:
                    other.cancel()
                await asyncio.gather(*others, return_exceptions=True)
        assert at > 0.003


@virtually
async def test_the_last_rank_waits_for_four_answers_of_the_store() -> None:
    """What does not depend on an answer is asked together; one that comes earlier decides nothing, and asks no more."""
    async with HashStore() as near:
        loop = asyncio.get_running_loop()
        early = join(Rendezvous(DistantStore(near.clone()), 0, 2))  # type: ignore[abstract] # its verbs are made there
        await asyncio.sleep(1)
        store = DistantStore(near.clone())  # type: ignore[abstract] # its verbs are made there
        began_s = loop.time()
        last = join(Rendezvous(store, 1, 2))
        await early
        asked = 4 + 3  # the last one reads who has come, looks whether all live, and decides
        assert loop.time() - began_s == pytest.approx(asked * 0.002)
        await last


@virtually
async def test_other_counts_of_interfaces_are_an_error_on_every_rank() -> None:
    async with HashStore() as store:
        ranks = [Rendezvous(store, rank, 2) for rank in range(2)]
        ranks[0].connections, ranks[1].connections = (2, 4), (1, 1)
        texts = await failures(*(join(rank) for rank in ranks))
        for text in texts:
            assert "has 2 network interfaces and 4 connections for each pair of ranks" in text
            assert "has 1 network interface and 1 connection for each pair of ranks" in text
            assert "but rank 0 (" in text or "but rank 1 (" in text


@virtually
async def test_different_world_sizes_are_an_error_on_every_rank() -> None:
    async with HashStore() as near:
        store = DistantStore(near)  # type: ignore[abstract] # its verbs are made there
        first = join(Rendezvous(store, 0, 2))
        await asyncio.sleep(0.1)
        texts = await failures(first, join(Rendezvous(store, 1, 3)), join(Rendezvous(store, 2, 3)))
        assert all("was started with world_size 3, but rank 0" in text for text in texts)
        assert asyncio.get_running_loop().time() < 1


@virtually
async def test_loopback_addresses_across_hosts_are_an_error_on_every_rank() -> None:
    async with HashStore() as store:
        texts = await failures(
            join(Rendezvous(store, 0, 2), host="a", loopback=True),
            join(Rendezvous(store, 1, 2), host="b", loopback=False),
        )
        assert all("different hosts" in text and "rank 0" in text and "MASTER_ADDR" in text for text in texts)


@virtually
async def test_other_hosts_without_loopback_and_one_host_with_it_are_fine() -> None:
    async with HashStore() as store:
        await asyncio.gather(
            join(Rendezvous(store, 0, 2), host="a", loopback=False),
            join(Rendezvous(store, 1, 2), host="b", loopback=False),
        )


@virtually
async def test_foreign_records_are_refused() -> None:
    async with HashStore() as store:
        await store.set("world/default/1/terms", b"\xc1 not ours")
        with pytest.raises(DistStoreError, match="not ours"):
            await join(Rendezvous(store, 0, 2))


@virtually
async def test_goodbyes_are_bounded() -> None:
    store = HashStore()
    rendezvous = Rendezvous(store, 0, 1)
    await join(rendezvous)
    await store.close()
    await rendezvous.leave()
    await rendezvous.wait_for_goodbyes(())


@virtually
async def test_a_world_vanishes_from_the_store_when_its_last_rank_has_left() -> None:
    async with HashStore() as store:
        await store.set("world/w2/other", "stays")
        ranks = [Rendezvous(store, rank, 3, "w") for rank in range(3)]
        await asyncio.gather(*(join(rank) for rank in ranks))
        for rank in ranks[:2]:
            await rank.leave()
        await asyncio.sleep(WORLD_LINGER_S + 1)
        assert await store.list_keys("world/w/")
        await ranks[2].leave()
        await asyncio.sleep(WORLD_LINGER_S - 1)
        again = Rendezvous(store, 0, 1, "w")
        assert (await join(again)).epoch == 2  # within that time the world is remembered
        await asyncio.sleep(WORLD_LINGER_S + 1)
        assert await store.list_keys("world/w/")
        await again.leave()
        await asyncio.sleep(WORLD_LINGER_S + 1)
        assert await store.list_keys() == ["world/w2/other"]


@virtually
async def test_a_world_whose_ranks_died_vanishes_too() -> None:
    async with HashStore() as store:
        clones = [store.clone() for _ in range(2)]
        await asyncio.gather(*(join(Rendezvous(clone, rank, 2)) for rank, clone in enumerate(clones)))
        for clone in clones:
            await clone.close()
        await asyncio.sleep(WORLD_LINGER_S + 1)
        assert await store.num_keys() == 0


@virtually
async def test_leaving_does_not_wait_for_a_store_that_takes_nothing_any_more() -> None:
    """The store came back without its data, and is gone again while we publish what it has forgotten."""
    async with HashStore() as store:
        met = Rendezvous(store, 0, 1)
        await join(met)

        async def never(*_: object, **__: object) -> None:
            await asyncio.Event().wait()

        met._store.multi_set = never  # type: ignore[method-assign]
        met.store_restarted()
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await met.leave()
        assert loop.time() - began_s <= GOODBYE_LIMIT_S
        assert asyncio.all_tasks() == {asyncio.current_task()}


@virtually
async def test_last_words_are_kept_as_long_as_somebody_may_ask() -> None:
    async with HashStore() as store:
        ranks = [Rendezvous(store, rank, 2) for rank in range(2)]
        await asyncio.gather(*map(join, ranks))
        await ranks[0].leave_words(b"why")
        await ranks[0].leave()
        assert await ranks[1].presence.words_of(0) == (b"why", Absence.LEFT)
        assert await ranks[1].presence.words_of(1) == (b"", Absence.NONE)
        await ranks[1].leave()
        assert not [key for key in await store.list_keys() if "words" in key]


@virtually
async def test_last_words_are_bounded_in_time() -> None:
    store = HashStore()
    rendezvous = Rendezvous(store, 0, 1)
    await join(rendezvous)

    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    rendezvous._store.set = never  # type: ignore[method-assign]
    rendezvous._store.check = never  # type: ignore[method-assign, assignment]
    start_s = loop.time()
    await rendezvous.leave_words(b"why")
    assert loop.time() - start_s == PUBLISH_LIMIT_S
    assert await rendezvous.presence.words_of(0) == (b"", Absence.UNKNOWN)
    assert loop.time() - start_s == PUBLISH_LIMIT_S + WORDS_LIMIT_S
    await store.close()
    await rendezvous.leave_words(b"why")
    assert await rendezvous.presence.words_of(0) == (b"", Absence.UNKNOWN)


class AwayStore(HashStore):
    """Its connection is broken, and nobody answers."""

    @property
    def is_connected(self) -> bool:
        return False


@virtually
async def test_all_that_is_said_in_parting_takes_a_second_where_the_store_is_away() -> None:
    async with HashStore() as store:
        leaves = Rendezvous(store, 0, 1)
        await join(leaves)

        async def never(*_: object, **__: object) -> None:
            await asyncio.Event().wait()

        for verb in ("set", "add"):
            setattr(leaves._store, verb, never)
        loop = asyncio.get_running_loop()
        for limit_s in (AWAY_LIMIT_S, GOODBYE_LIMIT_S):
            store.__class__ = AwayStore if limit_s == AWAY_LIMIT_S else HashStore
            leaves._farewell_s = None
            began_s = loop.time()
            assert not await leaves.leave_words(b"why")
            await leaves.leave()
            assert loop.time() - began_s == limit_s


@virtually
async def test_the_rank_that_hosts_the_store_says_for_whom_it_stays_and_may_be_hurried() -> None:
    async with HashStore() as store:
        ranks = [Rendezvous(store, rank, 3) for rank in range(3)]
        await asyncio.gather(*map(join, ranks))
        await ranks[0].leave()
        await ranks[2].leave()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        loop.call_later(1.0, ranks[0].hurry)
        await ranks[0].wait_for_goodbyes(())
        assert loop.time() - began_s == 1.0
        await ranks[0].wait_for_goodbyes(())
        assert loop.time() - began_s == 1.0


def test_a_stay_is_told_if_it_takes_long(caplog: pytest.LogCaptureFixture) -> None:
    async def main(stay_s: float) -> None:
        async with HashStore() as store:
            ranks = [Rendezvous(store, rank, 3) for rank in range(3)]
            await asyncio.gather(*map(join, ranks))
            await ranks[0].leave()
            staying = asyncio.create_task(ranks[0].wait_for_goodbyes({2}))
            await asyncio.sleep(stay_s)
            await ranks[1].leave()
            await staying

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main(STAY_NOTICE_S - 0.1))
        assert caplog.messages == []
        runner.run(main(STAY_NOTICE_S + 0.1))
        (said,) = caplog.messages
        assert said.endswith("keeps the store for up to 5 s, as others have not said goodbye: rank 1; Ctrl-C ends it")


@virtually
async def test_whose_goodbye_was_heard_is_not_taken_for_speechless() -> None:
    """It leaves in the middle of the question."""
    async with HashStore() as store:
        ranks = [Rendezvous(store, rank, 2) for rank in range(2)]
        await asyncio.gather(*map(join, ranks))
        check, asked = ranks[1]._store.check, []

        async def slow(keys: list[str]) -> bool:
            found = await check(keys)
            if keys == [ranks[0]._key("left/0")] and not asked:
                await ranks[0].leave_words(b"why")
                await ranks[0].leave()
                asked.append(keys)
            return found

        ranks[1]._store.check = slow  # type: ignore[method-assign, assignment]
        assert await ranks[1].presence.words_of(0) == (b"why", Absence.NONE)
        assert await ranks[1].presence.words_of(0) == (b"why", Absence.LEFT)


@virtually
async def test_who_resigned_has_not_left_in_order() -> None:
    async with HashStore() as store:
        ranks = [Rendezvous(store, rank, 2) for rank in range(2)]
        await asyncio.gather(*map(join, ranks))
        await ranks[0].resign()
        assert await ranks[0].presence.has_left(0)
        assert await ranks[1].presence.words_of(0) == (b"", Absence.RESIGNED)
