"""`asyncdist why` and `doctor`: what is wrong with a job, from its dumps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from rich.table import Table
from rich.text import Text

from asyncdist.cli.tables import show_seconds, table_console
from asyncdist.concurrency.integers import spell_ranks
from asyncdist.inspect.job import Job
from asyncdist.inspect.why import AFTER_S, Why

EXIT_CODES: Final[Mapping[str, int]] = {"healthy": 0, "unknown": 2}
"""By kind of verdict; 1 for all others."""
ROWS_SHOWN: Final = 64
"""Ranks that `doctor` shows on a line each: a screen or two."""

_folder_argument = click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
_after_option = click.option(
    "--after",
    "after_s",
    type=click.FloatRange(min=0),
    default=AFTER_S,
    show_default=True,
    help="Seconds that an operation must have waited to count.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command("why", short_help="Say why a job hangs, or is slow, in a sentence.")
@_folder_argument
@_after_option
@_json_option
@click.pass_context
def why_command(context: click.Context, folder: Path, after_s: float, as_json: bool) -> None:
    """Say why a job hangs, in one sentence that names rank, operation and line of code.

    FOLDER has the dumps of the ranks: rank_0.json and so on, as `asyncdist run --dump-dir` leaves them. The exit code
    is 0 if nothing is wrong, 1 if something is, 2 if that cannot be told.
    """
    verdict = _look(folder, after_s).verdict()
    click.echo(json.dumps(asdict(verdict)) if as_json else _printable(verdict.sentence))
    context.exit(EXIT_CODES.get(verdict.kind, 1))


@click.command("doctor", short_help="Say what is wrong with a job, and what each of its ranks does.")
@_folder_argument
@_after_option
@_json_option
@click.pass_context
def doctor_command(context: click.Context, folder: Path, after_s: float, as_json: bool) -> None:
    """Say what is wrong with a job, then what each rank does, and who comes last to the collectives of each group.

    Arguments and exit codes are those of `asyncdist why`.
    """
    found = _look(folder, after_s)
    verdict, rows, stragglers = found.verdict(), found.rows(), found.stragglers()
    late = [
        {"group": one.entry["group"], "tag": one.entry["tag"], "rank": one.rank, "last": one.last, "of": one.rounds}
        | {"waited": round(one.waited, 3)}
        for one in stragglers
    ]
    if as_json:
        report = {"verdict": asdict(verdict), "ranks": rows, "stragglers": late, "unread": found.job.unread}
        click.echo(json.dumps(report))
    else:
        click.echo(_printable(verdict.sentence) + "\n")
        console = table_console()
        first = sorted(rows, key=lambda row: row["rank"] not in verdict.ranks)[:ROWS_SHOWN]
        console.print(_table(sorted(first, key=lambda row: row["rank"])))
        if len(rows) > ROWS_SHOWN:
            click.echo(f"and {len(rows) - ROWS_SHOWN} ranks more; --json shows all")
        for one in late:
            often = f"rank {one['rank']} came last to {one['last']} of {one['of']} collectives"
            waited = f"and the others waited {one['waited']:.0%} of the time"
            click.echo(_printable(f"group {one['group']}, tag {one['tag']}: {often}, {waited}"))
        for line in found.job.unread:
            click.echo(_printable(f"not read: {line}"))
    context.exit(EXIT_CODES.get(verdict.kind, 1))


def _look(folder: Path, after_s: float) -> Why:
    try:
        return Why(Job.read(folder), after_s)
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error  # which ends with 2


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("RANK", "STATE", "FOR", "WAITS FOR", "DOES", "HOST", "PID"):
        table.add_column(name, justify="right" if name in ("RANK", "FOR", "PID") else "left", overflow="fold")
    for row in rows:
        since = show_seconds(row["since_s"]) if "since_s" in row else ""
        ranks = spell_ranks(row.get("waits_for", ()))
        cells = (row["rank"], row["state"], since, ranks, row["does"], row["host"] or "", row["pid"] or "")
        table.add_row(*(Text(_printable(str(cell))) for cell in cells))
    return table


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
