"""`asyncdist explain`, and sizes as people write them."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from asyncdist.cli import main
from asyncdist.cli.explain_command import MAX_WORLD, SIZES, bus_factor
from asyncdist.cli.tables import BYTES, MAX_BYTES, show_bytes, show_seconds
from asyncdist.plan.algorithms.registry import ALGORITHMS, algorithms, ordered_algorithms
from asyncdist.plan.cost.constants import MPI_LIKE
from asyncdist.world.tuning_file import save_constants


@pytest.fixture
def explain(tmp_path):
    environment = {"COLUMNS": "200", "XDG_CACHE_HOME": str(tmp_path), "ASYNCDIST_ALGO": "", "ASYNCDIST_TUNING": ""}

    def invoke(*arguments, **more):
        return CliRunner().invoke(main, ["explain", *arguments], env={**environment, **more})

    return invoke


def rows(text):
    """Cells by algorithm."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split("[│|]", line) if cell.strip()]
        if len(cells) == 8 and cells[0] != "algorithm":
            found[cells[0].removesuffix(" <- chosen")] = cells
    return found


def test_every_candidate_is_shown_and_the_chosen_one_marked(explain):
    result = explain("all_reduce", "--world", "64", "--bytes", "1MiB")
    assert result.exit_code == 0, result.output
    table = rows(result.output)
    assert set(table) == set(ALGORITHMS["all_reduce"])
    assert [cells[0] for cells in table.values() if "chosen" in cells[0]] == ["halving_doubling <- chosen"]
    assert "all_reduce of 1 MiB, 64 ranks, one per host" in result.output
    assert table["ring"][4] == "126"
    assert table["recursive_doubling"][5] == "6 MiB"


def test_bandwidths_are_those_of_the_time(explain):
    table = rows(explain("all_reduce", "--world", "4", "--bytes", "1MB", "--constants", "mpi-like").output)
    seconds = float(table["ring"][1].split()[0]) * 1e-6
    assert float(table["ring"][2]) == pytest.approx(1e6 / seconds / 1e9, rel=0.01)
    assert float(table["ring"][3]) == pytest.approx(1.5 * float(table["ring"][2]), rel=0.01)


@pytest.mark.parametrize("collective", [name for name in ALGORITHMS if "uneven" not in name])
def test_every_collective_is_explained(explain, collective):
    result = explain(collective, "--world", "6", "--bytes", "96KiB", "--ranks-per-host", "3", "--cores", "2")
    assert result.exit_code == 0, result.output
    assert set(rows(result.output)) == set(ALGORITHMS[collective])
    assert "3 per host" in result.output


def test_operations_that_do_not_commute(explain):
    result = explain("reduce", "--world", "6", "--bytes", "8", "--op", "ordered")
    assert set(rows(result.output)) == set(ordered_algorithms("reduce"))
    assert "no order to keep" in explain("broadcast", "--world", "6", "--op", "ordered").output


def test_shared_memory_is_a_candidate_where_it_is_said_to_be_there(explain):
    result = explain("all_reduce", "--world", "4", "--bytes", "4MiB", "--shared")
    assert result.exit_code == 0, result.output
    table = rows(result.output)
    assert set(table) == set(algorithms("all_reduce", shared=True))
    assert table["shared"][0].endswith("<- chosen")
    assert "4 ranks, 4 per host, which share memory" in result.output
    assert "us per step" in result.output
    ordered = explain("reduce", "--world", "6", "--bytes", "8", "--op", "ordered", "--shared")
    assert set(rows(ordered.output)) == set(ordered_algorithms("reduce", shared=True))


def test_an_override_with_shared_memory_counts_where_there_is_some(explain):
    override = {"ASYNCDIST_ALGO": "all_reduce:shared"}
    assert "shared <- chosen" in explain("all_reduce", "--world", "4", "--bytes", "4", "--shared", **override).output
    without = explain("all_reduce", "--world", "4", "--bytes", "4", **override)
    assert without.exit_code == 0
    assert "<- chosen" in without.output
    assert "shared" not in rows(without.output)


def test_as_many_ranks_share_memory_as_a_lane_has_members(explain):
    assert explain("barrier", "--world", "104", "--shared").exit_code == 0
    refused = explain("barrier", "--world", "105", "--shared")
    assert refused.exit_code == 2
    assert "up to 104 ranks of one host" in refused.output
    assert explain("barrier", "--world", "8", "--shared", "--ranks-per-host", "4").exit_code == 2


def test_an_override_is_the_chosen_one(explain):
    result = explain("all_reduce", "--world", "4", "--bytes", "4", ASYNCDIST_ALGO="all_reduce:ring_2d")
    assert "ring_2d <- chosen" in result.output


