"""`asyncdist tune` with its two processes, and a group that reads what it wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from asyncdist.cli import main
from asyncdist.errors import LaunchError
from asyncdist.host_constants import default_path, own_tuning, read_file, save_constants, stored_constants
from asyncdist.plan.constants import ASYNCIO
from asyncdist.tuning import session


def tune(tmp_path, *arguments):
    environment = {"XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "160"}
    command = [sys.executable, "-m", "asyncdist", "tune", *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)


def test_it_measures_writes_and_shows(tmp_path):
    done = tune(tmp_path, "--seconds", "0.5", "--transport", "tcp")
    assert done.returncode == 0, done.stderr
    path = default_path({"XDG_CACHE_HOME": str(tmp_path)})
    assert str(path) in done.stdout
    entry = read_file(path)["transports"]["tcp"]
    assert re.match(r"\d{4}-\d\d-\d\dT", entry["date"])
    assert "tcp" in entry["connection"]
    assert entry["machine"]["cores"] == os.cpu_count()
    assert set(entry["measured"]) >= {"message_s", "overhead_s", "byte_s", "reduced_byte_s", "loop_turn_s"}
    constants = stored_constants(path, "tcp")
    assert 1e-6 < constants.alpha_s < 1e-1
    assert 0 < constants.overhead_s <= constants.alpha_s / 2
    assert 1e-12 < constants.beta_s < 1e-6
    used = own_tuning({"XDG_CACHE_HOME": str(tmp_path)}, 2, one_host=True, transport="tcp", overrides={})
    assert used.constants.alpha_s == constants.alpha_s
    shown = tune(tmp_path, "--show")
    assert shown.returncode == 0
    assert "tcp" in shown.stdout
    assert "measured" in shown.stdout


def invoke(tmp_path, *arguments):
    environment = {"XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "160", "ASYNCDIST_TRANSPORT": ""}
    return CliRunner().invoke(main, ["tune", *arguments], env=environment)


def test_there_may_be_nothing_to_show(tmp_path):
    result = invoke(tmp_path, "--show")
    assert result.exit_code == 1
    assert "run `asyncdist tune`" in result.output


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text("{")
    result = invoke(tmp_path, "--show", "--output", str(path))
    assert result.exit_code == 1
    assert "mine.json" in result.output
    save_constants(path, "tcp", ASYNCIO, {})
    value = json.loads(path.read_text())
    value["transports"]["tcp"]["constants"]["alpha_s"] = -1
    path.write_text(json.dumps(value))
    assert "alpha_s must be positive" in invoke(tmp_path, "--show", "--output", str(path)).output


def test_what_a_measurement_says_wrongly_is_not_kept(tmp_path, monkeypatch):
    path = tmp_path / "mine.json"
    figures = session.Measured(0.0, 0.0, 1e-9, 1e-9, 2e-9, 1e-9, 1e-6)
    monkeypatch.setattr("asyncdist.cli.tune_command.measure_here", lambda *_: (figures, "tcp"))
    result = invoke(tmp_path, "--transport", "tcp", "--output", str(path))
    assert result.exit_code == 1
    assert "alpha_s must be positive" in result.output
    assert not path.exists()


def test_a_measurement_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(session, "START_LIMIT_S", -0.5)
    with pytest.raises(LaunchError, match="has not ended"):
        session.measure_here("tcp", 0.5, lambda phase, share: None)


def test_constants_are_those_measured():
    measured = session.Measured(
        message_s=40e-6,
        overhead_s=30e-6,
        byte_s=0.2e-9,
        byte_cpu_s=0.3e-9,
        duplex_byte_s=0.4e-9,
        reduced_byte_s=0.1e-9,
        loop_turn_s=1e-6,
    )
    constants = session.constants_of(measured)
    assert (constants.alpha_s, constants.beta_s, constants.gamma_s) == (40e-6, 0.2e-9, 0.1e-9)
    assert constants.overhead_s == 20e-6  # no more than a message takes
    assert constants.copy_s == 0.2e-9
