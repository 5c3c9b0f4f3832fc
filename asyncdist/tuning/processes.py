"""Processes: ranks on this host, each on a core of its own as far as there are any, that measure and report."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any, Final, TypeAlias

from asyncdist.concurrency.loop import run
from asyncdist.errors import LaunchError
from asyncdist.init import init_process_group
from asyncdist.launch.spawn import spawn

__all__ = ["START_LIMIT_S", "Body", "Report", "run_here"]

START_LIMIT_S: Final = 60.0
"""Longest that the processes may take beyond the measuring itself: to start, import and meet on a busy machine."""

_POLL_S: Final = 0.1

Report: TypeAlias = Callable[[str, float], None]
"""report(what is measured, share of it that is done)."""

Body: TypeAlias = Callable[..., Awaitable[Any]]
"""body(group, report, *arguments): what every rank does; importable by name. What rank 0 returns is the result."""


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
