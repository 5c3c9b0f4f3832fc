"""What reduce operations are made of."""

from __future__ import annotations

import numpy as np
import pytest
from group_kit import Group

from asyncdist import ReduceOp
from asyncdist.testing import run_world


@pytest.mark.parametrize("factor", [2, 2.0, np.float32(2), np.array(2.0), np.array([2.0]), np.array([[2]])])
def test_a_factor_is_a_number_or_an_array_of_one(factor: object) -> None:
    """torch takes a tensor of one element as well."""

    async def main(group: Group) -> None:
        x = np.ones(3, np.float32)
        await group.all_reduce(x, ReduceOp.PREMUL_SUM(factor))  # type: ignore[arg-type]
        assert x.tolist() == [4.0] * 3

    run_world(2, main)


@pytest.mark.parametrize("factor", ["2", None, True, np.True_, [2.0], np.array([2.0, 3.0]), np.array(["2"])])
def test_all_else_is_no_factor(factor: object) -> None:
    with pytest.raises(TypeError, match=r"the factor of ReduceOp\.PREMUL_SUM must be a number, got"):
        ReduceOp.PREMUL_SUM(factor)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes no factor"):
        ReduceOp.SUM(factor)  # type: ignore[arg-type]


def test_a_name_that_no_rank_can_be_told_is_refused() -> None:
    for name in ("\udc80", "half of \ud83d"):
        with pytest.raises(ValueError, match=r"name must be text that UTF-8 can hold, got '.*\\ud"):
            ReduceOp.custom(max, name=name)
