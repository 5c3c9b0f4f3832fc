"""Fleets: worlds of the members that are there. Members are tasks of this process, or processes that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from fleet_soak import Fleet
from waiting import eventually

import asyncdist as dist
from asyncdist import fleet
from asyncdist_server.serving.config import ServerConfig
from asyncdist_server.serving.daemon import StoreServer, serve

LIMIT_S = 30.0
GONE = (dist.PeerLostError, dist.GroupAbortedError)


@pytest.fixture
async def server() -> AsyncIterator[StoreServer]:
    async with asyncio.timeout(LIMIT_S), serve(ServerConfig(port=0)) as server:
        Member.tasks.clear()
        try:
            yield server
        finally:
            for task in Member.tasks:  # of a test that has failed
                task.cancel()
            await asyncio.gather(*Member.tasks, return_exceptions=True)


class Member:
    """A member that sums its number until it is to stop, in a task of its own."""

    tasks: ClassVar[list[asyncio.Task[None]]] = []

    def __init__(self, server: StoreServer, number: int, most: int = 8, settle: float = 0.1, **options: Any) -> None:
        self.number = number
        self.turns: list[tuple[int, tuple[str, ...]]] = []
        self.reasons: list[str] = []
        self.errors: list[Exception] = []
        self.stopping = False
        self.store: dist.TCPStore | None = None
        self.membership: Any = None
        self.worlds: Any = None
        self.task = asyncio.create_task(self._run(server.port, most, settle, options))
        self.tasks.append(self.task)

    async def _run(self, port: int, most: int, settle: float, options: dict[str, Any]) -> None:
        async with dist.TCPStore("127.0.0.1", port) as self.store:
            self.membership = await self.store.join("j", 1, most, None, name=f"m{self.number}", settle=settle)
            async with self.membership as member:
                self.worlds = member.worlds(**options)
                async for world in self.worlds:
                    assert (world.rank, world.size) == (member.rank, len(member.members))
                    assert dist.get_default_group() is world
                    try:
                        await self._sum(world, member)
                    except GONE as error:
                        self.errors.append(error)
                    if self.stopping:
                        return
                    await eventually(lambda: self.worlds.changing)
                    self.reasons.append(self.worlds.changing)

    async def _sum(self, world: dist.ProcessGroup, member: Any) -> None:
        x = np.zeros(2, np.int64)
        while not x[1]:
            x[:] = 1 << self.number, self.stopping or bool(self.worlds.changing)
            await world.all_reduce(x)
            assert x[0] == sum(1 << int(name[1:]) for name in member.members)
            if not self.turns or self.turns[-1][0] != member.epoch:
                self.turns.append((member.epoch, tuple(member.members)))
            await asyncio.sleep(0.001)

    def kill(self) -> None:
        """As a process that was killed: nothing is said."""
        self.task.cancel()

    async def stop(self) -> None:
        self.stopping = True
        await self.task


async def met(*members: Member) -> tuple[str, ...]:
    """Wait until these, and no others, are in a world; returns their names by rank."""
    names = {f"m{member.number}" for member in members}

    def together() -> bool:
        for member in members:
            if member.task.done():
                member.task.result()
        return all(member.turns and set(member.turns[-1][1]) == names for member in members)

    await eventually(together)
    return members[0].turns[-1][1]


async def test_worlds_follow_the_members(server: StoreServer) -> None:
    first = Member(server, 2)
    assert await met(first) == ("m2",)
    second = Member(server, 1)
    assert await met(first, second) == ("m2", "m1")  # those at work keep their order
    third = Member(server, 0)
    assert await met(first, second, third) == ("m2", "m1", "m0")
    await first.stop()
    assert await met(second, third) == ("m1", "m0")
    assert second.reasons == ["m0 joined", "m2 left"]
    assert not first.errors  # all have ended their turns after the same step
    assert not second.errors
    await second.stop()
    await third.stop()


async def test_many_joins_make_few_worlds(server: StoreServer) -> None:
    members = [Member(server, 0, 12, 0.3)]
    await met(*members)
    for number in range(1, 12):
        members.append(Member(server, number, 12, 0.3))
        await asyncio.sleep(0.01)
    await met(*members)
    assert len(members[0].turns) <= 3
    assert len(await members[0].membership.store.list_keys("worlds/")) <= 1
    for member in members:
        member.stopping = True
    await asyncio.gather(*(member.task for member in members))


async def test_nobody_joins_a_full_world_and_a_spare_takes_the_place_of_who_leaves(server: StoreServer) -> None:
    a, b = Member(server, 0, 2), Member(server, 1, 2)
    await met(a, b)
    turns = len(a.turns)
    spare = Member(server, 2, 2)
    await eventually(lambda: spare.store is not None and spare.store.is_connected)
    await asyncio.sleep(0.3)
    assert len(a.turns) == turns
    await a.stop()
    assert await met(b, spare) == ("m1", "m2")
    await b.stop()
    await spare.stop()


@pytest.mark.parametrize("finish", [0, 0.2])
async def test_a_turn_may_finish_before_its_operations_fail(server: StoreServer, finish: float) -> None:
    async with (
        dist.TCPStore("127.0.0.1", server.port) as store,
        await store.join("j", 1, 2, name="a", settle=0) as member,
    ):
        worlds = member.worlds(finish=finish)
        world = await anext(worlds)
        newcomer = asyncio.create_task(join_once(server.port))
        await eventually(lambda: worlds.changing)
        changed_s = time.monotonic()
        if finish:
            await world.barrier()
        with pytest.raises(
            dist.GroupAbortedError, match=r"group j, epoch 1, rank 0, recv.* a new world forms: b joined"
        ):
            await world.recv(np.zeros(1), None)
        assert time.monotonic() - changed_s >= finish - 0.05
        await (await anext(worlds)).barrier()
        await newcomer


async def join_once(port: int) -> None:
    async with dist.TCPStore("127.0.0.1", port) as store, await store.join("j", 1, 2, name="b", settle=0) as member:
        async for world in member.worlds():
            with contextlib.suppress(*GONE):
                await world.barrier()
            return


async def test_a_turn_that_ends_asks_for_a_new_world(server: StoreServer) -> None:
    a, b = Member(server, 0), Member(server, 1)
    await met(a, b)
    epoch = a.membership.epoch
    await a.worlds._world._say("ended", "m0 has ended its turn")
    await eventually(lambda: b.turns[-1][0] > epoch)
    assert await met(a, b) == ("m0", "m1")
    assert a.reasons[-1] == b.reasons[-1] == "m0 has ended its turn"
    await a.stop()
    await b.stop()


async def test_an_error_in_a_turn_ends_the_membership_and_the_others_go_on(server: StoreServer) -> None:
    async def failing() -> None:
        async with (
            dist.TCPStore("127.0.0.1", server.port) as store,
            await store.join("j", 1, 8, name="m7", settle=0.1) as member,
        ):
            async for world in member.worlds():
                if world.size == 2:
                    raise KeyError("a mistake")
                await world.recv(np.zeros(1))

    a = Member(server, 0)
    await met(a)
    with pytest.raises(KeyError):
        await failing()
    await eventually(lambda: a.errors)
    assert "left with KeyError: 'a mistake'" in str(a.errors[0])
    assert await met(a) == ("m0",)
    await a.stop()


async def test_leaving_ends_the_iteration_wherever_it_is(server: StoreServer) -> None:
    a, b = Member(server, 0), Member(server, 1)
    await met(a, b)
    await b.membership.leave()
    with pytest.raises(dist.ClosedError, match=r"all_reduce: the group is (being )?closed"):
        await b.task
    assert await met(a) == ("m0",)
    blocked = asyncio.Event()

    async def never_ends() -> None:
        async with (
            dist.TCPStore("127.0.0.1", server.port) as store,
            await store.join("j", 1, 8, name="c", settle=0) as member,
        ):
            async for _ in member.worlds():
                await blocked.wait()
                return

    task = asyncio.create_task(never_ends())
    await eventually(lambda: a.reasons[-1:] == ["c joined"] and a.worlds._world is not None)
    waiting = Member(server, 2)
    await eventually(lambda: a.reasons[-1:] == ["m2 joined"])  # and waits for c to end its turn
    await a.membership.leave()
    await a.task
    blocked.set()
    await task
    assert await met(waiting) == ("m2",)
    await waiting.stop()


async def test_a_member_that_never_comes_to_the_world_is_not_waited_for(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "FORM_S", 0.3)
    lost = await dist.TCPStore.connect("127.0.0.1", server.port)
    a = Member(server, 0, settle=0.3)
    await lost.join("j", 1, 8, name="x", settle=0.3)
    lost._abandon()
    assert await met(a) == ("m0",)
    assert a.membership.epoch == 2
    await a.stop()


@pytest.mark.parametrize("how", ["cancelled", "left"])
async def test_who_goes_while_a_world_forms_harms_no_other(server: StoreServer, how: str) -> None:
    a = Member(server, 0, settle=0.02)
    for turns in range(0, 40, 4):
        await met(a)
        count = len(a.reasons)
        b = Member(server, 1, settle=0.02)
        await eventually(lambda: len(a.reasons) > count or b.turns)  # noqa: B023
        for _ in range(turns):
            await asyncio.sleep(0)
        if how == "cancelled":
            b.task.cancel()
        else:
            await eventually(lambda: b.worlds is not None)  # noqa: B023
            await b.membership.leave()
        (ended,) = await asyncio.gather(b.task, return_exceptions=True)
        assert ended is None or isinstance(ended, asyncio.CancelledError | dist.ClosedError), ended
    await met(a)
    await a.stop()


async def test_an_expelled_member_is_told(server: StoreServer) -> None:
    a, b = Member(server, 0), Member(server, 1)
    await met(a, b)
    assert a.store is not None
    await a.store.expel("j", "m1")
    with pytest.raises(dist.LeaseLostError):
        await b.task
    assert await met(a) == ("m0",)
    await a.stop()


async def test_a_daemon_that_lost_its_data_ends_the_iteration() -> None:
    server = StoreServer(ServerConfig(port=0))
    await server.start()
    a, b = Member(server, 0), Member(server, 1)
    try:
        await met(a, b)
        port = server.port
        await server.stop()
        server = StoreServer(ServerConfig(port=port))
        await server.start()
        for member in (a, b):
            with pytest.raises(dist.LeaseLostError, match="restarted"):
                await member.task
        again = Member(server, 0)
        assert await met(again) == ("m0",)
        await again.stop()
    finally:
        await server.stop()


async def test_a_process_is_in_two_fleets_at_once(server: StoreServer) -> None:
    async def worker(number: int, other: Callable[[], bool]) -> list[tuple[str, int]]:
        async def take_part(store: dist.TCPStore, job: str) -> tuple[str, int]:
            async with await store.join(job, 2, name=f"m{number}", settle=0) as member:
                async for world in member.worlds():
                    x = np.ones(1)
                    await dist.all_reduce(x)
                    await world.barrier()
                    return job, int(x[0])
            raise AssertionError

        async with dist.TCPStore("127.0.0.1", server.port) as store:
            return await asyncio.gather(take_part(store, "a"), take_part(store, "b"))

    found = await asyncio.gather(*(worker(number, lambda: True) for number in range(2)))
    assert found == [[("a", 2), ("b", 2)]] * 2


@pytest.mark.slow("starts, ends and kills a dozen processes")
def test_processes_that_join_leave_and_are_killed() -> None:
    soak = Fleet(4, seed=2)
    try:
        soak.run(12, LIMIT_S)
    finally:
        soak.close()
    assert not soak.problems
    assert {"join", "kill", "leave"} <= set(soak.times_s)
