"""`asyncdist explain`: the algorithms of a collective, what each is predicted to take, and which one is chosen."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from asyncdist.cli.sizes import BYTES, show_bytes, show_seconds
from asyncdist.host_constants import own_tuning, read_file, stored_constants
from asyncdist.plan.constants import BUILT_IN, Constants
from asyncdist.plan.cost import Prediction
from asyncdist.plan.problem import BLOCK_COLLECTIVES, EXCHANGES, PRIVATE_COLLECTIVES, Problem
from asyncdist.plan.registry import ALGORITHMS
from asyncdist.plan.selector import candidates, parse_overrides, usable
from asyncdist.plan.shared import MAX_SHARED_RANKS, USUAL_LANE_BYTES
from asyncdist.plan.tuning import MAX_CORES, Tuning
from asyncdist.transport.config import TRANSPORTS

__all__ = ["bus_factor", "explain_command"]

MAX_WORLD: Final = 1 << 20
"""Largest world that is explained: formulas take any, but a vector of that many counts takes memory."""

_EXPLAINED: Final = tuple(name for name in ALGORITHMS if name not in PRIVATE_COLLECTIVES)


@click.command(
    "explain",
    short_help="Show which algorithm a collective would use, and what all would take.",
    epilog=f"COLLECTIVE is one of {', '.join(_EXPLAINED)}.",
)
@click.argument("collective", metavar="COLLECTIVE", type=click.Choice(_EXPLAINED))
@click.option("--world", type=click.IntRange(1, MAX_WORLD), required=True, help="Ranks in the group.")
@click.option(
    "--bytes",
    "nbytes",
    type=BYTES,
    default="0",
    help="The whole vector: all blocks together, of all_to_all those of one rank. 4096, 64KiB, 1MB ...",
)
@click.option("--dtype", default="float32", show_default=True, help="Elements are not cut.")
@click.option(
    "--ranks-per-host",
    type=click.IntRange(1, MAX_WORLD),
    help="Ranks that share a host and its cores; else as LOCAL_WORLD_SIZE says, or 1.",
)
@click.option(
    "--cores", type=click.IntRange(0, MAX_CORES), help="Cores of a host; 0 for one per rank; else this one's."
)
@click.option("--root", type=click.IntRange(0), default=0, help="Of collectives that have one.")
@click.option(
    "--op",
    type=click.Choice(["commutative", "ordered"]),
    default="commutative",
    show_default=True,
    help="Whether operands may change places.",
)
@click.option("--shared", is_flag=True, help="All ranks share memory, as those of one host do where they can.")
@click.option(
    "--constants",
    "source",
    help=f"A built-in set ({', '.join(BUILT_IN)}) or a file of `asyncdist tune`; else what a group here would use.",
)
@click.option(
    "--transport", type=click.Choice(TRANSPORTS), help="Whose constants of the file; else ASYNCDIST_TRANSPORT or auto."
)
def explain_command(
    collective: str,
    world: int,
    nbytes: int,
    dtype: str,
    ranks_per_host: int | None,
    cores: int | None,
    root: int,
    op: str,
    shared: bool,
    source: str | None,
    transport: str | None,
) -> None:
    """Show the algorithms of COLLECTIVE with their predicted time and bandwidth, the best first.

    algbw is bytes divided by time; busbw is what each rank's link carries of it, and can be compared with the
    link's bandwidth whatever the collective and the world.
    """
    itemsize = _itemsize(dtype)
    if shared and (world > MAX_SHARED_RANKS or ranks_per_host not in (None, world)):
        raise click.UsageError(f"--shared is for up to {MAX_SHARED_RANKS} ranks of one host")
    ranks_per_host, lane_bytes = (world, USUAL_LANE_BYTES) if shared else (ranks_per_host, 0)
    transport = transport or os.environ.get("ASYNCDIST_TRANSPORT", "").strip().lower() or "auto"
    try:
        tuning = _tuning(world, ranks_per_host, cores, source, transport)
        problem = _problem(collective, world, -(-nbytes // itemsize), root, tuning)
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error
    ordered = op == "ordered"
    found = candidates(problem, itemsize, tuning, ordered=ordered, lane_bytes=lane_bytes)
    if not found:
        raise click.UsageError(f"{collective} reduces nothing: there is no order to keep")
    named = tuning.override(collective)
    if named is not None and not usable(collective, named, ordered=ordered, shared=shared):
        named = None
    chosen = next((one.algorithm for one in found if one.algorithm == named), found[0].algorithm)
    moved = problem.total * itemsize
    console = Console()
    where = f"{tuning.ranks_per_host} per host" if tuning.ranks_per_host > 1 else "one per host"
    where += ", which share memory" if shared else ""
    console.print(f"{collective} of {show_bytes(moved)}, {world} ranks, {where}")
    console.print(_table(collective, world, moved, found, chosen))
    console.print(_described(tuning.constants), style="dim", highlight=False)


def bus_factor(collective: str, world: int) -> float:
    """Return busbw / algbw, as NVIDIA's nccl-tests define them."""
    if world == 1 or collective in ("broadcast", "reduce", "barrier", "scan", "exscan"):
        return 1.0
    share = (world - 1) / world
    return 2 * share if collective == "all_reduce" else share


