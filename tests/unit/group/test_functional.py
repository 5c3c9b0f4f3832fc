"""Collectives that return new arrays, along any dimension."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from group_kit import Group

import asyncdist as dist
from asyncdist import functional
from asyncdist.testing import run_world

SIZE = 3
ARRAYS = [np.random.default_rng(rank).integers(0, 100, (3, 6, 9)) for rank in range(SIZE)]


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_along_any_dimension(dim: int) -> None:
    """As numpy's own functions on the arrays of all ranks."""
    total = sum(ARRAYS)

    async def main(group: Group) -> None:
        x = ARRAYS[group.rank]
        before = x.copy()
        whole = await functional.all_gather(x, dim)
        np.testing.assert_array_equal(whole, np.concatenate(ARRAYS, dim))
        part = await functional.reduce_scatter(x, scatter_dim=dim)
        np.testing.assert_array_equal(part, np.split(total, SIZE, dim)[group.rank])
        for concat in range(3):
            exchanged = await functional.all_to_all(x, dim, concat)
            expected = [np.split(array, SIZE, dim)[group.rank] for array in ARRAYS]
            np.testing.assert_array_equal(exchanged, np.concatenate(expected, concat))
        np.testing.assert_array_equal(x, before)

    run_world(SIZE, main)


def test_new_arrays() -> None:
    async def main(group: Group) -> None:
        x = ARRAYS[group.rank]
        before = x.copy()
        np.testing.assert_array_equal(await functional.all_reduce(x), sum(ARRAYS))
        np.testing.assert_array_equal(await functional.all_reduce(x, dist.ReduceOp.MAX), np.max(ARRAYS, 0))
        np.testing.assert_array_equal(await functional.broadcast(x, 1), ARRAYS[1])
        np.testing.assert_array_equal(x, before)

    run_world(SIZE, main)


@pytest.mark.parametrize(
    ("destinations", "sources"),
    [([1, 2, 0], [2, 0, 1]), ({0: 2}, [None, None, 0]), ({0: 0, 2: 1}, [0, 2, None]), ({}, [None] * 3)],
)
def test_permutations(destinations: Any, sources: list[int | None]) -> None:
    async def main(group: Group) -> Any:
        received = await functional.permute(np.full(2, group.rank + 1), destinations, tag=3)
        return int(received[0])

    assert run_world(SIZE, main) == [0 if source is None else source + 1 for source in sources]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: functional.all_gather(np.zeros(()), 0), "gather_dim=0 is no dimension of an array of 0"),
        (lambda: functional.all_gather(np.zeros(3), 1), "gather_dim=1 is no dimension of an array of 1"),
        (
            lambda: functional.reduce_scatter(np.zeros(4)),
            "dimension 0 has 4 elements, which 3 ranks cannot",
        ),
        (lambda: functional.all_to_all(np.zeros((3, 4)), 1), "dimension 1 has 4 elements"),
        (lambda: functional.all_to_all(np.zeros(3), 0, 2), "concat_dim=2 is no dimension"),
        (lambda: functional.permute(np.zeros(3), [0, 0, 1]), "must be different ranks of the group's 3"),
        (lambda: functional.permute(np.zeros(3), {0: 3}), "must be different ranks of the group's 3"),
    ],
)
def test_what_is_refused(make: Any, said: str) -> None:
    async def main(group: Group) -> None:
        with pytest.raises(ValueError, match=said):
            make()

    run_world(SIZE, main)
