"""`asyncdist simulate`: how long a collective would take, in worlds of any size."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from asyncdist.cli.latency_picture import draw_latency
from asyncdist.cli.tables import (
    BYTES,
    CollectiveName,
    named_constants,
    show_bytes,
    show_seconds,
    table_console,
    transport_here,
)
from asyncdist.plan.cost.constants import BUILT_IN, Constants, Link
from asyncdist.plan.simulation.simulate import Method, Sweep, simulated_collectives

MAX_WORLD: Final = 1 << 20
"""Largest world that is simulated: a rank's plan has a number for every rank's block."""

_UNITS: Final = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "ps": 1e-12}


class _Seconds(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases only
    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([munp]?s)?", str(value).strip().lower())
        if match is None:
            self.fail(f"{value!r} is not a time: write 60us, 0.2ns or 6e-5", param, ctx)
        return float(match[1]) * _UNITS[match[2] or ""]


SECONDS: Final = _Seconds()
"""An option's value in seconds."""


class _Several(click.ParamType):  # type: ignore[type-arg]
    """Values of another type, with commas between them."""

    def __init__(self, one: click.ParamType) -> None:  # type: ignore[type-arg]
        self._one = one
        self.name = f"{one.name},..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part for part in str(value).split(",") if part.strip()]
        if not parts:
            self.fail("it names nothing", param, ctx)
        return tuple(self._one.convert(part, param, ctx) for part in parts)


@click.command(
    "simulate",
    short_help="Simulate how long a collective would take, with any number of ranks.",
    epilog=f"COLLECTIVE is one of {', '.join(simulated_collectives())}.",
)
@click.argument("collective", metavar="COLLECTIVE", type=CollectiveName(simulated_collectives()))
@click.option(
    "--world",
    "worlds",
    type=_Several(click.IntRange(1, MAX_WORLD)),
    help="Number of ranks; several numbers with commas.",
)
@click.option(
    "--bytes",
    "sizes",
    type=_Several(BYTES),
    default="8,1KiB,64KiB,1MiB,64MiB,1GiB",
    show_default=True,
    help="Size of the whole vector: all blocks together, or for all_to_all the blocks of one rank; several with "
    "commas.",
)
@click.option("--algorithm", help="Algorithms to simulate, with commas; else all.")
@click.option(
    "--hosts",
    type=click.IntRange(1, MAX_WORLD),
    help="Number of hosts; give it with --ranks-per-host instead of --world.",
)
@click.option(
    "--ranks-per-host", type=click.IntRange(1, MAX_WORLD), default=1, show_default=True, help="Ranks on each host."
)
@click.option(
    "--constants",
    "source",
    default="asyncio-tcp",
    show_default=True,
    help=f"A built-in set ({', '.join(BUILT_IN)}) or a file of `asyncdist tune`; the options below replace "
    "single constants.",
)
@click.option("--alpha", "alpha_s", type=SECONDS, help="Time per message, half a round trip; such as 60us.")
@click.option("--beta", "beta_s", type=SECONDS, help="Time per byte sent, such as 0.67ns.")
@click.option("--gamma", "gamma_s", type=SECONDS, help="Time per byte reduced.")
@click.option("--overhead", "overhead_s", type=SECONDS, help="Processor time per message at each end, part of --alpha.")
@click.option("--between-alpha", "between_alpha_s", type=SECONDS, help="Time per message between hosts.")
@click.option("--between-beta", "between_beta_s", type=SECONDS, help="Time per byte that a host's network card sends.")
@click.option("--cores", type=click.IntRange(0), help="Cores of a host, 0 for one per rank.")
@click.option("--itemsize", type=click.IntRange(1), default=4, show_default=True, help="Bytes per element.")
@click.option(
    "--method",
    type=click.Choice([method.value for method in Method]),
    default=Method.AUTO.value,
    show_default=True,
    help="events: simulate every rank exactly, however long that takes; symmetry: as large worlds are simulated.",
)
@click.option(
    "--plot",
    "picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw a picture of the times into this file as well.",
)
@click.option(
    "--latency",
    "curve",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the times of the smallest size against the number of ranks into this file as well, as SVG.",
)
def simulate_command(
    collective: str,
    worlds: tuple[int, ...] | None,
    sizes: tuple[int, ...],
    algorithm: str | None,
    hosts: int | None,
    ranks_per_host: int,
    source: str,
    cores: int | None,
    itemsize: int,
    method: str,
    picture: Path | None,
    curve: Path | None,
    **constants: float | None,
) -> None:
    """Simulate COLLECTIVE and show the seconds until the last rank is done.

    With one rank per host every message is one between hosts, if the constants tell the two apart.
    """
    try:
        worlds = _worlds(worlds, hosts, ranks_per_host)
        costs = _constants(source, cores, constants)
        sweep = Sweep(collective, costs, ranks_per_host, itemsize, Method(method))
        names = _algorithms(sweep, algorithm)
        console = table_console()
        per_host = f", {ranks_per_host} per host" if ranks_per_host > 1 else ""
        with Console(stderr=True).status("simulating") as status:
            for world in worlds:
                times_s: dict[int, dict[str, float]] = {}
                for nbytes in sizes if collective != "barrier" else (0,):
                    status.update(f"{collective}, {world} ranks, {show_bytes(nbytes)}")
                    times_s[nbytes] = {name: sweep.seconds(name, world, nbytes) for name in names}
                console.print(f"{collective}, {world} ranks{per_host}, simulated", highlight=False)
                console.print(_table(times_s))
            if picture is not None:
                status.update(f"drawing {picture}")
                plot(sweep, names, max(worlds), sizes, picture)
            if curve is not None:
                curve.write_text(_latency(sweep, names, max(worlds), min(sizes)))
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error
    except PlotUnavailableError as error:
        raise click.ClickException(str(error)) from error


