"""Partition, offsets, chunks and cyclic runs."""

from __future__ import annotations

import pytest

from asyncdist.plan.chunks import Run, cyclic_runs, offsets, partition, split
from asyncdist.plan.steps import Buffer, Slice


@pytest.mark.parametrize("count", [0, 1, 2, 6, 7, 8, 100])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64])
def test_partition_is_whole_and_even(count, parts):
    lengths = partition(count, parts)
    assert len(lengths) == parts
    assert sum(lengths) == count
    assert max(lengths) - min(lengths) <= 1
    assert list(lengths) == sorted(lengths, reverse=True)


def test_offsets_end_with_the_total():
    assert offsets((3, 0, 2)) == (0, 3, 3, 5)
    assert offsets(()) == (0,)


@pytest.mark.parametrize(
    ("length", "chunk", "lengths"), [(0, 4, []), (1, 4, [1]), (4, 4, [4]), (5, 4, [3, 2]), (9, 4, [3, 3, 3])]
)
def test_split(length, chunk, lengths):
    pieces = split(Slice(Buffer.INPUT, 10, length), chunk)
    assert [piece.length for piece in pieces] == lengths
    assert all(piece.buffer is Buffer.INPUT for piece in pieces)
    assert [piece.offset for piece in pieces] == [10 + start for start in offsets(lengths)[:-1]]


def test_cyclic_runs_wrap_once_and_leave_out_what_is_empty():
    starts = offsets((3, 0, 2, 4))
    assert cyclic_runs(starts, 0, 4) == (Run(0, 9),)
    assert cyclic_runs(starts, 2, 2) == (Run(3, 6),)
    assert cyclic_runs(starts, 3, 2) == (Run(5, 4), Run(0, 3))
    assert cyclic_runs(starts, 6, 4) == (Run(3, 6), Run(0, 3))
    assert cyclic_runs(starts, 1, 1) == ()
    assert cyclic_runs(starts, 1, 0) == ()
