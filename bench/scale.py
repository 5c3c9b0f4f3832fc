"""``python -m bench.scale``: all_reduce on 24,576 ranks by every algorithm, simulated and by closed formulas.

The formulas are those of the literature (Thakur, Rabenseifner and Gropp 2005; Sanders, Speck and Träff 2009), for one
port. They know nothing of threads, and let nothing overlap but the chunks of trees. So simulations are up to a seventh
shorter where chunks of large vectors are reduced while others are on the wire, and up to a fifth longer where a thread
handles the messages of several peers. Ratios beyond that are marked, and so are more than `PROMISED_S` seconds of
processor time for the table.

``--plot FILE`` draws what NVIDIA's announcement of double binary trees does: latency and algorithm bandwidth of rings
and trees against the number of ranks, here one to a host, with the constants of NCCL's own model.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from asyncdist.cli.tables import show_bytes, show_seconds
from asyncdist.plan.algorithms.ring_2d import row_length
from asyncdist.plan.cost.constants import BUILT_IN, Constants
from asyncdist.plan.problem import Problem
from asyncdist.plan.simulation.simulate import Sweep

WORLD: Final = 24_576
SIZES: Final = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 26, 1 << 30)
PROMISED_S: Final = 60.0
LOWEST, HIGHEST = 0.8, 1.3
"""Ratios of simulation and formula that need no other explanation."""

PLOTTED: Final = ("ring", "binary_tree", "double_tree", "ring_2d")
PLOTTED_SMALL, PLOTTED_LARGE = 8, 1 << 26
PLOTTED_RANKS: Final = tuple(3 << level for level in range(14))
"""3 to 24,576, twice as many each time."""


class Cell(NamedTuple):
    """One algorithm on one size."""

    algorithm: str
    nbytes: int
    simulated_s: float
    formula_s: float

    @property
    def ratio(self) -> float:
        """Return simulated divided by formula."""
        return self.simulated_s / self.formula_s


def _flat_ring(world: int, nbytes: int, costs: Constants) -> float:
    return 2 * (world - 1) * costs.alpha_s + _moved_s(world, nbytes, costs)


def _grid(world: int, nbytes: int, costs: Constants) -> float:
    width = row_length(Problem.of("all_reduce", world, 1))
    return 2 * (width + world // width - 2) * costs.alpha_s + _moved_s(world, nbytes, costs)


def _circulant(world: int, nbytes: int, costs: Constants) -> float:
    return 2 * _levels(world) * costs.alpha_s + _moved_s(world, nbytes, costs)


def _doubling(world: int, nbytes: int, costs: Constants) -> float:
    """floor(log2 p) exchanges of everything; two messages more, and a reduction, where p is no power of two."""
    exchanges = world.bit_length() - 1
    folds = world != 1 << exchanges
    messages, reductions = exchanges + 2 * folds, exchanges + folds
    return messages * (costs.alpha_s + nbytes * costs.beta_s) + reductions * nbytes * costs.gamma_s


def _halving(world: int, nbytes: int, costs: Constants) -> float:
    exchanges = world.bit_length() - 1
    folds = world != 1 << exchanges
    inside_s = 2 * exchanges * costs.alpha_s + _moved_s(1 << exchanges, nbytes, costs)
    return inside_s + folds * (2 * costs.alpha_s + nbytes * (2 * costs.beta_s + costs.gamma_s))


def _binary_tree(world: int, nbytes: int, costs: Constants) -> float:
    """An inner rank receives two vectors and its result, and reduces two, one chunk after another."""
    levels, wire_s = _levels(world), nbytes * costs.beta_s
    filling_s = 2 * 4 * math.sqrt(costs.alpha_s * wire_s * levels)
    return 2 * levels * costs.alpha_s + 3 * wire_s + 2 * nbytes * costs.gamma_s + filling_s


def _double_tree(world: int, nbytes: int, costs: Constants) -> float:
    """The same with two trees of half a vector each, in which every rank has no more than two children in all."""
    levels, wire_s = _levels(world), nbytes * costs.beta_s
    filling_s = 2 * math.sqrt(8 * costs.alpha_s * wire_s * levels)
    return 2 * levels * costs.alpha_s + 2 * wire_s + nbytes * costs.gamma_s + filling_s


def _direct(world: int, nbytes: int, costs: Constants) -> float:
    """Everything to everyone: p - 1 messages each way by one thread, and as many vectors through one port."""
    others = world - 1
    return (
        costs.latency_s
        + max(2 * others * costs.overhead_s, others * nbytes * costs.beta_s)
        + (others * nbytes * costs.gamma_s)
    )


def _linear(world: int, nbytes: int, costs: Constants) -> float:
    """Everything to rank 0, which reduces it, and back: as many vectors through one port, twice."""
    others = world - 1
    each_s = others * max(costs.overhead_s, nbytes * costs.beta_s)
    return 2 * (costs.latency_s + each_s) + others * nbytes * costs.gamma_s


FORMULAS: Final[Mapping[str, Callable[[int, int, Constants], float]]] = MappingProxyType(
    {
        "direct": _direct,
        "linear": _linear,
        "recursive_doubling": _doubling,
        "halving_doubling": _halving,
        "circulant": _circulant,
        "binary_tree": _binary_tree,
        "double_tree": _double_tree,
        "ring": _flat_ring,
        "ring_2d": _grid,
    }
)


@click.command()
@click.option("--world", type=click.IntRange(min=2), default=WORLD, show_default=True, help="Ranks, one to a host.")
@click.option("--constants", "source", type=click.Choice(sorted(BUILT_IN)), default="asyncio-tcp", show_default=True)
@click.option("--plot", "picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw into this file as well.")
def main(world: int, source: str, picture: Path | None) -> None:
    """Print simulated times, closed formulas and their ratios, and how long it took to work them out."""
    began_s, worked_s = time.perf_counter(), time.process_time()
    with Console(stderr=True).status("simulating"):
        cells = scaled(world, SIZES, BUILT_IN[source])
    spent_s, worked_s = time.perf_counter() - began_s, time.process_time() - worked_s
    console = Console()
    console.print(_table(cells, world))
    late = "" if worked_s <= PROMISED_S else " !"
    console.print(
        f"{len(cells)} cells in {spent_s:.1f} s, {worked_s:.1f} s of one processor (promised: {PROMISED_S:g} s){late}",
        highlight=False,
    )
    if picture is not None:
        draw(picture)


def scaled(world: int, sizes: Sequence[int], costs: Constants) -> list[Cell]:
    """Return every algorithm on every size, simulated and by formula."""
    sweep = Sweep("all_reduce", costs)
    return [
        Cell(name, nbytes, sweep.seconds(name, world, nbytes), FORMULAS[name](world, nbytes, costs))
        for name in sweep.algorithms()
        for nbytes in sizes
    ]


def draw(path: Path) -> None:
    """Draw latency of a small vector and bandwidth of a large one against ranks; needs matplotlib."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(11.0, 4.6), layout="constrained")
    latency, bandwidth = figure.subplots(1, 2)
    sweep = Sweep("all_reduce", BUILT_IN["nccl"])
    for name in PLOTTED:
        small_s = [sweep.seconds(name, world, PLOTTED_SMALL) for world in PLOTTED_RANKS]
        latency.plot(PLOTTED_RANKS, [seconds * 1e6 for seconds in small_s], marker=".", label=name)
        large_s = [sweep.seconds(name, world, PLOTTED_LARGE) for world in PLOTTED_RANKS]
        bandwidth.plot(PLOTTED_RANKS, [PLOTTED_LARGE / seconds / 1e9 for seconds in large_s], marker=".", label=name)
    latency.set(title=f"latency: all_reduce of {show_bytes(PLOTTED_SMALL)}", ylabel="us")
    bandwidth.set(title=f"algorithm bandwidth: all_reduce of {show_bytes(PLOTTED_LARGE)}", ylabel="GB/s")
    for axes in (latency, bandwidth):
        _scale(axes)
    latency.legend(fontsize="small")
    figure.savefig(path, dpi=100)


