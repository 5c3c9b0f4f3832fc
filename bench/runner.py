"""Runs a subject: opens every candidate's session, alternates their runs, collects the cells.

A *candidate* is one program that can do a subject's operations (asyncdist, a neighbor, the floor). A *session* is a
candidate's rank processes, connected and idle until asked; it can be bound to cores and freed again. For each number of
ranks all candidates open a session; then, for each case, round after round, every candidate makes one run, in the
opposite order every other round. So the runs of a round lie next to each other in time, drift cancels, and a ratio is
the median over the rounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.model import (
    Candidate,
    Case,
    Cell,
    Measurement,
    Mode,
    Profile,
    Record,
    Run,
    Server,
    Subject,
    combine,
    entered_before_left,
)
from bench.process import Child, pin_threads, status_bytes

OPEN_TIMEOUT_S = 60.0
"""Until every rank of a session is connected; importing torch in four processes on two cores takes some 10 s."""
CLOSE_TIMEOUT_S = 10.0
ROOT = Path(__file__).resolve().parent.parent


class BenchError(Exception):
    """A candidate could not be measured; the message says why."""


class Session:
    """The connected rank processes of one candidate; those of `lender`'s where it lends them (`Candidate.ranks_of`)."""

    def __init__(self, candidate: Candidate, world_size: int, lender: Session | None = None) -> None:
        self._candidate = candidate
        self._world_size = world_size
        self._lender = lender
        self.pids: dict[int, int] = {}
        """Process ids by rank."""
        self._stack = contextlib.ExitStack()
        self._children: list[Child] = []
        self._connections: dict[int, socket.socket] = {}
        self._readers: dict[int, Any] = {}
        self._server: Server | None = None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        control = os.path.join(directory, "control")
        listener.bind(control)
        listener.listen(self._world_size)
        listener.settimeout(0.2)
        address = f"{self._candidate.host}:{unused_port()}"
        options = dict(self._candidate.options)
        if self._candidate.server is not None:
            self._server = self._candidate.server(None)
            self._stack.callback(self._server.close)
            address = self._server.address
            options["server_pid"] = self._server.child.pid
        if self._lender is not None:
            self._borrow(self._lender, address)
            return
        description = {
            "entry": self._candidate.entry,
            "control": control,
            "directory": directory,
            "address": address,
            "world_size": self._world_size,
            "options": options,
        }
        for command in self._commands(description):
            child = Child(command, environment={**self._candidate.environment, "PYTHONPATH": str(ROOT)})
            self._children.append(child)
            self._stack.callback(child.stop)
        self._accept(listener)
        for rank in self._connections:
            self._read(rank, OPEN_TIMEOUT_S)

    def _borrow(self, lender: Session, address: str) -> None:
        """Have the ranks of another session connect to this one's server as well."""
        self.pids, self._connections, self._readers = lender.pids, lender._connections, lender._readers
        self._children = lender._children
        self._command(beside=self._candidate.name, address=address)
        for rank in self._connections:
            self._read(rank, OPEN_TIMEOUT_S)

    def _commands(self, description: dict[str, Any]) -> list[list[str]]:
        program = [sys.executable, "-m", "bench.rank"]
        if self._candidate.launcher == "mpirun":
            options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(self._world_size)]
            return [["mpirun", *options, *program, json.dumps({**description, "rank": -1})]]
        return [
            [*self._candidate.prefix(rank), *program, json.dumps({**description, "rank": rank})]
            for rank in range(self._world_size)
        ]

    def _accept(self, listener: socket.socket) -> None:
        deadline_s = time.monotonic() + OPEN_TIMEOUT_S
        while len(self._connections) < self._world_size:
            self._check_children()
            if time.monotonic() > deadline_s:
                raise BenchError(f"{self._candidate.name}: ranks did not start within {OPEN_TIMEOUT_S} s")
            with contextlib.suppress(TimeoutError):
                connection = self._stack.enter_context(listener.accept()[0])
                connection.settimeout(OPEN_TIMEOUT_S)
                reader = self._stack.enter_context(connection.makefile("rb"))
                hello = json.loads(reader.readline())
                rank = hello["rank"]
                self._connections[rank], self._readers[rank] = connection, reader
                self.pids[rank] = hello["pid"]

    def _check_children(self) -> None:
        for child in self._children:
            if child.process.poll() is not None:
                raise BenchError(f"{self._candidate.name}: a rank ended: {child.output_tail()}")

    def _read(self, rank: int, timeout_s: float) -> dict[str, Any]:
        self._connections[rank].settimeout(timeout_s)
        try:
            line = self._readers[rank].readline()
        except TimeoutError:
            raise BenchError(f"{self._candidate.name}: rank {rank} gave no answer within {timeout_s} s") from None
        if not line:
            tails = " | ".join(child.output_tail() for child in self._children)
            raise BenchError(f"{self._candidate.name}: rank {rank} ended: {tails}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self._candidate.name}: rank {rank}: {answer['error']}")
        return answer

    def use(self, mode: Mode) -> None:
        """Bind rank r to core r mod cores and the server to the core after the ranks, or let all run anywhere."""
        self._command(pinned=mode == "pinned")
        for rank in range(self._world_size):
            self._read(rank, OPEN_TIMEOUT_S)
        if self._server is not None:
            cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
            chosen = {cores[self._world_size % len(cores)]} if mode == "pinned" else set(cores)
            pin_threads(chosen, self._server.child.pid)

    def _command(self, **values: object) -> None:
        line = json.dumps(values).encode() + b"\n"
        for connection in self._connections.values():
            connection.sendall(line)

    def begin(self, case: Case) -> None:
        """Send the ranks into a run; `finish` collects it."""
        borrowed = {} if self._lender is None else {"of": self._candidate.name}
        self._command(case=case.to_json(), **borrowed)

    def finish(self, case: Case) -> Run:
        """Return the run that `begin` started."""
        records = [Record(**self._read(rank, case.timeout_s)) for rank in range(self._world_size)]
        cpu_s = [record.cpu_ns / 1e9 / (case.samples * case.operations) for record in records]
        run = Run(combine(case, records), sum(record.wrong for record in records), max(cpu_s), sum(cpu_s))
        if case.operation == "barrier":
            run.wrong += sum(not entered_before_left(records, index) for index in range(case.samples))
        for record in records:
            for name, value in record.extra.items():
                run.extra[name] = max(value, run.extra.get(name, value))
        return run

    def measure(self, case: Case) -> Run:
        """Make one run."""
        self.begin(case)
        return self.finish(case)

    def server_peak_bytes(self) -> int:
        """Return the server's peak resident memory, 0 without a server."""
        return status_bytes("VmHWM", self._server.child.pid) if self._server is not None else 0

    def close(self) -> None:
        """Ask the ranks to leave, then end whatever is still there; bounded. Ranks that are borrowed stay."""
        if self._lender is not None:
            self._stack.close()
            return
        with contextlib.suppress(OSError, BenchError, ValueError):
            self._command(close=True)
            for rank in self._connections:
                self._read(rank, CLOSE_TIMEOUT_S)
            for child in self._children:
                child.wait(CLOSE_TIMEOUT_S)
        self._stack.close()


def unused_port() -> int:
    """Return a TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


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
    """Yield the next candidate to run, with its round's number: all that are left, forwards and backwards by turns."""
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
