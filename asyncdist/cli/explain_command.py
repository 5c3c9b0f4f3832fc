"""`asyncdist explain`: the algorithms of a collective, what each is predicted to take, and which one is chosen."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

import click
import numpy as np
from rich.table import Table

from asyncdist.arrays.host import sendable_dtype
from asyncdist.cli.picture import MAX_RANKS, draw
from asyncdist.cli.tables import (
    BYTES,
    CollectiveName,
    named_constants,
    show_bytes,
    show_seconds,
    table_console,
    transport_here,
)
from asyncdist.plan.algorithms.registry import ALGORITHMS
from asyncdist.plan.cost.constants import BUILT_IN, Constants
from asyncdist.plan.problem import PRIVATE_COLLECTIVES, Problem
from asyncdist.plan.records import NO_LANE, USUAL_LANE
from asyncdist.plan.selection.prediction import MAX_SHARED_RANKS, Prediction
from asyncdist.plan.selection.selector import SCRATCH_MAX_BYTES, candidates, parse_overrides, usable
from asyncdist.plan.selection.tuning import MAX_CORES, Tuning
from asyncdist.transport.config import TRANSPORTS, single_copy_from_environ
from asyncdist.world.tuning_file import default_path, own_tuning, stored_constants

__all__ = ["explain_command"]

MAX_WORLD: Final = 1 << 20
"""Largest world that is explained: formulas take any, but a vector of that many counts takes memory."""

SIZES: Final = (8, *((1 << 10) << step for step in (0, 3, 6, 8, 10, 12, 14, 16, 18, 20)))
"""Bytes for which the choice is shown where none were given: 8 B, and 1 KiB to 1 GiB."""

PICTURED_ELEMENTS: Final = 16
"""For each rank, in a picture without --bytes: enough for the cuts of all algorithms."""

GUIDES: Final = ((32, "ring"), (513, "binary_tree"), (MAX_WORLD + 1, "double_tree"))
"""Guides to NCCL name an algorithm for an all_reduce by the number of GPUs alone: below these."""

_EXPLAINED: Final = tuple(name for name in ALGORITHMS if name not in PRIVATE_COLLECTIVES)


@click.command(
    "explain",
    short_help="Show which algorithm a collective would use, and what all would take.",
    epilog=f"COLLECTIVE is one of {', '.join(_EXPLAINED)}, or what torch or MPI call it.",
)
@click.argument("collective", metavar="COLLECTIVE", type=CollectiveName(_EXPLAINED))
@click.option("--world", type=click.IntRange(1, MAX_WORLD), help="Ranks in the group; or give --hosts.")
@click.option(
    "--bytes",
    "nbytes",
    type=BYTES,
    help="Size of the whole vector: all blocks together, or for all_to_all the blocks of one rank. Written as 4096, "
    "64KiB or 1MB. Without it, the choice for each size is shown.",
)
@click.option("--dtype", default="float32", show_default=True, help="Type of the elements; chunks hold whole elements.")
@click.option("--hosts", type=click.IntRange(1, MAX_WORLD), help="Number of hosts; each has the same number of ranks.")
@click.option(
    "--ranks-per-host",
    type=click.IntRange(1, MAX_WORLD),
    help="Ranks that share a host and its cores; else LOCAL_WORLD_SIZE, else 1.",
)
@click.option(
    "--cores", type=click.IntRange(0, MAX_CORES), help="Cores of a host, 0 for one per rank; else those of this host."
)
@click.option("--root", type=click.IntRange(0), default=0, help="Rank of the root, for collectives that have one.")
@click.option(
    "--op",
    type=click.Choice(["commutative", "ordered"]),
    default="commutative",
    show_default=True,
    help="Whether a reduction may change the order of its operands.",
)
@click.option(
    "--shared/--no-shared",
    "wanted",
    default=None,
    help="Whether all ranks share memory; else they do if all are on one host and the transport is not unix or tcp.",
)
@click.option(
    "--constants",
    "source",
    help=f"A built-in set ({', '.join(BUILT_IN)}) or a file of `asyncdist tune`; else what a group here would use.",
)
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    help="Transport whose constants are used; else ASYNCDIST_TRANSPORT, else auto.",
)
@click.option("--algorithm", help="The algorithm that --plot draws; else the one that is chosen.")
@click.option(
    "--plot",
    "picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"Draw what the ranks (up to {MAX_RANKS}) send each other, as SVG.",
)
def explain_command(
    collective: str,
    world: int | None,
    nbytes: int | None,
    dtype: str,
    hosts: int | None,
    ranks_per_host: int | None,
    cores: int | None,
    root: int,
    op: str,
    wanted: bool | None,
    source: str | None,
    transport: str | None,
    algorithm: str | None,
    picture: Path | None,
) -> None:
    """Show the algorithms of COLLECTIVE with their predicted time and bandwidth, the best first.

    algbw is bytes divided by time; busbw is what each rank's link carries of it, and can be compared with the
    link's bandwidth whatever the collective and the world. Steps are messages, or waits, one after another.
    """
    itemsize = _itemsize(dtype)
    transport = transport or transport_here()
    try:
        world, ranks_per_host = _shape(world, hosts, ranks_per_host)
        if wanted and ranks_per_host is None:
            ranks_per_host = world
        tuning = _tuning(world, ranks_per_host, cores, source, transport)
        shared = _shares_memory(wanted, world, tuning, transport)
        sizes = (nbytes or 0,) if nbytes is not None or collective == "barrier" else SIZES
        every = [_explained(collective, world, size, itemsize, root, tuning, op, shared=shared) for size in sizes]
        origin = source or _origin(transport)
        if picture is not None:
            problem = _pictured(collective, world, nbytes, itemsize, root, tuning.ranks_per_host)
            picture.write_text(draw(problem, algorithm or every[-1].chosen.algorithm))
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error
    console = table_console()
    where = "one per host" if tuning.ranks_per_host == 1 else f"{tuning.ranks_per_host} per host"
    where += ", which share memory" if shared else ""
    size = "" if len(every) > 1 or collective == "barrier" else f" of {show_bytes(every[0].nbytes)}"
    if world == 1:
        console.print(f"{collective}{size}: a rank alone has nobody to send to, and is done at once", highlight=False)
        return
    console.print(f"{collective}{size}, {world} ranks, {where}", highlight=False)
    tables = _size_table(collective, world, every) if len(every) > 1 else _candidate_table(collective, world, every[0])
    console.print(tables)
    notes = [_override_note(collective, every[0], tuning)]
    if len(every) == 1:
        notes += [_guides_note(collective, world, every[0])]
        notes += [_memory_note(collective, every[0]), _single_copy_note(every[0])]
    for note in filter(None, notes):
        console.print(note, highlight=False)
    for line in (*_described(tuning.constants, world, tuning.ranks_per_host, shared=shared), f"constants: {origin}"):
        console.print(line, style="dim", highlight=False)


def _pictured(
    collective: str, world: int, nbytes: int | None, itemsize: int, root: int, ranks_per_host: int
) -> Problem:
    """The problem of a picture: of any size, as large vectors are cut into chunks, which it does not show."""
    nbytes = itemsize * world * PICTURED_ELEMENTS if nbytes is None else nbytes
    return Problem.of_bytes(collective, world, nbytes, itemsize, root, ranks_per_host=ranks_per_host)


def _shape(world: int | None, hosts: int | None, ranks_per_host: int | None) -> tuple[int, int | None]:
    """Ranks, and how many share a host if that was said."""
    if hosts is None:
        if world is None:
            raise ValueError("how many ranks? give --world, or --hosts and --ranks-per-host")
        return world, ranks_per_host
    if world is None:
        world = hosts * (ranks_per_host or 1)
    if world % hosts or (ranks_per_host and hosts * ranks_per_host != world):
        each = f" of {ranks_per_host}" if ranks_per_host else ""
        raise ValueError(f"{world} ranks are not {hosts} hosts{each}")
    return world, world // hosts


def _shares_memory(wanted: bool | None, world: int, tuning: Tuning, transport: str) -> bool:
    able = 1 < world <= MAX_SHARED_RANKS and tuning.ranks_per_host == world
    if wanted and not able and world > 1:
        raise ValueError(f"--shared is for up to {MAX_SHARED_RANKS} ranks of one host")
    return able and (transport in ("auto", "shm") if wanted is None else wanted)


def _explained(
    collective: str, world: int, nbytes: int, itemsize: int, root: int, tuning: Tuning, op: str, *, shared: bool
) -> _Explained:
    per_host = tuning.ranks_per_host
    problem = Problem.of_bytes(collective, world, nbytes, itemsize, root, ranks_per_host=per_host)
    ordered = op == "ordered"
    single_copy = single_copy_from_environ(os.environ) != "off"
    memory = USUAL_LANE._replace(single_copy=single_copy) if shared else NO_LANE
    found = candidates(problem, itemsize, tuning, ordered=ordered, memory=memory)
    if not found:
        raise ValueError(f"{collective} reduces nothing: there is no order to keep")
    named = tuning.override(collective)
    if named is not None and not usable(collective, named, ordered=ordered, shared=shared):
        named = None
    chosen = next((one for one in found if one.algorithm == named), found[0])
    return _Explained(problem.total * itemsize, found, chosen)


def _override_note(collective: str, one: _Explained, tuning: Tuning) -> str | None:
    named = tuning.override(collective)
    if named is None:
        return None
    if one.chosen.algorithm == named:
        return f"ASYNCDIST_ALGO names {named}"
    return f"ASYNCDIST_ALGO names {named}, which does not count here: it needs shared memory, or changes the order"


def _origin(transport: str) -> str:
    """Say where the constants of a group here come from."""
    named = os.environ.get("ASYNCDIST_TUNING", "").strip()
    if named.lower() != "off":
        path = Path(named) if named else default_path(os.environ)
        try:
            if path is not None and stored_constants(path, transport) is not None:
                return f"measured, {path}"
        except (OSError, ValueError):  # the log says so already
            pass
    return f"built-in for {transport}; `asyncdist tune` measures this host"


def _itemsize(dtype: str) -> int:
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise click.UsageError(f"unknown dtype {dtype!r}") from error
    try:
        return sendable_dtype(found, "--dtype").itemsize
    except TypeError as error:
        raise click.UsageError(str(error)) from error


def _tuning(world: int, ranks_per_host: int | None, cores: int | None, source: str | None, transport: str) -> Tuning:
    overrides = parse_overrides(os.environ.get("ASYNCDIST_ALGO", ""))
    if source is None:
        tuning = own_tuning(os.environ, world, one_host=False, transport=transport, overrides=overrides)
    else:
        tuning = Tuning(named_constants(source, transport), 1, tuple(overrides.items()))
    ranks_per_host = min(ranks_per_host or tuning.ranks_per_host, world)
    if world % ranks_per_host:
        raise ValueError(f"{world} ranks are no whole number of hosts of {ranks_per_host}")
    constants = tuning.constants if cores is None else replace(tuning.constants, cores=cores)
    return replace(tuning, constants=constants, ranks_per_host=ranks_per_host)


LEAST_RATE: Final = 1e-3
"""Below this many GB/s it is latency that counts, and digits say nothing."""


class _Explained(NamedTuple):
    """The candidates of one size, the best first, and the one that would be used."""

    nbytes: int
    found: list[Prediction]
    chosen: Prediction


def bus_factor(collective: str, world: int) -> float:
    """Return busbw / algbw, as NVIDIA's nccl-tests define them."""
    if world == 1 or collective in ("broadcast", "reduce", "barrier", "scan", "exscan"):
        return 1.0
    share = (world - 1) / world
    return 2 * share if collective == "all_reduce" else share


