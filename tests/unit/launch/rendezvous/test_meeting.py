"""Launchers meet again on a store that has seen them end, fail, be interrupted and be killed."""

from __future__ import annotations

import asyncio

import pytest

from asyncdist.errors import LaunchError, StoreTimeoutError
from asyncdist.launch.rendezvous import nodes as nodes_module
from asyncdist.launch.rendezvous.nodes import Meeting, Nodes, Roster
from asyncdist.store import HashStore


def join(
    store: HashStore, node_rank: int | None, nnodes: int = 2, timeout_s: float = 5.0
) -> asyncio.Task[tuple[Roster, Meeting]]:
    meeting = Meeting(store.clone(), "job", nnodes)

    async def joined() -> tuple[Roster, Meeting]:
        return await meeting.join(node_rank, 1, "h", timeout_s), meeting

    return asyncio.create_task(joined())


async def arrived(store: HashStore, key: str) -> None:
    await store.get(f"launch/job/{key}", timeout=5)


async def run_ids(*joins: asyncio.Task[tuple[Roster, Meeting]]) -> set[str]:
    async with asyncio.timeout(60):
        return {roster.run_id for roster, _ in await asyncio.gather(*joins)}


@pytest.fixture(autouse=True)
def patience_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who can be told needs a roll call's time-out."""
    monkeypatch.setattr(nodes_module, "ROLL_CALL_S", 60.0)


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0), (None, None)])
async def test_after_one_was_interrupted_while_it_waited(ranks: tuple[int | None, int | None]) -> None:
    store = HashStore()
    waiting = join(store, ranks[0])
    await arrived(store, f"0/node/{ranks[0] or 0}")
    waiting.cancel()
    await asyncio.wait([waiting])
    assert len(await run_ids(join(store, ranks[0]), join(store, ranks[1]))) == 1


async def test_those_who_still_wait_meet_whom_replaces_the_interrupted() -> None:
    store = HashStore()
    first, second = join(store, 0, nnodes=3), join(store, 1, nnodes=3)
    await arrived(store, "0/node/0")
    await arrived(store, "0/node/1")
    first.cancel()
    await asyncio.wait([first])
    assert len(await run_ids(second, join(store, 0, nnodes=3), join(store, 2, nnodes=3))) == 1


@pytest.mark.parametrize("ranks", [(0, 1), (None, None)])
async def test_after_one_was_killed_while_it_waited(
    ranks: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_module, "ROLL_CALL_S", 0.2)
    store = HashStore()
    for key, value in {"nnodes": "2", "node/0": '{"nproc": 1, "host": "h", "run_id": "dead"}'}.items():
        await store.set(f"launch/job/0/{key}", value)
    await store.add("launch/job/0/seats", 1)
    await store.add("launch/job/0/claim/0", 1)
    second = join(store, ranks[1])
    assert await run_ids(join(store, ranks[0]), second) != {"dead"}


@pytest.mark.parametrize("ranks", [(0, 1), (None, None)])
@pytest.mark.parametrize("claimed", [True, False])
async def test_after_one_was_killed_as_it_took_its_seat(
    ranks: tuple[int | None, int | None], claimed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_module, "ROLL_CALL_S", 0.2)
    store = HashStore()
    await store.set("launch/job/0/nnodes", "2")
    await store.add("launch/job/0/seats", 1)
    if claimed:
        await store.add("launch/job/0/claim/0", 1)
    second = join(store, ranks[1])
    await arrived(store, "0/node/1")
    assert len(await run_ids(join(store, ranks[0]), second)) == 1


async def test_one_too_many_does_not_part_those_who_meet() -> None:
    store = HashStore()
    pair = [join(store, None), join(store, None)]
    assert await run_ids(*pair) == {"job"}
    spare, hasty = join(store, None, timeout_s=60.0), join(store, None, timeout_s=60.0)
    assert await run_ids(spare, hasty) == {"job-1"}
    await store.set("launch/job/2/nnodes", "2")
    await store.set("launch/job/meeting", "2")
    await store.add("launch/job/2/seats", 2)  # taken by two that are about to meet
    with pytest.raises(LaunchError, match="did not join"):
        await join(store, None, timeout_s=0.01)
    with pytest.raises(StoreTimeoutError):
        await store.get("launch/job/2/verdict", timeout=0)


