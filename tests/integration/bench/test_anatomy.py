"""What an all_reduce is made of: every part is measured, and the sums are of those parts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # bench is not installed: it lives beside the packages

from bench import anatomy  # noqa: E402

PARTS = "import json; from bench import anatomy; print(json.dumps(anatomy.measure_parts(50, 1, 1 << 20)))"


def test_parts_and_wholes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with forked.Popen([sys.executable, "-c", PARTS], cwd=ROOT, stdout=subprocess.PIPE) as process:
        found = json.loads(process.communicate(timeout=120)[0])  # which forks, so it must have no threads
    monkeypatch.setattr(anatomy, "measure_parts", lambda rounds, passes, nbytes: found)
    done = CliRunner().invoke(anatomy.main, ["--profile", "smoke"])
    assert done.exit_code == 0, done.output
    assert done.output.count(" us free") + done.output.count(" ms free") == 5


def test_sums_are_of_their_parts() -> None:
    parts_s = {
        "a word seen by the other core": 1.0,
        "the core given to another process": 10.0,
        "woken by an eventfd, on another core": 100.0,
    }
    for ranks in anatomy.RANKS:
        for part, seconds in zip(anatomy.PARTS, (1e3, 1e9, 2e3, 3e3), strict=True):
            parts_s[anatomy._python(part, ranks)] = seconds
        parts_s[anatomy._pass(ranks, anatomy.READ_AND_ADDED)] = 1e4
        parts_s[anatomy._pass(ranks, anatomy.READ)] = 1e5
    sums = [row.sum_s for row in anatomy.sums(parts_s)]
    assert sums == pytest.approx([6001, 11_200, 12021, 55_000, 82_500])
