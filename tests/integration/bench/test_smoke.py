"""The benchmarks run: real processes, tiny counts, no neighbors needed, every result verified."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # bench is not installed: it lives beside the packages

from click.testing import CliRunner  # noqa: E402

from bench import (  # noqa: E402
    durable,
    many_connections,
    overlap,
    rendezvous,
    runner,
    store,
    subjects,
    targets,
)
from bench.__main__ import main  # noqa: E402
from bench.model import FULL, SMOKE, Candidate, Case, Cell, Measurement, Record, Subject, combine, format_bytes  # noqa: E402
from bench.operations import MessagePattern, SumPattern  # noqa: E402
from bench.runner import Session, run_subject  # noqa: E402
from bench.servers import ServerProcess, asyncdist_server  # noqa: E402
from bench.targets import main_job  # noqa: E402
from bench.targets.verdict import document  # noqa: E402

SUBJECTS = {
    subject.name: subject
    for subject in (
        subjects.P2P_PROMISED,
        subjects.ALL_REDUCE,
        store.SUBJECT,
        durable.SUBJECT,
        rendezvous.SUBJECT,
        overlap.SUBJECT,
        many_connections.SUBJECT,
    )
}


def test_steps_of_training_are_compared() -> None:
    command = [sys.executable, "-m", "bench.data_parallel", "--ranks", "2", "--steps", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert "2 ranks, 4 steps of each, weights alike" in done.stdout, done.stderr


def test_echoes_are_compared() -> None:
    command = [sys.executable, "-m", "bench.rpc", "--calls", "20", "--rounds", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.count("round trip") == done.stdout.count("asyncdist.rpc") == 2, done.stderr


def assert_measured(cells: list[Cell]) -> None:
    assert cells
    for cell in cells:
        assert cell.measurements
        for measurement in cell.measurements.values():
            assert measurement.failure is None, measurement.failure
            assert measurement.wrong == 0
            assert all(sample_s > 0 for sample_s in measurement.samples_s)
            assert len(measurement.samples_s) == cell.case.samples * SMOKE.rounds


@pytest.mark.parametrize("name", list(SUBJECTS))
def test_subject_runs_and_verifies(name: str) -> None:
    subject = dataclasses.replace(SUBJECTS[name], ranks=SUBJECTS[name].ranks[:1])
    assert_measured(run_subject(subject, SMOKE))


def test_a_rendezvous_counts_the_requests_of_its_ranks() -> None:
    (cell,) = run_subject(rendezvous.SUBJECT, SMOKE)
    assert cell.measurements["asyncdist"].extra["rank_requests"] == main_job.RANK_REQUESTS


@pytest.mark.parametrize(
    ("ranks", "took_s", "requests", "met"),
    [
        (1000, 2.9, 12, True),
        (1000, 3.1, 12, False),
        (2000, 9.9, 12, True),
        (2000, 10.1, 12, False),
        (250, 1, 13, False),
    ],
)
def test_a_rendezvous_is_judged_by_time_and_requests(ranks: int, took_s: float, requests: int, met: bool) -> None:
    cell = cell_of(Case("rendezvous", 0, 1, 0, "span", ranks), 4, asyncdist=took_s)
    found = {"rank_requests": requests, "decider_requests": 16, "server_peak_bytes": 1 << 20}
    cell.measurements["asyncdist"].extra.update(found)
    (verdict,) = main_job.judge([cell])
    assert verdict.met is met
    assert f"{requests} requests a rank (16)" in verdict.measured


def test_one_client_is_measured_on_both_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose ranks are borrowed has none of its own, ends with its own server only, and both give right answers."""
    if why := store.missing_torch_daemon():
        pytest.skip(why)
    opened: list[Session] = []

    class Noted(Session):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            opened.append(self)

    monkeypatch.setattr(runner, "Session", Noted)
    cells = run_subject(store.TORCH_SUBJECT, dataclasses.replace(SMOKE, neighbors=True))
    assert_measured(cells)
    assert all(len(cell.measurements) == 2 for cell in cells)
    ours, torchs = opened
    assert ours.pids == torchs.pids


