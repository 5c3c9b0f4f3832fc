"""A tuning session: two processes on this host that measure, and what their figures mean to the cost model."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

from asyncdist.errors import LaunchError
from asyncdist.initialize import init_process_group
from asyncdist.launch.spawn import spawn
from asyncdist.loop import run
from asyncdist.plan.constants import Constants
from asyncdist.tuning.measure import Measured, measure
from asyncdist.tuning.probe import PROBE_WORLD

__all__ = ["START_LIMIT_S", "constants_of", "measure_here"]

START_LIMIT_S: Final = 60.0
"""Longest that two processes may take beyond the measuring itself: to start, import and meet on a busy machine."""

_POLL_S: Final = 0.1


def measure_here(transport: str, budget_s: float, report: Callable[[str, float], None]) -> tuple[Measured, str]:
    """Measure with two processes over `transport`, a word of ASYNCDIST_TRANSPORT, for about `budget_s`.

    Returns the figures and the kind of connection that was used. `report(phase, share)` is called in this process.
    Raises LaunchError when a process fails or takes far too long. Blocks; no process outlives it.
    """
    reader, writer = multiprocessing.Pipe(duplex=False)
    with reader, writer:
        deadline_s = time.monotonic() + budget_s + START_LIMIT_S
        found: tuple[Measured, str] | None = None
        with spawn(_rank, (transport, budget_s, writer), PROBE_WORLD, join=False) as context:
            while not context.join(0.0):
                if time.monotonic() > deadline_s:
                    raise LaunchError(f"measuring over {transport} has not ended after {budget_s + START_LIMIT_S:g} s")
                if reader.poll(_POLL_S):
                    found = _take(reader, report) or found
        while reader.poll():
            found = _take(reader, report) or found
    if found is None:
        raise LaunchError(f"measuring over {transport} ended without a result")
    return found


def constants_of(measured: Measured) -> Constants:
    """Turn figures into constants of the cost model; `cores` and links between hosts are not among them."""
    return Constants(
        alpha_s=measured.message_s,
        beta_s=measured.byte_s,
        gamma_s=measured.reduced_byte_s,
        overhead_s=min(measured.overhead_s, measured.message_s / 2),
        # Bytes both ways are copied twice by one thread, which bounds what a copy can take.
        copy_s=min(measured.byte_cpu_s, measured.duplex_byte_s / 2),
    )


def _take(reader: Connection, report: Callable[[str, float], None]) -> tuple[Measured, str] | None:
    kind, *values = reader.recv()
    if kind == "progress":
        report(*values)
        return None
    return Measured(*values[0]), values[1]


def _rank(local_rank: int, transport: str, budget_s: float, writer: Connection) -> None:
    """What each of the two processes runs."""
    os.environ["ASYNCDIST_TRANSPORT"] = transport
    os.environ["ASYNCDIST_TUNING"] = "off"
    os.environ.pop("ASYNCDIST_ALGO", None)
    run(_measure(local_rank, budget_s, writer))


async def _measure(rank: int, budget_s: float, writer: Connection) -> None:
    def report(phase: str, share: float) -> None:
        if rank == 0:
            writer.send(("progress", phase, share))

    async with init_process_group() as group:
        measured = await measure(group, budget_s, report)
        if rank == 0:
            writer.send(("result", tuple(measured), group.world.mesh.describe(1)))
