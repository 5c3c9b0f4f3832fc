"""What every page of figures says of when, of which sources and on which processor they were taken."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from bench import machine

CPUINFO = """processor : 0
vendor_id : AuthenticAMD
cpu family : 25
model  : 17
model name : AMD EPYC
stepping : 1
processor : 1
cpu family : 25
"""


def test_figures_have_a_date_a_commit_and_a_processor() -> None:
    found = machine.about()
    assert list(found)[:3] == ["date", "commit", "processor"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert found["commit"]


def test_a_processor_is_named_with_what_tells_its_generation(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO.replace(" :", "\t:"))
    assert machine.processor(path) == "AMD EPYC (family 25, model 17, stepping 1)"
    path.write_text("CPU implementer\t: 0x41\n")
    assert "family" not in machine.processor(path)


def test_a_commit_says_whether_the_sources_are_still_its(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    assert machine.commit(tmp_path) == "unknown"
    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    assert re.fullmatch("[0-9a-f]{10}", machine.commit(tmp_path))
    (tmp_path / "file").write_text("two")
    assert re.fullmatch("[0-9a-f]{10} with changes that are not committed", machine.commit(tmp_path))


def test_without_git_the_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.commit(tmp_path) == "unknown"
