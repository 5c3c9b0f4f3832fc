"""A tuning session: ranks on this host that measure and report, and what their figures mean to the cost model.

Each rank is a process on a core of its own, as far as there are any.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple, TypeAlias

from asyncdist.concurrency.loop import run
from asyncdist.errors import LaunchError
from asyncdist.group.process_group import ProcessGroup
from asyncdist.init import init_process_group
from asyncdist.launch.spawn import spawn
from asyncdist.plan.cost.constants import Constants
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.tuning.fit import fitted
from asyncdist.tuning.measure import PROBE_WORLD, Measured, measure
from asyncdist.tuning.trials import Trial, try_all
from asyncdist.world.tuning_file import built_in_constants, host_cores

__all__ = ["WORLDS", "Cell", "Found", "Report", "constants_of", "find_here", "measure_here", "try_here"]


START_LIMIT_S: Final = 60.0
"""Longest that the processes may take beyond the measuring itself: to start, import and meet on a busy machine."""

_POLL_S: Final = 0.1

Report: TypeAlias = Callable[[str, float], None]
"""report(what is measured, share of it that is done)."""

Body: TypeAlias = Callable[..., Awaitable[Any]]
"""body(group, report, *arguments): what every rank does; importable by name. What rank 0 returns is the result."""

WORLDS: Final = (2, 4)
"""Ranks of trials. On small hosts four have to share cores, which costs something of its own."""

PROBING: Final = 0.25
"""Share of the time that probes of messages get; the trials of collectives get the rest."""


class Cell(NamedTuple):
    """A collective on one size, in bytes."""

    collective: str
    nbytes: int
    names: tuple[str, ...] = ()
    """Algorithms that are tried, if there are such here; else all."""


CELLS: Final = (
    *(
        Cell(collective, nbytes)
        for nbytes in (1 << 10, 256 << 10, 4 << 20)
        for collective in ("all_reduce", "all_gather", "broadcast", "all_to_all")
    ),
    *(Cell(collective, 32 << 20, ("shared", "shared_direct")) for collective in ("all_reduce", "all_to_all")),
)
"""What is tried to find the constants: what waits, what fits a cache, what is as good as large, and, through shared
memory, what fits no cache.
"""


class Found(NamedTuple):
    """What a session has found out."""

    constants: Constants
    measured: Measured
    trials: tuple[Trial, ...]
    connection: str
    """What carried messages: "tcp ..., unix ..., shm ..."."""


def find_here(transport: str, budget_s: float, report: Report) -> Found:
    """Measure messages with two ranks and collectives with a few over `transport`, for about `budget_s`.

    The constants are those of the messages, fitted to what every algorithm of the collectives took. `report(phase,
    share)` is called in this process. Raises LaunchError when a process fails or takes far too long, or a collective
    gives a wrong result. Blocks; no process outlives it.
    """
    measured, connection = measure_here(transport, PROBING * budget_s, report)
    start = constants_of(measured, built_in_constants(transport))
    each_s = (1 - PROBING) * budget_s / len(WORLDS)
    trials = [trial for world in WORLDS for trial in try_here(transport, world, CELLS, start, each_s, report)]
    report("fitting", 0.0)
    constants = fitted(trials, start, host_cores(max(WORLDS)))
    return Found(constants, measured, tuple(trials), connection)


def measure_here(transport: str, budget_s: float, report: Report) -> tuple[Measured, str]:
    """Measure messages with two processes, and say what carried them; otherwise as `find_here`."""
    found: tuple[Measured, str] = run_here(_probe, (budget_s,), PROBE_WORLD, transport, budget_s, report)
    return found


def try_here(
    transport: str, world: int, cells: Sequence[Cell], constants: Constants, budget_s: float, report: Report
) -> list[Trial]:
    """Try every algorithm in each of `cells`, in the chunks that `constants` lead to; otherwise as `find_here`."""
    tuning = Tuning(replace(constants, cores=host_cores(world)), world)
    found: list[Trial] = run_here(_try, (tuple(cells), tuning, budget_s), world, transport, budget_s, report)
    return found


def constants_of(measured: Measured, otherwise: Constants) -> Constants:
    """Turn figures of messages into constants of the cost model; what they do not tell is `otherwise`'s."""
    return replace(
        otherwise,
        alpha_s=measured.message_s,
        beta_s=measured.byte_s,
        gamma_s=measured.reduced_byte_s,
        overhead_s=min(measured.overhead_s, measured.message_s / 2),
        # Bytes both ways are copied twice by one thread, which bounds what a copy can take.
        copy_s=min(measured.byte_cpu_s, measured.duplex_byte_s / 2),
        between=None,
    )


async def _probe(group: ProcessGroup, report: Report, budget_s: float) -> tuple[Measured, str]:
    measured = await measure(group, budget_s, report)
    return measured, group.world.mesh.describe(1 - group.rank)


async def _try(
    group: ProcessGroup, report: Report, cells: Sequence[Cell], tuning: Tuning, budget_s: float
) -> list[Trial]:
    found: list[Trial] = []
    for number, cell in enumerate(cells):
        report(f"{cell.collective}, {group.size} ranks", number / len(cells))
        found += await try_all(group, cell.collective, cell.nbytes, tuning, budget_s / len(cells), cell.names)
    return found


def run_here(
    body: Body, arguments: tuple[Any, ...], world: int, transport: str, budget_s: float, report: Report
) -> Any:
    """Run `body` on `world` ranks over `transport`, a word of ASYNCDIST_TRANSPORT; return what rank 0 does.

    It should take about `budget_s`. `report` is called in this process. Ranks choose by built-in constants and have no
    overrides. Raises LaunchError when one fails or they take far too long. Blocks; no process outlives it.
    """
    reader, writer = multiprocessing.Pipe(duplex=False)
    results: list[Any] = []

    def take() -> None:
        kind, *values = reader.recv()
        if kind == "progress":
            report(*values)
        else:
            results.extend(values)

    with reader, writer:
        deadline_s = time.monotonic() + budget_s + START_LIMIT_S
        with spawn(_rank, (world, transport, body, arguments, writer), world, join=False) as context:
            while not context.join(0.0):
                if time.monotonic() > deadline_s:
                    raise LaunchError(f"measuring over {transport} has not ended after {budget_s + START_LIMIT_S:g} s")
                if reader.poll(_POLL_S):
                    take()
        while reader.poll():
            take()
    if not results:
        raise LaunchError(f"measuring over {transport} ended without a result")
    return results[0]


def _rank(
    local_rank: int, world: int, transport: str, body: Body, arguments: tuple[Any, ...], writer: Connection
) -> None:
    """What each of the processes runs."""
    os.environ["ASYNCDIST_TRANSPORT"] = transport
    os.environ["ASYNCDIST_TUNING"] = "off"
    os.environ.pop("ASYNCDIST_ALGO", None)
    if hasattr(os, "sched_setaffinity"):  # two that the system happens to put on one core would tell of that
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[local_rank % len(cores)]})
    run(_measure(local_rank, body, arguments, writer))


async def _measure(rank: int, body: Body, arguments: tuple[Any, ...], writer: Connection) -> None:
    def report(phase: str, share: float) -> None:
        if rank == 0:
            writer.send(("progress", phase, share))

    async with init_process_group() as group:
        found = await body(group, report, *arguments)
        if rank == 0:
            writer.send(("result", found))
