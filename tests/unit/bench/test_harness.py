"""The harness without processes: the loop's watch, the choice of cases, runs under a time limit, pictures."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from punctual import assert_within, punctual

import bench
from bench import report, runner, subjects
from bench.candidates import FLOOR_TCP, GLOO, MPI
from bench.model import FULL, SMOKE, Candidate, Case, Cell, Measurement, Record, Run, Subject, entered_before_left
from bench.process import status_bytes
from bench.runner import count_runs, run_subject
from bench.stall import TimedLoop, watch
from bench.subjects import Selection, chosen_subjects

HELD_S = 0.03


async def nothing() -> None:
    """What goes before an operation here."""


async def test_a_held_loop_is_seen() -> None:
    found = await watch(lambda: time.sleep(HELD_S), nothing, 2)
    assert found["stall_max_s"] > HELD_S / 2


@punctual
async def test_an_operation_that_waits_holds_nothing() -> None:
    found = await watch(lambda: asyncio.sleep(HELD_S), nothing, 1)
    assert_within(found.get("callback_max_s", HELD_S) + HELD_S, found["stall_max_s"])


def test_processor_time_of_callbacks_is_taken() -> None:
    def burn() -> None:
        until_s = time.thread_time() + HELD_S
        while time.thread_time() < until_s:
            pass

    async def main() -> dict[str, float]:
        async def operation() -> None:
            asyncio.get_running_loop().call_soon(burn)
            await asyncio.sleep(0.001)

        return await watch(lambda: operation(), nothing, 1)

    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        found = runner.run(main())
    assert HELD_S <= found["callback_max_s"] < 10 * HELD_S


def test_growth_of_memory_is_seen() -> None:
    if not status_bytes("VmHWM"):
        pytest.skip("no /proc")
    program = (
        "from bench.process import PeakMemory; peak = PeakMemory(); held = bytearray(b'x') * (64 << 20); "
        "print(peak.growth_bytes())"
    )  # in a process of its own: what other tests left behind is freed at any time
    root = Path(bench.__file__).parents[1]
    found = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert 48 << 20 < int(found.stdout) < 96 << 20


def test_a_barrier_that_lets_a_rank_out_early_is_wrong() -> None:
    assert entered_before_left([Record([1], [5]), Record([4], [6])], 0)
    assert not entered_before_left([Record([1], [3]), Record([4], [6])], 0)


def test_a_selection_narrows_candidates_sizes_and_operations() -> None:
    chosen = Selection(
        transports=frozenset({"shm"}),
        peers=frozenset({"mpi", "floors"}),
        sizes=(8, 2048),
        operations=("gather", "ping_pong"),
    )
    messages, several = chosen_subjects(["p2p", "collectives"], chosen)
    assert [c.name for c in several.candidates] == ["asyncdist shm", "floor", "floor unix", "mpi"]
    assert [case.label for case in several.cases(FULL)] == ["gather 8 B", "gather 2 KiB"]
    assert [case.label for case in messages.cases(FULL)] == ["ping_pong 8 B", "ping_pong 2 KiB"]
    (both,) = [subject for subject in chosen_subjects([], Selection()) if subject.name == "collectives"]
    assert both is not subjects.EVERY_COLLECTIVE
    assert both.candidates == subjects.EVERY_COLLECTIVE.candidates
    assert chosen_subjects(["floors"], Selection())[0].candidates == tuple(
        c for c in subjects.P2P.candidates if "floor" in c.name
    )


class FakeSession:
    """A session whose operations take as long as told, by a clock of its own."""

    def __init__(self, operation_s: float, order: list[str], name: str) -> None:
        self.operation_s, self.order, self.name, self.closed = operation_s, order, name, False
        self.cases: list[Case] = []

    def use(self, _mode: str) -> None: ...

    def server_peak_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True

    def measure(self, case: Case) -> Run:
        self.cases.append(case)
        self.order.append(self.name)
        CLOCK[0] += self.operation_s * (case.samples + case.warmup)
        return Run([self.operation_s] * case.samples)


CLOCK = [0.0]


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sessions are fake; the names of those that run, in order."""
    ran: list[str] = []
    slow = {"gloo": 0.1, "mpi": 0.001}

    class FakeTime:
        @staticmethod
        def monotonic() -> float:
            return CLOCK[0]

    def open_session(candidate: Candidate, _world_size: int, _lender: Any) -> Any:
        return FakeSession(slow.get(candidate.name, 0.01), ran, candidate.name)

    monkeypatch.setattr(runner, "Session", open_session)
    monkeypatch.setattr(runner, "time", FakeTime)
    return ran


