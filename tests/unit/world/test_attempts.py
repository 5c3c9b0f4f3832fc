"""Attempts: a start that failed is over, and the next one begins clean, whatever stands in the store of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from distant_store import DistantStore
from fewer_cases import examples

from asyncdist.concurrency.deadline import Deadline
from asyncdist.errors import ConnectTimeoutError, DistError
from asyncdist.store import HashStore
from asyncdist.testing.loop import VirtualTimeLoop
from asyncdist.transport.addresses import PeerAddress
from asyncdist.transport.context import Absence
from asyncdist.world.attempts import ALIVE_S, ENDS_KEPT
from asyncdist.world.rendezvous import Met, Rendezvous

STARTS = examples(17)
JOIN_S = 5.0
"""How long a rank waits for the others."""
CHANCE = random.Random(20)


def virtually(main: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run an asynchronous test in virtual time."""

    def test() -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(main())

    test.__name__ = main.__name__
    test.__doc__ = main.__doc__
    return test


class Process:
    """A process that joins as `rank` of a daemon's clients, and may be killed: its connection ends with it."""

    def __init__(
        self,
        daemon: HashStore,
        rank: int,
        size: int = 2,
        timeout_s: float | None = JOIN_S,
        chance: random.Random = CHANCE,
    ) -> None:
        self.rank = rank
        self.store = DistantStore(daemon.clone(), chance)  # type: ignore[abstract] # its verbs are made there
        self.rendezvous = Rendezvous(self.store, rank, size)
        loop = asyncio.get_running_loop()

        async def listen(_world_id: bytes) -> PeerAddress:
            return PeerAddress(f"host of {rank}")

        joining = self.rendezvous.join("a", True, {}, listen, Deadline.after(timeout_s, loop.time()))
        self.joining: asyncio.Task[Met] = loop.create_task(joining)

    async def kill(self) -> None:
        """As by kill -9: nothing more is said, and the daemon sees the connection end."""
        await self.store.kill()
        self.joining.cancel()
        await asyncio.wait([self.joining])

    async def end(self) -> None:
        """Exit, whether the world has formed or not."""
        self.joining.cancel()
        await asyncio.wait([self.joining])
        if not self.joining.cancelled() and self.joining.exception() is None:
            await self.rendezvous.leave()
        await self.store.close()


async def formed(*processes: Process) -> int:
    """All of `processes` are in one world, and hear so at once; gives the attempt."""
    worlds = await asyncio.gather(*(process.joining for process in processes))
    assert len({(met.world_id, met.epoch) for met in worlds}) == 1
    return worlds[0].epoch


async def failed(*processes: Process) -> list[str]:
    outcomes = await asyncio.gather(*(process.joining for process in processes), return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, DistError), outcome
    return list(map(str, outcomes))


