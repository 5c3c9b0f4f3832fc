"""`asyncdist tune --check`: try everything that could be chosen, and show what would be chosen and how good that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.table import Table

from asyncdist.cli.tables import show_bytes, show_seconds, table_console
from asyncdist.plan.cost.constants import Constants
from asyncdist.tuning.fit import CLOSE, TOLERABLE, Choice, judge, summary
from asyncdist.tuning.session import WORLDS, Cell, Report, try_here
from asyncdist.tuning.trials import EXERCISES, Trial
from asyncdist.world.tuning_file import VERSION, built_in_constants, host_cores, stored_constants

__all__ = ["CHECKED_SIZES", "check_here", "measured_constants", "show_check"]

CHECKED_SIZES: Final = tuple((1 << 10) << step for step in range(0, 15, 2))
"""Bytes: 1 KiB to 16 MiB."""


def check_here(transport: str, constants: Constants, budget_s: float, report: Report) -> list[Trial]:
    """Try every algorithm of five collectives over `transport` for about `budget_s`, in chunks as `constants` say.

    Raises as `asyncdist.tuning.session.find_here`.
    """
    cells = tuple(Cell(collective, nbytes) for collective in EXERCISES for nbytes in CHECKED_SIZES)
    each_s = budget_s / len(WORLDS)
    return [trial for world in WORLDS for trial in try_here(transport, world, cells, constants, each_s, report)]


def measured_constants(path: Path, transport: str) -> Constants | None:
    """Return what `asyncdist tune` has found for `transport`, None if nothing. Raises ValueError for a damaged file."""
    try:
        return stored_constants(path, transport)
    except FileNotFoundError:
        return None


def show_check(transport: str, trials: Sequence[Trial], measured: Constants | None, *, everything: bool) -> None:
    """Print the cells, of those constants that a group here would use, and how good these and the built-in ones are.

    `everything`: a line for each candidate, instead of one for each cell.
    """
    console = table_console()
    built_in = judge(trials, _with_cores(built_in_constants(transport)))
    judged = built_in if measured is None else judge(trials, _with_cores(measured))
    console.print(_candidates(judged) if everything else _cells(judged))
    console.print(_line(f"{transport}, built-in constants", built_in), highlight=False)
    if measured is not None:
        console.print(_line(f"{transport}, as measured here", judged), highlight=False)
    else:
        console.print(f"{transport}: nothing of version {VERSION} was measured here yet (`asyncdist tune`)")


def _with_cores(constants: Constants) -> Constants:
    return replace(constants, cores=host_cores(max(WORLDS)))


def _line(title: str, choices: Sequence[Choice]) -> str:
    found = summary(choices)
    return (
        f"{title}: of {found.cells} choices {found.fastest} are the fastest, {found.close} within "
        f"{round(100 * (CLOSE - 1))} % of it, {found.tolerable} within {round(100 * (TOLERABLE - 1))} %; "
        f"mean {found.mean:.3f}, worst {found.worst:.2f}"
    )


def _cells(choices: Sequence[Choice]) -> Table:
    table = Table()
    for title in (
        "collective",
        "ranks",
        "bytes",
        "chosen",
        "predicted",
        "measured",
        "fastest",
        "predicted",
        "measured",
    ):
        table.add_column(title, justify="left" if title in ("collective", "chosen", "fastest") else "right")
    table.add_column("chosen / fastest", justify="right")
    for choice in choices:
        chosen, fastest = choice.chosen, choice.fastest
        mark = " !" if choice.ratio > TOLERABLE else ""
        table.add_row(
            chosen.trial.collective,
            str(chosen.trial.world),
            show_bytes(chosen.trial.nbytes),
            chosen.trial.algorithm,
            show_seconds(chosen.predicted_s),
            show_seconds(chosen.trial.seconds),
            fastest.trial.algorithm,
            show_seconds(fastest.predicted_s),
            show_seconds(fastest.trial.seconds),
            f"{choice.ratio:.2f}{mark}",
        )
    return table


def _candidates(choices: Sequence[Choice]) -> Table:
    table = Table()
    for title in (
        "collective",
        "ranks",
        "bytes",
        "algorithm",
        "chunk",
        "predicted",
        "measured",
        "/ fastest",
        "samples",
    ):
        table.add_column(title, justify="left" if title in ("collective", "algorithm") else "right")
    for choice in choices:
        for number, (trial, predicted_s) in enumerate(choice.candidates):
            table.add_row(
                *((trial.collective, str(trial.world), show_bytes(trial.nbytes)) if not number else ("", "", "")),
                f"{trial.algorithm} <- chosen" if not number else trial.algorithm,
                show_bytes(trial.chunk_bytes),
                show_seconds(predicted_s),
                show_seconds(trial.seconds),
                f"{trial.seconds / choice.fastest.trial.seconds:.2f}",
                str(trial.samples),
                end_section=number == len(choice.candidates) - 1,
            )
    return table
