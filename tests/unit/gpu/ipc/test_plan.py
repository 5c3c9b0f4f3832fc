"""The plans of collectives through shared device memory, run step by step on host memory and compared with numpy."""

from __future__ import annotations

import ctypes
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest

from asyncdist.arrays import reduction
from asyncdist.arrays.device import DeviceArray
from asyncdist.arrays.reduce_op import PremulSum, ReduceOp
from asyncdist.collectives.arguments import call as calls
from asyncdist.collectives.arguments.call import Call
from asyncdist.gpu.ipc.plan import ALIGN_BYTES, CALLERS, Chunk, Combine, Move, Place, chunks, is_small

SLOT_BYTES = 4096
ONE_SHOT_BYTES = 512


def on_device(array: np.ndarray) -> DeviceArray:
    return DeviceArray(array.ctypes.data, array.shape, array.dtype, 0, owner=array)


class Ranks:
    """Slots of all ranks, and what carries out their steps."""

    def __init__(self, every: list[Call]) -> None:
        self.size = len(every)
        self.calls = every
        self.slots = [np.full(SLOT_BYTES, 0xEE, np.uint8) for _ in every]
        self.plans = [
            list(chunks(call, rank, self.size, SLOT_BYTES, ONE_SHOT_BYTES)) for rank, call in enumerate(every)
        ]

    def memory(self, place: Place, nbytes: int) -> np.ndarray:
        if place.rank == CALLERS:
            return np.frombuffer((ctypes.c_char * nbytes).from_address(place.offset), np.uint8)
        assert place.offset + nbytes <= self.slots[place.rank].size, f"{place} is outside of the slot"
        return self.slots[place.rank][place.offset : place.offset + nbytes]

    def work(self, rank: int, step: Move | Combine) -> None:
        target = self.memory(step.target, step.nbytes)
        if isinstance(step, Move):
            target[...] = self.memory(step.source, step.nbytes)
            return
        dtype = self.calls[rank].dtype
        total, *others = (self.memory(source, step.nbytes).copy().view(dtype) for source in step.sources)
        reduction.prepare(step.op, total)
        kernel = reduction.kernel(step.op, dtype)
        for other in others:
            kernel(total, other, total)
        reduction.finish(step.op, total, len(step.sources))
        target[...] = total.view(np.uint8)

    def run(self) -> None:
        """All ranks, stage by stage; that no chunk writes what others still read of another is for the channel."""
        for row in zip_longest(*self.plans):
            check_signals(row)
            check_slots(row)
            for stage in range(3):
                for rank, chunk in enumerate(row):
                    if chunk is not None and stage < len(chunk.stages):
                        for step in chunk.stages[stage].work:
                            self.work(rank, step)


def check_signals(row: tuple[Chunk | None, ...]) -> None:
    """Whoever waits is told, and nobody is told in vain; readers and read agree; all write their own memory only."""
    told, waited = set(), set()
    for rank, chunk in enumerate(row):
        for stage, content in enumerate(chunk.stages if chunk is not None else ()):
            told |= {(rank, other, stage) for other in content.tell}
            waited |= {(other, rank, stage - 1) for other in content.wait}
            for step in content.work:
                sources = step.sources if isinstance(step, Combine) else (step.source,)
                assert step.target.rank in (CALLERS, rank)
                assert chunk.writes or step.target.rank == CALLERS
                assert {place.rank for place in sources} - {CALLERS, rank} <= chunk.sources
        readers = {other for other, peer in enumerate(row) if peer is not None and rank in peer.sources}
        assert readers == (chunk.readers if chunk is not None else set())
    assert told == waited


def check_slots(row: tuple[Chunk | None, ...]) -> None:
    """Nobody writes in a stage what others read in it, be they sooner or later."""
    for stage in range(3):
        written: list[tuple[int, Place, int]] = []
        read: list[tuple[int, Place, int]] = []
        for rank, chunk in enumerate(row):
            work = chunk.stages[stage].work if chunk is not None and stage < len(chunk.stages) else ()
            for step in work:
                written.append((rank, step.target, step.nbytes))
                sources = step.sources if isinstance(step, Combine) else (step.source,)
                read += [(rank, source, step.nbytes) for source in sources]
        for writer, target, target_bytes in written:
            for reader, source, source_bytes in read:
                apart = target.offset + target_bytes <= source.offset or source.offset + source_bytes <= target.offset
                elsewhere = target.rank == CALLERS or target.rank != source.rank
                assert reader == writer or elsewhere or apart, f"rank {writer} writes {target}, rank {reader} reads it"


def vectors(size: int, count: int) -> list[np.ndarray]:
    return [np.random.default_rng([size, count, rank]).integers(0, 9, count).astype(np.float32) for rank in range(size)]


