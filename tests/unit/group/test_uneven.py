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
from waiting import eventually

import asyncdist as dist
from asyncdist.collectives.host.backend import HostBackend
from asyncdist.collectives.shared.inline import InlineOperation
from asyncdist.collectives.shared.items import Items
from asyncdist.collectives.shared.layout import INLINE_BYTES, RECORDS
from asyncdist.collectives.shared.recipes import Pieces
from asyncdist.collectives.shared.runner import PIECE_BYTES
from asyncdist.plan.records import PIECES_BYTES, SINGLE_COPY_BYTES
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
        real: Callable[..., bool] = getattr(Items, name)

        def counted(self: Items, *arguments: Any) -> bool:
            done = real(self, *arguments)
            counts[name] += done
            return done

        monkeypatch.setattr(Items, name, counted)

    for name in ("bcopy", "zcopy", "by_message"):
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
    assert isinstance(backend, HostBackend)
    return next(recipe.plan.algorithm for (key, _), recipe in backend._recipes.items() if key[0] == collective)


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
        for _ in range(8 // size):
            await exchanged(group, matrix(size, rng))
        for collective in ("all_to_all_uneven", "gather_uneven", "scatter_uneven"):
            assert algorithm_of(group, collective) == "shared"

    await run_ranks(size, main)
    assert ways["bcopy"]
    assert bool(ways["zcopy"]) == (single_copy == "auto")
    assert bool(ways["by_message"]) == (single_copy == "off")


async def test_arrays_that_lie_in_shared_memory_are_read_there(
    monkeypatch: pytest.MonkeyPatch, ways: Counter[str]
) -> None:
    monkeypatch.setenv("ASYNCDIST_SINGLE_COPY", "off")

    async def main(group: Group) -> None:
        lengths = [[1 << 20] * 3] * 3
        for _ in range(3):
            await exchanged(group, lengths, group.empty)

    await run_ranks(3, main)
    assert ways["zcopy"] > ways["by_message"] / 2, "but for the first of each rank, and the whole that is a usual array"


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


COLLECTIVES = ("all_to_all_uneven", "gather_uneven", "scatter_uneven")


@pytest.fixture
def items(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the items that were put out, of all ranks."""
    lengths: list[int] = []

    def watch(name: str, length: Callable[..., int]) -> None:
        real: Callable[..., bool] = getattr(Items, name)

        def watched(self: Items, *arguments: Any) -> bool:
            done = real(self, *arguments)
            if done:
                lengths.append(length(*arguments))
            return done

        monkeypatch.setattr(Items, name, watched)

    watch("bcopy", lambda _operation, payload: len(payload))
    watch("zcopy", lambda _operation, _segment, _offset, length: length)
    return lengths


def short_piece(source: int, target: int, length: int, dtype: Any = np.uint8) -> np.ndarray:
    return ((np.arange(length) + 31 * source + 7 * target) % 113).astype(dtype)


class Exchange:
    """Every collective once, rank s giving `lengths[s][d]` elements to rank d; `issue` them, and `check` what came."""

    def __init__(self, group: Group, lengths: list[list[int]], root: int, dtype: Any = np.uint8) -> None:
        rank, size = group.rank, group.size
        self.inputs = [short_piece(rank, target, lengths[rank][target], dtype) for target in range(size)]
        self.wanted = [short_piece(source, rank, lengths[source][rank], dtype) for source in range(size)]
        self.to_root = [short_piece(source, root, lengths[source][root], dtype) for source in range(size)]
        self.outputs = [np.zeros_like(one) for one in self.wanted]
        self.blocks = [np.zeros_like(one) for one in self.to_root] if rank == root else None
        self.own = np.zeros_like(self.wanted[root])
        self.group, self.root = group, root

    def issue(self) -> list[Any]:
        group, root = self.group, self.root
        return [
            group.all_to_all(self.outputs, self.inputs),
            group.gather(self.inputs[root], self.blocks, root, uneven=True),
            group.scatter(self.own, self.inputs if self.group.rank == root else None, root, uneven=True),
        ]

    def check(self) -> None:
        assert all(np.array_equal(*pair) for pair in zip(self.outputs, self.wanted, strict=True))
        assert self.blocks is None or all(np.array_equal(*pair) for pair in zip(self.blocks, self.to_root, strict=True))
        assert np.array_equal(self.own, self.wanted[self.root])


def drawn(size: int, lengths: tuple[int, ...], rng: random.Random) -> list[list[int]]:
    return [[rng.choice(lengths) for _ in range(size)] for _ in range(size)]


@pytest.mark.parametrize("dtype", ["u1", "?", "f2", "i4", "c16", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3, 4])
async def test_short_pieces_need_no_items(size: int, dtype: str, items: list[int]) -> None:
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16

    async def main(group: Group) -> None:
        rng = random.Random(size)
        for number in range(6):
            exchange = Exchange(group, drawn(size, (0, 1, 3, 40, 900), rng), number % size, np.dtype(dtype))
            for work in exchange.issue():
                await work
            exchange.check()

    await run_ranks(size, main)
    assert not items


def head(pieces: int) -> int:
    """Bytes of a payload before its pieces."""
    return -(-4 * (pieces + 1) // 16) * 16


@pytest.mark.parametrize("past", [0, 1])
async def test_as_much_as_may_go_so_and_one_byte_more(past: int, items: list[int]) -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        rank = group.rank
        rest = PIECES_BYTES - head(2) - 1000 + past
        lengths = [[0, 1000, rest], [rest, 0, 1000], [1000, rest, 0]]
        inputs = [np.full(length, rank, np.uint8) for length in lengths[rank]]
        outputs = [np.zeros(row[rank], np.uint8) for row in lengths]
        await group.all_to_all(outputs, inputs)
        assert all((output == source).all() for source, output in enumerate(outputs))
        length = PIECES_BYTES - head(1) + past
        blocks = [np.zeros(length, np.uint8) for _ in range(3)] if rank == 0 else None
        await group.gather(np.full(length, rank + 1, np.uint8), blocks, 0, uneven=True)
        assert blocks is None or [int(block[-1]) for block in blocks] == [1, 2, 3]

    await run_ranks(3, main)
    rest = PIECES_BYTES - head(2) - 1000 + 1
    assert sorted(items) == sorted([1000, rest] * 3 + [PIECES_BYTES - head(1) + 1] * 2) * past


SHORT_LENGTHS = (0, 1, INLINE_BYTES, PIECES_BYTES // 4, PIECES_BYTES, 200_000)


@pytest.mark.parametrize("single_copy", ["auto", "off"])
@pytest.mark.parametrize("seed", range(4))
async def test_each_rank_decides_for_what_it_gives(
    seed: int, single_copy: str, monkeypatch: pytest.MonkeyPatch, items: list[int]
) -> None:
    """Many in flight, some ranks with short pieces and some with long ones, one of them late now and then."""
    monkeypatch.setenv("ASYNCDIST_SINGLE_COPY", single_copy)
    turned = 0
    real = HostBackend.go_on_in_steps

    def go_on_in_steps(self: HostBackend, operation: InlineOperation) -> None:
        nonlocal turned
        turned += 1
        real(self, operation)

    monkeypatch.setattr(HostBackend, "go_on_in_steps", go_on_in_steps)

    async def main(group: Group) -> None:
        rng, own = random.Random(seed), random.Random(group.rank)
        await group.barrier()
        for count in (1, 12, 12):
            exchanges, works, totals = [], [], []
            for number in range(count):
                lengths = [
                    [rng.choice(SHORT_LENGTHS[:3] if rng.random() < 0.9 else SHORT_LENGTHS) for _ in range(group.size)]
                    for _ in range(group.size)
                ]
                exchanges.append(Exchange(group, lengths, number % group.size))
                works += exchanges[-1].issue()
                totals.append(np.full(rng.choice((1, 50_000)), 1.0))
                works.append(group.all_reduce(totals[-1]))
                if own.random() < 0.2:
                    await asyncio.sleep(0.002)
            for work in works:
                await work
            for exchange in exchanges:
                exchange.check()
            assert all((total == group.size).all() for total in totals)

    size = 2 + seed % 3
    await run_ranks(size, main)
    assert items
    assert turned or size == 2, "of two each knows by what it takes whether that is short"


@pytest.mark.parametrize("length", [3, PIECES_BYTES // 8])
async def test_a_rank_that_is_late_finds_what_was_meant_for_it(length: int, items: list[int]) -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        if group.rank == 1:
            await asyncio.sleep(0.05)
        works = []
        for number in range(2 * RECORDS):
            parts = [np.zeros(length + rank, np.int32) for rank in range(3)] if group.rank == 0 else None
            own = np.full(length + group.rank, 10 * number + group.rank, np.int32)
            works.append((number, parts, group.gather(own, parts, 0, uneven=True)))
        for number, parts, work in works:
            await work
            for rank, part in enumerate(parts or ()):
                assert (part == 10 * number + rank).all()

    await run_ranks(3, main)
    assert not items


async def test_inputs_that_are_outputs_and_arrays_with_gaps() -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        rank = group.rank
        for length in (2, 100_000):  # by records, and by items
            y = [np.full(length + (rank + target) % 3, 10 * rank + target) for target in range(3)]
            await group.all_to_all(y, y[:])
            assert [array.tolist() for array in y] == [
                [10 * source + rank] * (length + (rank + source) % 3) for source in range(3)
            ]
            base = np.zeros((3 * length, 2))
            splits = [length, length, length]
            await group.all_to_all_single(
                base[:, 1], np.repeat([10.0 * rank + n for n in range(3)], length), splits, splits
            )
            assert (base[:, 1] == np.repeat([10.0 * source + rank for source in range(3)], length)).all()
            assert not base[:, 0].any()

    await run_ranks(3, main)


async def test_cancelled_and_refused_ones_leave_the_others_right() -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        rng = random.Random(3)
        exchanges = [Exchange(group, drawn(3, (0, 2, 300), rng), number % 3) for number in range(8)]
        works = [work for exchange in exchanges for work in exchange.issue()]
        waiter = asyncio.ensure_future(works[3].wait())
        await asyncio.sleep(0)
        waiter.cancel()
        arguments: list[Any] = [[np.zeros(1)] * 3, [np.zeros(1)] * 3]
        if group.rank == 2:
            with pytest.raises(TypeError):
                await group.all_to_all("no arrays", arguments[1])
        else:
            error = await outcome(group.all_to_all(*arguments))
            assert isinstance(error, dist.CollectiveMismatchError)
            assert "rank 2 refused" in str(error)
        later = Exchange(group, drawn(3, (0, 2, 300), rng), 1)
        for work in [*works, *later.issue()]:
            await work
        for exchange in [*exchanges, later]:
            exchange.check()
        lane = lane_of(group)
        assert lane is not None
        assert not lane.inline.queue

    await run_ranks(3, main)


async def test_a_refusal_while_another_rank_turns_to_items() -> None:
    """Long pieces of one rank, which another then takes in steps, are given up in the middle."""

    async def main(group: Group) -> None:
        await group.barrier()
        lengths = [[1, 1, 1], [1, 1, 300_000], [1, 1, 1]]
        if group.rank == 2:
            with pytest.raises(TypeError):
                await group.all_to_all("no arrays", [np.zeros(1)] * 3)
        else:
            inputs = [np.zeros(length, np.uint8) for length in lengths[group.rank]]
            outputs = [np.zeros(row[group.rank], np.uint8) for row in lengths]
            error = await outcome(group.all_to_all(outputs, inputs))
            assert isinstance(error, dist.CollectiveMismatchError)
        for number in range(2 * RECORDS):
            exchange = Exchange(group, lengths, number % 3)
            for work in exchange.issue():
                await work
            exchange.check()

    await run_ranks(3, main)


async def test_what_a_rank_gave_before_it_left_is_taken() -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        own = np.full(group.rank + 1, group.rank)
        parts = [np.zeros(rank + 1, int) for rank in range(3)] if group.rank == 0 else None
        if group.rank != 2:
            await asyncio.sleep(0.05)
        await group.gather(own, parts, 0, uneven=True)
        assert parts is None or [part.tolist() for part in parts] == [[0], [1, 1], [2, 2, 2]]
        if group.rank == 2:
            return
        error = await outcome(group.all_to_all([np.zeros(1)] * 3, [np.zeros(1)] * 3))
        assert isinstance(error, dist.PeerLostError | dist.GroupAbortedError)

    await run_ranks(3, main)


async def test_a_time_out_names_who_is_missing() -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        if group.rank == 2:
            await eventually(lambda: group._core._aborted)
            return
        error = await outcome(group.all_to_all([np.zeros(1)] * 3, [np.zeros(1)] * 3, timeout=0.05))
        assert isinstance(error, dist.CollectiveTimeoutError)
        assert error.missing == (2,)

    await run_ranks(3, main)


@pytest.mark.parametrize("bounds", [(0, 1 << 30), (20, 16), ((1 << 32) - 1, 0)])
@pytest.mark.parametrize("other", [4, 300_000])
async def test_a_table_that_says_what_cannot_be_loses_its_rank(
    bounds: tuple[int, int], other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the pieces are taken at once, or in steps as another rank's are long."""
    real = Pieces.put

    def put(self: Pieces, operation: InlineOperation, payload: memoryview) -> None:
        real(self, operation, payload)
        if operation.recipe.rank == 1:
            payload[:8] = np.array(bounds, np.uint32).view(np.uint8).data

    async def main(group: Group) -> None:
        await group.barrier()
        lengths = [[4, 4, other], [4, 4, 4], [other, 4, 4]]
        inputs = [np.zeros(length, np.uint8) for length in lengths[group.rank]]
        outputs = [np.zeros(row[group.rank], np.uint8) for row in lengths]
        monkeypatch.setattr(Pieces, "put", put)
        error = await outcome(group.all_to_all(outputs, inputs))
        if group.rank == 2:  # the first piece of rank 1
            assert isinstance(error, dist.PeerLostError)
            assert error.rank == 1
            assert "a piece lies from" in str(error)

    await run_ranks(3, main)


async def test_what_goes_so_is_said_by_the_plan() -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        exchange = Exchange(group, [[1] * 3] * 3, 1)
        for work in exchange.issue():
            await work
        backend = group._core._backend
        assert isinstance(backend, HostBackend)
        recipes = {key[0]: recipe.inline for (key, _), recipe in backend._recipes.items() if key[0] in COLLECTIVES}
        rank = group.rank
        after, before = (rank + 1) % 3, (rank - 1) % 3
        expected = {
            "all_to_all_uneven": ((after, before), {(before, 0, before), (after, 1, after)}, ((rank, rank),)),
            "gather_uneven": ((), {(2, 0, 2), (0, 0, 0)}, ((0, 1),)) if rank == 1 else ((0,), set(), ()),
            "scatter_uneven": ((2, 0), set(), ((1, 0),)) if rank == 1 else ((), {(1, 0 if rank == 2 else 1, 0)}, ()),
        }
        for collective in COLLECTIVES:
            recipe = recipes[collective]
            assert recipe is not None
            pieces = recipe.pieces
            assert pieces is not None
            assert (pieces.giving, set(pieces.taking), pieces.own) == expected[collective]

    await run_ranks(3, main)
