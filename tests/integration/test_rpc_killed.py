"""Calls among processes, some cancelled, and a callee that is killed; `make soak` issues a hundred thousand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "soak"))

from rpc_soak import check


@pytest.mark.slow("four processes")
def test_each_call_ends_once_and_nothing_is_left() -> None:
    ends = check(3000, 1)
    assert ends["done"] > 1500
    assert ends["lost"] > 300
    assert 50 < ends["cancelled"] < 300
