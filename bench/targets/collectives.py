"""What is promised of the collectives over TCP, beside gloo and the floor."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

from bench import overlap, subjects
from bench.candidates import ASYNCDIST_TCP, FLOOR_TCP, GLOO
from bench.driver import GROUPS, IN_FLIGHT, ONE_BY_ONE
from bench.model import Candidate, Case, Cell, Measurement, Mode, Profile, Subject
from bench.report import format_time
from bench.runner import ROOT, Progress, run_subject
from bench.subjects import collective_cases
from bench.targets.verdict import Verdict, all_hold, at_least, at_most, p50_of, speeds, times_faster, verdict

SIZES: Final = (4, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
LARGEST_OF_8_RANKS: Final = 1 << 20
OTHER_SIZES: Final = (1 << 10, 1 << 20, 16 << 20)
OTHERS: Final = ("broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier")
SMALL_BYTES: Final = 64 << 10
FLOOR_TIMES: Final = 1.5
LARGE_SPEED: Final = {2: 1.5, 4: 1.0}
"""How many times as fast as gloo, by ranks."""
LOWEST_SPEED: Final = 0.8
CELLS_AHEAD: Final = 0.9
MEMORY_BYTES: Final = 48 << 20
OVERLAP_ROUNDS: Final = 3
OVERLAP_SAMPLES: Final = 3
SIMULATED_RANKS: Final = 24_576
SIMULATED_BYTES: Final = "8,1KiB,64KiB,1MiB,64MiB,1GiB"
SIMULATED_LIMIT_S: Final = 60.0
SIMULATED_TIMEOUT_S: Final = 300.0

TITLE: Final = "Collectives over TCP, float32"


def _wanted(candidate: Candidate, case: Case, ranks: int) -> bool:
    return ranks < 8 or case.nbytes <= LARGEST_OF_8_RANKS


ALL_REDUCE = Subject(
    "collectives",
    TITLE,
    (2, 4, 8),
    lambda profile: collective_cases(profile, ("all_reduce",), SIZES, stall=False),
    (ASYNCDIST_TCP, FLOOR_TCP, GLOO),
    budgeted=True,
    wanted=_wanted,
)
OTHER = Subject(
    "collectives",
    TITLE,
    (4,),
    lambda profile: collective_cases(profile, OTHERS, OTHER_SIZES, stall=False),
    (ASYNCDIST_TCP, GLOO),
    budgeted=True,
)
CONCURRENCY = dataclasses.replace(
    subjects.CONCURRENCY, ranks=(2, 4), candidates=(ASYNCDIST_TCP, GLOO), modes=("free",), budgeted=True
)
MEMORY = Subject(
    "memory", "Memory of a large all_reduce over TCP", (2, 4), subjects.memory_cases, (ASYNCDIST_TCP, GLOO), ("free",)
)
OVERLAP = dataclasses.replace(
    overlap.SUBJECT, modes=("free",), candidates=tuple(c for c in overlap.CANDIDATES if c.name != "loop")
)


def measure(profile: Profile, modes: Sequence[Mode] | None, progress: Progress) -> list[Cell]:
    """Measure every cell the promises speak of."""
    cells: list[Cell] = []
    for subject in (ALL_REDUCE, OTHER, CONCURRENCY, MEMORY):
        cells += run_subject(subject, profile, modes=None if subject.modes else modes, progress=progress)
    shorter = dataclasses.replace(profile, rounds=min(profile.rounds, OVERLAP_ROUNDS), large_samples=OVERLAP_SAMPLES)
    cells += run_subject(OVERLAP, shorter, progress=progress)
    progress(f"simulating {SIMULATED_RANKS} ranks")
    return [*cells, simulated()]


def simulated() -> Cell:
    """Time the table of every algorithm of all_reduce in a world of thousands of ranks, as a command."""
    command = [sys.executable, "-m", "asyncdist", "simulate", "all_reduce", "--world", str(SIMULATED_RANKS)]
    began_s = time.monotonic()
    case = Case("simulate", 0, 1, 0, title=f"all_reduce simulated, {SIMULATED_RANKS:,} ranks, 8 B to 1 GiB")
    measurement = Measurement("asyncdist")
    try:
        done = subprocess.run(
            [*command, "--bytes", SIMULATED_BYTES],
            cwd=ROOT,
            capture_output=True,
            timeout=SIMULATED_TIMEOUT_S,
            check=False,
        )
        measurement.runs_s.append([time.monotonic() - began_s])
        measurement.failure = None if done.returncode == 0 else done.stderr.decode(errors="replace")[-500:]
    except subprocess.TimeoutExpired:
        measurement.failure = f"not done within {SIMULATED_TIMEOUT_S} s"
    return Cell("simulate", case, 1, "free", {"asyncdist": measurement}, frozenset({"asyncdist"}), frozenset())


def judge(cells: Sequence[Cell]) -> list[Verdict]:
    """Return a verdict on every promise."""
    chosen = [cell for cell in cells if cell.subject == "collectives"]
    found = [_all_reduce(cell) for cell in chosen if cell.case.operation == "all_reduce"]
    others = [cell for cell in chosen if cell.case.operation != "all_reduce"]
    found += _summaries(others) + [_other(cell) for cell in others]
    found += in_flight(cells)
    found += [_memory(cell) for cell in cells if cell.subject == "memory"]
    found += _overlap([cell for cell in cells if cell.subject == overlap.SUBJECT.name])
    for cell in cells:
        if cell.subject == "simulate":
            limit = f"< {SIMULATED_LIMIT_S:.0f} s"
            found.append(verdict(cell, cell.case.label, limit, at_most(p50_of(cell), SIMULATED_LIMIT_S)))
    return found


def _all_reduce(cell: Cell) -> Verdict:
    measure = f"TCP {cell.case.label}, {cell.ranks} ranks"
    faster, to_floor = times_faster(cell, "gloo"), cell.ratio("asyncdist", "floor")
    measured = speeds(cell, ("gloo",))
    if measured is not None and to_floor is not None:
        measured = f"{measured}, {to_floor:.2f}x the floor"
    if cell.case.nbytes <= SMALL_BYTES:
        met = all_hold(at_most(to_floor, FLOOR_TIMES), at_least(faster, 1.0))
        return verdict(cell, measure, f"<= {FLOOR_TIMES}x floor, faster than gloo", met, measured)
    if cell.ranks not in LARGE_SPEED:
        return verdict(cell, measure, "", None, measured)
    least = LARGE_SPEED[cell.ranks]
    return verdict(cell, measure, f">= {least:g}x gloo", at_least(faster, least), measured)


def _other(cell: Cell) -> Verdict:
    met = at_least(times_faster(cell, "gloo"), LOWEST_SPEED)
    measure = f"TCP {cell.case.label}, {cell.ranks} ranks"
    return verdict(cell, measure, f">= {LOWEST_SPEED}x gloo", met, speeds(cell, ("gloo",)))


def _summaries(cells: Sequence[Cell]) -> list[Verdict]:
    """Return in how many cells asyncdist is at least as fast as gloo, for each mode."""
    found = []
    for mode in dict.fromkeys(cell.mode for cell in cells):
        values = [times_faster(cell, "gloo") for cell in cells if cell.mode == mode]
        known = [value for value in values if value is not None]
        ahead = sum(value >= 1.0 for value in known)
        met = ahead >= CELLS_AHEAD * len(known) if len(known) == len(values) else None
        text = f"{ahead} of {len(known)} cells, the lowest {min(known):.2f}x" if known else "not measured"
        promised = f">= gloo in {CELLS_AHEAD:.0%} of cells"
        found.append(Verdict(f"{len(OTHERS)} other collectives, 4 ranks", mode, promised, text, "", met))
    return found


def in_flight(cells: Sequence[Cell]) -> list[Verdict]:
    """Return verdicts on bursts: in flight at once faster than one after the other."""
    singles = {
        (cell.ranks, cell.mode, cell.case.operations, cell.case.nbytes): cell
        for cell in cells
        if cell.case.operation == ONE_BY_ONE
    }
    found = []
    for cell in cells:
        if cell.case.operation not in (IN_FLIGHT, GROUPS):
            continue
        other = singles.get((cell.ranks, cell.mode, cell.case.operations, cell.case.nbytes))
        single_s, burst_s = p50_of(other) if other else None, p50_of(cell)
        promised = "faster than one by one" if cell.case.operation == IN_FLIGHT else ""
        met = None if single_s is None or burst_s is None else burst_s < single_s
        measured = (
            None
            if single_s is None or burst_s is None
            else f"{format_time(burst_s)}, {format_time(single_s)} one by one"
        )
        found.append(verdict(cell, f"{cell.case.label}, {cell.ranks} ranks", promised, met, measured))
    return found


def _memory(cell: Cell) -> Verdict:
    grown = {
        name: found.extra["memory_bytes"] for name, found in cell.measurements.items() if "memory_bytes" in found.extra
    }
    own = grown.get("asyncdist")
    beside = ", ".join(f"{name} {value / (1 << 20):.0f} MiB" for name, value in grown.items() if name != "asyncdist")
    text = "not measured" if own is None else f"{own / (1 << 20):.1f} MiB"
    measure = f"memory of {cell.case.label}, {cell.ranks} ranks"
    met = None if own is None else own < MEMORY_BYTES
    return Verdict(measure, cell.mode, f"< {MEMORY_BYTES >> 20} MiB a rank", text, beside, met)


def _overlap(cells: Sequence[Cell]) -> list[Verdict]:
    found = []
    for name, ranks, _mode, computation, fraction, _promised, slower in overlap.summary(cells):
        left = float(fraction.removesuffix("x"))
        measure = f"all_reduce beside {computation}, {name}, {ranks} ranks"
        promised = f">= {overlap.PROMISED_FRACTION:g}x of idle bandwidth"
        beside = f"computation {slower} as long"
        found.append(Verdict(measure, "free", promised, fraction, beside, left >= overlap.PROMISED_FRACTION))
    return found
