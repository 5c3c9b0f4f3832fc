"""`asyncdist tune` with its two processes, and a group that reads what it wrote."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
from dataclasses import replace
from functools import partial

import pytest
from click.testing import CliRunner

from asyncdist.cli import main
from asyncdist.errors import LaunchError
from asyncdist.launch.spawn import spawn
from asyncdist.plan.cost.constants import ASYNCIO, SHARED_MEMORY
from asyncdist.tuning import session
from asyncdist.tuning.measure import Measured
from asyncdist.tuning.trials import Trial
from asyncdist.world.tuning_file import default_path, own_tuning, read_file, save_constants, stored_constants


@pytest.fixture(autouse=True)
def others_may_have_the_cores(monkeypatch):
    monkeypatch.setattr(session, "START_LIMIT_S", 250.0)


@pytest.fixture
def forked_processes(monkeypatch):
    """Eight interpreters that start take longer than what is measured; where they do is in the check's test."""
    multiprocessing.set_forkserver_preload([session.__name__])
    monkeypatch.setattr(session, "spawn", partial(spawn, start_method="forkserver"))


@pytest.mark.slow("measures a host")
@pytest.mark.usefixtures("forked_processes")
def test_it_measures_writes_and_shows(tmp_path, monkeypatch):
    """With smaller collectives than users': most of the time went into moving their bytes."""
    monkeypatch.setattr(session, "CELLS", [cell._replace(nbytes=cell.nbytes // 16) for cell in session.CELLS])
    done = invoke(tmp_path, "--seconds", "0.5", "--transport", "auto")
    assert done.exit_code == 0, done.output
    path = default_path({"XDG_CACHE_HOME": str(tmp_path)})
    assert str(path) in done.output
    entry = read_file(path)["transports"]["auto"]
    assert re.match(r"\d{4}-\d\d-\d\dT", entry["date"])
    assert entry["connection"]
    assert entry["machine"]["cores"] == os.cpu_count()
    assert set(entry["measured"]) >= {"message_s", "overhead_s", "byte_s", "reduced_byte_s", "loop_turn_s"}
    assert entry["trials"] > 2 * 4 * 3  # ranks, collectives, sizes, and of those every algorithm
    constants = stored_constants(path, "auto")
    assert 1e-6 < constants.alpha_s < 1e-1
    assert 1e-12 < constants.beta_s < 1e-6
    if sys.platform == "linux":  # nothing can be exactly what it was taken to be
        assert constants.shared.step_s != SHARED_MEMORY.step_s
        assert "shared memory" in done.output
    used = own_tuning({"XDG_CACHE_HOME": str(tmp_path)}, 2, one_host=True, transport="auto", overrides={})
    assert used.constants.shared == constants.shared
    shown = invoke(tmp_path, "--show")
    assert shown.exit_code == 0
    assert "auto" in shown.output
    assert "measured" in shown.output


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
    figures = Measured(0.0, 0.0, 1e-9, 1e-9, 2e-9, 1e-9, 1e-6)
    found = session.Found(session.constants_of(figures, ASYNCIO), figures, (), "tcp")
    monkeypatch.setattr("asyncdist.cli.tune_command.find_here", lambda *_: found)
    result = invoke(tmp_path, "--transport", "tcp", "--output", str(path))
    assert result.exit_code == 1
    assert "alpha_s must be positive" in result.output
    assert not path.exists()


def test_a_measurement_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(session, "START_LIMIT_S", -0.5)
    with pytest.raises(LaunchError, match="has not ended"):
        session.measure_here("tcp", 0.5, lambda phase, share: None)


def test_constants_are_those_measured():
    measured = Measured(
        message_s=40e-6,
        overhead_s=30e-6,
        byte_s=0.2e-9,
        byte_cpu_s=0.3e-9,
        duplex_byte_s=0.4e-9,
        reduced_byte_s=0.1e-9,
        loop_turn_s=1e-6,
    )
    constants = session.constants_of(measured, ASYNCIO)
    assert (constants.alpha_s, constants.beta_s, constants.gamma_s) == (40e-6, 0.2e-9, 0.1e-9)
    assert constants.overhead_s == 20e-6  # no more than a message takes
    assert constants.copy_s == 0.2e-9
    assert constants.shared == SHARED_MEMORY
    assert constants.between is None


@pytest.mark.slow("measures each of 30 candidates")
def test_a_check_measures_every_candidate_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncdist.cli.tune_command.CHECKED_SIZES", (1024,))
    monkeypatch.setattr("asyncdist.cli.tune_command.WORLDS", (2,))
    command = ("--check", "--transport", "tcp", "--seconds", "0.1", "--output", str(tmp_path / "mine.json"))
    result = invoke(tmp_path, *command)
    assert result.exit_code == 0, result.output
    assert "tcp, built-in constants: of 5 choices" in result.output  # five collectives
    assert "nothing of version 2 was measured here yet" in result.output
    assert not list(tmp_path.iterdir())


def test_a_check_shows_choices_before_and_after_and_marks_bad_ones(tmp_path, monkeypatch):
    def trial(algorithm, seconds):
        return Trial("all_reduce", 2, 1 << 20, algorithm, 1 << 18, seconds, 9)

    trials = [trial("ring", 500e-6), trial("recursive_doubling", 100e-6), trial("direct", 200e-6)]
    monkeypatch.setattr("asyncdist.cli.tune_command.try_here", lambda _, world, *rest: trials if world == 2 else [])
    path = tmp_path / "mine.json"
    slow_links = replace(ASYNCIO, alpha_s=1e-2)
    save_constants(path, "tcp", slow_links, {})
    command = ("--check", "--transport", "tcp", "--output", str(path))
    result = invoke(tmp_path, *command)
    assert result.exit_code == 0, result.output
    assert "built-in constants: of 1 choices 0 are the fastest" in result.output
    assert "as measured here: of 1 choices 1 are the fastest, 1 within 10 % of it" in result.output
    everything = invoke(tmp_path, *command, "--candidates")
    assert "recursive_doubling <- chosen" in everything.output
    assert "5.00" in everything.output
    path.unlink()
    assert "5.00 !" in invoke(tmp_path, *command).output


def test_options_that_do_not_go_together(tmp_path):
    assert invoke(tmp_path, "--check", "--show").exit_code == 2
    assert invoke(tmp_path, "--candidates").exit_code == 2
