"""`python -m bench.recorder`: what the recorder costs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # bench is not installed: it lives beside the packages

from click.testing import CliRunner  # noqa: E402

from bench import recorder  # noqa: E402


def test_every_case_is_measured_by_both_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "PROMISED_US", 1e6)  # here it is that it runs
    done = CliRunner().invoke(recorder.main, ["--pairs", "1", "--judge"])
    assert done.exit_code == 0, done.output
    assert done.output.count(" shm ") == done.output.count(" tcp ") == len(recorder.CASES)
