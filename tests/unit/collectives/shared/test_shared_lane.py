"""The operations of a lane on several ranks in one process: right results whatever the order, in bounded turns."""

from __future__ import annotations

import asyncio
import random

import pytest
from shared_lane_kit import Execution, all_reduce, broadcast, make, settle

from asyncdist.collectives.shared.channel import SKIPPED
from asyncdist.collectives.shared.layout import RECORDS
from asyncdist.collectives.shared.operation import TURN_BYTES


@pytest.mark.parametrize("seed", range(25))
def test_random_programs_end_right_without_a_recheck(seed: int) -> None:
    """Operations of all sizes, given up on all ranks here and there; only rings move anything."""
    rng = random.Random(seed)
    ranks, _ = make(rng.randint(2, 5))
    calls: list[tuple[str, int, int]] = []
    for _ in range(rng.randint(5, 150)):
        kind = rng.choice(("all_reduce", "all_reduce", "broadcast", "message", "refused"))
        calls.append((kind, rng.choice((1, 10, 999, 5000, 200_000)), rng.randrange(len(ranks))))
    started: list[list[Execution | None]] = [[] for _ in ranks]
    while any(len(entries) < len(calls) for entries in started) or any(rank.loop.ready for rank in ranks):
        rank = rng.choice(ranks)
        mine = started[rank.index]
        if len(mine) < len(calls) and rng.random() < 0.3:
            number = len(mine)
            kind, count, root = calls[number]
            if kind == "message":
                rank.lane.add(5)
                rank.lane.flush()
                mine.append(None)
            elif kind == "refused" and rank.index == root:
                rank.lane.add(SKIPPED)
                rank.lane.flush()
                mine.append(None)
            elif kind == "broadcast":
                mine.append(broadcast(rank, count, root, number).start(number))
            else:
                mine.append(all_reduce(rank, count, rank.index + number).start(number))
                if kind == "refused" and rng.random() < 0.5:
                    mine[-1].part.end()  # type: ignore[union-attr]
        else:
            rank.loop.run_one()
        for index, (kind, _, root) in enumerate(calls):  # news of refusals travels another way
            if kind == "refused" and len(started[root]) > index:
                for entries in started:
                    if len(entries) > index and entries[index] is not None and rng.random() < 0.1:
                        entries[index].part.end()  # type: ignore[union-attr]
    for entries in started:
        for (kind, _, _), execution in zip(calls, entries, strict=True):
            if kind == "refused" and execution is not None:
                execution.part.end()
    settle(ranks, rng)
    total = len(ranks) * (len(ranks) - 1) // 2
    for number, (kind, _, _) in enumerate(calls):
        for entries in started:
            execution = entries[number]
            if execution is None or kind == "refused":
                continue
            assert execution.done, f"operation {number} of {len(calls)}, {kind}, was left behind"
            expected = number if kind == "broadcast" else total + number * len(ranks)
            assert (execution.buffers[1] == expected).all()
    assert not any(rank.faults for rank in ranks)


def test_no_turn_moves_much_more_than_its_bytes() -> None:
    ranks, _ = make(3)
    count = 4 << 20
    works = [all_reduce(rank, count, 1) for rank in ranks]
    for work in works:
        work.start()
        assert work.rank.lane.moved <= TURN_BYTES + (256 << 10)
    settle(ranks)
    assert all(work.done for work in works)
    assert all(rank.most <= TURN_BYTES + (256 << 10) for rank in ranks)


def test_a_step_done_outside_of_a_turn_is_told_to_the_others() -> None:
    """A reduction in slices ends in a callback of its own, and what follows may be a publication."""
    ranks, _ = make(2)
    reader = broadcast(ranks[1], 10, 0, 0).start()
    root = broadcast(ranks[0], 10, 0, 7)
    root.part = ranks[0].lane.add(1, root.program, root)  # type: ignore[arg-type]
    ranks[0].lane.flush()
    settle(ranks)
    root.advance(list(root.program.first_steps(itemsize=1)))
    settle(ranks)
    assert root.done
    assert reader.done


def test_more_operations_than_records_wait_their_turn() -> None:
    ranks, _ = make(2)
    first = [all_reduce(ranks[0], 10, number).start() for number in range(3 * RECORDS)]
    settle(ranks)
    second = [all_reduce(ranks[1], 10, number).start() for number in range(3 * RECORDS)]
    settle(ranks)
    assert all(work.done for work in first + second)
    assert [int(work.buffers[1][0]) for work in first] == [2 * number for number in range(3 * RECORDS)]


async def test_it_runs_on_a_real_loop_too() -> None:
    ranks, _ = make(2)
    for rank in ranks:
        rank.lane._loop = asyncio.get_running_loop()
    works = [all_reduce(rank, 100_000, 1).start() for rank in ranks]
    while not all(work.done for work in works):
        for rank in ranks:
            rank.look()
        await asyncio.sleep(0)
    assert (works[0].buffers[1] == 2).all()
