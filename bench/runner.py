"""The harness: sessions of rank processes, runs that alternate between candidates, statistics.

A *candidate* is one program that can do a subject's operations (asyncdist, a neighbor, the floor). A *session* is a
candidate's rank processes, connected and idle until asked. For each (ranks, pinned or free) all candidates open a
session; then, for each case, round after round, every candidate makes one run. So the runs of a round lie next to
each other in time, and a ratio is the median over the rounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from bench.cases import Case, Record, combine, percentile
from bench.process import Child

Mode = Literal["pinned", "free"]

OPEN_TIMEOUT_S = 60.0
"""Until every rank of a session is connected; importing torch in four processes on two cores takes some 10 s."""
CLOSE_TIMEOUT_S = 10.0
ROOT = Path(__file__).resolve().parent.parent


class BenchError(Exception):
    """A candidate could not be measured; the message says why."""


@dataclass(frozen=True)
class Profile:
    """How much is measured. `FULL` is what a quoted figure needs, `SMOKE` only shows that everything runs."""

    name: str
    rounds: int
    small_samples: int
    large_samples: int
    large_bytes: int
    neighbors: bool
    modes: tuple[Mode, ...]

    def samples(self, *, large: bool) -> tuple[int, int]:
        """Return (samples, warm-up samples) of a case."""
        count = self.large_samples if large else self.small_samples
        return count, max(1, count // 10)


FULL = Profile("full", 5, 200, 20, 64 << 20, True, ("pinned", "free"))
SMOKE = Profile("smoke", 1, 4, 2, 1 << 20, False, ("free",))


class Server(Protocol):
    """A server process that a candidate's ranks talk to."""

    address: str
    child: Child

    def close(self) -> None:
        """End the process."""


@dataclass(frozen=True)
class Candidate:
    """One program to measure. ``missing`` returns why it cannot run here, or None.

    ``entry`` names the `Rank` class as ``module:Class``; ``server`` starts the server it needs (given the core to pin
    it to, or None); ``operations`` are those it can do.
    """

    name: str
    entry: str
    operations: frozenset[str]
    missing: Callable[[], str | None] = lambda: None
    server: Callable[[int | None], Server] | None = None
    launcher: Literal["spawn", "mpirun"] = "spawn"
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    own: bool = False
    floor: bool = False
    max_ranks: int = 64


@dataclass(frozen=True)
class Subject:
    """What is measured: cases for each number of ranks, and who is measured; ``modes`` replaces the profile's."""

    name: str
    title: str
    ranks: tuple[int, ...]
    cases: Callable[[Profile], Sequence[Case]]
    candidates: tuple[Candidate, ...]
    modes: tuple[Mode, ...] | None = None


@dataclass
class Measurement:
    """All runs of one candidate in one cell: ``runs_s[round]`` are that run's samples in seconds."""

    candidate: str
    runs_s: list[list[float]] = field(default_factory=list)
    wrong: int = 0
    failure: str | None = None
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def samples_s(self) -> list[float]:
        """The samples of all runs."""
        return [sample for run in self.runs_s for sample in run]

    def medians_s(self) -> list[float]:
        """The median of each run."""
        return [statistics.median(run) for run in self.runs_s]

    def p50_s(self) -> float:
        """The median of the runs' medians."""
        return statistics.median(self.medians_s())

    def p99_s(self) -> float:
        """The 99th percentile of all samples."""
        return percentile(self.samples_s, 0.99)


@dataclass
class Cell:
    """One case with so many ranks, pinned or free: everybody's measurements."""

    subject: str
    case: Case
    ranks: int
    mode: Mode
    measurements: dict[str, Measurement]
    own: frozenset[str]
    floors: frozenset[str]

    def ratio(self, candidate: str, other: str) -> float | None:
        """Return the median over the rounds of candidate's p50 divided by other's, None where one is missing."""
        mine, theirs = self.measurements.get(candidate), self.measurements.get(other)
        if mine is None or theirs is None or not mine.runs_s or not theirs.runs_s:
            return None
        pairs = zip(mine.medians_s(), theirs.medians_s(), strict=False)
        return statistics.median(a / b for a, b in pairs)


class Session:
    """The connected rank processes of one candidate."""

    def __init__(self, candidate: Candidate, world_size: int, mode: Mode) -> None:
        self._candidate = candidate
        self._world_size = world_size
        self._pinned = mode == "pinned"
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
        address = f"127.0.0.1:{unused_port()}"
        if self._candidate.server is not None:
            server_core = self._world_size if self._pinned else None
            self._server = self._candidate.server(server_core)
            self._stack.callback(self._server.close)
            address = self._server.address
        description = {
            "entry": self._candidate.entry,
            "control": control,
            "directory": directory,
            "address": address,
            "world_size": self._world_size,
            "pinned": self._pinned,
            "options": dict(self._candidate.options),
        }
        for command in self._commands(description):
            child = Child(command, environment={**self._candidate.environment, "PYTHONPATH": str(ROOT)})
            self._children.append(child)
            self._stack.callback(child.stop)
        self._accept(listener)
        for rank in self._connections:
            self._read(rank, OPEN_TIMEOUT_S)

    def _commands(self, description: dict[str, Any]) -> list[list[str]]:
        program = [sys.executable, "-m", "bench.rank"]
        if self._candidate.launcher == "mpirun":
            options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(self._world_size)]
            return [["mpirun", *options, *program, json.dumps({**description, "rank": -1})]]
        return [[*program, json.dumps({**description, "rank": rank})] for rank in range(self._world_size)]

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
                rank = json.loads(reader.readline())["rank"]
                self._connections[rank], self._readers[rank] = connection, reader

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

    def measure(self, case: Case) -> tuple[list[float], int]:
        """Make one run; return its samples in seconds and the number of wrong results."""
        command = json.dumps({"case": case.to_json()}).encode() + b"\n"
        for connection in self._connections.values():
            connection.sendall(command)
        records = [Record(**self._read(rank, case.timeout_s)) for rank in range(self._world_size)]
        return combine(case, records), sum(record.wrong for record in records)

    def server_peak_bytes(self) -> int:
        """Return the server's peak resident memory, 0 without a server."""
        return self._server.child.resident_bytes("VmHWM") if self._server is not None else 0

    def close(self) -> None:
        """Ask the ranks to leave, then end whatever is still there; bounded."""
        with contextlib.suppress(OSError, BenchError, ValueError):
            for connection in self._connections.values():
                connection.sendall(b'{"close": true}\n')
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