def _scale(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(PLOTTED_RANKS)
    axes.set_xticklabels([f"{world:,}" for world in PLOTTED_RANKS], rotation=45)
    axes.set_xlabel("ranks, one to a host")
    axes.grid(visible=True, which="major", alpha=0.3)


def _moved_s(world: int, nbytes: int, costs: Constants) -> float:
    """The least that an all_reduce without a clever network moves and reduces."""
    return nbytes * (world - 1) / world * (2 * costs.beta_s + costs.gamma_s)


def _levels(world: int) -> int:
    return (world - 1).bit_length()


def _table(cells: Sequence[Cell], world: int) -> Table:
    table = Table(title=f"all_reduce on {world:,} ranks: simulated (/ closed formula)", title_justify="left")
    table.add_column("algorithm", no_wrap=True)
    sizes = sorted({cell.nbytes for cell in cells})
    for nbytes in sizes:
        table.add_column(show_bytes(nbytes), justify="right", no_wrap=True)
    found = {(cell.algorithm, cell.nbytes): cell for cell in cells}
    best_s = {nbytes: min(cell.simulated_s for cell in cells if cell.nbytes == nbytes) for nbytes in sizes}
    for name in dict.fromkeys(cell.algorithm for cell in cells):
        row = []
        for nbytes in sizes:
            cell = found[name, nbytes]
            mark = "" if LOWEST <= cell.ratio <= HIGHEST else " !"
            text = f"{show_seconds(cell.simulated_s)} ({cell.ratio:.2f}{mark})"
            row.append(f"[bold]{text}[/]" if cell.simulated_s == best_s[nbytes] else text)
        table.add_row(name, *row)
    return table


if __name__ == "__main__":
    main()
