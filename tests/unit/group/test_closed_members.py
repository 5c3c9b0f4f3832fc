"""Who waits for a message of a member that has closed the group hears so, and gets all that was sent before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from group_kit import Group, outcome
from socket_world import run_ranks

import asyncdist as dist
from asyncdist.group.deadlines import ASK_S, MAX_PROBE_DIALS
from asyncdist.group.membership import MAX_ANY_DIALS, ClosedMembers
from asyncdist.messages.work import ANY_SOURCE
from asyncdist.testing import DeadlockError, run_world
from asyncdist.transport.protocol.frame import CREDIT_BYTES, EAGER_BYTES
from asyncdist.world.control import Closed, ControlMessage
from asyncdist.world.world import World

NAMED_S = 1.0
"""Within which a rank is named that will never send what is waited for."""

RECEIVES: dict[str, Callable[[Group, int | None], Any]] = {
    "recv": lambda group, src: group.recv(np.zeros(1), src),
    "irecv": lambda group, src: group.irecv(np.zeros(1), src, tag=7),
    "recv_array": lambda group, src: group.recv_array(src),
    "recv_object_list": lambda group, src: group.recv_object_list([None], src),
}


def made_of(group: Group, ranks: list[int] | None = None, **options: Any) -> Group:
    made = dist.new_group(ranks, group=group, **options)
    assert isinstance(made, Group)
    return made


@pytest.mark.parametrize("receive", RECEIVES.values(), ids=RECEIVES)
@pytest.mark.parametrize("after_s", [0.0, 5.0])
def test_who_has_closed_the_group_is_named(receive: Callable[[Group, int | None], Any], after_s: float) -> None:
    """Be it before or while it is waited for, and at once from then on."""

    async def main(group: Group) -> None:
        made = made_of(group)
        loop = asyncio.get_running_loop()
        if group.rank == 1:
            await asyncio.sleep(after_s)
            await made.close()
            await asyncio.sleep(10)
            return
        for limit_s in (after_s + NAMED_S, 0.01):
            since_s = loop.time()
            error = await outcome(receive(made, 1))
            assert isinstance(error, dist.CollectiveMismatchError)
            assert error.peer == 1
            assert str(error).endswith("(rank 1): rank 1 has closed the group without sending this")
            assert loop.time() - since_s < limit_s
        await made.close()

    run_world(2, main)


@pytest.mark.parametrize("ends", ["close", "leave"])
def test_of_any_source_all_others_have_to_be_gone(ends: str) -> None:
    async def main(group: Group) -> None:
        made = made_of(group)
        loop = asyncio.get_running_loop()
        if group.rank:
            await asyncio.sleep(5 * group.rank)
            if group.rank == 2:
                await made.send(np.ones(1), 0)
            if ends == "close" or group.rank == 1:
                await made.close()
                await group.barrier() if ends == "close" else await asyncio.sleep(10)
            return
        assert await made.recv(np.zeros(1), None) == 2
        error = await outcome(made.recv(np.zeros(1), None))
        assert isinstance(error, dist.CollectiveMismatchError)
        assert error.peer == 1
        assert "(any source): nobody can send this any more: rank 1" in str(error)
        assert loop.time() < 10 + NAMED_S
        if ends == "close":
            await group.barrier()

    run_world(3, main)


def test_a_rank_that_may_send_to_itself_is_a_source() -> None:
    async def main(group: Group) -> None:
        made = made_of(group)
        if group.rank:
            await made.close()
            await asyncio.sleep(5)
            return
        await made.isend(np.ones(1), 0, tag=1)
        waits = made.irecv(np.zeros(1), None)
        await asyncio.sleep(3)
        await made.send(np.ones(1), 0)
        assert await waits == 0

    run_world(2, main)


@pytest.mark.parametrize("parent_s", [0.0, 5.0])
@pytest.mark.parametrize("members_only", [False, True])
@pytest.mark.parametrize("what", ["recv", "large send", "all_reduce"])
def test_who_has_closed_the_parent_will_never_make_the_group(what: str, members_only: bool, parent_s: float) -> None:
    async def main(group: Group) -> None:
        parent = made_of(group, group_desc="parent")
        if group.rank == 1:
            await asyncio.sleep(parent_s)
            await parent.close()
            await asyncio.sleep(10)
            return
        made = made_of(parent, [0, 1], use_local_synchronization=members_only)
        if what == "recv":
            work: Any = made.recv(np.zeros(1), 1)
        else:
            work = made.isend(np.zeros(EAGER_BYTES), 1) if what == "large send" else made.all_reduce(np.zeros(1))
        error = await outcome(work)
        assert isinstance(error, dist.CollectiveMismatchError)
        assert "rank 1 has closed group parent without making this one of it" in str(error)
        assert error.peer == 1
        assert asyncio.get_running_loop().time() < parent_s + NAMED_S

    run_world(2, main)


def test_who_is_late_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it makes the group later."""
    asked: list[float] = []
    tell = World.tell

    def noted(world: World, ranks: tuple[int, ...], message: ControlMessage, *, dial: bool) -> list[int]:
        if isinstance(message, Closed) and ranks:
            asked.append(world.loop.time())
        return tell(world, ranks, message, dial=dial)

    monkeypatch.setattr(World, "tell", noted)

    async def main(group: Group) -> None:
        if group.rank:
            await asyncio.sleep(40)
            made = made_of(group)
            await made.send(np.ones(1), 0)
            await asyncio.sleep(40)
            await made.close()
            await asyncio.sleep(5)
            return
        made = made_of(group)
        await made.recv(np.zeros(1), 1)
        assert "rank 1 has closed the group" in str(await outcome(made.recv(np.zeros(1), 1)))
        assert asyncio.get_running_loop().time() == pytest.approx(80, abs=0.1)

    run_world(2, main)
    assert asked == [ASK_S, 80]


