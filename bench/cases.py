"""What is measured and what comes back: plain values that travel as JSON between the runner and its processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

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
