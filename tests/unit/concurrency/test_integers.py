"""Whole numbers: what counts as one."""

from __future__ import annotations

import numpy as np
import pytest

from asyncdist.concurrency.integers import as_int


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3)])
def test_numpys_are_ints_too(value: object) -> None:
    found = as_int(value, "it must be an int")
    assert type(found) is int
    assert found == 3


@pytest.mark.parametrize("value", [True, np.True_, 3.0, np.float32(3), "3", None, [3], np.array([3, 4]), np.array(3.0)])
def test_all_else_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=f"^it must be an int, not {type(value).__name__}$"):
        as_int(value, "it must be an int")