def test_constants_come_from_the_host_or_a_file(explain, tmp_path):
    assert "message 32 us" in explain("barrier", "--world", "4").output
    assert "message 2 us" in explain("barrier", "--world", "4", "--constants", "mpi-like").output
    path = tmp_path / "mine.json"
    save_constants(path, "tcp", MPI_LIKE, {})
    assert (
        "message 2 us"
        in explain("barrier", "--world", "4", ASYNCDIST_TUNING=str(path), ASYNCDIST_TRANSPORT="tcp").output
    )
    assert "message 2 us" in explain("barrier", "--world", "4", "--constants", str(path), "--transport", "tcp").output
    refused = explain("barrier", "--world", "4", "--constants", str(path), "--transport", "unix")
    assert refused.exit_code == 2
    assert "it has: tcp" in refused.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all_reduce"], "--world"),
        (["all_reduse", "--world", "4"], "did you mean all_reduce?"),
        (["bkast", "--world", "4"], "did you mean broadcast?"),
        (["everything", "--world", "4"], "There are: all_reduce, broadcast"),
        (["gather_uneven", "--world", "4"], "it is shared with a lane, else linear"),
        (["all_reduce", "--world", str(MAX_WORLD + 1)], "is not in the range"),
        (["all_reduce", "--world", "8", "--hosts", "3"], "8 ranks are not 3 hosts"),
        (["all_reduce", "--world", "8", "--hosts", "2", "--ranks-per-host", "2"], "8 ranks are not 2 hosts of 2"),
        (["all_reduce", "--world", "0"], "Invalid value"),
        (["all_reduce", "--world", "4", "--bytes", "many"], "is not a size"),
        (["all_reduce", "--world", "4", "--dtype", "float31"], "unknown dtype"),
        (["all_reduce", "--world", "4", "--dtype", "S0"], "cannot be sent"),
        (["all_reduce", "--world", "4", "--ranks-per-host", "3"], "no whole number of hosts"),
        (["broadcast", "--world", "4", "--root", "4"], "root 4"),
        (["all_reduce", "--world", "4", "--constants", "nowhere"], "no file and no built-in set"),
    ],
)
def test_wrong_arguments(explain, arguments, message):
    result = explain(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == 0.75
    assert bus_factor("broadcast", 4) == 1
    assert bus_factor("all_reduce", 1) == 1


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("4096", 4096), ("64KiB", 65536), ("1.5 MB", 1_500_000), ("2g", 2 * 10**9), ("1024TiB", MAX_BYTES)],
)
def test_sizes_are_read(text, nbytes):
    assert BYTES.convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "1 KB/s", "1e6", "KiB", "1025TiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(click.BadParameter):
        BYTES.convert(text, None, None)


def test_sizes_and_times_are_written():
    assert [show_bytes(n) for n in (0, 1023, 1024, 3 << 19, 1 << 40)] == ["0 B", "1023 B", "1 KiB", "1.5 MiB", "1 TiB"]
    assert [show_seconds(s) for s in (0, 1.9e-6, 0.0123, 2.95)] == ["0 us", "1.9 us", "12.3 ms", "2.95 s"]
    assert [show_seconds(s) for s in (999, 1000, 22_876)] == ["999 s", "1,000 s", "22,900 s"]


def test_without_a_size_the_choice_by_size_is_shown(explain):
    result = explain("all_reduce", "--hosts", "1", "--world", "4")
    assert result.exit_code == 0, result.output
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if "│" in line]
    assert [line[0] for line in lines] == [show_bytes(size) for size in SIZES]
    assert lines[0][1] == "shared_direct"
    assert lines[-1][1] == "shared"
    assert all(float(line[6].removesuffix("x")) >= 0.97 for line in lines), "the next best is not better"
    one = explain("all_reduce", "--hosts", "1", "--world", "4", "--bytes", "1MiB")
    algorithm, predicted = next(line[1:3] for line in lines if line[0] == "1 MiB")
    assert rows(one.output)[algorithm][1] == predicted


@pytest.mark.parametrize("arguments", [("--world", "1"), ("--world", "1", "--bytes", "1MiB"), ("--hosts", "1")])
def test_a_rank_alone(explain, arguments):
    result = explain("all_reduce", *arguments)
    assert result.exit_code == 0
    assert "a rank alone has nobody to send to" in result.output
    assert "│" not in result.output


def test_no_bytes_have_no_bandwidth_and_no_chunks(explain):
    cells = rows(explain("all_reduce", "--world", "4", "--bytes", "0").output)["ring"]
    assert cells[2] == cells[3] == cells[6] == "-"
    assert "<0.001" in rows(explain("all_reduce", "--world", "4", "--bytes", "8").output)["ring"][2]


