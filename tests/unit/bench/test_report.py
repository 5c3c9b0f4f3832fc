"""What is printed and how it is judged, from cells as if measured."""

from __future__ import annotations

import dataclasses
import json

import pytest

from bench import report, stress, subjects
from bench.candidates import ASYNCDIST_EMPTY
from bench.driver import IN_FLIGHT, ONE_BY_ONE
from bench.model import PROMISES, SMOKE, Case, Cell, Measurement
from bench.subjects import collective_cases
from bench.targets import TARGETS, collectives, shared_memory
from bench.targets.verdict import Verdict, document

MIB = 1 << 20


def cell_of(subject: str, case: Case, ranks: int, **medians_s: float) -> Cell:
    """A cell in which every sample of a candidate took the same time; `_` in a name stands for a space."""
    cell = Cell(subject, case, ranks, "free", {}, frozenset({"asyncdist"}), frozenset({"floor"}))
    for name, median_s in medians_s.items():
        named = name.replace("_", " ")
        cell.measurements[named] = Measurement(named, [[median_s] * 3], [median_s / 2], [median_s])
    return cell


def case_of(operation: str, nbytes: int) -> Case:
    return next(iter(collective_cases(dataclasses.replace(PROMISES, large_bytes=1 << 30), (operation,), (nbytes,))))


def one(found: list[Verdict], measure: str) -> Verdict:
    (verdict,) = [verdict for verdict in found if verdict.measure == measure]
    return verdict


@pytest.mark.parametrize(
    ("own_s", "gloo_s", "floor_s", "met"),
    [(30e-6, 31e-6, 20e-6, True), (31e-6, 40e-6, 20e-6, False), (30e-6, 29e-6, 20e-6, False)],
)
def test_small_all_reduce_over_tcp_is_judged_by_floor_and_gloo(
    own_s: float, gloo_s: float, floor_s: float, met: bool
) -> None:
    cell = cell_of("collectives", case_of("all_reduce", 65536), 8, asyncdist=own_s, gloo=gloo_s, floor=floor_s)
    assert one(collectives.judge([cell]), "TCP all_reduce 64 KiB, 8 ranks").met is met


@pytest.mark.parametrize(("ranks", "own_s", "met"), [(2, 2.0, True), (2, 2.1, False), (4, 3.0, True), (4, 3.1, False)])
def test_large_all_reduce_over_tcp_is_judged_by_gloo(ranks: int, own_s: float, met: bool) -> None:
    cell = cell_of("collectives", case_of("all_reduce", 64 * MIB), ranks, asyncdist=own_s, gloo=3.0)
    assert one(collectives.judge([cell]), f"TCP all_reduce 64 MiB, {ranks} ranks").met is met


@pytest.mark.parametrize(("slow", "slower_s", "met"), [(1, 1.2, True), (2, 1.2, False), (1, 1.3, False)])
def test_other_collectives_may_lag_in_a_tenth_of_the_cells_and_by_a_fifth(
    slow: int, slower_s: float, met: bool
) -> None:
    cells = [
        cell_of("collectives", case_of("gather", 1024 * (1 + i)), 4, asyncdist=slower_s if i < slow else 0.5, gloo=1.0)
        for i in range(10)
    ]
    found = collectives.judge(cells)
    summary = found[0]
    assert "other collectives" in summary.measure
    assert all(verdict.met is not False for verdict in found) is met


def test_a_burst_must_be_faster_than_one_by_one() -> None:
    burst = Case(IN_FLIGHT, 65536, 1, 0, operations=200, title="burst")
    single = dataclasses.replace(burst, operation=ONE_BY_ONE, title="single")
    for burst_s, met in ((0.9, True), (1.0, False)):
        found = collectives.in_flight(
            [cell_of("concurrency", burst, 2, asyncdist=burst_s), cell_of("concurrency", single, 2, asyncdist=1.0)]
        )
        assert one(found, "burst, 2 ranks").met is met


@pytest.mark.parametrize(("own_bytes", "met"), [((48 << 20) - 1, True), (48 << 20, False)])
def test_memory_is_bounded(own_bytes: int, met: bool) -> None:
    cell = cell_of("memory", case_of("all_reduce", 256 * MIB), 2, asyncdist=1.0)
    cell.measurements["asyncdist"].extra["memory_bytes"] = own_bytes
    (verdict,) = collectives.judge([cell])[0:] or [None]
    assert verdict is not None
    assert verdict.met is met


def shared(cell: Cell, measure: str) -> bool | None:
    return one(shared_memory.judge([cell]), measure).met


