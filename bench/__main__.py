"""``python -m bench``: measure asyncdist beside its neighbors."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table

from asyncdist.cli.tables import BYTES
from bench import overlap, report, stress, targets
from bench.candidates import PEERS
from bench.command_line import Bar, ListOf
from bench.machine import about
from bench.model import FULL, PROFILES, Cell, Mode, Profile, Subject
from bench.operations import OPERATIONS
from bench.runner import count_runs, run_subject
from bench.subjects import ANY_RANKS, FLOORS, SUBJECTS, TRANSPORT_NAMES, Selection, chosen_subjects
from bench.targets.verdict import HEADER, document, write_document

BUSY_LOAD = 0.5
"""Runnable processes, averaged over a minute, above which two cores are not quiet."""
TABLE_WIDTH = 190
"""Columns of a table that goes to a file or a pipe."""


@click.command(epilog=f"SUBJECTS are {', '.join([*SUBJECTS, FLOORS])}; docs/benchmarking.md says what each measures.")
@click.argument("names", nargs=-1, metavar="[SUBJECTS]...", type=click.Choice([*SUBJECTS, FLOORS]))
@click.option("--profile", type=click.Choice(list(PROFILES)), default=None, help="full: quotable; smoke: it runs.")
@click.option(
    "--ranks", type=ListOf(click.IntRange(min=2)), help=f"Numbers of ranks of {', '.join(sorted(ANY_RANKS))}."
)
@click.option("--pin/--free", "pin", default=None, help="Only pinned, or only free (both by default).")
@click.option("--rounds", type=click.IntRange(min=1), default=None, help="Alternating runs of each candidate.")
@click.option("--only", default=None, help="Candidates by name, such as asyncdist,floor.")
@click.option(
    "--transport", "transports", type=ListOf(click.Choice(TRANSPORT_NAMES)), help="asyncdist's, all by default."
)
@click.option("--peers", type=ListOf(click.Choice(list(PEERS))), help="Neighbors, all by default.")
@click.option(
    "--operations",
    type=ListOf(click.Choice([*OPERATIONS, "ping_pong", "one_way", "window"])),
    help="Those of collectives and p2p, all by default.",
)
@click.option("--sizes", type=ListOf(BYTES), help="Bytes, such as 4,64KiB, of p2p, all_reduce and collectives.")
@click.option("--stress-operations", type=click.IntRange(min=1), default=None, help="Operations of stress: 1,000,000.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "osu", "nccl", "json"]),
    default="table",
    help="How figures are printed: as a table (by default), or as those suites do.",
)
@click.option("--plot", is_flag=True, help="Draw a picture of each operation into docs/benchmarks/.")
@click.option(
    "--targets",
    "promised",
    is_flag=False,
    flag_value=targets.MAIN_JOB,
    default=None,
    type=click.Choice(list(targets.TARGETS)),
    help="Measure the promised figures and judge them.",
)
@click.option("--write", is_flag=True, help="With --targets: write the report into docs/benchmarks/.")
def main(
    names: tuple[str, ...],
    profile: str | None,
    ranks: tuple[int, ...] | None,
    pin: bool | None,
    rounds: int | None,
    only: str | None,
    transports: tuple[str, ...] | None,
    peers: tuple[str, ...] | None,
    operations: tuple[str, ...] | None,
    sizes: tuple[int, ...] | None,
    stress_operations: int | None,
    form: str,
    plot: bool,
    promised: str | None,
    write: bool,
) -> None:
    """Measure SUBJECTS (all by default), or with --targets what is promised."""
    console, errors = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    if plot and (failure := report.missing_matplotlib()):
        raise SystemExit(failure)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))  # leave through the cleanup
    machine = about()
    if float(machine["load before"]) > BUSY_LOAD:
        errors.print(f"load average {machine['load before']}: this machine is busy, the figures will not be quotable")
    modes: tuple[Mode, ...] | None = None if pin is None else (("pinned",) if pin else ("free",))
    if promised is not None:
        target = targets.TARGETS[promised]
        chosen = _profile(profile or target.profile.name, rounds, stress_operations)
        with Bar(errors) as bar:
            cells = target.measure(chosen, modes, bar.line)
        _print_targets(console, target, cells, machine, write=write, plot=plot)
    else:
        selection = Selection(_set(only.split(",") if only else None), _set(transports), _set(peers), sizes, operations)
        chosen = _profile(profile or FULL.name, rounds, stress_operations)
        cells = _measure(chosen_subjects(names, selection), chosen, ranks, modes, errors)
        if plot:
            for path in report.draw(cells, targets.FOLDER, "bench"):
                errors.print(f"wrote {path}")
    _print(console, cells, machine, form, judged=promised is not None)
    for line in _missing(cells):
        errors.print(line, soft_wrap=True, markup=False)
    if any(measurement.wrong for cell in cells for measurement in cell.measurements.values()):
        raise SystemExit("wrong results: see the column 'wrong'")


def _set(values: Sequence[str] | None) -> frozenset[str] | None:
    return None if values is None else frozenset(values)


def _profile(name: str, rounds: int | None, stress_operations: int | None) -> Profile:
    chosen = PROFILES[name]
    return dataclasses.replace(
        chosen,
        rounds=rounds or chosen.rounds,
        stress_operations=stress_operations or chosen.stress_operations,
    )


def _measure(
    chosen: Sequence[Subject],
    profile: Profile,
    ranks: Sequence[int] | None,
    modes: Sequence[Mode] | None,
    errors: Console,
) -> list[Cell]:
    cells: list[Cell] = []
    asked = {subject.name: ranks if subject.name in ANY_RANKS else None for subject in chosen}
    total = sum(count_runs(subject, profile, ranks=asked[subject.name], modes=modes) for subject in chosen)
    with Bar(errors, total) as bar:
        for subject in chosen:
            if subject.name == stress.SUBJECT.name:
                cells += stress.run_stress(profile, bar.line)
            else:
                cells += run_subject(subject, profile, ranks=asked[subject.name], modes=modes, progress=bar.line)
    return cells


def _print(console: Console, cells: list[Cell], machine: dict[str, str], form: str, *, judged: bool) -> None:
    if form == "json":
        click.echo(report.to_json(cells, machine))
    elif form == "osu":
        click.echo(report.osu_tables(cells))
    elif form == "nccl":
        click.echo(report.nccl_tables(cells))
    else:
        _print_tables(console, cells, judged=judged)


def _print_tables(console: Console, cells: list[Cell], *, judged: bool) -> None:
    for name in dict.fromkeys(cell.subject for cell in cells):
        title = SUBJECTS[name].title if name in SUBJECTS else name
        report.print_table(title, [cell for cell in cells if cell.subject == name], console)
    if cells:
        console.print(report.LEGEND, soft_wrap=True, highlight=False, markup=False)
    if not judged and any(cell.subject == overlap.SUBJECT.name for cell in cells):
        table = Table(title="Bandwidth left beside computation")
        for column in overlap.HEADER:
            table.add_column(column)
        for row in overlap.summary(cells):
            table.add_row(*row)
        console.print(table)


def _print_targets(
    console: Console, target: targets.Target, cells: list[Cell], machine: dict[str, str], *, write: bool, plot: bool
) -> None:
    verdicts = target.judge(cells)
    table = Table(title=f"Promised: {target.title}")
    for column in HEADER:
        table.add_column(column)
    for verdict in verdicts:
        table.add_row(*verdict.row())
    console.print(table)
    pictures = report.draw(cells, targets.FOLDER, target.name) if plot else []
    if write:
        text = document(target.title, target.command, target.about, verdicts, cells, machine, pictures)
        write_document(text, target.path)


def _missing(cells: list[Cell]) -> list[str]:
    """Return one line for each candidate that could not be measured, and each operation it does not offer."""
    found: dict[str, None] = {}
    for cell in cells:
        for measurement in cell.measurements.values():
            if measurement.failure is not None:
                what = cell.case.operation if measurement.failure.startswith("not offered") else ""
                where = f"{cell.subject}: {measurement.candidate}"
                found[f"{where}: {what + ' ' if what else ''}{measurement.failure}"] = None
    return list(found)


if __name__ == "__main__":
    main()