SIZES = (1, 2, 3, 4)
COUNTS = (0, 1, 5, ONE_SHOT_BYTES // 4, ONE_SHOT_BYTES // 4 + 1, 1024, 1025, 5000)
every_size = pytest.mark.parametrize("size", SIZES)
every_count = pytest.mark.parametrize("count", COUNTS)


@every_size
@every_count
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG, ReduceOp.PREMUL_SUM(3)])
def test_all_reduce(size: int, count: int, op: Any) -> None:
    arrays = vectors(size, count)
    stack = np.stack(arrays)
    expected = {ReduceOp.SUM: stack.sum(0), ReduceOp.MAX: stack.max(0), ReduceOp.AVG: stack.sum(0) / np.float32(size)}
    Ranks([calls.all_reduce(on_device(array), op) for array in arrays]).run()
    for array in arrays:
        np.testing.assert_allclose(array, expected.get(op, 3 * stack.sum(0)), rtol=1e-6)


@every_size
@every_count
def test_reduce_leaves_the_others_alone(size: int, count: int) -> None:
    arrays, root = vectors(size, count), size - 1
    before = [array.copy() for array in arrays]
    Ranks([calls.reduce(on_device(array), root, ReduceOp.SUM, rank) for rank, array in enumerate(arrays)]).run()
    for rank in range(size):
        np.testing.assert_array_equal(arrays[rank], np.stack(before).sum(0) if rank == root else before[rank])


@every_size
@every_count
def test_blocks(size: int, count: int) -> None:
    arrays, root = vectors(size, count), size // 2
    whole = np.concatenate(arrays)
    every = [array.copy() for array in arrays]
    Ranks([calls.broadcast(on_device(array), root, rank) for rank, array in enumerate(every)]).run()
    for array in every:
        np.testing.assert_array_equal(array, arrays[root])
    rows = [np.zeros(size * count, np.float32) for _ in arrays]
    pairs = zip(rows, arrays, strict=True)
    Ranks([calls.all_gather_into_tensor(on_device(row), on_device(array), size) for row, array in pairs]).run()
    for row in rows:
        np.testing.assert_array_equal(row, whole)
    places = [np.zeros(count, np.float32) for _ in arrays]
    lists = [[on_device(place) for place in places] if rank == root else None for rank in range(size)]
    Ranks([calls.gather(on_device(arrays[rank]), lists[rank], root, rank, size) for rank in range(size)]).run()
    np.testing.assert_array_equal(np.concatenate(places), whole)
    into = [np.zeros(count, np.float32) for _ in arrays]
    lists = [[on_device(array) for array in arrays] if rank == root else None for rank in range(size)]
    Ranks([calls.scatter(on_device(into[rank]), lists[rank], root, rank, size) for rank in range(size)]).run()
    np.testing.assert_array_equal(np.concatenate(into), whole)


@every_size
@every_count
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PREMUL_SUM(2)])
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_scatter(size: int, count: int, op: Any, in_place: bool) -> None:
    inputs = vectors(size, size * count)
    expected = np.stack(inputs).sum(0) * (op.factor if isinstance(op, PremulSum) else 1)
    outputs = [array[rank * count : (rank + 1) * count] for rank, array in enumerate(inputs)]
    if not in_place:
        outputs = [np.zeros(count, np.float32) for _ in inputs]
    pairs = zip(outputs, inputs, strict=True)
    Ranks([calls.reduce_scatter_tensor(on_device(out), on_device(array), op, size) for out, array in pairs]).run()
    np.testing.assert_array_equal(np.concatenate(outputs), expected)


@every_size
def test_uneven_reduce_scatter_and_all_gather(size: int) -> None:
    counts = [(0, 3, 1100, 257)[rank] for rank in range(size)]
    blocks = [[np.full(count, rank + 1.0, np.float32) for count in counts] for rank in range(size)]
    outputs = [np.zeros(count, np.float32) for count in counts]
    every = []
    for rank in range(size):
        inputs = [on_device(block) for block in blocks[rank]]
        every.append(calls.reduce_scatter(on_device(outputs[rank]), inputs, ReduceOp.SUM, rank, size))
    Ranks(every).run()
    for output in outputs:
        np.testing.assert_array_equal(output, np.full(output.size, sum(range(1, size + 1)), np.float32))
    lists = [[np.zeros(count, np.float32) for count in counts] for _ in counts]
    every = []
    for rank in range(size):
        places = [on_device(place) for place in lists[rank]]
        every.append(calls.all_gather(places, on_device(blocks[rank][rank]), rank, size))
    Ranks(every).run()
    for row in lists:
        for rank, place in enumerate(row):
            np.testing.assert_array_equal(place, np.full(counts[rank], rank + 1.0, np.float32))


