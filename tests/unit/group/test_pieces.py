"""Collectives whose ranks know only their own lengths, through a lane: right whichever way a piece goes, and lengths
that disagree named.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from group_kit import Group, outcome
from lane_kit import lane_of
from socket_world import LIMIT_S, run_ranks

import asyncdist as dist
from asyncdist.collectives.host.backend import AioBackend
from asyncdist.collectives.shared.channel import Lane
from asyncdist.collectives.shared.operation import PIECE_BYTES
from asyncdist.plan.records import SINGLE_COPY_BYTES
from asyncdist.transport.shared_memory import doorbell

LENGTHS = (0, 1, SINGLE_COPY_BYTES, PIECE_BYTES, PIECE_BYTES + 1, 3 << 20)
"""Bytes of a piece: nothing, hardly anything, and about where another way begins."""


@pytest.fixture(autouse=True)
def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wake-up that got lost is a hang here, and fails."""
    monkeypatch.setattr(doorbell, "RECHECK_S", 10 * LIMIT_S)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many items were put out, by the way they go."""
    counts: Counter[str] = Counter()

    def count(name: str) -> None:
        real: Callable[..., bool] = getattr(Lane, name)

        def counted(self: Lane, *arguments: Any) -> bool:
            done = real(self, *arguments)
            counts[name] += done
            return done

        monkeypatch.setattr(Lane, name, counted)

    for name in ("publish", "lend", "travels"):
        count(name)
    return counts


def piece(source: int, target: int, nbytes: int) -> np.ndarray:
    return (np.arange(nbytes) + 31 * source + 7 * target).astype(np.uint8)


async def exchanged(group: Group, lengths: list[list[int]], make: Callable[..., np.ndarray] = np.empty) -> None:
    """Rank s sends `lengths[s][d]` bytes to rank d, in each of the collectives."""
    rank, size = group.rank, group.size

    def given(source: int, target: int) -> np.ndarray:
        array = make(lengths[source][target], np.uint8)
        array[...] = piece(source, target, lengths[source][target])
        return array

    inputs = [given(rank, target) for target in range(size)]
    outputs = [np.zeros(row[rank], np.uint8) for row in lengths]
    await group.all_to_all(outputs, inputs)
    single = np.zeros(sum(row[rank] for row in lengths), np.uint8)
    whole = np.concatenate(inputs)
    await group.all_to_all_single(single, whole, [row[rank] for row in lengths], lengths[rank])
    for source, output in enumerate(outputs):
        assert np.array_equal(output, piece(source, rank, lengths[source][rank]))
    assert np.array_equal(single, np.concatenate(outputs))
    for root in range(size):
        blocks = [np.zeros(row[root], np.uint8) for row in lengths] if rank == root else None
        await group.gather(inputs[root], blocks, root, uneven=True)
        assert blocks is None or all(np.array_equal(*pair) for pair in zip(blocks, outputs, strict=True))
        own = np.zeros(lengths[root][rank], np.uint8)
        await group.scatter(own, inputs if rank == root else None, root, uneven=True)
        assert np.array_equal(own, outputs[root])


def algorithm_of(group: Group, collective: str) -> str:
    backend = group._core._backend
    assert isinstance(backend, AioBackend)
    return next(recipe.program.plan.algorithm for (key, _), recipe in backend._recipes.items() if key[0] == collective)


def matrix(size: int, rng: random.Random) -> list[list[int]]:
    return [[rng.choice(LENGTHS) for _ in range(size)] for _ in range(size)]


@pytest.mark.parametrize("single_copy", ["auto", "off"])
@pytest.mark.parametrize("size", [2, 3, 4])
async def test_pieces_of_all_lengths(
    size: int, single_copy: str, monkeypatch: pytest.MonkeyPatch, ways: Counter[str]
) -> None:
    monkeypatch.setenv("ASYNCDIST_SINGLE_COPY", single_copy)

    async def main(group: Group) -> None:
        rng = random.Random(size)
        for _ in range(4):
            await exchanged(group, matrix(size, rng))
        for collective in ("all_to_all_uneven", "gather_uneven", "scatter_uneven"):
            assert algorithm_of(group, collective) == "shared"

    await run_ranks(size, main)
    assert ways["publish"]
    assert bool(ways["lend"]) == (single_copy == "auto")
    assert bool(ways["travels"]) == (single_copy == "off")


async def test_arrays_that_lie_in_shared_memory_are_read_there(
    monkeypatch: pytest.MonkeyPatch, ways: Counter[str]
) -> None:
    monkeypatch.setenv("ASYNCDIST_SINGLE_COPY", "off")

    async def main(group: Group) -> None:
        lengths = [[1 << 20] * 3] * 3
        for _ in range(3):
            await exchanged(group, lengths, group.empty)

    await run_ranks(3, main)
    assert ways["lend"] > ways["travels"] / 2, "but for the first of each rank, and the whole that is a usual array"


async def test_small_lanes_and_tags_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that is not the first has 2 MiB for items: hardly four of the longest pieces that are copied."""
    monkeypatch.setenv("ASYNCDIST_SINGLE_COPY", "off")

    async def main(group: Group) -> None:
        await group.barrier()
        size, rank = group.size, group.rank
        for number in range(6):
            inputs = [np.full(PIECE_BYTES - number, rank + number, np.uint8) for _ in range(size)]
            outputs = [np.zeros(PIECE_BYTES - number, np.uint8) for _ in range(size)]
            await group.all_to_all(outputs, inputs, tag=5)
            assert all((output == source + number).all() for source, output in enumerate(outputs))
        assert lane_of(group, 5) is not None

    await run_ranks(4, main)


