"""Every library-side path of the suite with real processes: tiny counts, no neighbors needed, every result verified."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # bench is not installed: it lives beside the packages

from click.testing import CliRunner  # noqa: E402

from bench import stress, subjects  # noqa: E402
from bench.__main__ import main  # noqa: E402
from bench.candidates import (  # noqa: E402
    ASYNCDIST_DOORBELL,
    ASYNCDIST_EMPTY,
    FLOOR_TCP,
    GLOO,
    MEMCPY,
    MPI,
    TRANSPORTS,
    XOSCAR,
)
from bench.model import (  # noqa: E402
    SMOKE,
    Candidate,
    Case,
    Cell,
    Profile,
    Subject,
)
from bench.operations import OPERATIONS  # noqa: E402
from bench.runner import run_subject  # noqa: E402

TINY = dataclasses.replace(SMOKE, small_samples=2, large_samples=1, large_bytes=1 << 16, stress_operations=200)
SIZES = (4, 1 << 16)


def assert_right(cells: list[Cell]) -> None:
    assert cells
    for cell in cells:
        for measurement in cell.measurements.values():
            assert measurement.failure is None, measurement.failure
            assert measurement.runs_s
            assert measurement.wrong == 0


def with_candidates(subject: Subject, *candidates: Candidate) -> Subject:
    return dataclasses.replace(subject, candidates=candidates)


def test_every_collective_over_shared_memory_and_tcp_beside_floor_and_copies() -> None:
    def cases(profile: Profile) -> list[Case]:
        return list(subjects.collective_cases(profile, OPERATIONS, SIZES))

    chosen = (TRANSPORTS["shm"], TRANSPORTS["tcp"], ASYNCDIST_DOORBELL, ASYNCDIST_EMPTY, FLOOR_TCP, MEMCPY)
    subject = dataclasses.replace(subjects.EVERY_COLLECTIVE, candidates=chosen, cases=cases)
    cells = run_subject(subject, dataclasses.replace(TINY, modes=("pinned", "free"), run_budget_s=0.1), ranks=[2])
    assert_right(cells)
    assert {cell.case.operation for cell in cells} == set(OPERATIONS)
    own = [cell.measurements["asyncdist tcp"] for cell in cells]
    assert all(measurement.cpu_s() > 0 for measurement in own)


def test_messages_and_bursts() -> None:
    shm = TRANSPORTS["shm"]
    assert_right(run_subject(with_candidates(subjects.P2P, shm, MEMCPY), TINY))
    assert_right(run_subject(with_candidates(subjects.CONCURRENCY, shm), TINY, ranks=[2]))
    assert_right(run_subject(with_candidates(subjects.EVERY_OBJECT_CALL, shm), TINY, ranks=[2]))


def test_loop_and_memory_are_watched() -> None:
    timed = tuple(candidate for candidate in subjects.STALL.candidates if candidate.own)[:1]
    (cell,) = run_subject(with_candidates(subjects.STALL, *timed), TINY, ranks=[2])
    assert_right([cell])
    found = cell.measurements[timed[0].name].extra
    assert {"stall_max_s", "callback_p99_s", "callback_max_s", "memory_bytes", "segment_bytes"} <= found.keys()
    assert found["callback_max_s"] > 0
    assert found["segment_bytes"] > 0


def test_stress_survives_pauses() -> None:
    assert_right(stress.run_stress(TINY))


@pytest.mark.peers
@pytest.mark.parametrize("peer", [GLOO, MPI, XOSCAR], ids=lambda candidate: candidate.name)
def test_neighbors_do_what_they_are_measured_for(peer: Candidate) -> None:
    failure = peer.missing()
    if failure is not None:
        pytest.skip(failure)
    offered = [name for name in OPERATIONS if name in peer.operations]
    subject = dataclasses.replace(
        subjects.EVERY_COLLECTIVE,
        candidates=(peer,),
        cases=lambda profile: list(subjects.collective_cases(profile, offered, SIZES)),
    )
    assert_right(run_subject(subject, dataclasses.replace(TINY, neighbors=True), ranks=[2]))


OUTPUTS = [("osu", "# all_reduce: floor, 2 ranks"), ("nccl", "# Avg bus bandwidth")]


@pytest.mark.parametrize(("form", "expected"), OUTPUTS)
def test_command_prints_as_other_suites_do(form: str, expected: str) -> None:
    arguments = ["collectives", "--profile", "smoke", "--ranks", "2", "--operations", "all_reduce", "--sizes", "4,1KiB"]
    result = CliRunner().invoke(main, [*arguments, "--only", "floor", "--format", form])
    assert result.exit_code == 0, result.output
    assert expected in result.stdout


def test_command_narrows_by_transport_and_peers() -> None:
    arguments = ["collectives", "--profile", "smoke", "--ranks", "2", "--operations", "barrier", "--format", "json"]
    result = CliRunner().invoke(main, [*arguments, "--transport", "unix", "--peers", "floors"])
    assert result.exit_code == 0, result.output
    (cell,) = json.loads(result.stdout)["cells"]
    assert set(cell["candidates"]) == {"asyncdist unix", "floor", "floor unix"}