PRESENT = tuple(dataclasses.replace(c, missing=lambda: None) for c in (FLOOR_TCP, GLOO, MPI))


def test_runs_alternate_and_every_other_round_is_reversed(order: list[str]) -> None:
    subject = Subject("x", "", (2,), lambda _profile: [Case("all_reduce", 4, 3, 1)], PRESENT)
    profile = dataclasses.replace(FULL, rounds=3, modes=("free",))
    (cell,) = run_subject(subject, profile)
    assert order == ["floor", "gloo", "mpi", "mpi", "gloo", "floor", "floor", "gloo", "mpi"]
    assert all(len(found.runs_s) == 3 for found in cell.measurements.values())
    assert count_runs(subject, profile) == len(PRESENT) + 9


def test_runs_cut_into_blocks_alternate_block_by_block(order: list[str]) -> None:
    subject = Subject("x", "", (2,), lambda _profile: [Case("all_reduce", 4, 6, 1)], PRESENT[:2], blocks=3)
    profile = dataclasses.replace(FULL, rounds=1, modes=("free",))
    (cell,) = run_subject(subject, profile)
    assert order == ["floor", "gloo", "gloo", "floor", "floor", "gloo"]
    assert all([len(run) for run in found.runs_s] == [2, 2, 2] for found in cell.measurements.values())
    assert count_runs(subject, profile) == 2 + 6


def test_a_run_under_a_time_limit_takes_as_many_samples_as_fit(order: list[str]) -> None:
    subject = Subject("x", "", (2,), lambda _profile: [Case("all_reduce", 4, 100, 8)], PRESENT, budgeted=True)
    (cell,) = run_subject(subject, dataclasses.replace(FULL, rounds=2, modes=("free",), run_budget_s=0.55))
    samples = {name: [len(run) for run in found.runs_s] for name, found in cell.measurements.items()}
    assert samples["gloo"] == [5, 5]
    assert all(50 <= number <= 55 for number in samples["floor"])
    assert samples["mpi"] == [100, 100]


def test_what_is_not_offered_is_named_and_not_run(order: list[str]) -> None:
    lacking = dataclasses.replace(PRESENT[2], operations=frozenset(), lacks={"all_reduce": "not offered"})
    subject = Subject("x", "", (2,), lambda _profile: [Case("all_reduce", 4, 3, 1)], (PRESENT[0], lacking))
    (cell,) = run_subject(subject, dataclasses.replace(SMOKE, neighbors=True))
    assert cell.measurements["mpi"].failure == "not offered"
    assert order == ["floor"]


def test_pictures_are_drawn(tmp_path: Path) -> None:
    if report.missing_matplotlib():
        pytest.skip("matplotlib is not installed")
    cells = []
    for nbytes in (4, 1024):
        for ranks in (2, 4):
            cell = Cell("x", Case("all_reduce", nbytes, 1, 0), ranks, "free", {}, frozenset(), frozenset())
            cell.measurements["gloo"] = Measurement("gloo", [[1e-3]])
            cell.measurements["absent"] = Measurement("absent", failure="not installed")
            cells.append(cell)
    (path,) = report.draw(cells, tmp_path, "bench")
    assert path.name == "bench-all-reduce.png"
    assert path.read_bytes().startswith(b"\x89PNG")
