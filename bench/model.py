"""What is measured and what came out: cases, profiles, candidates, subjects, measurements, cells.

Cases and records travel as JSON between the runner and its processes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from bench.process import Child

Mode = Literal["pinned", "free"]


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
    run_budget_s: float | None = None
    """Seconds a run of a subject that allows it may take: fewer samples then; the tables say how many."""
    stress_operations: int = 1_000_000

    def samples(self, *, large: bool) -> tuple[int, int]:
        """Return (samples, warm-up samples) of a case."""
        count = self.large_samples if large else self.small_samples
        return count, max(1, count // 10)


FULL = Profile("full", 5, 200, 20, 64 << 20, True, ("pinned", "free"), run_budget_s=1.0)
PROMISES = Profile("promises", 5, 40, 4, 64 << 20, True, ("pinned", "free"), run_budget_s=0.5)
"""What the promises about collectives and shared memory take: 200 small or 20 large samples of each candidate in five
alternating runs, less where a neighbor needs longer than the budget (gloo with more ranks than cores takes milliseconds
for four bytes)."""
SMOKE = Profile("smoke", 1, 4, 2, 1 << 20, False, ("free",), stress_operations=1_000)
PROFILES = {profile.name: profile for profile in (FULL, PROMISES, SMOKE)}


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
    it to, or None); ``operations`` are those it can do. ``ranks_of`` names another candidate whose processes measure
    this one too, so that nothing but the server differs: where the kernel puts a process decides about microseconds.
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
    lacks: Mapping[str, str] = field(default_factory=dict)
    ranks_of: str = ""
    host: str = "127.0.0.1"
    """Address of rank 0's host."""
    prefix: Callable[[int], Sequence[str]] = lambda _rank: ()
    """What starts a rank's command, such as on another host."""


@dataclass(frozen=True)
class Subject:
    """What is measured: cases for each number of ranks, and the candidates; ``modes`` replaces the profile's.

    ``wanted`` leaves candidates out of some cases and numbers of ranks. ``budgeted``: runs end when the profile's
    budget is spent. ``blocks``: each run is cut into so many short ones, which alternate as runs do.
    """

    name: str
    title: str
    ranks: tuple[int, ...]
    cases: Callable[[Profile], Sequence[Case]]
    candidates: tuple[Candidate, ...]
    modes: tuple[Mode, ...] | None = None
    budgeted: bool = False
    wanted: Callable[[Candidate, Case, int], bool] = lambda _candidate, _case, _ranks: True
    blocks: int = 1


@dataclass
class Run:
    """One run of one candidate: its samples, and the processor time of an operation (slowest rank, all ranks)."""

    samples_s: list[float]
    wrong: int = 0
    cpu_max_s: float = 0.0
    cpu_sum_s: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)


@dataclass
class Measurement:
    """All runs of one candidate in one cell: ``runs_s[round]`` are that run's samples in seconds.

    ``cpu_max_s`` and ``cpu_sum_s`` hold one entry a run, see `Run`; ``extra`` the largest of each other figure.
    """

    candidate: str
    runs_s: list[list[float]] = field(default_factory=list)
    cpu_max_s: list[float] = field(default_factory=list)
    cpu_sum_s: list[float] = field(default_factory=list)
    wrong: int = 0
    failure: str | None = None
    extra: dict[str, float] = field(default_factory=dict)

    def add(self, run: Run) -> None:
        self.runs_s.append(run.samples_s)
        self.cpu_max_s.append(run.cpu_max_s)
        self.cpu_sum_s.append(run.cpu_sum_s)
        self.wrong += run.wrong
        for name, value in run.extra.items():
            self.extra[name] = max(value, self.extra.get(name, value))

    def cpu_s(self) -> float:
        """The processor time of one operation in the rank that used most: the median of the runs."""
        return statistics.median(self.cpu_max_s) if self.cpu_max_s else 0.0

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
        return percentile(self.samples_s, 0.99)


@dataclass
class Cell:
    """One case with so many ranks, pinned or free: the measurements of all candidates."""

    subject: str
    case: Case
    ranks: int
    mode: Mode
    measurements: dict[str, Measurement]
    own: frozenset[str]
    floors: frozenset[str]

    def ratio(self, candidate: str, other: str) -> float | None:
        """Return the median over the rounds of candidate's p50 divided by other's, None where one is missing."""
        found = self.ratios(candidate, other)
        return statistics.median(found) if found else None

    def ratios(self, candidate: str, other: str) -> list[float]:
        """Return candidate's p50 divided by other's, of each round that both have measured."""
        mine, theirs = self.measurements.get(candidate), self.measurements.get(other)
        if mine is None or theirs is None:
            return []
        return [a / b for a, b in zip(mine.medians_s(), theirs.medians_s(), strict=False)]


