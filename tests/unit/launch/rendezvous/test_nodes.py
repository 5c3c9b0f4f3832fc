"""Launchers of one job, talking through a store in this process."""

from __future__ import annotations

import asyncio

import pytest

from asyncdist.errors import LaunchError
from asyncdist.launch.failure import Failure
from asyncdist.launch.rendezvous.nodes import Nodes, Roster
from asyncdist.store import HashStore

FAILURE = Failure(node=1, rank=5, host="h", pid=12, exitcode=3, description="exit code 3")


def launchers(
    count: int, job_id: str | None = "job", store: HashStore | None = None, lost_after_s: float = 60.0
) -> list[Nodes]:
    first = store or HashStore()
    stores = [first, *(first.clone() for _ in range(count - 1))]
    return [Nodes(store, job_id, count, lost_after_s=lost_after_s) for store in stores]


async def all_join(launched: list[Nodes], node_ranks: list[int | None], nprocs: list[int]) -> list[Roster]:
    calls = zip(launched, node_ranks, nprocs, strict=True)
    async with asyncio.timeout(60):
        return await asyncio.gather(*(nodes.join(rank, nproc, "h", 60.0) for nodes, rank, nproc in calls))


async def all_leave(launched: list[Nodes]) -> None:
    async with asyncio.timeout(60):
        await asyncio.gather(*(nodes.leave(hosting=number == 0) for number, nodes in enumerate(launched)))


async def test_ranks_follow_node_ranks_whatever_the_order_and_the_sizes() -> None:
    launched = launchers(3)
    rosters = await all_join(launched, [2, 0, 1], [1, 2, 4])
    assert [(roster.node_rank, roster.first_rank) for roster in rosters] == [(2, 6), (0, 0), (1, 2)]
    assert {(roster.world_size, roster.run_id) for roster in rosters} == {(7, "job")}
    await all_leave(launched)


async def test_the_store_deals_out_node_ranks_and_node_0_names_the_run() -> None:
    launched = launchers(3, job_id=None)
    rosters = await all_join(launched, [None] * 3, [1, 1, 1])
    assert sorted(roster.node_rank for roster in rosters) == [0, 1, 2]
    assert len({roster.run_id for roster in rosters}) == 1
    assert rosters[0].run_id
    await all_leave(launched)


async def test_the_same_job_id_again_is_another_run() -> None:
    store = HashStore()
    first = launchers(2, store=store)
    assert {roster.run_id for roster in await all_join(first, [0, 1], [1, 1])} == {"job"}
    second = launchers(2, store=store.clone())
    assert {roster.run_id for roster in await all_join(second, [None, None], [1, 1])} == {"job-1"}
    await all_leave(second)
    await all_leave(first)


async def test_a_node_rank_claimed_twice() -> None:
    launched = launchers(3)
    joins = [asyncio.create_task(nodes.join(1, 1, "h", 60.0)) for nodes in launched[:2]]
    done, pending = await asyncio.wait(joins, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(LaunchError, match="claim node rank 1"):
        done.pop().result()
    for task in pending:
        task.cancel()
    await asyncio.gather(*joins, return_exceptions=True)
    await all_leave(launched)


async def test_nodes_that_do_not_come_are_named() -> None:
    launched = launchers(3)
    with pytest.raises(LaunchError, match=r"nodes \[0, 2\] of 3 did not join within 0\.01 s"):
        await launched[0].join(1, 1, "h", 0.01)
    await all_leave(launched)


async def test_the_first_failure_is_everybodys() -> None:
    launched = launchers(2)
    await all_join(launched, [0, 1], [1, 1])
    heard: list[list[Failure]] = [[], []]
    both = asyncio.Event()

    def listener(number: int) -> object:
        def on_failure(failure: Failure) -> None:
            heard[number].append(failure)
            if all(heard):
                both.set()

        return on_failure

    async with launched[0].watching(0, listener(0)), launched[1].watching(0, listener(1)):  # type: ignore[arg-type]
        await launched[1].report_failure(0, FAILURE)
        await launched[0].report_failure(0, Failure(0, 0, "other", 1, 1, "exit code 1"))
        async with asyncio.timeout(60):
            await both.wait()
    assert heard == [[FAILURE], [FAILURE]]
    await all_leave(launched)


async def test_a_silent_node_is_reported() -> None:
    launched = launchers(2, lost_after_s=0.1)
    await all_join(launched, [0, 1], [1, 1])
    heard: asyncio.Queue[Failure] = asyncio.Queue()
    async with launched[0].watching(0, heard.put_nowait):
        launched[1].store.lease_keeper._renew = lambda: None  # type: ignore[attr-defined]
        async with asyncio.timeout(60):
            failure = await heard.get()
    assert (failure.node, failure.rank, failure.host, failure.exitcode) == (1, -1, "h", 1)
    assert failure.description == "no sign of life for 0.1 s (or this host is cut off)"
    await all_leave(launched)


async def test_nobody_waits_for_a_node_that_went_before_another_attempt() -> None:
    launched = launchers(3)
    await all_join(launched, [0, 1, 2], [1, 1, 1])
    heard: asyncio.Queue[Failure] = asyncio.Queue()
    async with asyncio.timeout(60), launched[1].watching(0, heard.put_nowait):
        await launched[2].store.close()
        ends = [asyncio.create_task(launched[node].end(1, b"failed")) for node in (0, 1)]
        async with launched[0].watching(1, heard.put_nowait), launched[1].watching(1, heard.put_nowait):
            failures = [await heard.get() for _ in range(2)]
            await asyncio.gather(*ends)
    assert failures[0] == failures[1]
    assert (failures[0].node, failures[0].rank, failures[0].host, failures[0].exitcode) == (2, -1, "h", 1)
    assert "killed" in failures[0].description
    await all_leave(launched)


async def test_a_launcher_that_is_lost_when_its_workers_are_done_fails_nobody() -> None:
    launched = launchers(3, lost_after_s=1.0)  # those that renew theirs are not lost on a busy machine, either
    await all_join(launched, [0, 1, 2], [1, 1, 1])
    heard: asyncio.Queue[Failure] = asyncio.Queue()
    store = launched[0].store
    async with asyncio.timeout(60), launched[0].watching(0, heard.put_nowait), store.watch("") as watch:
        done = asyncio.create_task(launched[2].end(0, b"ok"))
        launched[2].store.lease_keeper._renew = lambda: None  # type: ignore[attr-defined]
        async for event in watch:
            if event.key.endswith("there/2/heard"):
                break
        for _ in range(50):  # the others notice, and would report it
            await asyncio.sleep(0)
        await asyncio.gather(done, *(launched[node].end(0, b"ok") for node in (0, 1)))
        assert heard.empty()
        async with launched[1].watching(1, heard.put_nowait):  # it is missed in another attempt
            assert (await heard.get()).node == 2
    await all_leave(launched)


async def test_a_closed_store_is_a_failure_that_says_so() -> None:
    store = HashStore()
    nodes = Nodes(store, None, 1)
    await nodes.join(0, 1, "h", 60.0)
    heard: asyncio.Queue[Failure] = asyncio.Queue()
    async with nodes.watching(0, heard.put_nowait):
        await asyncio.sleep(0)
        await store.close()
        async with asyncio.timeout(60):
            assert "store was lost" in (await heard.get()).description


async def test_the_end_waits_for_all() -> None:
    launched = launchers(2)
    await all_join(launched, [0, 1], [1, 1])
    first = asyncio.create_task(launched[0].end(0, b"ok"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not first.done()
    async with asyncio.timeout(60):
        await launched[1].end(0, b"failed")
        await first
    await all_leave(launched)
