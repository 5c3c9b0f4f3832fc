"""`asyncdist tune --links`, run by the ranks of a world; one host has to do for two."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from launching import run

from asyncdist.cli import main
from asyncdist.cli.tune_command import _stored_link
from asyncdist.plan.cost.constants import ASYNCIO, ASYNCIO_LOOPBACK, Link
from asyncdist.world.tuning_file import own_tuning, read_file, save_constants, stored_constants


def launch(path: Path, *, ranks: int = 2, transport: str = "tcp") -> subprocess.CompletedProcess[str]:
    """Run it as a launched world."""
    command = ["--nproc-per-node", str(ranks), "-m", "asyncdist", "tune", "--links", "--seconds", "0.3"]
    return run(*command, "--output", str(path), ASYNCDIST_TRANSPORT=transport, ASYNCDIST_TUNING="off")


@pytest.mark.slow("starts ranks and measures")
def test_the_link_is_kept_beside_what_the_file_says(tmp_path):
    path = tmp_path / "tuning.json"
    host = replace(ASYNCIO_LOOPBACK, alpha_s=0.000123)
    save_constants(path, "tcp", host, {"date": "then"})
    done = launch(path, ranks=3)
    assert done.returncode == 0, done.stderr
    assert "between hosts" in done.stdout
    found = stored_constants(path, "tcp")
    assert found is not None
    assert found.between is not None
    assert replace(found, between=host.between) == host
    assert 1e-6 < found.between.alpha_s < 1e-1
    assert 1e-12 < found.between.beta_s < 1e-6
    entry = read_file(path)["transports"]["tcp"]
    assert entry["date"] == "then"
    assert "tcp" in entry["link"]["connection"]
    used = own_tuning({"ASYNCDIST_TUNING": str(path)}, 2, one_host=False, transport="tcp", overrides={})
    assert used.constants.between == found.between


@pytest.mark.slow("starts ranks and measures")
def test_ranks_of_one_host_have_none(tmp_path):
    if sys.platform != "linux":
        pytest.skip("only on Linux ranks of a host share memory")
    done = launch(tmp_path / "tuning.json", transport="auto")
    assert done.returncode != 0
    assert "ranks 0 and 1 share one" in done.stdout + done.stderr
    assert not (tmp_path / "tuning.json").exists()


@pytest.mark.parametrize(
    ("environment", "arguments", "said"),
    [
        ({"RANK": ""}, ["--links"], "run it on two at once"),
        ({}, ["--links"], "run it on two at once"),
        ({}, ["--links", "--show"], "three things"),
        ({}, ["--links", "--check"], "three things"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
            ["--links"],
            "this world has one rank",
        ),
    ],
)
def test_what_it_needs_is_said(tmp_path, monkeypatch, environment, arguments, said):
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "tuning.json"
    result = CliRunner().invoke(main, ["tune", *arguments, "--output", str(path)], env=environment)
    assert result.exit_code != 0
    assert said in " ".join(result.output.split())
    assert not path.exists()


def test_measuring_the_host_again_keeps_the_link(tmp_path):
    path = tmp_path / "tuning.json"
    assert _stored_link(path, "tcp") is None
    link = Link(0.01, 1e-8)
    save_constants(path, "tcp", replace(ASYNCIO, between=link), {})
    assert _stored_link(path, "tcp") == link
    assert _stored_link(path, "auto") is None
    path.write_text("damaged")
    assert _stored_link(path, "tcp") is None


@pytest.mark.parametrize("link_date", ["2026-02-02", None])
def test_each_figure_is_shown_in_its_column(tmp_path, link_date):
    path = tmp_path / "tuning.json"
    details = {"date": "2026-01-01", "link": "odd" if link_date is None else {"date": link_date}}
    save_constants(path, "tcp", replace(ASYNCIO_LOOPBACK, between=Link(0.01, 1e-8)), details)
    shown = CliRunner().invoke(main, ["tune", "--show", "--output", str(path)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    titles = [line.strip("┃ ").split("┃") for line in lines if "transport" in line]
    assert [(len(row), row[-1].strip()) for row in titles] == [(8, "measured"), (4, "measured")]
    messages, between = ([cell.strip() for cell in line.strip("│ ").split("│")] for line in lines if "│ tcp" in line)
    assert (len(messages), messages[-1]) == (8, "2026-01-01")
    assert between == ["tcp", "10 ms", "0.1", *([link_date] if link_date else [])]
