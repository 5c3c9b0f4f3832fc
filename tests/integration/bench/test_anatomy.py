"""What an all_reduce is made of: every part is measured, and the sums are of those parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # bench is not installed: it lives beside the packages

from bench import anatomy, parts  # noqa: E402


def test_parts_and_wholes_are_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.anatomy", "--profile", "smoke"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" us free") + done.stdout.count(" ms free") == 5


def test_sums_are_of_their_parts() -> None:
    parts_s = {
        "a word seen by the other core": 1.0,
        "the core given to another process": 10.0,
        "woken by an eventfd, on another core": 100.0,
    }
    for ranks in anatomy.RANKS:
        for part, seconds in zip(parts.PARTS, (1e3, 1e9, 2e3, 3e3), strict=True):
            parts_s[anatomy._python(part, ranks)] = seconds
        parts_s[anatomy._pass(ranks, anatomy.ADDED)] = 1e4
        parts_s[anatomy._pass(ranks, anatomy.COPIED)] = 1e5
    sums = [row.sum_s for row in anatomy.sums(parts_s)]
    assert sums == pytest.approx([6001, 11_200, 12021, 155_000, 182_500])
