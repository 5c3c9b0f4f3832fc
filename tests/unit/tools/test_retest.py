"""What failed beside others is unsteady only if few failed, and all of them pass every time alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import retest


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The runs of pytest, none of which finds a failure."""
    monkeypatch.chdir(tmp_path)
    retest.FAILED.parent.mkdir(parents=True)
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(retest.subprocess, "run", run)
    return commands


@pytest.mark.parametrize(("failed", "times"), [(0, 0), (1, retest.TIMES), (retest.MOST, retest.TIMES), (6, 0)])
def test_few_are_run_again_and_named(runs: list[list[str]], failed: int, times: int) -> None:
    names = [f"tests/test_x.py::test[{number} ]" for number in range(failed)]
    retest.FAILED.write_text(json.dumps(dict.fromkeys(names, True)))
    retest.UNSTEADY.write_text("of the run before")
    assert retest.main() == (0 if times else 1)
    assert [command[-failed:] for command in runs] == [names] * times
    said = retest.UNSTEADY.read_text().splitlines() if times else []
    assert [line.split(" failed once")[0] for line in said] == [f"UNSTEADY: {name}" for name in names[: len(said)]]
    assert len(said) == (failed if times else 0)
    assert retest.UNSTEADY.exists() == bool(times)


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("last", [1, retest.TIMES])
def test_one_failure_alone_is_enough(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    codes = iter([0] * (last - 1) + [1])
    monkeypatch.setattr(retest.subprocess, "run", lambda command, check: subprocess.CompletedProcess([], next(codes)))
    retest.FAILED.write_text('{"tests/test_x.py::test": true}')
    assert retest.main() == 1
    assert not retest.UNSTEADY.exists()


@pytest.mark.usefixtures("runs")
def test_without_a_record_nothing_is_put_right() -> None:
    assert retest.main() == 1
