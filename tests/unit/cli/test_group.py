"""The command group: commands are imported when asked for, and one that is missing hides itself only."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from asyncdist import cli


def test_the_group_imports_no_command() -> None:
    code = "import sys, asyncdist.cli; print([m for m in sys.modules if m.startswith('asyncdist.cli.')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_command_that_is_not_there_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli._COMMANDS, "absent", ("asyncdist.cli.absent_command", "absent"))
    context = click.Context(cli.main)
    assert isinstance(cli.main, click.Group)
    assert "absent" not in cli.main.list_commands(context)
    assert "run" in cli.main.list_commands(context)
    result = CliRunner().invoke(cli.main, ["absent"])
    assert result.exit_code == 2
    assert "No such command 'absent'" in result.output


def test_a_command_whose_dependency_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli._COMMANDS, "run", ("asyncdist.cli.run_command", "run_command"))
    monkeypatch.delitem(sys.modules, "asyncdist.cli.run_command", raising=False)
    monkeypatch.setitem(sys.modules, "asyncdist.launch.config", None)
    result = CliRunner().invoke(cli.main, ["run", "x"])
    assert isinstance(result.exception, ModuleNotFoundError)


@pytest.mark.parametrize("command", ["explain", "simulate"])
def test_a_collective_is_one_of_those_that_help_lists(command: str) -> None:
    text = " ".join(CliRunner().invoke(cli.main, [command, "--help"]).output.split())
    assert "COLLECTIVE is one of " in text
    wrong = CliRunner().invoke(cli.main, [command, "all_reduc", "--world", "4"])
    assert wrong.exit_code == 2
    assert "Invalid value for 'COLLECTIVE': there is no collective 'all_reduc'; did you mean all_reduce?" in " ".join(
        wrong.output.split()
    )
