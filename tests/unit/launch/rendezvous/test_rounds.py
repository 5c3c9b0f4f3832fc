"""Launchers of elastic jobs meet, lose each other while they do, and meet again."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import pytest

from asyncdist.errors import DistStoreError, LaunchError
from asyncdist.launch.config import Endpoint, LaunchConfig
from asyncdist.launch.failure import Conclusion, End, Failure
from asyncdist.launch.rendezvous.job_store import Outage
from asyncdist.launch.rendezvous.links import LinkPlace
from asyncdist.launch.rendezvous.round import Entry, Plan, Round, Stop
from asyncdist.launch.rendezvous.rounds import JobOverError, Outcome, Rounds
from asyncdist.store import HashStore

LOST_AFTER_S = 30.0
"""No stall of a busy machine is so long; who is killed here breaks its connection."""
ALL_COME_S = 0.5
"""A last call in which the third of three comes as well, though the process has no core for a while."""

FAILURE = Failure(node=0, rank=0, host="h", pid=12, exitcode=3, description="exit code 3")


class Host:
    """Hosts the launchers' own stores of all nodes of a test in this process."""

    def __init__(self, stores: list[HashStore]) -> None:
        self._stores = stores
        self._place: LinkPlace | None = None
        self.opened: list[HashStore] = []

    async def place(self) -> LinkPlace:
        if self._place is None:
            self._place = LinkPlace("h", len(self._stores), "key")
            self._stores.append(HashStore())
        return self._place

    async def open(self, place: LinkPlace) -> HashStore:
        self.opened.append(self._stores[place.port].clone())
        return self.opened[-1]

    async def close(self) -> None:
        """The launcher is killed: with it goes what it hosts."""
        mine = [] if self._place is None else [self._stores[self._place.port]]
        for store in [*self.opened, *mine]:
            await store.close()