@every_size
@every_count
def test_all_to_all(size: int, count: int) -> None:
    inputs = vectors(size, size * count)
    outputs = [np.zeros(size * count, np.float32) for _ in inputs]
    every = [
        calls.all_to_all_single(on_device(outputs[rank]), on_device(inputs[rank]), None, None, rank, size)
        for rank in range(size)
    ]
    Ranks(every).run()
    expected = np.stack(inputs).reshape(size, size, count).swapaxes(0, 1)
    np.testing.assert_array_equal(np.stack(outputs).reshape(size, size, count), expected)


@every_size
def test_uneven_pieces(size: int) -> None:
    lengths = np.random.default_rng(size).integers(0, 3, (size, size)) * 700
    sent = [[np.full(lengths[a, b], 10 * a + b, np.int64) for b in range(size)] for a in range(size)]
    into = [[np.zeros(lengths[b, a], np.int64) for b in range(size)] for a in range(size)]
    given = [[on_device(piece) for piece in row] for row in sent]
    taken = [[on_device(piece) for piece in row] for row in into]
    Ranks([calls.all_to_all(taken[rank], given[rank], rank, size) for rank in range(size)]).run()
    for rank in range(size):
        for other in range(size):
            np.testing.assert_array_equal(into[rank][other], sent[other][rank])
            into[rank][other][...] = 0
    every = [
        calls.gather_uneven(given[rank][0], taken[0] if rank == 0 else None, 0, rank, size) for rank in range(size)
    ]
    Ranks(every).run()
    for other in range(size):
        np.testing.assert_array_equal(into[0][other], sent[other][0])
        into[other][0][...] = 0
    every = [
        calls.scatter_uneven(taken[rank][0], given[0] if rank == 0 else None, 0, rank, size) for rank in range(size)
    ]
    Ranks(every).run()
    for rank in range(size):
        np.testing.assert_array_equal(into[rank][0], sent[0][rank])


def test_all_gather_in_place_copies_nothing_of_its_own() -> None:
    rows = [np.zeros((2, 8), np.float32) for _ in range(2)]
    for rank, row in enumerate(rows):
        row[rank] = rank + 1
    ranks = Ranks(
        [calls.all_gather_into_tensor(on_device(row), on_device(row[rank]), 2) for rank, row in enumerate(rows)]
    )
    assert [step for stage in ranks.plans[0][0].stages for step in stage.work if step.target.rank == CALLERS] == [
        Move(Place(CALLERS, rows[0][1].ctypes.data), Place(1, 0), 32)
    ]
    ranks.run()
    np.testing.assert_array_equal(rows[0], rows[1])


@pytest.mark.parametrize(("nbytes", "stages"), [(ONE_SHOT_BYTES, 2), (ONE_SHOT_BYTES + 1, 3)])
def test_one_shot_up_to_its_limit(nbytes: int, stages: int) -> None:
    every = [calls.all_reduce(on_device(np.zeros(nbytes, np.uint8)), ReduceOp.SUM) for _ in range(2)]
    assert len(Ranks(every).plans[0][0].stages) == stages


@pytest.mark.parametrize(("more", "count"), [(0, 1), (1, 2)])
def test_a_chunk_fills_a_slot(more: int, count: int) -> None:
    every = [calls.broadcast(on_device(np.zeros(SLOT_BYTES + more, np.uint8)), 0, rank) for rank in range(2)]
    assert [len(plan) for plan in Ranks(every).plans] == [count, count]
    assert is_small(every[0], 2, SLOT_BYTES) == (not more)


@pytest.mark.parametrize(("more", "count"), [(0, 1), (1, 2)])
@every_size
def test_two_shots_fill_a_slot(size: int, more: int, count: int) -> None:
    arrays = [np.zeros(SLOT_BYTES + more, np.uint8) for _ in range(size)]
    every = [calls.all_reduce(on_device(array), ReduceOp.SUM) for array in arrays]
    assert [len(plan) for plan in Ranks(every).plans] == [count] * size


@pytest.mark.parametrize(("more", "count"), [(0, 1), (1, 2)])
def test_a_part_for_every_reader_fills_its_part_of_a_slot(more: int, count: int) -> None:
    nbytes = SLOT_BYTES // 3 // ALIGN_BYTES * ALIGN_BYTES + more
    arrays = [np.zeros(3 * nbytes, np.uint8) for _ in range(6)]
    every = [
        calls.all_to_all_single(on_device(arrays[rank]), on_device(arrays[rank + 3]), None, None, rank, 3)
        for rank in range(3)
    ]
    assert [len(plan) for plan in Ranks(every).plans] == [count] * 3
    assert is_small(every[0], 3, SLOT_BYTES) == (not more)
