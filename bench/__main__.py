"""``python -m bench``: measure asyncdist beside its neighbors."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Callable, Mapping

import click
from rich.console import Console
from rich.table import Table

from bench import all_reduce, overlap, p2p, rendezvous, report, store, targets
from bench.machine import about
from bench.runner import FULL, SMOKE, Candidate, Cell, Mode, Profile, Subject
from bench.schedule import run_subject

SUBJECTS: Mapping[str, Subject] = {
    subject.name: subject
    for subject in (p2p.SUBJECT, all_reduce.SUBJECT, store.SUBJECT, rendezvous.SUBJECT, overlap.SUBJECT)
}
PROFILES: Mapping[str, Profile] = {profile.name: profile for profile in (FULL, SMOKE)}
FLOORS = "floors"
BUSY_LOAD = 0.5
"""Runnable processes, averaged over a minute, above which two cores are not quiet."""
TABLE_WIDTH = 150
"""Columns of a table that goes to a file or a pipe."""


@click.command()
@click.argument("subjects", nargs=-1, type=click.Choice([*SUBJECTS, FLOORS]))
@click.option("--profile", type=click.Choice(list(PROFILES)), default="full", help="full: quotable; smoke: it runs.")
@click.option("--ranks", default=None, help="Numbers of ranks of all_reduce, such as 2,4,8.")
@click.option("--pin/--free", "pin", default=None, help="Only pinned, or only free (both by default).")
@click.option("--rounds", type=click.IntRange(min=1), default=None, help="Alternating runs of each candidate.")
@click.option("--only", default=None, help="Candidates by name, such as asyncdist,floor.")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table")
@click.option("--targets", "check_targets", is_flag=True, help="Measure the promised figures and judge them.")
@click.option("--write", is_flag=True, help="With --targets: write the report into docs/benchmarks/.")
def main(
    subjects: tuple[str, ...],
    profile: str,
    ranks: str | None,
    pin: bool | None,
    rounds: int | None,
    only: str | None,
    form: str,
    check_targets: bool,
    write: bool,
) -> None:
    """Measure SUBJECTS (all by default): p2p, all_reduce, store, rendezvous, overlap; floors: the bare sockets."""
    console, errors = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))  # leave through the cleanup
    machine = about()
    if float(machine["load before"]) > BUSY_LOAD:
        errors.print(f"load average {machine['load before']}: this machine is busy, the figures will not be quotable")
    chosen = PROFILES[profile]
    if rounds is not None:
        chosen = dataclasses.replace(chosen, rounds=rounds)
    modes: tuple[Mode, ...] | None = None if pin is None else (("pinned",) if pin else ("free",))
    with errors.status("starting") as status:
        if check_targets:
            cells = targets.measure(chosen, modes, status.update)
        else:
            numbers = [int(number) for number in ranks.split(",")] if ranks else None
            cells = []
            for subject in _selected(subjects, only):
                asked = numbers if subject.name == all_reduce.SUBJECT.name else None
                cells += run_subject(subject, chosen, ranks=asked, modes=modes, progress=status.update)
    if check_targets:
        _print_targets(console, cells, machine, write)
    elif form == "json":
        click.echo(report.to_json(cells, machine))
    if form == "table":
        _print_tables(console, cells)
    for line in _missing(cells):
        errors.print(line, soft_wrap=True, markup=False)
    if any(measurement.wrong for cell in cells for measurement in cell.measurements.values()):
        raise SystemExit("wrong results: see the column 'wrong'")


def _selected(subjects: tuple[str, ...], only: str | None) -> list[Subject]:
    """Return the subjects to run, with no more candidates than asked for."""
    wanted = set(only.split(",")) if only else None

    def keep(subject: Subject, condition: Callable[[Candidate], bool]) -> Subject:
        kept = tuple(candidate for candidate in subject.candidates if condition(candidate))
        return dataclasses.replace(subject, candidates=kept)

    found = []
    for name in subjects or tuple(SUBJECTS):
        if name == FLOORS:
            bare = [keep(SUBJECTS[other], lambda c: c.name.startswith("floor")) for other in ("p2p", "all_reduce")]
            found += bare
        else:
            found.append(keep(SUBJECTS[name], lambda c: wanted is None or c.name in wanted))
    return found


def _print_tables(console: Console, cells: list[Cell]) -> None:
    for name, subject in SUBJECTS.items():
        chosen = [cell for cell in cells if cell.subject == name]
        if chosen:
            report.print_table(subject.title, chosen, console)
    if any(cell.subject == overlap.SUBJECT.name for cell in cells):
        table = Table(title="Bandwidth left beside computation")
        for column in overlap.HEADER:
            table.add_column(column)
        for row in overlap.summary(cells):
            table.add_row(*row)
        console.print(table)


def _print_targets(console: Console, cells: list[Cell], machine: dict[str, str], write: bool) -> None:
    verdicts = targets.judge(cells)
    table = Table(title="Promised figures")
    for column in targets.HEADER:
        table.add_column(column)
    for verdict in verdicts:
        table.add_row(*verdict.row())
    console.print(table)
    if write:
        targets.write_document(targets.document(verdicts, cells, machine))


def _missing(cells: list[Cell]) -> list[str]:
    """Return one line for each candidate that could not be measured."""
    found: dict[str, None] = {}
    for cell in cells:
        for measurement in cell.measurements.values():
            if measurement.failure is not None:
                found[f"{cell.subject}: {measurement.candidate}: {measurement.failure}"] = None
    return list(found)


if __name__ == "__main__":
    main()