def test_a_connection_that_is_not_woken_counts_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon with room for fewer connections than come: those refused are neither forgotten nor waited for."""

    def small(core: int | None) -> ServerProcess:
        room = many_connections.SMOKE_CONNECTIONS - 3
        return asyncdist_server(core, "--max-connections", str(room + 1))  # one sets the key

    candidate = dataclasses.replace(many_connections.ASYNCDIST, server=small)
    monkeypatch.setattr(many_connections, "SAMPLES", 1)
    (cell,) = run_subject(dataclasses.replace(many_connections.SUBJECT, candidates=(candidate,)), SMOKE)
    assert cell.measurements["asyncdist"].failure is None
    assert cell.measurements["asyncdist"].wrong == 3


def test_all_reduce_floor_with_four_ranks_pinned() -> None:
    floor = tuple(candidate for candidate in subjects.ALL_REDUCE.candidates if candidate.floor)
    subject = dataclasses.replace(subjects.ALL_REDUCE, candidates=floor)
    assert_measured(run_subject(subject, SMOKE, ranks=[4], modes=["pinned"]))


def test_missing_neighbor_is_named_and_the_others_are_measured() -> None:
    absent = Candidate("absent", "no.such:Rank", frozenset({"ping_pong"}), missing=lambda: "not installed: absent")
    broken = Candidate("broken", "no.such:Rank", frozenset({"ping_pong"}))
    floor = next(candidate for candidate in subjects.P2P_PROMISED.candidates if candidate.floor)
    subject = Subject("p2p", "", (2,), lambda profile: subjects.promised_messages(profile)[:1], (absent, broken, floor))
    (cell,) = run_subject(subject, dataclasses.replace(SMOKE, neighbors=True))
    assert cell.measurements["absent"].failure == "not installed: absent"
    assert "No module named 'no'" in (cell.measurements["broken"].failure or "")
    assert cell.measurements["floor"].runs_s


def test_command_prints_json() -> None:
    result = CliRunner().invoke(main, ["floors", "--profile", "smoke", "--ranks", "2", "--format", "json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {cell["case"] for cell in found["cells"]} >= {"ping_pong 4 B", "one_way 1 MiB", "all_reduce 64 KiB"}
    assert all(cell["candidates"]["floor"]["wrong"] == 0 for cell in found["cells"])
    assert found["about"]["Python"]


def cell_of(case: Case, ranks: int, **medians_s: float) -> Cell:
    """A cell as if measured: one round in which every sample of a candidate took the same time."""
    subject = Subject("", "", (ranks,), lambda _profile: [case], ())
    cell = Cell(subject.name, case, ranks, "pinned", {}, frozenset({"asyncdist"}), frozenset({"floor"}))
    for name, median_s in medians_s.items():
        cell.measurements[name] = Measurement(name, runs_s=[[median_s] * 3])
    return cell


@pytest.mark.parametrize(
    ("own_s", "gloo_s", "floor_s", "met"),
    [(36e-6, 36e-6, 24e-6, True), (36.1e-6, 40e-6, 24e-6, False), (36e-6, 35.9e-6, 24e-6, False)],
)
def test_half_round_trip_is_judged_by_gloo_and_floor(own_s: float, gloo_s: float, floor_s: float, met: bool) -> None:
    case = subjects.promised_messages(FULL)[0]
    (verdict,) = main_job.judge([cell_of(case, 2, asyncdist=own_s, gloo=gloo_s, floor=floor_s)])
    assert verdict.met is met


def test_nothing_is_judged_met_that_was_not_compared() -> None:
    case = subjects.promised_messages(FULL)[0]
    (verdict,) = main_job.judge([cell_of(case, 2, asyncdist=1e-6, floor=24e-6)])
    assert verdict.met is None


def test_document_has_every_verdict_and_the_machine() -> None:
    case = subjects.all_reduce_cases(FULL)[0]
    cells = [cell_of(case, 4, asyncdist=100e-6, gloo=400e-6, floor=80e-6)]
    target = targets.TARGETS["main-job"]
    text = document(target.title, target.command, target.about, target.judge(cells), cells, {"cores": "2"})
    assert "| TCP all_reduce 4 B, 4 ranks | pinned | <= 135 us, faster than gloo | 100.0 us" in text
    assert "- cores: 2" in text


@pytest.mark.parametrize(
    ("combiner", "expected_ns"), [("slowest", 50), ("half_round_trip", 10), ("one_way", 60), ("span", 60)]
)
def test_samples_are_combined_over_ranks(combiner: str, expected_ns: int) -> None:
    records = [Record([100], [120]), Record([110], [160])]
    assert combine(Case("x", 4, 1, 0, combiner), records) == [expected_ns / 1e9]


@pytest.mark.parametrize("size", [4, 4096])
@pytest.mark.parametrize("make", [MessagePattern, lambda size: SumPattern(size, 0, 1)])
def test_verification_sees_one_wrong_element(size: int, make: Callable[[int], MessagePattern]) -> None:
    pattern = make(size)
    array = pattern.empty()
    pattern.fill(array, 7)
    assert pattern.is_right(array, 7)
    assert not pattern.is_right(array, 8)
    array[-1] += 1
    assert not pattern.is_right(array, 7)


def test_bytes_are_written_as_people_do() -> None:
    assert [format_bytes(n) for n in (4, 65536, 1 << 20, 64 << 20, 1500)] == [
        "4 B",
        "64 KiB",
        "1 MiB",
        "64 MiB",
        "1500 B",
    ]
