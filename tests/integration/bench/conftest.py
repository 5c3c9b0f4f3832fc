"""The ranks of a session are forked: the tests of the benchmarks start dozens of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # bench is not installed: it lives beside the packages

from bench import process


def _start(command: list[str], *, preexec_fn: Any, **options: Any) -> subprocess.Popen[bytes]:
    if command[:3] == [sys.executable, "-m", "bench.rank"]:
        return forked.Popen(command, **options)
    return subprocess.Popen(command, preexec_fn=preexec_fn, **options)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what tests bench/: it is run by .ci/run, and slow as it measures."""
    folder = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(folder):
            item.add_marker(pytest.mark.bench)
            item.add_marker(pytest.mark.slow("measures"))


@pytest.fixture(autouse=True)
def ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out before they run, they do themselves (to die with their parent) or do not need."""
    monkeypatch.setattr(process, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": _start}))