@pytest.mark.parametrize("past", [0, 1])
def test_in_so_large_groups_only_the_connected_are_asked(past: int) -> None:
    told: list[bool] = []

    def tell(ranks: tuple[int, ...], message: ControlMessage, *, dial: bool) -> list[int]:
        told.append(dial)
        return []

    world: Any = SimpleNamespace(rank=0, tell=tell)
    closed_members = ClosedMembers(world, 1, 2, tuple(range(MAX_PROBE_DIALS + past)), set, lambda _: None)
    closed_members.ask([1])
    assert told == [not past]


@pytest.mark.parametrize("past", [0, 1])
def test_who_waits_for_any_source_of_a_large_group_asks_those_that_are_connected(past: int) -> None:
    told: list[tuple[set[int], bool]] = []

    def tell(ranks: tuple[int, ...], message: ControlMessage, *, dial: bool) -> list[int]:
        told.append((set(ranks), dial))
        return []

    async def main() -> None:
        world: Any = SimpleNamespace(rank=0, tell=tell, loop=asyncio.get_running_loop())
        members = tuple(range(1 + MAX_ANY_DIALS + past))
        ClosedMembers(world, 1, 2, members, lambda: {3, ANY_SOURCE}, lambda _: None).watch(3)
        await asyncio.sleep(ASK_S + 0.1)
        others = set(members) - {0}
        assert told == ([(others, False), ({3}, True)] if past else [(others, True)])

    asyncio.run(main())


def test_of_the_group_of_all_ranks_nobody_is_asked() -> None:
    async def main(group: Group) -> None:
        if group.rank:
            await asyncio.Event().wait()
        await group.recv(np.zeros(1), 1)

    with pytest.raises(DeadlockError, match="at 0 s"):
        run_world(2, main)


def test_a_receive_nobody_waits_for_fails_no_close() -> None:
    """As where the other has left: had this rank closed first, nothing would be said of it either."""

    async def main(group: Group) -> None:
        made = made_of(group)
        if group.rank == 0:
            waits = made.irecv(np.zeros(1), 1)
            await group.barrier()
            await asyncio.sleep(NAMED_S)
            assert waits.done()
        else:
            await group.barrier()
        await made.close()
        await group.barrier(tag=1)

    run_world(2, main)


@pytest.mark.parametrize("progress", ["loop", "thread"])
@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
async def test_what_was_sent_before_is_received(progress: Any, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more than a pair has credit for, received while the other closes, and in part when it has closed."""
    monkeypatch.setenv("ASYNCDIST_TRANSPORT", transport)
    count, late = 3 * CREDIT_BYTES // 40_000, 20

    async def main(group: Any) -> None:
        made = dist.new_group(group=group)
        assert isinstance(made, Group)
        if group.rank == 1:
            works = [made.isend(np.full(5000, number), 0) for number in range(count)]
            for number in range(late):
                await made.send(np.full(10, number), 0, tag=1)
            await asyncio.gather(*works)
            await made.close()
        else:
            never = made.irecv(np.zeros(1), 1, tag=2)
            got = np.zeros(5000, int)
            for number in range(count):
                await made.recv(got, 1)
                assert (got == number).all()
                if number == count // 2:
                    await asyncio.sleep(ASK_S)
            assert "rank 1 has closed the group" in str(await outcome(never))
            for number in range(late):
                await made.recv(got, 1, tag=1)
                assert (got[:10] == number).all()
            assert "rank 1 has closed the group" in str(await outcome(made.recv(got, 1, tag=1)))
            assert "without receiving the message" in str(await outcome(made.isend(np.zeros(1_000_000), 1)))
            await made.close()
        await group.barrier()

    await run_ranks(2, main, progress=progress)