async def test_another_number_of_nodes_is_another_run() -> None:
    store = HashStore()
    assert await run_ids(join(store, 0), join(store, 1)) == {"job"}
    assert await run_ids(join(store, 0, nnodes=1)) == {"job-1"}
    assert await run_ids(*(join(store, None, nnodes=3) for _ in range(3))) == {"job-2"}


async def test_two_numbers_of_nodes_at_once_are_an_error() -> None:
    store = HashStore()
    joins = [join(store, 0, 2), join(store, 1, 3)]
    async with asyncio.timeout(60):
        done, pending = await asyncio.wait(joins, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(LaunchError, match=r"expects [23] nodes, another one [23]"):
        done.pop().result()
    for task in pending:
        task.cancel()
    await asyncio.wait(joins)


async def test_who_alone_expects_another_number_of_nodes_is_told_so_although_the_others_have_met() -> None:
    store = HashStore()
    first = join(store, 0)
    await arrived(store, "0/node/0")
    odd = Meeting(store.clone(), "job", 3)
    next_meeting = odd._next_meeting

    async def next_meeting_late() -> None:
        await run_ids(first, join(store, 1))
        await next_meeting()

    odd._next_meeting = next_meeting_late  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        with pytest.raises(LaunchError, match="expects 3 nodes, another one 2"):
            await odd.join(None, 1, "h", 60.0)


async def test_a_time_out_of_one_does_not_end_the_others() -> None:
    store = HashStore()
    patient, hasty = join(store, 0), join(store, 0, timeout_s=0.01)
    with pytest.raises(LaunchError, match=r"nodes \[1\] of 2 did not join|claim node rank 0"):
        await hasty
    assert len(await run_ids(patient, join(store, 1))) == 1


async def test_launchers_whose_time_is_up_one_after_the_other_name_the_same_missing_node() -> None:
    store = HashStore()
    hasty, *patient = join(store, None, 4, 0.1), join(store, None, 4, 0.3), join(store, None, 4, 0.5)
    with pytest.raises(LaunchError, match=r"^nodes \[3\] of 4 did not join within 0.1 s$"):
        await hasty
    for one, timeout_s in zip(patient, (0.3, 0.5), strict=True):
        with pytest.raises(LaunchError) as raised:
            await one
        assert str(raised.value) == (
            "nodes [3] of 4 did not join within 0.1 s, as a launcher said that gave up then; nobody has taken its "
            f"place within {timeout_s:g} s"
        )


async def test_who_joins_after_that_is_not_said_to_be_missing() -> None:
    store = HashStore()
    hasty, patient = join(store, None, 3, 0.1), join(store, None, 3, 1.0)
    with pytest.raises(LaunchError, match="did not join"):
        await hasty
    with pytest.raises(LaunchError, match=r"^nodes \[2\] of 3 did not join within 0.2 s$"):
        await join(store, None, 3, 0.2)
    with pytest.raises(LaunchError, match=r"^nodes \[2\] of 3 did not join within 0.2 s, as a launcher said"):
        await patient
    hasty, patient = join(store, None, 3, 0.1), join(store, None, 3, 0.4)
    with pytest.raises(LaunchError, match="did not join"):
        await hasty
    last = join(store, None, 3, 60.0)
    with pytest.raises(LaunchError, match=r"^nodes \[2\] of 3 did not join within 0.4 s$"):
        await patient
    last.cancel()
    await asyncio.wait([last])


async def test_who_is_silent_at_the_deadline_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "ROLL_CALL_S", 0.05)
    store = HashStore()
    await store.set("launch/job/0/node/0", '{"nproc": 1, "host": "h", "run_id": "dead"}')
    with pytest.raises(LaunchError, match=r"nodes \[0\] of 2 came and went silent"):
        await join(store, 1, timeout_s=0.01)


async def test_a_store_that_stays_is_left_tidy() -> None:
    store = HashStore()
    for run in range(3):
        launched = [Nodes(store.clone(), "job", 2) for _ in range(2)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(nodes.join(None, 1, "h", 60.0) for nodes in launched))
            await asyncio.gather(*(nodes.leave(hosting=False, outlived=True) for nodes in launched))
        left = sorted(await store.list_keys("launch/job/"))
        assert left == [
            *(f"launch/job/{past}/verdict" for past in range(run + 1)),
            "launch/job/meeting",
            "launch/job/runs",
        ]
