"""Collectives between network namespaces are measured, tuned and not, and nothing is left of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # bench is not installed: it lives beside the packages

from bench import hosts  # noqa: E402


def namespaces() -> set[str]:
    """Those of this process's benchmark."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=30, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith(f"bench{os.getpid()}-")}


@pytest.fixture
def needs_namespaces() -> None:
    if sys.platform != "linux" or os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs root, ip and tc, to make network namespaces")


@pytest.mark.usefixtures("needs_namespaces")
def test_hosts_are_measured_and_removed(monkeypatch):
    monkeypatch.setattr(hosts, "TUNE_S", 0.3)
    command = ["--hosts", "2", "--operations", "all_reduce", "--sizes", "64KiB", "--profile", "smoke"]
    done = CliRunner().invoke(hosts.main, command)
    assert done.exit_code == 0, done.output
    row = next(line for line in done.output.splitlines() if "64 KiB" in line)
    own, tuned = row.split("│")[3:5]
    assert "%" in own
    assert "%" in tuned
    assert not namespaces()


@pytest.mark.usefixtures("needs_namespaces")
@pytest.mark.parametrize("ranks", ["2", "3,1"])
def test_what_leaves_a_host_is_counted(monkeypatch, ranks):
    """A ring over all four ranks, which does not know hosts, sends half as much again."""
    monkeypatch.setattr(hosts, "TUNE_S", 0.3)
    monkeypatch.setattr(hosts, "PLAIN_S", 0.3)
    command = ["--hosts", "2", "--ranks-per-host", ranks, "--operations", "all_reduce", "--sizes", "4MiB", "--bytes"]
    done = CliRunner().invoke(hosts.main, command)
    assert done.exit_code == 0, done.output
    row = next(line for line in done.output.splitlines() if "4 MiB" in line)
    own, _tuned, ring = (float(cell.split(",")[1].strip(" x")) for cell in row.split("│")[2:5])
    assert 1.0 <= own < 1.3 < ring
    assert not namespaces()


@pytest.mark.usefixtures("needs_namespaces")
def test_a_network_that_cannot_be_made_leaves_nothing():
    with pytest.raises(hosts.click.ClickException, match="tc"), hosts.Network((1, 1), 0):
        pass
    assert not namespaces()