def _worlds(worlds: tuple[int, ...] | None, hosts: int | None, ranks_per_host: int) -> tuple[int, ...]:
    if hosts is not None:
        if worlds and worlds != (hosts * ranks_per_host,):
            raise ValueError(f"{hosts} hosts of {ranks_per_host} ranks are {hosts * ranks_per_host}, not --world")
        return (hosts * ranks_per_host,)
    if not worlds:
        raise ValueError("how many ranks? give --world, or --hosts and --ranks-per-host")
    for world in worlds:
        if world % ranks_per_host:
            raise ValueError(f"{world} ranks are no whole number of hosts of {ranks_per_host}")
    return worlds


def _constants(source: str, cores: int | None, given: Mapping[str, float | None]) -> Constants:
    found = named_constants(source, transport_here())
    changes: dict[str, Any] = {
        name: value for name, value in given.items() if value is not None and not name.startswith("between")
    }
    if cores is not None:
        changes["cores"] = cores
    alpha_s, beta_s = given["between_alpha_s"], given["between_beta_s"]
    if alpha_s is not None or beta_s is not None:
        link = found.between or Link(changes.get("alpha_s", found.alpha_s), changes.get("beta_s", found.beta_s))
        changes["between"] = Link(
            link.alpha_s if alpha_s is None else alpha_s, link.beta_s if beta_s is None else beta_s
        )
    return replace(found, **changes)


def _algorithms(sweep: Sweep, given: str | None) -> tuple[str, ...]:
    known = sweep.algorithms()
    names = tuple(name.strip() for name in given.split(",") if name.strip()) if given else known
    for name in names:
        if name not in known:
            raise ValueError(f"{sweep.collective} has no algorithm {name!r}; it has: {', '.join(known)}")
    return names


def _table(times_s: Mapping[int, Mapping[str, float]]) -> Table:
    """Return the table of one world: a line for each algorithm, a column for each size, its shortest time bold."""
    table = Table(box=SIMPLE)
    table.add_column("algorithm", no_wrap=True)
    for nbytes in times_s:
        table.add_column(show_bytes(nbytes), justify="right", no_wrap=True)
    best_s = {nbytes: min(column.values()) for nbytes, column in times_s.items()}
    for name in next(iter(times_s.values())):
        cells = [(show_seconds(column[name]), column[name] == best_s[nbytes]) for nbytes, column in times_s.items()]
        table.add_row(name, *(f"[bold]{text}[/]" if best else text for text, best in cells))
    return table


SIZES: Final = (8, 1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 23, 1 << 26, 1 << 30)
"""Bytes over which a picture is drawn where fewer than two were given."""

WIDTH_INCHES: Final = 11.0
HEIGHT_INCHES: Final = 4.6
DOTS_PER_INCH: Final = 100


class PlotUnavailableError(RuntimeError):
    """There is no matplotlib; the message says what to install."""


def plotted_sizes(given: Sequence[int]) -> tuple[int, ...]:
    """Sizes on the axis: those given, or the usual ones if that is one alone."""
    return tuple(sorted(set(given))) if len(set(given)) > 1 else SIZES


def plotted_worlds(largest: int, ranks_per_host: int) -> tuple[int, ...]:
    """Worlds on the axis: two hosts, four, eight ... and the largest."""
    worlds = [largest]
    world = 2 * ranks_per_host
    while world < largest:
        worlds.append(world)
        world *= 2
    return tuple(sorted(worlds))


def plot(sweep: Sweep, names: Sequence[str], world: int, sizes: Sequence[int], path: Path) -> None:
    """Draw time against ranks (for the smallest size) and against bytes (in a world of `world`) into `path`.

    Raises PlotUnavailableError without matplotlib, ValueError for a kind of file it does not know.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise PlotUnavailableError("--plot needs matplotlib: pip install 'asyncdist[plot]'") from error
    figure = figures.Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    left, right = figure.subplots(1, 2)
    smallest = min(sizes)
    worlds = plotted_worlds(world, sweep.ranks_per_host)
    _lines(left, worlds, {name: [sweep.seconds(name, each, smallest) for each in worlds] for name in names})
    left.set(title=f"{sweep.collective} of {show_bytes(smallest)}", xlabel="ranks")
    nbytes = plotted_sizes(sizes)
    _lines(right, nbytes, {name: [sweep.seconds(name, world, each) for each in nbytes] for name in names})
    right.set(title=f"{sweep.collective} on {world} ranks", xlabel="bytes")
    right.set_xticks([each for each in SIZES if nbytes[0] <= each <= nbytes[-1]])
    right.set_xticklabels([show_bytes(each) for each in SIZES if nbytes[0] <= each <= nbytes[-1]], rotation=40)
    left.legend(fontsize="small")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _latency(sweep: Sweep, names: Sequence[str], world: int, nbytes: int) -> str:
    worlds = plotted_worlds(world, sweep.ranks_per_host)
    if len(worlds) < 2:
        raise ValueError("--latency needs more than two hosts, to draw a line")
    each = f", {sweep.ranks_per_host} on each host" if sweep.ranks_per_host > 1 else ""
    title = f"{sweep.collective} of {show_bytes(nbytes)} on up to {world:,} ranks{each}, simulated"
    return draw_latency(title, worlds, {name: [sweep.seconds(name, one, nbytes) for one in worlds] for name in names})


def _lines(axes: Any, where: Sequence[int], times_s: dict[str, list[float]]) -> None:
    for name, values in times_s.items():
        axes.plot(where, values, marker=".", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylabel("seconds")
    axes.grid(visible=True, which="major", alpha=0.3)
