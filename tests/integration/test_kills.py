"""Ranks killed at random instants; `make soak` kills hundreds, and is strict about when all must know."""

from __future__ import annotations

import sys

import pytest
from kill_soak import TRANSPORTS, kill

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

BUSY_S = 5.0
"""What a machine that runs many tests at once may take longer than it should."""
SEEDS = (1, 3, 5)
"""With the first the ranks are idle when one of them is killed."""
FIRST, *OTHERS = zip(SEEDS, TRANSPORTS, strict=True)
CASES = [FIRST, *(pytest.param(*case, marks=pytest.mark.thorough) for case in OTHERS)]


@pytest.mark.slow("kills ranks at many moments")
@pytest.mark.parametrize(("seed", "transport"), CASES)
def test_survivors_know_who_go_on_and_leave_nothing(seed: int, transport: str) -> None:
    assert not kill(seed, transport, noticed_s=BUSY_S)
