"""What is promised of one host: shared memory, beside gloo and Open MPI."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from bench import stress, subjects
from bench.candidates import ASYNCDIST_DOORBELL, ASYNCDIST_EMPTY, ASYNCDIST_SHM, GLOO, MEMCPY, MPI, XOSCAR, asyncdist
from bench.model import Candidate, Case, Cell, Mode, Profile, Subject
from bench.report import format_time, gigabytes_per_second
from bench.runner import Progress, run_subject
from bench.subjects import collective_cases
from bench.targets.collectives import in_flight
from bench.targets.verdict import Verdict, all_hold, at_least, at_most, p50_of, speeds, times_faster, verdict

SIZES: Final = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
OTHER_SIZES: Final = (1 << 20, 16 << 20)
OTHERS: Final = ("broadcast", "all_gather", "reduce_scatter", "all_to_all")
SMALLEST_BYTES: Final = 1 << 10
HUGE_BYTES: Final = 16 << 20
SMALLEST_LIMITS_S: Final = {("asyncdist", 2): 8e-6, ("asyncdist doorbell", 2): 35e-6, ("asyncdist", 4): 45e-6}
MIDDLE_LIMITS_S: Final = {2: 20e-6, 4: 70e-6}
LARGE_SPEED: Final = 8.0
LARGE_TIMES_MPI: Final = 1.2
HUGE_SPEED: Final = {
    ("asyncdist", 2): 4.0,
    ("asyncdist", 4): 3.0,
    ("asyncdist empty", 2): 4.0,
    ("asyncdist empty", 4): 4.0,
}
HUGE_SPEED_MPI: Final = 1.5
OTHER_SPEED: Final = 4.0
PING_PONG_LIMITS_S: Final = {"asyncdist": 12e-6, "asyncdist doorbell": 30e-6}
ONE_WAY_GIGABYTES: Final = {"asyncdist": 8.0, "asyncdist empty": 15.0}
CALLBACK_P99_S: Final = 1e-3
CALLBACK_MAX_S: Final = 2e-3
GAP_P99_S: Final = 2e-3
CORES: Final = 2
"""Of the reference machine: the promise about gaps holds for as many ranks."""
SEGMENT_BYTES: Final = 32 << 20
NAMES: Final = {"asyncdist": "", "asyncdist doorbell": ", doorbell", "asyncdist empty": ", empty"}


def _wanted(candidate: Candidate, case: Case, ranks: int) -> bool:
    if candidate is ASYNCDIST_DOORBELL:
        return case.nbytes <= SMALLEST_BYTES and ranks <= CORES
    if candidate in (ASYNCDIST_EMPTY, MEMCPY):
        return case.nbytes >= HUGE_BYTES
    return True


ALL_REDUCE = Subject(
    "shared memory",
    "One host, all_reduce, float32",
    (2, 4),
    lambda profile: collective_cases(profile, ("all_reduce",), SIZES, stall=False),
    (ASYNCDIST_SHM, ASYNCDIST_DOORBELL, ASYNCDIST_EMPTY, GLOO, MPI, MEMCPY),
    budgeted=True,
    wanted=_wanted,
)
OTHER = Subject(
    "shared memory",
    "One host, other collectives, float32",
    (4,),
    lambda profile: collective_cases(profile, OTHERS, OTHER_SIZES, stall=False),
    (ASYNCDIST_SHM, GLOO, MPI),
    budgeted=True,
)
MESSAGES = Subject(
    "p2p",
    "One host, messages",
    (2,),
    subjects.promised_messages,
    (ASYNCDIST_SHM, ASYNCDIST_DOORBELL, ASYNCDIST_EMPTY, GLOO, MPI, MEMCPY),
    budgeted=True,
    wanted=_wanted,
)
STALL = dataclasses.replace(subjects.STALL, candidates=(asyncdist("asyncdist", "auto", timed_loop=True), GLOO, XOSCAR))
CONCURRENCY = dataclasses.replace(
    subjects.CONCURRENCY, ranks=(4,), candidates=(ASYNCDIST_SHM, GLOO), modes=("free",), budgeted=True
)
STALL_ROUNDS: Final = 2


def measure(profile: Profile, modes: Sequence[Mode] | None, progress: Progress) -> list[Cell]:
    """Measure every cell the promises speak of."""
    cells: list[Cell] = []
    for subject in (ALL_REDUCE, OTHER, MESSAGES, CONCURRENCY):
        cells += run_subject(subject, profile, modes=None if subject.modes else modes, progress=progress)
    shorter = dataclasses.replace(profile, rounds=min(profile.rounds, STALL_ROUNDS))
    cells += run_subject(STALL, shorter, progress=progress)
    return cells + stress.run_stress(profile, progress)


def judge(cells: Sequence[Cell]) -> list[Verdict]:
    """Return a verdict on every promise."""
    found: list[Verdict] = []
    for cell in cells:
        operation = cell.case.operation
        if cell.subject == STALL.name:
            found += [_stall(cell), _segments(cell)]
        elif cell.subject == ALL_REDUCE.name:
            found += _all_reduce(cell) if operation == "all_reduce" else [_other(cell)]
        elif operation == "ping_pong":
            found += [_time(cell, name, limit_s) for name, limit_s in PING_PONG_LIMITS_S.items()]
        elif operation == "one_way":
            measured = {name: limit for name, limit in ONE_WAY_GIGABYTES.items() if name in cell.measurements}
            found += [_rate(cell, name, limit) for name, limit in measured.items()]
        elif cell.subject == stress.SUBJECT.name:
            found.append(_stress(cell))
    return found + in_flight(cells)


def _measure(cell: Cell, candidate: str) -> str:
    label = cell.case.label.replace("ping_pong", "half round trip")
    return f"{label}, {cell.ranks} ranks{NAMES[candidate]}"


def _time(cell: Cell, candidate: str, limit_s: float) -> Verdict:
    met = at_most(p50_of(cell, candidate), limit_s)
    measured = speeds(cell, ("gloo",), candidate)
    return verdict(cell, _measure(cell, candidate), f"<= {limit_s * 1e6:.0f} us", met, measured, candidate)


def _rate(cell: Cell, candidate: str, least: float) -> Verdict:
    rate = gigabytes_per_second(cell, cell.measurements[candidate])
    text = None if rate is None else f"{rate:.2f} GB/s"
    return verdict(cell, _measure(cell, candidate), f">= {least:g} GB/s", at_least(rate, least), text, candidate)


def _all_reduce(cell: Cell) -> list[Verdict]:
    nbytes, ranks = cell.case.nbytes, cell.ranks
    if nbytes <= SMALLEST_BYTES:
        return [_time(cell, name, limit_s) for (name, number), limit_s in SMALLEST_LIMITS_S.items() if number == ranks]
    if nbytes < 1 << 20:
        return [_time(cell, "asyncdist", MIDDLE_LIMITS_S[ranks])]
    if nbytes < HUGE_BYTES:
        least, most = LARGE_SPEED, LARGE_TIMES_MPI
        met = all_hold(at_least(times_faster(cell, "gloo"), least), at_most(cell.ratio("asyncdist", "mpi"), most))
        promised = f">= {least:g}x gloo, <= {most:g}x Open MPI's time"
        return [verdict(cell, _measure(cell, "asyncdist"), promised, met, speeds(cell, ("gloo", "mpi")))]
    return [_huge(cell, name, least) for (name, number), least in HUGE_SPEED.items() if number == ranks]


def _huge(cell: Cell, candidate: str, least: float) -> Verdict:
    met = all_hold(
        at_least(times_faster(cell, "gloo", candidate), least),
        at_least(times_faster(cell, "mpi", candidate), HUGE_SPEED_MPI),
    )
    promised = f">= {least:g}x gloo, >= {HUGE_SPEED_MPI:g}x Open MPI"
    measured = speeds(cell, ("gloo", "mpi"), candidate)
    return verdict(cell, _measure(cell, candidate), promised, met, measured, candidate)


def _other(cell: Cell) -> Verdict:
    met = all_hold(at_least(times_faster(cell, "gloo"), OTHER_SPEED), at_least(times_faster(cell, "mpi"), 1.0))
    promised = f">= {OTHER_SPEED:g}x gloo, >= 1x Open MPI"
    return verdict(cell, _measure(cell, "asyncdist"), promised, met, speeds(cell, ("gloo", "mpi")))


def _stall(cell: Cell) -> Verdict:
    """Processor time within a callback, and (where every rank has a core) how late other callbacks come."""
    extra = cell.measurements["asyncdist"].extra
    promised = f"callbacks <= {CALLBACK_P99_S * 1e3:g} ms p99, <= {CALLBACK_MAX_S * 1e3:g} ms"
    met = all_hold(
        at_most(extra.get("callback_p99_s"), CALLBACK_P99_S), at_most(extra.get("callback_max_s"), CALLBACK_MAX_S)
    )
    if cell.ranks <= CORES:
        promised += f", gaps <= {GAP_P99_S * 1e3:g} ms p99"
        met = all_hold(met, at_most(extra.get("stall_p99_s"), GAP_P99_S))
    names = ("callback_p99_s", "callback_max_s", "stall_p99_s", "stall_max_s")
    measured = None
    if all(name in extra for name in names):
        figures = [format_time(extra[name]) for name in names]
        measured = f"callbacks {figures[0]} p99, {figures[1]} max; gaps {figures[2]} p99, {figures[3]} max"
    found = verdict(cell, f"loop during {cell.case.label}, {cell.ranks} ranks", promised, met, measured)
    others = [
        f"{name} gaps {format_time(other.extra['stall_max_s'])}"
        for name, other in cell.measurements.items()
        if name != "asyncdist" and "stall_max_s" in other.extra
    ]
    return dataclasses.replace(found, beside=", ".join(others))


def _segments(cell: Cell) -> Verdict:
    extra = cell.measurements["asyncdist"].extra
    segment = extra.get("segment_bytes")
    met = None if segment is None else segment <= SEGMENT_BYTES
    text = None
    if segment is not None:
        grown = extra.get("memory_bytes", 0.0) / (1 << 20)
        text = f"{segment / (1 << 20):.1f} MiB of segments, {grown:.1f} MiB more resident"
    measure = f"memory of {cell.case.label}, {cell.ranks} ranks"
    found = verdict(cell, measure, f"<= {SEGMENT_BYTES >> 20} MiB of segments a rank", met, text)
    return dataclasses.replace(found, beside="")


def _stress(cell: Cell) -> Verdict:
    own = cell.measurements["asyncdist"]
    measured = None
    if own.runs_s:
        measured = f"all right in {own.p50_s():.0f} s, ranks paused {own.extra.get('pauses', 0):.0f} times"
    met = own.wrong == 0 if own.runs_s else None if (own.failure or "").startswith("not ") else False
    return verdict(cell, f"{cell.case.label}, {cell.ranks} ranks", "all right, none hung", met, measured)