def _itemsize(dtype: str) -> int:
    try:
        return np.dtype(dtype).itemsize
    except TypeError as error:
        raise click.UsageError(f"unknown dtype {dtype!r}") from error


def _tuning(world: int, ranks_per_host: int | None, cores: int | None, source: str | None, transport: str) -> Tuning:
    overrides = parse_overrides(os.environ.get("ASYNCDIST_ALGO", ""))
    if source is None:
        tuning = own_tuning(os.environ, world, one_host=False, transport=transport, overrides=overrides)
    else:
        tuning = Tuning(_constants(source, transport), 1, tuple(overrides.items()))
    ranks_per_host = min(ranks_per_host or tuning.ranks_per_host, world)
    if world % ranks_per_host:
        raise ValueError(f"{world} ranks are no whole number of hosts of {ranks_per_host}")
    constants = tuning.constants if cores is None else replace(tuning.constants, cores=cores)
    return replace(tuning, constants=constants, ranks_per_host=ranks_per_host)


def _constants(source: str, transport: str) -> Constants:
    if source in BUILT_IN:
        return BUILT_IN[source]
    constants = stored_constants(Path(source), transport)
    if constants is None:
        known = ", ".join(read_file(Path(source))["transports"])
        raise ValueError(f"{source} has no constants for transport {transport!r}; it has: {known}")
    return constants


def _problem(collective: str, world: int, elements: int, root: int, tuning: Tuning) -> Problem:
    if collective == "barrier":
        elements = 0
    elif collective in BLOCK_COLLECTIVES or collective in EXCHANGES:
        elements = -(-elements // world)
    return Problem.of(collective, world, elements, root, tuning.ranks_per_host)


def _table(collective: str, world: int, nbytes: int, found: list[Prediction], chosen: str) -> Table:
    table = Table()
    table.add_column("algorithm", no_wrap=True, min_width=24)
    for title in ("predicted", "algbw GB/s", "busbw GB/s", "steps", "sent per rank", "chunk", "temporary"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found:
        rate = nbytes / one.seconds / 1e9 if one.seconds else 0.0
        table.add_row(
            f"{one.algorithm} <- chosen" if one.algorithm == chosen else one.algorithm,
            show_seconds(one.seconds),
            f"{rate:.3g}",
            f"{rate * bus_factor(collective, world):.3g}",
            str(one.rounds),
            show_bytes(one.sent_bytes),
            show_bytes(one.chunk_bytes),
            show_bytes(one.scratch_bytes),
            style="bold" if one.algorithm == chosen else None,
        )
    return table


def _described(constants: Constants) -> str:
    lines = [
        f"message {show_seconds(constants.alpha_s)}, of which {show_seconds(constants.overhead_s)} of processor time "
        f"at each end; {1e-9 / constants.beta_s:.3g} GB/s; reduction {1e-9 / constants.gamma_s:.3g} GB/s"
    ]
    if constants.copy_s:
        lines.append(f"copies at each end {1e-9 / constants.copy_s:.3g} GB/s")
    if constants.cores:
        lines.append(f"{constants.cores} cores per host")
    if constants.between is not None:
        between = constants.between
        lines.append(f"between hosts {show_seconds(between.alpha_s)}, {1e-9 / between.beta_s:.3g} GB/s per host")
    memory = constants.shared
    lines.append(
        f"shared memory {show_seconds(memory.wake_s)} to wake up, {show_seconds(memory.step_s)} per step, "
        f"copies {1e-9 / memory.copy_s:.3g} GB/s, reduction {1e-9 / memory.reduce_s:.3g} GB/s"
    )
    return "; ".join(lines)
