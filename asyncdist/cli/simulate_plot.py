"""The picture `asyncdist simulate --plot` draws; matplotlib is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from asyncdist.cli.sizes import show_bytes
from asyncdist.plan.simulation.simulate import Sweep

__all__ = ["PlotUnavailableError", "plot", "plotted_sizes", "plotted_worlds"]

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


def _lines(axes: Any, where: Sequence[int], times_s: dict[str, list[float]]) -> None:
    for name, values in times_s.items():
        axes.plot(where, values, marker=".", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylabel("seconds")
    axes.grid(visible=True, which="major", alpha=0.3)
