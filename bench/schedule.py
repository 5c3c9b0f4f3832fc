"""Run a subject: open every candidate's session, alternate their runs, collect the cells."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from bench.cases import Case
from bench.runner import BenchError, Candidate, Cell, Measurement, Mode, Profile, Session, Subject

Progress = Callable[[str], None]


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
        for mode in modes or subject.modes or profile.modes:
            cells += _run_block(subject, profile, world_size, mode, progress)
    return cells


def _run_block(subject: Subject, profile: Profile, world_size: int, mode: Mode, progress: Progress) -> list[Cell]:
    cases = list(subject.cases(profile))
    candidates = [c for c in subject.candidates if (profile.neighbors or c.own or c.floor)]
    cells = [
        Cell(
            subject.name,
            case,
            world_size,
            mode,
            {c.name: Measurement(c.name) for c in candidates if case.operation in c.operations},
            frozenset(c.name for c in candidates if c.own),
            frozenset(c.name for c in candidates if c.floor),
        )
        for case in cases
    ]
    with contextlib.ExitStack() as stack:
        sessions = _open_sessions(stack, candidates, world_size, mode, cells, progress)
        for cell in cells:
            for number in range(profile.rounds):
                for name, measurement in cell.measurements.items():
                    if name in sessions:
                        progress(f"{subject.name}: {cell.case.label}, {world_size} ranks, {mode}, {name}, {number + 1}")
                        _run_once(sessions[name], cell.case, measurement)
                        if measurement.failure is not None:  # ranks may be out of step: this session is over
                            sessions.pop(name).close()
                            _fail(cells[cells.index(cell) + 1 :], name, measurement.failure)
    return cells


def _fail(cells: Sequence[Cell], candidate: str, failure: str) -> None:
    for cell in cells:
        if candidate in cell.measurements:
            cell.measurements[candidate].failure = failure


def _open_sessions(
    stack: contextlib.ExitStack,
    candidates: Sequence[Candidate],
    world_size: int,
    mode: Mode,
    cells: Sequence[Cell],
    progress: Progress,
) -> dict[str, Session]:
    sessions: dict[str, Session] = {}
    for candidate in candidates:
        failure = candidate.missing()
        if failure is None and world_size > candidate.max_ranks:
            failure = f"not run with {world_size} ranks"
        if failure is None:
            progress(f"starting {candidate.name}, {world_size} ranks, {mode}")
            try:
                session = Session(candidate, world_size, mode)
            except BenchError as error:
                failure = str(error)
            else:
                stack.callback(session.close)
                sessions[candidate.name] = session
        if failure is not None:
            _fail(cells, candidate.name, failure)
    return sessions


def _run_once(session: Session, case: Case, measurement: Measurement) -> None:
    try:
        samples_s, wrong = session.measure(case)
    except (BenchError, OSError) as error:
        measurement.failure = str(error)
        return
    measurement.runs_s.append(samples_s)
    measurement.wrong += wrong
    peak = session.server_peak_bytes()
    if peak:
        measurement.extra["server_peak_bytes"] = max(peak, measurement.extra.get("server_peak_bytes", 0))
