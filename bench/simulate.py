"""``python -m bench.simulate``: all_reduce as the simulator predicts it, beside what it takes on this machine.

Both use the same constants: those that a world here would use (of ``asyncdist tune``, where it has run), or those of
the file or built-in set that ``--constants`` names. The algorithm and the chunks are the selector's. A ratio of 1 is a
right prediction, and one between `LOWEST` and `HIGHEST` good enough to choose by.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.table import Table

from asyncdist.plan.cost.constants import BUILT_IN
from asyncdist.plan.problem import Problem
from asyncdist.plan.selection.selector import choose
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.plan.simulation.simulate import simulate
from asyncdist.world.tuning_file import own_tuning, save_constants
from bench.candidates import ASYNCDIST_TCP
from bench.model import FULL, LARGE_BYTES, SMOKE, Case, Cell, Profile, Subject, format_bytes
from bench.runner import run_subject

ITEMSIZE = 4
TRANSPORT = "tcp"
RANKS = (2, 4, 8)
SIZES = tuple((4 << 10) << step for step in range(0, 15, 2))
"""4 KiB to 64 MiB."""
LOWEST, HIGHEST = 0.5, 2.0
"""Ratios that count as predicted."""


class Prediction(NamedTuple):
    """What the simulator says of one cell."""

    algorithm: str
    seconds: float


@click.command()
@click.option("--ranks", default=",".join(map(str, RANKS)), show_default=True, help="Numbers of ranks.")
@click.option("--sizes", default=None, help="Bytes, with commas (4 KiB to 64 MiB).")
@click.option("--constants", "source", default=None, help=f"A tuning file, or one of {', '.join(BUILT_IN)}.")
@click.option("--profile", type=click.Choice([FULL.name, SMOKE.name]), default=FULL.name, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=None, help="Runs of each cell.")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
def main(ranks: str, sizes: str | None, source: str | None, profile: str, rounds: int | None, form: str) -> None:
    """Print predicted and measured all_reduce, and their ratio."""
    chosen = FULL if profile == FULL.name else SMOKE
    if rounds is not None:
        chosen = dataclasses.replace(chosen, rounds=rounds)
    numbers = [int(number) for number in ranks.split(",")]
    asked = [int(size) for size in sizes.split(",")] if sizes else list(SIZES)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        environment = dict(os.environ)
        if source is not None:
            environment["ASYNCDIST_TUNING"] = str(_tuning_file(source, Path(folder)))
        with Console(stderr=True).status("starting") as status:
            cells = run_subject(
                _subject(asked, environment), chosen, ranks=numbers, modes=("free",), progress=status.update
            )
        found = [(cell, predicted(cell.ranks, cell.case.nbytes, environment)) for cell in cells]
    if form == "json":
        click.echo(json.dumps([_as_json(cell, prediction) for cell, prediction in found], indent=1))
    else:
        Console().print(_table(found))
    for cell in cells:
        failure = cell.measurements[ASYNCDIST_TCP.name].failure
        if failure is not None:
            raise SystemExit(f"{cell.case.label}, {cell.ranks} ranks: {failure}")


def predicted(world: int, nbytes: int, environment: dict[str, str]) -> Prediction:
    """Return what the selector chooses in a world on this host, and what the simulator says of it."""
    tuning = _tuning(world, environment)
    problem = Problem.of("all_reduce", world, -(-nbytes // ITEMSIZE), 0, tuning.ranks_per_host)
    algorithm, chunk_bytes, _ = choose(problem, ITEMSIZE, tuning)
    chunk_length = max(1, chunk_bytes // ITEMSIZE)
    return Prediction(algorithm, simulate(problem, algorithm, ITEMSIZE, tuning.constants, chunk_length))


def _tuning(world: int, environment: dict[str, str]) -> Tuning:
    return own_tuning(environment, world, one_host=True, transport=TRANSPORT, overrides={})


def _tuning_file(source: str, folder: Path) -> Path:
    """Return the file named, or one made of a built-in set."""
    if source not in BUILT_IN:
        return Path(source).resolve()
    path = folder / "tuning.json"
    save_constants(path, TRANSPORT, BUILT_IN[source], {})
    return path


def _subject(sizes: Sequence[int], environment: dict[str, str]) -> Subject:
    tuning = {name: value for name, value in environment.items() if name == "ASYNCDIST_TUNING"}
    candidate = dataclasses.replace(ASYNCDIST_TCP, environment={**ASYNCDIST_TCP.environment, **tuning})

    def cases(profile: Profile) -> list[Case]:
        found = []
        for nbytes in sizes:
            samples, warmup = profile.samples(large=nbytes > LARGE_BYTES)
            found.append(Case("all_reduce", nbytes, samples, warmup))
        return found

    return Subject("simulate", "all_reduce, predicted and measured", RANKS, cases, (candidate,))


def _ratio(cell: Cell, prediction: Prediction) -> float | None:
    measurement = cell.measurements[ASYNCDIST_TCP.name]
    return prediction.seconds / measurement.p50_s() if measurement.runs_s else None


def _table(found: Sequence[tuple[Cell, Prediction]]) -> Table:
    table = Table(title="all_reduce over TCP: predicted beside measured")
    for title in ("ranks", "bytes", "algorithm", "predicted us", "measured us", "predicted / measured"):
        table.add_column(title, justify="right")
    for cell, prediction in found:
        ratio = _ratio(cell, prediction)
        measured = f"{cell.measurements[ASYNCDIST_TCP.name].p50_s() * 1e6:.1f}" if ratio is not None else "-"
        mark = "" if ratio is not None and LOWEST <= ratio <= HIGHEST else " !"
        table.add_row(
            str(cell.ranks),
            format_bytes(cell.case.nbytes),
            prediction.algorithm,
            f"{prediction.seconds * 1e6:.1f}",
            measured,
            "-" if ratio is None else f"{ratio:.2f}{mark}",
        )
    return table


def _as_json(cell: Cell, prediction: Prediction) -> dict[str, object]:
    ratio = _ratio(cell, prediction)
    return {
        "ranks": cell.ranks,
        "bytes": cell.case.nbytes,
        "algorithm": prediction.algorithm,
        "predicted_s": prediction.seconds,
        "measured_s": None if ratio is None else prediction.seconds / ratio,
        "ratio": ratio,
    }


if __name__ == "__main__":
    main()