@pytest.mark.parametrize("single_copy", ["auto", "off"])
async def test_many_in_flight_among_other_collectives(single_copy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_SINGLE_COPY", single_copy)

    async def main(group: Group) -> None:
        rng = random.Random(7)
        rank, size = group.rank, group.size
        for _ in range(3):
            checks, works = [], []
            for number in range(20):
                lengths = [[rng.choice(LENGTHS[:-1]) for _ in range(size)] for _ in range(size)]
                inputs = [np.full(lengths[rank][target], number, np.uint8) for target in range(size)]
                outputs = [np.zeros(lengths[source][rank], np.uint8) for source in range(size)]
                works.append(group.all_to_all(outputs, inputs))
                total = np.full(rng.choice((3, 30_000, 400_000)), 1.0)
                works.append(group.all_reduce(total))
                checks.append((number, outputs, total))
            await asyncio.gather(*works)
            for number, outputs, total in checks:
                assert all((output == number).all() for output in outputs)
                assert (total == size).all()

    await run_ranks(3, main)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (0, 1),
        (0, PIECE_BYTES + 1),
        (3, 0),
        (3, 4),
        (4, 3),
        (3, 1 << 20),
        (2 << 20, 0),
        (2 << 20, 3),
        (2 << 20, 3 << 20),
    ],
)
@pytest.mark.parametrize("single_copy", ["auto", "off"])
async def test_lengths_that_disagree_name_the_rank_that_sends(
    sent: int, expected: int, single_copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCDIST_SINGLE_COPY", single_copy)

    async def main(group: Group) -> BaseException | None:
        await group.barrier()
        sizes = [[1, 1, 1], [1, 1, sent], [1, 1, 1]]
        inputs = [np.zeros(n, np.uint8) for n in sizes[group.rank]]
        outputs = [np.zeros(row[group.rank], np.uint8) for row in sizes]
        if group.rank == 2:
            outputs[1] = np.zeros(expected, np.uint8)
        async with asyncio.timeout(LIMIT_S / 4):
            return await outcome(group.all_to_all(outputs, inputs))

    error = (await run_ranks(3, main))[2]
    assert isinstance(error, dist.CollectiveMismatchError)
    assert f"rank 1 sent {sent} bytes where {expected} are expected" in str(error)
    assert "rank 2, all_to_all #" in str(error)


async def test_a_piece_taken_back_is_nobodys_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that gives up takes back what it has lent, and the others end within the time they are given."""

    async def main(group: Group) -> None:
        await group.barrier()
        await group.barrier()
        inputs = [np.full(2 << 20, group.rank, np.uint8) for _ in range(3)]
        outputs = [np.full(2 << 20, 9, np.uint8) for _ in range(3)]
        if group.rank == 2:
            await asyncio.sleep(0.2)
            group.abort("enough")
            return
        error = await outcome(group.all_to_all(outputs, inputs))
        assert isinstance(error, dist.GroupAbortedError)
        assert (outputs[2] == 9).all()

    await run_ranks(3, main)
