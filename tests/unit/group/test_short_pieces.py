"""Collectives whose ranks know only their own lengths, of pieces so short that they travel in the records of a lane."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from group_kit import Group, outcome
from lane_kit import lane_of
from socket_world import LIMIT_S, run_ranks
from waiting import eventually

import asyncdist as dist
from asyncdist.collectives.host.backend import AioBackend
from asyncdist.collectives.shared.channel import Lane
from asyncdist.collectives.shared.inline_blocks import PiecesKind, PiecesOperation
from asyncdist.collectives.shared.layout import EXPRESS_BYTES, RECORDS
from asyncdist.plan.records import PIECES_BYTES
from asyncdist.transport.shared_memory import doorbell

COLLECTIVES = ("all_to_all_uneven", "gather_uneven", "scatter_uneven")


@pytest.fixture(autouse=True)
def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wake-up that got lost is a hang here, and fails."""
    monkeypatch.setattr(doorbell, "RECHECK_S", 10 * LIMIT_S)


@pytest.fixture
def items(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the items that were put out, of all ranks."""
    lengths: list[int] = []

    def watch(name: str, length: Callable[..., int]) -> None:
        real: Callable[..., bool] = getattr(Lane, name)

        def watched(self: Lane, *arguments: Any) -> bool:
            done = real(self, *arguments)
            if done:
                lengths.append(length(*arguments))
            return done

        monkeypatch.setattr(Lane, name, watched)

    watch("publish", lambda _operation, payload: len(payload))
    watch("lend", lambda _operation, _segment, _offset, length: length)
    watch("travels", lambda _operation, length: length)
    return lengths


def piece(source: int, target: int, length: int, dtype: Any = np.uint8) -> np.ndarray:
    return ((np.arange(length) + 31 * source + 7 * target) % 113).astype(dtype)


class Exchange:
    """Every collective once, rank s giving `lengths[s][d]` elements to rank d; `issue` them, and `check` what came."""

    def __init__(self, group: Group, lengths: list[list[int]], root: int, dtype: Any = np.uint8) -> None:
        rank, size = group.rank, group.size
        self.inputs = [piece(rank, target, lengths[rank][target], dtype) for target in range(size)]
        self.wanted = [piece(source, rank, lengths[source][rank], dtype) for source in range(size)]
        self.to_root = [piece(source, root, lengths[source][root], dtype) for source in range(size)]
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


LENGTHS = (0, 1, EXPRESS_BYTES, PIECES_BYTES // 4, PIECES_BYTES, 200_000)


@pytest.mark.parametrize("single_copy", ["auto", "off"])
@pytest.mark.parametrize("seed", range(4))
async def test_each_rank_decides_for_what_it_gives(
    seed: int, single_copy: str, monkeypatch: pytest.MonkeyPatch, items: list[int]
) -> None:
    """Many in flight, some ranks with short pieces and some with long ones, one of them late now and then."""
    monkeypatch.setenv("ASYNCDIST_SINGLE_COPY", single_copy)
    turned = 0
    real = PiecesOperation.by_items

    def by_items(self: PiecesOperation) -> None:
        nonlocal turned
        turned += 1
        real(self)

    monkeypatch.setattr(PiecesOperation, "by_items", by_items)

    async def main(group: Group) -> None:
        rng, own = random.Random(seed), random.Random(group.rank)
        await group.barrier()
        for count in (1, 12, 12):
            exchanges, works, totals = [], [], []
            for number in range(count):
                lengths = [
                    [rng.choice(LENGTHS[:3] if rng.random() < 0.9 else LENGTHS) for _ in range(group.size)]
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
        assert not lane._express

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
    real = PiecesOperation.put

    def put(self: PiecesOperation, target: Any) -> None:
        real(self, target)
        if self.kind.rank == 1:
            target[:8] = np.array(bounds, np.uint32).view(np.uint8)

    async def main(group: Group) -> None:
        await group.barrier()
        lengths = [[4, 4, other], [4, 4, 4], [other, 4, 4]]
        inputs = [np.zeros(length, np.uint8) for length in lengths[group.rank]]
        outputs = [np.zeros(row[group.rank], np.uint8) for row in lengths]
        monkeypatch.setattr(PiecesOperation, "put", put)
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
        assert isinstance(backend, AioBackend)
        kinds = {key[0]: recipe.express for (key, _), recipe in backend._recipes.items() if key[0] in COLLECTIVES}
        rank = group.rank
        after, before = (rank + 1) % 3, (rank - 1) % 3
        expected = {
            "all_to_all_uneven": ((after, before), {(before, 0, before), (after, 1, after)}, ((rank, rank),)),
            "gather_uneven": ((), {(2, 0, 2), (0, 0, 0)}, ((0, 1),)) if rank == 1 else ((0,), set(), ()),
            "scatter_uneven": ((2, 0), set(), ((1, 0),)) if rank == 1 else ((), {(1, 0 if rank == 2 else 1, 0)}, ()),
        }
        for collective in COLLECTIVES:
            kind = kinds[collective]
            assert isinstance(kind, PiecesKind)
            assert (kind.giving, set(kind.taking), kind.own) == expected[collective]

    await run_ranks(3, main)
