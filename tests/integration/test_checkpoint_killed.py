"""Checkpoints whose writers are killed at random instants."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "soak"))

from checkpoint_soak import check


def test_what_is_found_is_whole_and_nothing_done_is_lost(tmp_path: Path) -> None:
    """`make soak` kills fifty times."""
    steps = check(2, 1, str(tmp_path))
    assert steps == sorted(set(steps))