@pytest.mark.parametrize(
    ("nbytes", "ranks", "name", "measure", "limit_s"),
    [
        (4, 2, "asyncdist", "all_reduce 4 B, 2 ranks", 8e-6),
        (1024, 2, "asyncdist_doorbell", "all_reduce 1 KiB, 2 ranks, doorbell", 35e-6),
        (1024, 4, "asyncdist", "all_reduce 1 KiB, 4 ranks", 45e-6),
        (65536, 2, "asyncdist", "all_reduce 64 KiB, 2 ranks", 20e-6),
        (65536, 4, "asyncdist", "all_reduce 64 KiB, 4 ranks", 70e-6),
    ],
)
def test_small_all_reduce_in_shared_memory_has_a_limit(
    nbytes: int, ranks: int, name: str, measure: str, limit_s: float
) -> None:
    for own_s, met in ((limit_s, True), (limit_s * 1.01, False)):
        times_s = {"asyncdist": 1.0, "asyncdist_doorbell": 1.0, name: own_s}
        assert shared(cell_of("shared memory", case_of("all_reduce", nbytes), ranks, **times_s), measure) is met


def test_large_all_reduce_in_shared_memory_is_judged_by_gloo_and_open_mpi() -> None:
    case, measure = case_of("all_reduce", MIB), "all_reduce 1 MiB, 4 ranks"
    for gloo_s, mpi_s, met in ((8.0, 1 / 1.2, True), (7.9, 1.0, False), (8.0, 0.8, False)):
        assert shared(cell_of("shared memory", case, 4, asyncdist=1.0, gloo=gloo_s, mpi=mpi_s), measure) is met
    case, measure = case_of("all_reduce", 64 * MIB), "all_reduce 64 MiB, 4 ranks"
    for gloo_s, mpi_s, met in ((3.0, 1.5, True), (2.9, 1.5, False), (3.0, 1.4, False)):
        times_s = {"asyncdist": 1.0, "asyncdist_empty": 1.0, "gloo": gloo_s, "mpi": mpi_s}
        assert shared(cell_of("shared memory", case, 4, **times_s), measure) is met
        assert shared(cell_of("shared memory", case, 4, **times_s), f"{measure}, empty") is False  # 4x is promised


def test_other_collectives_in_shared_memory_are_judged_by_both() -> None:
    case, measure = case_of("all_to_all", 16 * MIB), "all_to_all 16 MiB, 4 ranks"
    for gloo_s, mpi_s, met in ((4.0, 1.0, True), (3.9, 1.0, False), (4.0, 0.9, False)):
        assert shared(cell_of("shared memory", case, 4, asyncdist=1.0, gloo=gloo_s, mpi=mpi_s), measure) is met


def test_messages_in_shared_memory_have_limits() -> None:
    small, large = subjects.message_case("ping_pong", 4, PROMISES), subjects.message_case("one_way", 64 * MIB, PROMISES)
    cell = cell_of("p2p", small, 2, asyncdist=12e-6, asyncdist_doorbell=31e-6)
    assert shared(cell, "half round trip 4 B, 2 ranks") is True
    assert shared(cell, "half round trip 4 B, 2 ranks, doorbell") is False
    cell = cell_of("p2p", large, 2, asyncdist=64 * MIB / 8.1e9, asyncdist_empty=64 * MIB / 14.9e9)
    assert shared(cell, "one_way 64 MiB, 2 ranks") is True
    assert shared(cell, "one_way 64 MiB, 2 ranks, empty") is False


def test_a_candidate_that_a_case_leaves_out_is_not_judged() -> None:
    case = subjects.message_case("one_way", SMOKE.large_bytes, SMOKE)
    assert not shared_memory.MESSAGES.wanted(ASYNCDIST_EMPTY, case, 2)
    cell = cell_of("p2p", case, 2, asyncdist=1.0)
    assert [verdict.measure for verdict in shared_memory.judge([cell])] == ["one_way 1 MiB, 2 ranks"]


@pytest.mark.parametrize(
    ("p99_s", "max_s", "gap_s", "met"),
    [(1e-3, 2e-3, 2e-3, True), (1.1e-3, 2e-3, 0, False), (0, 2.1e-3, 0, False), (0, 0, 2.1e-3, False)],
)
def test_the_loop_is_judged_by_callbacks_and_gaps(p99_s: float, max_s: float, gap_s: float, met: bool) -> None:
    cell = cell_of("stall", subjects.stall_cases(PROMISES)[0], 2, asyncdist=1.0)
    extra = {"callback_p99_s": p99_s, "callback_max_s": max_s, "stall_p99_s": gap_s, "stall_max_s": gap_s}
    cell.measurements["asyncdist"].extra = {**extra, "segment_bytes": 33 << 20}
    assert shared(cell, "loop during all_reduce 256 MiB, 2 ranks") is met
    assert shared(cell, "memory of all_reduce 256 MiB, 2 ranks") is False


