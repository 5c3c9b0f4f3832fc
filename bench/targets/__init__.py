"""The promised figures: what was promised, what was measured just now, met or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.model import FULL, PROMISES, Cell, Mode, Profile
from bench.runner import ROOT, Progress
from bench.targets import collectives, main_job, shared_memory
from bench.targets.verdict import Verdict

FOLDER: Final = ROOT / "docs" / "benchmarks"
MAIN_JOB: Final = "main-job"


@dataclass(frozen=True)
class Target:
    """One set of promises: how it is measured and judged, and what its report says."""

    name: str
    title: str
    about: str
    profile: Profile
    measure: Callable[[Profile, Sequence[Mode] | None, Progress], list[Cell]]
    judge: Callable[[Sequence[Cell]], list[Verdict]]

    @property
    def command(self) -> str:
        """The command that makes the report."""
        return f"python -m bench --targets {self.name} --write"

    @property
    def path(self) -> Path:
        """Where the report is kept."""
        return FOLDER / f"{self.name}.md"


TARGETS: Final[Mapping[str, Target]] = {
    target.name: target
    for target in (
        Target(
            MAIN_JOB,
            "The main job's figures",
            '"floor" is `bench/floors.py`, the least that an honest program does on bare sockets. Ratios with "x" are '
            "asyncdist divided by the other, of times or of throughput as the promise says.",
            FULL,
            main_job.measure,
            main_job.judge,
        ),
        Target(
            "collectives",
            "Collectives over TCP",
            'asyncdist uses TCP only here, as gloo does. "floor" is `bench/floors.py`: recursive doubling on bare '
            "sockets, the least that an honest program does; at 64 MiB it shows what the kernel's copies allow.",
            PROMISES,
            collectives.measure,
            collectives.judge,
        ),
        Target(
            "shared-memory",
            "One host",
            'asyncdist chooses its transport itself: shared memory. "doorbell" never spins (ASYNCDIST_SPIN_US=0), '
            '"empty" has its arrays in shared memory (`asyncdist.empty`). Open MPI spins, as it does by default.',
            PROMISES,
            shared_memory.measure,
            shared_memory.judge,
        ),
    )
}