async def rerun(daemon: HashStore, size: int = 2) -> None:
    """The right start, at once: it comes up, and soon."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    ranks = list(range(size))
    CHANCE.shuffle(ranks)
    processes = [Process(daemon, rank, size) for rank in ranks]
    await formed(*processes)
    assert loop.time() - began_s < 1
    for process in processes:
        await process.end()


@virtually
async def test_after_a_rank_was_missing_until_the_time_was_over() -> None:
    async with HashStore() as daemon:
        for _ in range(STARTS):
            alone = Process(daemon, CHANCE.randrange(2))
            (text,) = await failed(alone)
            assert "1 of 2 ranks joined in time" in text
            await alone.end()
            await rerun(daemon)


@virtually
async def test_after_a_rank_was_started_twice() -> None:
    async with HashStore() as daemon:
        for _ in range(STARTS):
            processes = [Process(daemon, rank, 3) for rank in (0, 1, 1)]
            for text in await failed(*processes):
                assert "claims a rank that rank 1" in text
            for process in processes:
                await process.end()
            await rerun(daemon, 3)


@virtually
async def test_after_all_were_killed_before_they_had_met_and_after() -> None:
    async with HashStore() as daemon:
        for number in range(STARTS):
            processes = [Process(daemon, rank, 3) for rank in range(2 + number % 2)]
            await asyncio.sleep(CHANCE.uniform(0, 0.01))
            for process in processes:
                await process.kill()
            await rerun(daemon, 3)


@virtually
async def test_after_the_sizes_of_the_world_differed() -> None:
    async with HashStore() as daemon:
        for _ in range(STARTS):
            processes = [Process(daemon, 0, 2), Process(daemon, 1, 3)]
            for text in await failed(*processes):
                assert "world_size 2" in text or "with 2" in text
                assert "world_size 3" in text or "with 3" in text
            for process in processes:
                await process.end()
            await rerun(daemon)


@virtually
async def test_one_restarted_by_its_supervisor_takes_the_place_of_the_dead_while_others_wait() -> None:
    async with HashStore() as daemon:
        for _ in range(STARTS):
            waits, dies = Process(daemon, 0, 3), Process(daemon, 1, 3)
            await asyncio.sleep(CHANCE.uniform(0, 1))
            await dies.kill()
            again, last = Process(daemon, 1, 3), Process(daemon, 2, 3)
            await formed(waits, again, last)
            for process in (waits, again, last):
                await process.end()


@virtually
async def test_a_world_is_not_formed_with_a_rank_that_has_died_waiting() -> None:
    async with HashStore() as daemon:
        dies = Process(daemon, 1)
        await asyncio.sleep(1)
        await dies.kill()
        waits = Process(daemon, 0)
        await asyncio.sleep(1)
        assert not waits.joining.done()
        again = Process(daemon, 1)
        assert await formed(waits, again) > 1


@virtually
async def test_a_rerun_beside_ranks_that_live_is_refused_and_does_not_disturb_them() -> None:
    async with HashStore() as daemon:
        running = [Process(daemon, rank) for rank in range(2)]
        epoch = await formed(*running)
        for text in await failed(*(Process(daemon, rank) for rank in range(2))):
            assert "holds already" in text
            assert "ASYNCDIST_JOB_ID" in text
        assert await running[0].rendezvous.presence.words_of(1) == (b"", Absence.NONE)
        await running[1].kill()
        alone = Process(daemon, 1, timeout_s=None)  # whoever is left of the old world is in the old world
        await asyncio.sleep(2 * ALIVE_S)
        assert not alone.joining.done()
        await running[0].end()
        assert await formed(Process(daemon, 0), alone) == epoch + 1


@virtually
async def test_who_comes_after_a_failure_says_what_it_was_where_it_waits_in_vain() -> None:
    async with HashStore() as daemon:
        await failed(Process(daemon, 0), Process(daemon, 1, 3))
        (text,) = await failed(Process(daemon, 0))
        assert "1 of 2 ranks joined in time; missing: rank 1" in text
        assert "; the attempt before this one failed: rank " in text
        assert "was started with world_size" in text


@virtually
async def test_who_died_waiting_is_named_as_missing() -> None:
    async with HashStore() as daemon:
        waits, dies = Process(daemon, 0, 3), Process(daemon, 1, 3)
        await asyncio.sleep(1)
        await dies.kill()
        with pytest.raises(ConnectTimeoutError, match="1 of 3 ranks joined in time; missing: rank 1, 2"):
            await waits.joining


@virtually
async def test_attempts_that_failed_leave_little_behind() -> None:
    async with HashStore() as daemon:
        counts = []
        for _ in range(ENDS_KEPT + 6):
            await failed(Process(daemon, 0, 3), Process(daemon, 1, 3))
            counts.append(await daemon.num_keys())
        assert counts[-1] == counts[-2] == counts[-3]


@virtually
async def test_a_slow_rank_still_hears_what_became_of_its_attempt() -> None:
    """Two attempts have failed since, each of which swept what was left of the one before."""
    async with HashStore() as daemon:
        rendezvous = Rendezvous(daemon.clone(), 2, 3)
        slow = rendezvous._attempts
        await slow.enter(lambda: rendezvous._terms("a", True))
        for _ in range(2):
            await failed(Process(daemon, 0, 3), Process(daemon, 1, 3))
        assert "failure" in await slow.end()


def test_processes_that_die_and_come_again_at_any_time_end_in_one_world() -> None:
    """As under supervisors: each starts its rank again at once, whenever it ends before the world has formed."""

    async def supervised(daemon: HashStore, rank: int, size: int, chance: random.Random) -> Met:
        for _ in range(chance.randrange(4)):
            process = Process(daemon, rank, size, JOIN_S, chance)
            await asyncio.wait([process.joining], timeout=chance.choice([0, 0.001, 0.01, 0.1, 1, 7]))
            await (process.kill() if chance.random() < 0.7 else process.end())
        while True:
            process = Process(daemon, rank, size, 30.0, chance)
            with contextlib.suppress(DistError):  # it failed to form, or a rank of it was lost
                met = await process.joining
                await process.store.barrier(f"all of {met.world_id.hex()} are there", size, 1.0)
                return met
            await process.end()

    async def main(seed: int) -> None:
        chance = random.Random(seed)
        async with HashStore() as daemon:
            size = chance.randrange(1, 5)
            async with asyncio.timeout(300):
                worlds = await asyncio.gather(*(supervised(daemon, rank, size, chance) for rank in range(size)))
            assert len({met.world_id for met in worlds}) == 1

    for seed in range(examples(60)):
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(main(seed))