LARGE_BYTES = 1 << 20
"""From here on a message is large: fewer samples are taken and gigabytes a second are printed."""


@dataclass(frozen=True)
class Case:
    """One cell of a table: an operation on so many bytes.

    ``combine`` says how the ranks' (start, end) pairs become one sample, see `COMBINERS`. ``operations`` is how many
    operations one sample holds (a burst of pipelined requests holds many; anything else one). ``title`` is printed
    instead of the operation's name. After its samples a run may watch the event loop during ``stall_samples`` more
    operations; ``memory`` says that the first run measures how much memory the first operation of this size takes.
    """

    operation: str
    nbytes: int
    samples: int
    warmup: int
    combine: str = "slowest"
    operations: int = 1
    timeout_s: float = 120.0
    title: str = ""
    stall_samples: int = 0
    memory: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def label(self) -> str:
        """The cell's name as printed, such as ``all_reduce 64 KiB``."""
        if self.title:
            return self.title
        return f"{self.operation} {format_bytes(self.nbytes)}" if self.nbytes else self.operation


@dataclass
class Record:
    """What one rank measured: nanoseconds of the machine-wide monotonic clock, one pair a sample.

    ``cpu_ns`` is the processor time of the whole process during the samples, 0 where it was not taken. ``extra`` holds
    other figures of the run by name, such as ``stall_max_s``; of several ranks the largest counts.
    """

    starts_ns: list[int] = field(default_factory=list)
    ends_ns: list[int] = field(default_factory=list)
    wrong: int = 0
    cpu_ns: int = 0
    extra: dict[str, float] = field(default_factory=dict)

    def add(self, start_ns: int, end_ns: int, cpu_ns: int = 0) -> None:
        self.starts_ns.append(start_ns)
        self.ends_ns.append(end_ns)
        self.cpu_ns += cpu_ns


@dataclass(frozen=True)
class RankContext:
    """What a measuring process knows about itself.

    ``directory`` is a private folder shared by the ranks of one session (for addresses); ``address`` is host:port of
    the server under test, or of the rendezvous; ``options`` are the candidate's own.
    """

    rank: int
    world_size: int
    directory: str
    address: str
    options: Mapping[str, Any]


class Rank:
    """One measuring process of one candidate. The methods may block: nothing else runs in the process."""

    def __init__(self, context: RankContext) -> None:
        self._context = context

    async def open(self) -> None:
        """Connect everything."""

    async def measure(self, case: Case) -> Record:
        """Take ``case.warmup`` untimed and ``case.samples`` timed samples."""
        raise NotImplementedError

    async def beside(self, address: str) -> Rank:
        """Return one of the same process that is connected to the server at ``address``, if this is offered."""
        raise NotImplementedError

    async def close(self) -> None:
        """Leave cleanly."""


def _slowest(records: Sequence[Record], index: int) -> int:
    return max(record.ends_ns[index] - record.starts_ns[index] for record in records)


def _half_round_trip(records: Sequence[Record], index: int) -> int:
    return (records[0].ends_ns[index] - records[0].starts_ns[index]) // 2


def _one_way(records: Sequence[Record], index: int) -> int:
    return max(record.ends_ns[index] for record in records[1:]) - records[0].starts_ns[index]


def _span(records: Sequence[Record], index: int) -> int:
    return max(record.ends_ns[index] for record in records) - min(record.starts_ns[index] for record in records)


COMBINERS: Mapping[str, Callable[[Sequence[Record], int], int]] = {
    "slowest": _slowest,  # the slowest rank's own time
    "half_round_trip": _half_round_trip,  # half of what rank 0 measured
    "one_way": _one_way,  # from rank 0's start to the last other rank's end; the clock is the machine's
    "span": _span,  # from the first start to the last end
}


def entered_before_left(records: Sequence[Record], index: int) -> bool:
    """Whether the last rank had entered before the first one left, as every barrier promises."""
    return max(record.starts_ns[index] for record in records) <= min(record.ends_ns[index] for record in records)


def combine(case: Case, records: Sequence[Record]) -> list[float]:
    """Return the samples of one run in seconds, one for each index that every rank has."""
    combiner = COMBINERS[case.combine]
    return [combiner(records, index) / 1e9 for index in range(case.samples)]


def format_bytes(nbytes: int) -> str:
    """Return a size as people write it: ``4 B``, ``64 KiB``, ``64 MiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the value below which ``fraction`` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
