"""Measures two checkouts of asyncdist in turns, and says how much longer the second takes.

    git worktree add ../before main && make -C ../before check
    python -m bench.compare_trees ../before . --pairs 5 -- p2p all_reduce store --profile promises

What stands behind ``--`` goes to ``python -m bench`` of each checkout, which measures asyncdist alone, once. A ratio is
the median over the pairs of (second's median / first's median). Both sides of a pair are seconds apart, so that a
machine whose speed drifts does not decide.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path
from typing import Final, TypeAlias

import click
from rich.console import Console
from rich.table import Table

from bench.report import format_time

OWN: Final = "asyncdist,asyncdist tcp,asyncdist unix,asyncdist shm"

Figures: TypeAlias = dict[tuple[str, int, str], float]
"""The median seconds of (case, ranks, mode)."""


def figures_of(report: str) -> Figures:
    """Read what ``python -m bench --format json`` printed; a wrong result or a failure is an error."""
    figures: Figures = {}
    for cell in json.loads(report)["cells"]:
        for name, measured in cell["candidates"].items():
            if measured["failure"] or measured["wrong"]:
                raise click.ClickException(f"{cell['case']}: {measured['failure'] or 'wrong results'}")
            if name.startswith("asyncdist"):
                case = f"{cell['subject']}: {cell['case']}{name.removeprefix('asyncdist')}"
                figures[case, cell["ranks"], cell["mode"]] = measured["p50_s"]
    return figures


def ratios(pairs: list[tuple[Figures, Figures]]) -> dict[tuple[str, int, str], list[float]]:
    """Return second / first of every pair, for each cell that both sides measured."""
    return {
        cell: [after[cell] / before[cell] for before, after in pairs] for cell in pairs[0][0] if cell in pairs[0][1]
    }


def _measure(tree: Path, arguments: tuple[str, ...]) -> Figures:
    own = tree / ".venv" / "bin" / "python"  # its editable install is of its own checkout
    if not own.exists():
        raise click.ClickException(f"{tree} has no .venv: run make check in it")
    command = [str(own), "-m", "bench", *arguments, "--only", OWN, "--rounds", "1", "--format", "json"]
    done = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{tree}: python -m bench {' '.join(arguments)} ended with {done.returncode}")
    return figures_of(done.stdout)


@click.command()
@click.argument("first", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("second", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--pairs", type=click.IntRange(min=1), default=5, help="How often each is measured.")
@click.option("--at-most", type=float, default=None, help="Fail where a median ratio is above this.")
def main(first: Path, second: Path, arguments: tuple[str, ...], pairs: int, at_most: float | None) -> None:
    """Measure the checkouts FIRST and SECOND in turns with `python -m bench ARGUMENTS`."""
    trees = (first.resolve(), second.resolve())
    measured: list[tuple[Figures, Figures]] = []
    for number in range(pairs):
        order = trees if number % 2 == 0 else trees[::-1]
        found = {tree: _measure(tree, arguments) for tree in order}
        measured.append((found[trees[0]], found[trees[1]]))
    table = Table("case", "ranks", "cores", "first", "second", "second / first", "lowest .. highest")
    worst = 0.0
    for cell, found_ratios in ratios(measured).items():
        case, ranks, mode = cell
        ratio = statistics.median(found_ratios)
        worst = max(worst, ratio)
        sides = (statistics.median(side[cell] for side in column) for column in zip(*measured, strict=True))
        spread = f"{min(found_ratios):.2f} .. {max(found_ratios):.2f}"
        table.add_row(case, str(ranks), mode, *(format_time(side_s) for side_s in sides), f"{ratio:.2f}", spread)
    console = Console()
    if not console.is_terminal:
        console.width = 120
    console.print(table)
    if at_most is not None and worst > at_most:
        raise click.ClickException(f"a median ratio is {worst:.2f}, above {at_most:.2f}")


if __name__ == "__main__":
    main()