def _candidate_table(collective: str, world: int, one: _Explained) -> Table:
    """Every algorithm for one size."""
    table = Table()
    table.add_column("algorithm", no_wrap=True, min_width=24)
    for title in ("predicted", "algbw GB/s", "busbw GB/s", "steps", "sent per rank", "chunk", "temporary"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in one.found:
        marked = each is one.chosen
        table.add_row(
            f"{each.algorithm} <- chosen" if marked else each.algorithm,
            show_seconds(each.seconds),
            *_rates(collective, world, one.nbytes, each),
            str(each.rounds),
            show_bytes(each.sent_bytes),
            show_bytes(each.chunk_bytes) if each.chunk_bytes < one.nbytes else "-",
            show_bytes(each.scratch_bytes),
            style="bold" if marked else None,
        )
    return table


def _size_table(collective: str, world: int, every: Sequence[_Explained]) -> Table:
    """What is chosen for each size, and how much longer the next best takes."""
    table = Table()
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("chosen", no_wrap=True)
    for title in ("predicted", "algbw GB/s", "busbw GB/s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("next best", no_wrap=True)
    table.add_column("takes", justify="right", no_wrap=True)
    guided = [_guided(collective, world, one) for one in every]
    if guided[0] is not None:
        table.add_column(f"guides: {guided[0].algorithm}", justify="right", no_wrap=True)
    for one, named in zip(every, guided, strict=True):
        others = [each for each in one.found if each is not one.chosen]
        second = min(others, key=attrgetter("seconds"), default=None)
        table.add_row(
            show_bytes(one.nbytes),
            one.chosen.algorithm,
            show_seconds(one.chosen.seconds),
            *_rates(collective, world, one.nbytes, one.chosen),
            second.algorithm if second else "-",
            f"{second.seconds / one.chosen.seconds:.2f}x" if second else "-",
            *([] if named is None else [f"{named.seconds / one.chosen.seconds:.2f}x"]),
        )
    return table


def _guided(collective: str, world: int, one: _Explained) -> Prediction | None:
    """What guides to NCCL recommend."""
    name = next(name for below, name in GUIDES if world < below)
    return next((each for each in one.found if each.algorithm == name and collective == "all_reduce"), None)


def _guides_note(collective: str, world: int, one: _Explained) -> str | None:
    """Set what guides recommend beside what is chosen."""
    named = _guided(collective, world, one)
    if named is None:
        return None
    ratio = f", predicted to take {named.seconds / one.chosen.seconds:.2f} times as long as {one.chosen.algorithm}"
    return f"guides to NCCL name {named.algorithm} for so many GPUs{'' if named is one.chosen else ratio}"


def _memory_note(collective: str, one: _Explained) -> str | None:
    """Say why a faster one was not chosen, if its memory is the reason."""
    faster = [each for each in one.found if each.seconds < one.chosen.seconds]
    greedy = [each for each in faster if each.scratch_bytes > SCRATCH_MAX_BYTES]
    if not greedy:
        return None
    best = min(greedy, key=attrgetter("seconds"))
    return (
        f"{best.algorithm} is not chosen since it needs {show_bytes(best.scratch_bytes)} of temporary memory, and no "
        f"more than {show_bytes(SCRATCH_MAX_BYTES)} is taken unasked; ASYNCDIST_ALGO={collective}:{best.algorithm} asks"
    )


def _single_copy_note(one: _Explained) -> str | None:
    """Say which algorithms copy nothing into shared memory."""
    names = ", ".join(each.algorithm for each in one.found if each.single_copy)
    return f"{names}: what a rank puts out is read where it lies, if the system lets ranks do so" if names else None


def _described(constants: Constants, world: int, ranks: int, *, shared: bool) -> list[str]:
    """Lines that say what messages, hosts and memory cost, as far as that counts for hosts of `ranks` ranks."""
    inside = (
        f"message {show_seconds(constants.alpha_s)}, of which {show_seconds(constants.overhead_s)} of processor time "
        f"at each end; {1e-9 / constants.beta_s:.3g} GB/s; reduction {1e-9 / constants.gamma_s:.3g} GB/s"
    )
    if constants.copy_s:
        inside += f"; copies at each end {1e-9 / constants.copy_s:.3g} GB/s"
    lines = [inside]
    if constants.cores:
        turns = constants.begun_s(ranks)
        crowded = f", which ranks share: {show_seconds(turns)} until all have begun" if turns else ""
        lines.append(f"{constants.cores} cores per host{crowded}")
    between = constants.between
    if between is not None and ranks < world:
        lines.append(f"between hosts {show_seconds(between.alpha_s)}, {1e-9 / between.beta_s:.3g} GB/s per host")
    if shared:
        memory = constants.shared
        lines.append(
            f"shared memory {show_seconds(memory.begin_s)} to begin, {show_seconds(memory.wake_s)} to wake up, "
            f"{show_seconds(memory.step_s)} per step, copies {1e-9 / memory.copy_s:.3g} GB/s, "
            f"reduction {1e-9 / memory.reduce_s:.3g} GB/s, single copy {1e-9 / memory.read_s:.3g} GB/s"
        )
    return lines


def _rates(collective: str, world: int, nbytes: int, one: Prediction) -> tuple[str, str]:
    if not nbytes or not one.seconds:
        return "-", "-"
    rate = nbytes / one.seconds / 1e9
    return _rate(rate), _rate(rate * bus_factor(collective, world))


def _rate(gigabytes: float) -> str:
    return f"{gigabytes:.3g}" if gigabytes >= LEAST_RATE else f"<{LEAST_RATE:g}"