def test_a_hang_in_the_stress_run_is_no_success() -> None:
    cell = cell_of("stress", stress.cases(PROMISES)[0], 4, asyncdist=60.0)
    measure = "1,000,000 mixed operations, ranks paused, 4 ranks"
    assert shared(cell, measure) is True
    cell.measurements["asyncdist"] = Measurement("asyncdist", failure="asyncdist: rank 2 gave no answer within 1 s")
    assert shared(cell, measure) is False


def test_an_error_does_not_pass_for_something_not_installed() -> None:
    cell = cell_of("collectives", case_of("all_reduce", MIB), 2, gloo=1.0)
    cell.measurements["asyncdist"] = Measurement("asyncdist", failure="not installed: asyncdist")
    assert one(collectives.judge([cell]), "TCP all_reduce 1 MiB, 2 ranks").met is None
    cell.measurements["asyncdist"] = Measurement("asyncdist", failure="asyncdist: rank 0 ended")
    assert one(collectives.judge([cell]), "TCP all_reduce 1 MiB, 2 ranks").met is False


def test_the_report_names_what_is_missing_and_the_load() -> None:
    target = TARGETS["shared-memory"]
    assert target.path.name == "shared-memory.md"
    cell = cell_of("collectives", case_of("all_reduce", MIB), 2, asyncdist=1.0)
    cell.measurements["gloo"] = Measurement("gloo", failure="not installed: torch")
    text = document(target.title, target.command, target.about, [], [cell], {"load before": "0.10"})
    assert "- gloo, all_reduce: not installed: torch" in text
    assert "- load before: 0.10" in text
    assert "- load after: " in text
    assert "python -m bench --targets shared-memory --write" in text


def test_osu_prints_latency_and_bandwidth() -> None:
    latency = cell_of("collectives", case_of("all_reduce", 1024), 2, asyncdist=12.5e-6)
    bandwidth = cell_of("p2p", subjects.message_case("window", 8192, PROMISES), 2, asyncdist=1e-3)
    lines = report.osu_tables([latency, bandwidth]).splitlines()
    assert lines[0] == "# all_reduce: asyncdist, 2 ranks, free"
    assert lines[2].split() == ["1024", "12.50", "12.50", "12.50", "3"]
    assert lines[-1].split() == ["8192", f"{8192 * 64 / 1e3:.2f}"]


def test_nccl_prints_algbw_and_busbw_on_the_side_that_was_measured() -> None:
    inside = cell_of("collectives", case_of("all_reduce", 10**6 * 4), 4, asyncdist=1e-3)
    outside = cell_of("collectives", case_of("all_gather", 10**6 * 4), 4, asyncdist=1e-3)
    lines = report.nccl_tables([inside, outside]).splitlines()
    assert lines[3].split() == [
        "4000000",
        "1000000",
        "float",
        "sum",
        "-1",
        *["N/A"] * 4,
        "1000.00",
        "4.00",
        "6.00",
        "0",
    ]
    assert lines[4] == "# Avg bus bandwidth    : 6.0000"
    assert lines[9].split() == [
        "4000000",
        "1000000",
        "float",
        "none",
        "-1",
        "1000.00",
        "4.00",
        "3.00",
        "0",
        *["N/A"] * 4,
    ]


def test_json_has_bandwidth_processor_time_and_samples() -> None:
    cell = cell_of("collectives", case_of("all_reduce", 4 * MIB), 4, asyncdist=1e-3)
    (found,) = json.loads(report.to_json([cell], {}))["cells"]
    entry = found["candidates"]["asyncdist"]
    assert entry["samples"] == 3
    assert entry["bus_gigabytes_per_s"] == pytest.approx(1.5 * 4 * MIB / 1e6)
    assert entry["cpu_s_per_operation"] == 0.5e-3
    assert entry["wrong"] == 0


def test_many_rounds_show_how_far_their_ratios_lie_apart() -> None:
    assert report.format_ratio([]) == ""
    few = [1.0] * (report.MANY_ROUNDS - 1)
    assert report.format_ratio(few) == "1.00"
    assert report.format_ratio([*few, 9.0]) == "1.00 (1.00-1.00)"
    assert report.format_ratio([number / 10 for number in range(1, 20)]) == "1.00 (0.50-1.50)"
