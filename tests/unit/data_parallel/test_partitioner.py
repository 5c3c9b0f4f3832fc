"""DataPartitioner: every item in one part, alike on all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from asyncdist import DataPartitioner
from asyncdist.data_parallel.partitioner import ROUNDING


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 10, 49])
@pytest.mark.parametrize("length", [0, 1, 10, 100, 1001])
def test_equal_parts_leave_nothing_out(length: int, parts: int) -> None:
    divided = DataPartitioner(range(length), [1 / parts] * parts)
    items = [list(divided.use(rank)) for rank in range(parts)]
    assert sorted(item for part in items for item in part) == list(range(length))
    assert max(map(len, items)) - min(map(len, items)) <= 1


def test_sizes_are_fractions() -> None:
    divided = DataPartitioner(list("abcdefghij"))
    parts = [divided.use(index) for index in range(3)]
    assert [len(part) for part in parts] == [7, 2, 1]
    assert sorted("".join(item for part in parts for item in part)) == list("abcdefghij")


def test_what_is_left_over_is_in_no_part() -> None:
    divided = DataPartitioner(range(100), (0.5, 0.25))
    assert [len(divided.use(index)) for index in range(2)] == [50, 25]


def test_the_seed_decides() -> None:
    def first(seed: int) -> list[int]:
        return list(DataPartitioner(range(100), (0.5, 0.5), seed=seed).use(0))

    assert first(1) == first(1)
    assert first(1) != first(2)
    assert first(1) != sorted(first(1))


def test_items_of_an_array_and_of_a_list() -> None:
    data = np.arange(20.0).reshape(10, 2)
    part = DataPartitioner(data, (0.5, 0.5)).use(1)
    assert np.array_equal(part[3], data[part.indices[3]])
    assert np.array_equal(part[-2:], data[part.indices[-2:]])
    assert np.array_equal(part[np.array([0, 4])], data[part.indices[[0, 4]]])
    assert np.array_equal(np.stack(list(part)), part[:])

    listed = DataPartitioner(list(data), (0.5, 0.5)).use(1)
    assert np.array_equal(listed[3], part[3])
    assert isinstance(listed[1:3], list)
    assert np.array_equal(listed[1:3], part[1:3])
    with pytest.raises(IndexError):
        part[5]


def test_wrong_sizes() -> None:
    for sizes, reason in [((), "empty"), ((0.5, -0.1), "negative"), ((0.5, float("nan")), "negative")]:
        with pytest.raises(ValueError, match=reason):
            DataPartitioner(range(10), sizes)
    DataPartitioner(range(10), (0.5, 0.5 + ROUNDING))
    with pytest.raises(ValueError, match="add up to 1 at most"):
        DataPartitioner(range(10), (0.5, 0.5 + 2 * ROUNDING))


@pytest.mark.parametrize("partition", [-1, 3])
def test_no_such_partition(partition: int) -> None:
    with pytest.raises(IndexError, match=f"0 to 2, but no {partition}"):
        DataPartitioner(range(10)).use(partition)
