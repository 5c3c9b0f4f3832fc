"""Run a subject: open every candidate's session, alternate their runs, collect the cells."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from bench.cases import Case
from bench.model import Candidate, Cell, Measurement, Mode, Profile, Run, Subject
from bench.runner import BenchError, Session

Progress = Callable[[str], None]
OPERATION_S = "operation_s"
"""Where a measurement under a time limit keeps how long one operation took, with all that is not timed."""


def run_subject(
    subject: Subject,
    profile: Profile,
    *,
    ranks: Sequence[int] | None = None,
    modes: Sequence[Mode] | None = None,
    progress: Progress = lambda _line: None,
) -> list[Cell]:
    """Measure every case of ``subject`` and return the cells; a candidate that fails is reported in its cells.

    ``ranks`` and ``modes`` replace those of the subject and of the profile. ``progress`` is given one line a run.
    """
    cells: list[Cell] = []
    for world_size in ranks or subject.ranks:
        cells += _run_world(subject, profile, world_size, modes or subject.modes or profile.modes, progress)
    return cells


def count_runs(
    subject: Subject, profile: Profile, *, ranks: Sequence[int] | None = None, modes: Sequence[Mode] | None = None
) -> int:
    """Return how many lines of progress `run_subject` gives at most: each start of a candidate, each run."""
    total = 0
    for world_size in ranks or subject.ranks:
        total += len(subject.candidates)
        for mode in modes or subject.modes or profile.modes:
            cells = _cells(subject, profile, world_size, mode)
            total += profile.rounds * sum(_blocks(subject, cell.case) * len(cell.measurements) for cell in cells)
    return total


def _blocks(subject: Subject, case: Case) -> int:
    return min(subject.blocks, case.samples)


def _cells(subject: Subject, profile: Profile, world_size: int, mode: Mode) -> list[Cell]:
    candidates = [c for c in subject.candidates if (profile.neighbors or c.own or c.floor)]
    found = []
    for case in subject.cases(profile):
        measurements: dict[str, Measurement] = {}
        for c in candidates:
            if subject.wanted(c, case, world_size) and case.operation in c.operations | c.lacks.keys():
                measurements[c.name] = Measurement(c.name, failure=c.lacks.get(case.operation))
        if not measurements:
            continue
        own, floors = frozenset(c.name for c in candidates if c.own), frozenset(c.name for c in candidates if c.floor)
        found.append(Cell(subject.name, case, world_size, mode, measurements, own, floors))
    return found


def _run_world(
    subject: Subject, profile: Profile, world_size: int, modes: Sequence[Mode], progress: Progress
) -> list[Cell]:
    """Measure all modes of one number of ranks with the same processes: starting them takes longest."""
    candidates = [c for c in subject.candidates if (profile.neighbors or c.own or c.floor)]
    cells = [cell for mode in modes for cell in _cells(subject, profile, world_size, mode)]
    budget_s = profile.run_budget_s if subject.budgeted else None
    with contextlib.ExitStack() as stack:
        sessions = _open_sessions(stack, candidates, world_size, cells, progress)
        used: Mode | None = None
        for position, cell in enumerate(cells):
            if cell.mode != used:
                used = cell.mode
                _use(sessions, used, cells[position:])
            blocks = _blocks(subject, cell.case)
            block = dataclasses.replace(cell.case, samples=cell.case.samples // blocks)
            for number, name in _turns(cell, sessions, profile.rounds * blocks):
                progress(f"{subject.name}: {cell.case.label}, {world_size} ranks, {cell.mode}, {name}, {number + 1}")
                failure = _run_once(sessions[name], block, cell.measurements[name], budget_s)
                if failure is not None:  # ranks may be out of step: this session is over
                    sessions.pop(name).close()
                    _fail(cells[position:], name, failure)
    return cells


def _turns(cell: Cell, sessions: Mapping[str, Session], rounds: int) -> Iterator[tuple[int, str]]:
    """Who runs next, with the number of the round: all that are still there, forwards and backwards by turns."""
    for number in range(rounds):
        names = [name for name in cell.measurements if name in sessions]
        for name in names if number % 2 == 0 else reversed(names):
            if cell.measurements[name].failure is None:  # else it is not offered
                yield number, name


def _use(sessions: dict[str, Session], mode: Mode, cells: Sequence[Cell]) -> None:
    for name, session in list(sessions.items()):
        try:
            session.use(mode)
        except (BenchError, OSError) as error:
            sessions.pop(name).close()
            _fail(cells, name, str(error))


def _fail(cells: Sequence[Cell], candidate: str, failure: str) -> None:
    for cell in cells:
        if candidate in cell.measurements:
            cell.measurements[candidate].failure = failure


def _open_sessions(
    stack: contextlib.ExitStack,
    candidates: Sequence[Candidate],
    world_size: int,
    cells: Sequence[Cell],
    progress: Progress,
) -> dict[str, Session]:
    sessions: dict[str, Session] = {}
    for candidate in candidates:
        failure = candidate.missing()
        if failure is None and world_size > candidate.max_ranks:
            failure = f"not run with {world_size} ranks"
        if failure is None:
            progress(f"starting {candidate.name}, {world_size} ranks")
            try:
                session = Session(candidate, world_size, sessions.get(candidate.ranks_of))
            except BenchError as error:
                failure = str(error)
            else:
                stack.callback(session.close)
                sessions[candidate.name] = session
        if failure is not None:
            _fail(cells, candidate.name, failure)
    return sessions


def _run_once(session: Session, case: Case, measurement: Measurement, budget_s: float | None) -> str | None:
    """Make one run and take it in; return why it failed, None where it did not."""
    if measurement.runs_s:  # memory is measured once: the first operation of a size is what takes it
        case = dataclasses.replace(case, memory=False)
    try:
        run = session.measure(case) if budget_s is None else _measure_within(session, case, measurement, budget_s)
    except (BenchError, OSError) as error:
        return str(error)
    measurement.add(run)
    peak = session.server_peak_bytes()
    if peak:
        measurement.extra["server_peak_bytes"] = max(peak, measurement.extra.get("server_peak_bytes", 0))
    return None


def _measure_within(session: Session, case: Case, measurement: Measurement, budget_s: float) -> Run:
    """Make one run of as many samples as the time allows, by what the last run (or a first single sample) took."""
    operation_s = measurement.extra.get(OPERATION_S)
    if operation_s is None:
        began_s = time.monotonic()
        run = session.measure(dataclasses.replace(case, samples=1, warmup=1, stall_samples=0))
        operation_s = (time.monotonic() - began_s) / 2
        case = dataclasses.replace(case, memory=False)
        measurement.extra |= run.extra
    samples = max(1, min(case.samples, int(budget_s / operation_s)))
    warmup = max(1, min(case.warmup, samples // 4))
    began_s = time.monotonic()
    run = session.measure(dataclasses.replace(case, samples=samples, warmup=warmup))
    measurement.extra[OPERATION_S] = (time.monotonic() - began_s) / (samples + warmup)
    return run
