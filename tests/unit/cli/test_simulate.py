"""`asyncdist simulate`: tables, what it refuses, and pictures."""

from __future__ import annotations

import importlib
import re
import sys

import click
import pytest
from click.testing import CliRunner

from asyncdist.cli import main
from asyncdist.cli.simulate_command import MAX_WORLD, SECONDS, SIZES, plotted_sizes, plotted_worlds
from asyncdist.plan.cost.constants import MPI_LIKE
from asyncdist.world.tuning_file import save_constants


def simulate(*arguments, **environment):
    return CliRunner().invoke(main, ["simulate", *arguments], env={"COLUMNS": "160", **environment})


def rows(text):
    """Cells by the first one of their line; that of the titles is `algorithm`."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.startswith("  ")]
    return {cells[0]: cells[1:] for cells in lines if len(cells) > 1}


def test_a_table_has_a_line_per_algorithm_and_a_column_per_size():
    result = simulate("all_reduce", "--world", "8", "--bytes", "8,1KiB", "--algorithm", "ring,recursive_doubling")
    assert result.exit_code == 0, result.output
    assert rows(result.output) == {
        "algorithm": ["8 B", "1 KiB"],
        "ring": ["840 us", "841 us"],
        "recursive_doubling": ["180 us", "183 us"],
    }
    assert "all_reduce, 8 ranks, simulated" in result.output


def test_all_algorithms_and_several_worlds():
    result = simulate("broadcast", "--world", "4,8", "--bytes", "64KiB")
    assert result.output.count("binomial_tree") == 2
    assert {"linear", "binomial_tree", "chain"} <= rows(result.output).keys()


def test_large_worlds_and_hosts():
    flat = simulate("all_reduce", "--world", "24576", "--bytes", "8", "--algorithm", "ring")
    assert rows(flat.output)["ring"] == ["2.95 s"]
    hosts = ("--hosts", "3072", "--ranks-per-host", "8", "--constants", "nccl")
    result = simulate("all_reduce", *hosts, "--bytes", "8", "--algorithm", "ring")
    assert rows(result.output)["ring"] == ["106 ms"]
    assert "24576 ranks, 8 per host" in result.output


def test_constants_are_given_one_by_one():
    costs = ("--alpha", "10us", "--beta", "1ns", "--gamma", "0", "--overhead", "2us")
    result = simulate("broadcast", "--world", "2", "--bytes", "10000", "--algorithm", "linear", *costs)
    assert rows(result.output)["linear"] == ["20 us"]
    result = simulate(
        "broadcast", "--world", "2", "--bytes", "10000", "--algorithm", "linear", *costs, "--between-alpha", "90us"
    )
    assert rows(result.output)["linear"] == ["100 us"]


def test_constants_of_a_file(tmp_path):
    path = tmp_path / "tuning.json"
    save_constants(path, "tcp", MPI_LIKE, {})
    command = ("broadcast", "--world", "2", "--bytes", "4", "--algorithm", "linear", "--constants", str(path))
    assert rows(simulate(*command, ASYNCDIST_TRANSPORT="tcp").output)["linear"] == ["2 us"]
    refused = simulate(*command, ASYNCDIST_TRANSPORT="shm")
    assert refused.exit_code == 2
    assert "no constants for transport 'shm'; it has: tcp" in refused.output


def test_a_barrier_has_no_bytes():
    assert rows(simulate("barrier", "--world", "8").output)["dissemination"] == ["180 us"]


def test_methods_agree():
    command = ("all_reduce", "--world", "200", "--bytes", "8", "--algorithm", "ring", "--method")
    assert rows(simulate(*command, "events").output) == rows(simulate(*command, "symmetry").output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all_reduce"], "give --world"),
        (["all_reduce", "--world", "8", "--algorithm", "star"], "no algorithm 'star'"),
        (["all_reduce", "--world", "9", "--ranks-per-host", "2"], "no whole number of hosts"),
        (["all_reduce", "--world", "9", "--hosts", "2", "--ranks-per-host", "2"], "are 4, not --world"),
        (["all_reduce", "--world", str(MAX_WORLD + 1)], "is not in the range"),
        (["all_reduce", "--world", "8", "--bytes", "many"], "is not a size"),
        (["all_reduce", "--world", "8", "--bytes", ","], "names nothing"),
        (["all_reduce", "--world", "8", "--alpha", "soon"], "is not a time"),
        (["all_reduce", "--world", "8", "--constants", "none.json"], "no file and no built-in set"),
        (["gather_uneven", "--world", "8"], "no rank knows all lengths"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments, message):
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_the_largest_world_is_taken():
    result = simulate("barrier", "--world", str(MAX_WORLD))
    assert rows(result.output)["dissemination"] == ["1.2 ms"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("60us", 60e-6), ("0.2 ns", 0.2e-9), ("6e-5", 6e-5), ("1ms", 1e-3), ("2s", 2), ("1ps", 1e-12)]
)
def test_times_as_people_write_them(text, seconds):
    assert SECONDS.convert(text, None, None) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "us", "-1us", "1 hour"])
def test_other_words_are_no_times(text):
    with pytest.raises(click.BadParameter):
        SECONDS.convert(text, None, None)


def test_a_picture_is_drawn(tmp_path):
    path = tmp_path / "ring.png"
    result = simulate("all_reduce", "--world", "12", "--bytes", "8,1KiB", "--algorithm", "ring", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_an_unknown_kind_is_refused(tmp_path):
    result = simulate("barrier", "--world", "4", "--plot", str(tmp_path / "ring.doc"))
    assert result.exit_code == 2
    assert "not supported" in result.output


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = simulate("barrier", "--world", "4", "--plot", str(tmp_path / "ring.png"))
    assert result.exit_code == 1
    assert "pip install 'asyncdist[plot]'" in result.output


def test_the_command_imports_no_matplotlib():
    before = set(sys.modules)
    importlib.import_module("asyncdist.cli.simulate_command")
    assert not {name for name in set(sys.modules) - before if name.startswith("matplotlib")}


def test_axes():
    assert plotted_sizes([8]) == SIZES
    assert plotted_sizes([64, 8, 8]) == (8, 64)
    assert plotted_worlds(12, 1) == (2, 4, 8, 12)
    assert plotted_worlds(24, 8) == (16, 24)