class Node:
    """A launcher whose workers work until they are told to stop, or `finish` is set."""

    max_restarts = 1

    def __init__(
        self,
        cluster: Cluster,
        nnodes: tuple[int, int],
        nproc: int = 1,
        join_s: float = 60.0,
        last_call_s: float = 0.02,
    ) -> None:
        config = LaunchConfig(
            command=("true",),
            nnodes=nnodes[1],
            min_nodes=nnodes[0],
            nproc_per_node=nproc,
            store=Endpoint("h", 1),
            job_id="job",
            join_timeout_s=join_s,
            last_call_s=last_call_s,
            lost_after_s=LOST_AFTER_S,
        )
        self.store = cluster.store.clone()
        host: Any = Host(cluster.links)
        self.host: Host = host
        self.said: list[str] = []
        outage = Outage("here", math.inf, self.said.append, look_s=0.01)
        self.rounds = Rounds(self.store, config, self.said.append, outage, host)
        self.nproc = nproc
        self.restarts = 0
        self.plans: list[tuple[int, Plan]] = []  # with the node's rank
        self.changed = asyncio.Event()
        self.finish = asyncio.Event()
        self.fail = asyncio.Event()
        self.stops: list[Stop] = []
        self.conclusions: list[Conclusion] = []

    async def live(self) -> Conclusion:
        while True:
            current = await self.rounds.meet()
            stopped = asyncio.Event()

            def on_stop(why: Stop, stopped: asyncio.Event = stopped) -> None:
                self.stops.append(why)
                stopped.set()

            async with current.watched(on_stop):
                plan = await current.agree(Entry(self.nproc, "h", self.restarts))
                end = End()
                async with current.linked(plan) as together:
                    if plan is not None and together:
                        self.restarts = plan.restarts
                        self.plans.append((current.rank, plan))
                        self.changed.set()
                        end = await self._work(current, stopped)
                    conclusion = await current.conclude(end, self.restarts, self.max_restarts)
            self.conclusions.append(conclusion)
            self.restarts += conclusion.counted
            if conclusion.kind != "again":
                await self.rounds.finish(Outcome(0 if conclusion.kind == "done" else 3, "why"))
                return conclusion

    async def _work(self, current: Round, stopped: asyncio.Event) -> End:
        waits = [asyncio.create_task(event.wait()) for event in (stopped, self.finish, self.fail)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if self.fail.is_set() and not stopped.is_set():
            self.fail.clear()
            await current.stop(Stop("failed", "rank 0 failed"))
            return End(failure=FAILURE)
        return End(completed=self.finish.is_set())

    async def until(self, condition: Callable[[int, Plan], bool]) -> tuple[int, Plan]:
        async with asyncio.timeout(60):
            while not self.plans or not condition(*self.plans[-1]):
                self.changed.clear()
                await self.changed.wait()
        return self.plans[-1]

    async def world_of(self, nodes: int, after: int = -1) -> tuple[int, Plan]:
        return await self.until(lambda _, plan: len(plan.nprocs) == nodes and plan.number > after)


class Cluster:
    """A store and the launchers on it."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.links: list[HashStore] = []
        self.lives: dict[Node, asyncio.Task[Conclusion]] = {}

    def start(self, nnodes: tuple[int, int] = (1, 3), nproc: int = 1, join_s: float = 60.0) -> Node:
        node = Node(self, nnodes, nproc, join_s)
        self.lives[node] = asyncio.create_task(node.live())
        return node

    async def end(self, node: Node) -> Conclusion:
        async with asyncio.timeout(60):
            return await self.lives[node]

    async def kill(self, node: Node) -> None:
        """From one moment to the next it says nothing any more."""
        await node.store.close()
        await node.host.close()
        self.lives[node].cancel()
        await asyncio.gather(self.lives[node], return_exceptions=True)

    async def leave(self, node: Node) -> None:
        self.lives[node].cancel()
        await asyncio.gather(self.lives[node], return_exceptions=True)
        await node.rounds.leave(others_s=0)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    for life in cluster.lives.values():
        life.cancel()
    await asyncio.gather(*cluster.lives.values(), return_exceptions=True)
    for node in cluster.lives:
        await node.host.close()
        await node.store.close()
    await cluster.store.close()


async def test_all_have_one_plan_and_the_job_is_done_when_all_are(cluster: Cluster) -> None:
    nodes = [cluster.start((3, 4), nproc) for nproc in (1, 2, 4)]
    found = [await node.world_of(3) for node in nodes]
    assert sorted(rank for rank, _ in found) == [0, 1, 2]
    assert found[0][1] == found[1][1] == found[2][1]
    for rank, (node, (own, plan)) in enumerate(zip(nodes, found, strict=True)):
        assert plan.nprocs[own] == node.nproc, rank
    nodes[0].finish.set()
    nodes[1].finish.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not cluster.lives[nodes[0]].done()
    nodes[2].finish.set()
    assert {(await cluster.end(node)).kind for node in nodes} == {"done"}
    assert [len(node.plans) for node in nodes] == [1, 1, 1]


async def test_newcomers_are_met_together_and_leave_again_and_again(cluster: Cluster) -> None:
    stayer = cluster.start((1, 3))
    _, plan = await stayer.world_of(1)
    for _ in range(3):
        pair = [cluster.start((1, 3)), cluster.start((1, 3))]
        rank, plan = await stayer.world_of(3, after=plan.number)
        assert rank == 0
        await cluster.leave(pair[0])
        rank, plan = await stayer.world_of(2, after=plan.number)
        await cluster.kill(pair[1])
        rank, plan = await stayer.world_of(1, after=plan.number)
    assert plan.restarts == 0
    numbers = [plan.number for _, plan in stayer.plans]
    assert numbers == sorted(set(numbers))
    assert {why.kind for why in stayer.stops} == {"joined", "left", "lost"}


@pytest.mark.parametrize("lost", [0, 2])
async def test_a_node_that_is_lost_during_the_meeting(cluster: Cluster, lost: int) -> None:
    """The node met the others in the store, and says no more: not its part of the plan, and not the plan."""
    members = [Node(cluster, (2, 3), last_call_s=ALL_COME_S) for _ in range(3)]
    async with asyncio.timeout(60):
        rounds = await asyncio.gather(*(member.rounds.meet() for member in members))
    by_rank = {met.rank: (member, met) for member, met in zip(members, rounds, strict=True)}
    await by_rank[lost][0].store.close()
    survivors = [by_rank[rank] for rank in range(3) if rank != lost]

    async def go_on(member: Node, current: Round) -> Round:
        async with current.watched(lambda why: None):
            plan = await current.agree(Entry(1, "h", 0))
            async with current.linked(plan) as together:
                assert not together
                assert await current.conclude(End(), 0, 0) == Conclusion("again")
        return await member.rounds.meet()

    async with asyncio.timeout(60):
        again = await asyncio.gather(*(go_on(*survivor) for survivor in survivors))
    assert [met.rank for met in again] == [0, 1]  # in the order they had
    for member, _ in survivors:
        await member.rounds.leave(others_s=0)


async def test_a_plan_that_only_one_node_saw_before_a_loss_holds_nobody_up(cluster: Cluster) -> None:
    members = [Node(cluster, (2, 3), last_call_s=ALL_COME_S) for _ in range(3)]
    async with asyncio.timeout(60):
        rounds = await asyncio.gather(*(member.rounds.meet() for member in members))
        by_rank = {met.rank: (member, met) for member, met in zip(members, rounds, strict=True)}
        stopped = [asyncio.Event(), asyncio.Event()]
        async with contextlib.AsyncExitStack() as stack:
            for rank in (0, 1):
                await stack.enter_async_context(by_rank[rank][1].watched(lambda why, at=rank: stopped[at].set()))
            entries = [asyncio.create_task(by_rank[rank][1].agree(Entry(1, "h", 0))) for rank in (0, 1)]
            dead = by_rank[2][1]
            await dead._store.set(
                f"{dead._keys}node/2", Entry(1, "h", 0, link=asdict(LinkPlace("h", 0, "key"))).to_json()
            )
            assert await entries[0] is not None
            await by_rank[2][0].store.close()
            await asyncio.gather(*(event.wait() for event in stopped))
            await entries[1]
            assert await by_rank[1][1].agree(Entry(1, "h", 0)) is None  # it has seen the loss by now
            conclusions = await asyncio.gather(*(by_rank[rank][1].conclude(End(), 0, 0) for rank in (0, 1)))
        assert conclusions == [Conclusion("again")] * 2
    for rank in (0, 1):
        await by_rank[rank][0].rounds.leave(others_s=0)


async def test_failures_are_counted_by_all_and_end_the_job(cluster: Cluster) -> None:
    nodes = [cluster.start((1, 2)) for _ in range(2)]
    for node in nodes:
        await node.world_of(2)
    nodes[1].fail.set()
    for node in nodes:
        await node.until(lambda _, plan: plan.restarts == 1)
    newcomer = cluster.start((1, 2))  # no room: nobody is disturbed
    nodes[1].fail.set()
    for node in nodes:
        assert await cluster.end(node) == Conclusion("over", False, FAILURE)
    with pytest.raises(JobOverError) as over:
        await cluster.end(newcomer)
    assert over.value.outcome == Outcome(3, "why")


async def test_who_comes_when_workers_have_ended_disturbs_nobody_and_ends_with_the_job(cluster: Cluster) -> None:
    nodes = [cluster.start((1, 3)), cluster.start((1, 3))]
    for node in nodes:
        await node.world_of(2)
    rounds = [len(node.plans) for node in nodes]
    nodes[0].finish.set()
    rank, plan = nodes[0].plans[-1]
    await nodes[0].host.opened[-1].get(f"{plan.number}/end/{rank}", timeout=60)
    async with asyncio.timeout(60), cluster.store.watch("job/job/members/") as watch:
        newcomer = cluster.start((1, 3))
        assert (await anext(watch)).kind == "set"
    for _ in range(100):  # long enough to be stopped, if anybody said so
        await asyncio.sleep(0)
    nodes[1].finish.set()
    for node in nodes:
        assert (await cluster.end(node)).kind == "done"
        await node.rounds.leave(others_s=0)
    with pytest.raises(JobOverError) as over:
        await cluster.end(newcomer)
    assert over.value.outcome.exitcode == 0
    assert [len(node.plans) for node in nodes] == rounds


async def test_the_next_run_has_another_name(cluster: Cluster) -> None:
    names = []
    for _ in range(2):
        node = cluster.start((1, 2))
        await node.world_of(1)
        names.append(node.rounds.run_id)
        node.finish.set()
        await cluster.end(node)
        await node.rounds.leave(others_s=0)
    assert names == ["job", "job-1"]
    assert set(await cluster.store.list_keys("launch/")) == {"launch/job/elastic", "launch/job/runs"}


async def test_a_run_that_two_begin_in_the_same_instant_has_the_first_name(cluster: Cluster) -> None:
    """The second has looked for a run when there was none yet, and is the first to name it."""
    for name in ("job", "job-1"):
        slow, quick = Node(cluster, (1, 2)), Node(cluster, (1, 2))
        named = asyncio.Event()
        compare_set = slow.store.compare_set

        async def late(key: str, expected: str | bytes, desired: str | bytes) -> bytes:
            await named.wait()  # noqa: B023
            return await compare_set(key, expected, desired)  # noqa: B023

        slow.store.compare_set = late  # type: ignore[method-assign, assignment]
        slow_name = asyncio.create_task(slow.rounds._current_run())
        while not await cluster.store.list_keys("launch/job/runs"):
            pass
        assert await quick.rounds._current_run() == name
        named.set()
        assert await slow_name == name
        await cluster.store.set("launch/job/elastic", b"")  # it is over
        for node in (slow, quick):
            await node.store.close()


async def test_a_run_whose_launchers_were_all_killed_goes_on(cluster: Cluster) -> None:
    first = cluster.start((1, 2))
    _, plan = await first.world_of(1)
    await cluster.kill(first)
    second = cluster.start((1, 2))
    _, plan = await second.world_of(1)
    assert (second.rounds.run_id, plan.number) == ("job", 1)


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_all_that_are_there_end_up_in_one_world(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Nodes come, leave, are killed, fail and are taken for lost, at any moment of meetings, rounds and conclusions."""
    monkeypatch.setattr(Node, "max_restarts", 1000)
    draw = random.Random(seed)
    there = [cluster.start((1, 4), join_s=600.0) for _ in range(2)]
    for _ in range(25):
        for _ in range(draw.choice((0, 1, 5, 20, 100))):
            await asyncio.sleep(0)
        await asyncio.sleep(draw.choice((0, 0, 0.01, 0.03)))
        node = draw.choice(there)
        match draw.choice(("come", "come", "leave", "kill", "fail")):
            case "come" if len(there) < 6:
                there.append(cluster.start((1, 4), join_s=600.0))
            case "leave" if len(there) > 1:
                there.remove(node)
                await cluster.leave(node)
            case "kill" if len(there) > 1:
                there.remove(node)
                await cluster.kill(node)
            case "fail" if node.plans:
                node.fail.set()
    count = min(len(there), 4)
    async with asyncio.timeout(60):
        while True:
            worlds = [node.plans[-1] for node in there if node.plans]
            newest = max((plan.number for _, plan in worlds), default=-1)
            if sorted(rank for rank, plan in worlds if plan.number == newest) == list(range(count)):
                break
            assert not any(cluster.lives[node].done() for node in there)
            await asyncio.sleep(0.01)
        for node in there:
            node.finish.set()
        ends = await asyncio.gather(*(cluster.lives[node] for node in there), return_exceptions=True)
    kinds = [end.kind if isinstance(end, Conclusion) else type(end).__name__ for end in ends]
    assert sorted(kinds) == ["JobOverError"] * (len(there) - count) + ["done"] * count


async def test_too_few_nodes(cluster: Cluster) -> None:
    alone = cluster.start((2, 3), join_s=0.05)
    with pytest.raises(LaunchError, match=r"fewer than 2 nodes met within 0\.05 s, missing: 1 more members"):
        await cluster.end(alone)
    first, second = (cluster.start((2, 3), join_s=2.0) for _ in range(2))
    await first.world_of(2)
    await cluster.kill(second)
    with pytest.raises(LaunchError, match=r"within 2 s, missing: 1 more members; gone since .*: node . \(.*\), lost"):
        await cluster.end(first)


async def test_no_place(cluster: Cluster) -> None:
    nodes = [cluster.start((1, 2)) for _ in range(2)]
    for node in nodes:
        await node.world_of(2)
    rounds = [len(node.plans) for node in nodes]
    with pytest.raises(LaunchError, match=r"no place in the job became free within 0\.1 s: 2 nodes, the most"):
        await cluster.end(cluster.start((1, 2), join_s=0.1))
    assert [len(node.plans) for node in nodes] == rounds  # nobody was disturbed


@asynccontextmanager
async def alone(cluster: Cluster, join_s: float = 60.0) -> AsyncIterator[tuple[Node, Round]]:
    node = Node(cluster, (1, 2), join_s=join_s)
    yield node, await node.rounds.meet()
    await node.rounds.leave(others_s=0)


async def test_a_node_that_is_taken_for_lost_is_told_and_comes_back(cluster: Cluster) -> None:
    async with alone(cluster) as (node, current):
        stops: asyncio.Queue[Stop] = asyncio.Queue()
        member = node.rounds._member
        assert member is not None
        async with current.watched(stops.put_nowait):
            assert await current.agree(Entry(1, "h", 0)) is not None
            await node.store.expel(member.job, member.name)
            async with asyncio.timeout(60):
                why = await stops.get()
            with pytest.raises(DistStoreError) as error:
                await current.conclude(End(), 0, 0)
        assert "no longer part of the job" in why.text
        await node.rounds.lost(error.value)
        assert (await node.rounds.meet()).rank == 0


async def test_a_store_that_is_gone_and_other_errors_end_the_launcher(cluster: Cluster) -> None:
    async with alone(cluster, join_s=0.5) as (node, _):
        with pytest.raises(LaunchError, match="full"):
            await node.rounds.lost(DistStoreError("full"))
        await node.store.close()
        with pytest.raises(LaunchError, match=r"store was lost: \S"):
            await node.rounds.lost(DistStoreError("gone"))


async def test_who_goes_while_ends_are_gathered_disturbs_nobody() -> None:
    rounds: list[Any] = []

    class Store:
        async def multi_get(self, keys: list[str], timeout: float | None) -> list[bytes]:
            return [End(completed=True).to_json().encode() for _ in keys]

        async def get(self, key: str, timeout: float) -> bytes:
            rounds[0].gone.setdefault(0, "left")  # it has said how it ended, and goes
            return End(left=True).to_json().encode()

    class Member:
        store = Store()
        epoch, rank, members = 0, 1, ("a", "b", "c")

    class Links:
        store = Store()

    class Others:
        outage = Outage("", 1.0, print)
        lost_after_s = 1.0

    anything: Any = None
    member: Any = Member()
    others: Any = Others()
    links: Any = Links()
    rounds.append(Round(member, anything, others))
    rounds[0]._links = links
    rounds[0].gone[2] = "left"
    found = await rounds[0]._all_ends()
    assert found == {0: End(completed=True), 1: End(completed=True), 2: End(left=True)}