@pytest.mark.parametrize("collective", [name for name in ALGORITHMS if "uneven" not in name])
def test_the_largest_world(explain, collective):
    result = explain(collective, "--world", str(MAX_WORLD), "--bytes", "1MiB")
    assert result.exit_code == 0, result.output
    assert "<- chosen" in result.output


def test_hosts_instead_of_a_world(explain):
    together = explain("all_reduce", "--hosts", "3", "--ranks-per-host", "4", "--bytes", "1MiB")
    assert "12 ranks, 4 per host" in together.output
    assert "between hosts" in together.output
    assert rows(together.output) == rows(
        explain("all_reduce", "--hosts", "3", "--world", "12", "--bytes", "1MiB").output
    )


def test_ranks_of_one_host_share_memory_unless_told_otherwise(explain):
    shared = explain("all_reduce", "--world", "4", "--ranks-per-host", "4", "--bytes", "8")
    assert "which share memory" in shared.output
    assert "between hosts" not in shared.output
    assert "until all have begun" in explain("barrier", "--world", "4", "--hosts", "1", "--cores", "2").output
    for arguments in (("--no-shared",), ("--transport", "tcp")):
        without = explain("all_reduce", "--world", "4", "--ranks-per-host", "4", "--bytes", "8", *arguments)
        assert "share memory" not in without.output
        assert "shared" not in rows(without.output)
    assert "share memory" not in explain("barrier", "--hosts", "1", "--world", "105").output


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("allreduce", "all_reduce"),
        ("MPI_Allreduce", "all_reduce"),
        ("MPI.Allreduce", "all_reduce"),
        ("MPI_Bcast", "broadcast"),
        ("MPI_Reduce_scatter_block", "reduce_scatter"),
        ("bcast", "broadcast"),
        ("All-To-All", "all_to_all"),
        ("all_gather_into_tensor", "all_gather"),
        ("reduce_scatter_tensor", "reduce_scatter"),
    ],
)
def test_what_others_call_it(explain, name, meant):
    assert explain(name, "--world", "4", "--bytes", "8").output.startswith(meant)


def test_what_is_fast_and_not_chosen_is_explained(explain):
    result = explain("all_to_all", "--world", str(MAX_WORLD), "--bytes", "1MiB")
    text = " ".join(result.output.split())
    assert "bruck is not chosen since it needs" in text
    assert "ASYNCDIST_ALGO=all_to_all:bruck asks" in text
    assert "is not chosen since" not in explain("all_to_all", "--world", "4", "--bytes", "1MiB").output


@pytest.mark.parametrize(
    ("world", "named"),
    [(31, "ring"), (32, "binary_tree"), (512, "binary_tree"), (513, "double_tree"), (MAX_WORLD, "double_tree")],
)
def test_what_guides_to_nccl_name_is_set_beside_what_is_chosen(explain, world, named):
    table = explain("all_reduce", "--world", str(world), "--constants", "nccl").output
    assert f"guides: {named}" in table
    one = explain("all_reduce", "--world", str(world), "--constants", "nccl", "--bytes", "8")
    assert f"guides to NCCL name {named} for so many GPUs, predicted to take" in " ".join(one.output.split())
    assert "guides" not in explain("broadcast", "--world", str(world)).output


def test_guides_that_name_what_is_chosen_have_no_ratio(explain):
    one = explain("all_reduce", "--world", "8", "--constants", "nccl", "--bytes", "1GiB")
    assert "guides to NCCL name ring for so many GPUs\n" in one.output


def test_overrides_are_mentioned(explain):
    named = explain("all_reduce", "--world", "4", "--bytes", "4", ASYNCDIST_ALGO="all_reduce:ring")
    assert "ASYNCDIST_ALGO names ring" in named.output
    ignored = explain("all_reduce", "--world", "4", "--bytes", "4", ASYNCDIST_ALGO="all_reduce:shared")
    assert "names shared, which does not count here" in ignored.output


def test_where_constants_come_from(explain, tmp_path):
    assert "constants: built-in for auto" in explain("barrier", "--world", "4").output
    assert "constants: mpi-like" in explain("barrier", "--world", "4", "--constants", "mpi-like").output
    path = tmp_path / "mine.json"
    save_constants(path, "auto", MPI_LIKE, {})
    assert "constants: measured" in explain("barrier", "--world", "4", ASYNCDIST_TUNING=str(path)).output
    assert "constants: built-in" in explain("barrier", "--world", "4", ASYNCDIST_TUNING="off").output
