"""The command group: commands are imported when asked for, and its help says what each is for."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from asyncdist import cli
from asyncdist.cli.store_commands import store_group
from asyncdist_server.cli import main as server


def test_the_group_imports_no_command() -> None:
    code = "import sys, asyncdist.cli; print([m for m in sys.modules if m.startswith('asyncdist.cli.')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_command_that_is_not_there_is_named() -> None:
    result = CliRunner().invoke(cli.main, ["absent"])
    assert result.exit_code == 2
    assert "No such command 'absent'" in result.output


@pytest.mark.parametrize(("words", "meant"), [(["rum"], "run"), (["store", "lst"], "ls"), (["absent"], None)])
def test_a_misspelt_command_gets_a_suggestion(words: list[str], meant: str | None) -> None:
    result = CliRunner().invoke(cli.main, words)
    assert result.exit_code == 2
    assert f"No such command '{words[-1]}'" in result.output
    assert ("Did you mean" in result.output) == (meant is not None)
    assert meant is None or f"Did you mean {meant}?" in result.output


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("asyncdist sto", "plain,store"),
        ("asyncdist store --token", "plain,--token-file"),
        ("asyncdist store cl", "plain,clients"),
        ("asyncdist run --nnodes 2 tr", "file,tr"),
        ("asyncdist run train.py --conf da", "file,da"),
        ("asyncdist completion f", "plain,fish"),
    ],
)
def test_a_shell_is_told_how_words_may_end(words: str, found: str) -> None:
    script = CliRunner().invoke(cli.main, ["completion", "bash"]).output
    assert script.count("complete -o nosort -F") == 2
    assert "_ASYNCDIST_COMPLETE=bash_complete" in script
    position = str(words.count(" "))
    asked = {"COMP_WORDS": words, "COMP_CWORD": position, "_ASYNCDIST_COMPLETE": "bash_complete"}
    assert CliRunner().invoke(cli.main, env=asked, prog_name="asyncdist").output == f"{found}\n"


@pytest.mark.parametrize("group", [cli.main, store_group, server], ids=["asyncdist", "store", "asyncdist-server"])
def test_the_list_of_commands_cuts_no_sentence_off(group: click.Command) -> None:
    commands = CliRunner().invoke(group, ["--help"]).output.split("\nCommands:\n")[1]
    assert "..." not in commands


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
