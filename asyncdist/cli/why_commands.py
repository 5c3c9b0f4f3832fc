"""`asyncdist why` and `doctor`: what is wrong with a job that runs, or that has left dumps."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from asyncdist.cli.live import job_options, live_worlds
from asyncdist.cli.rank_lines import printable, rank_lines
from asyncdist.cli.store_target import Target
from asyncdist.inspect.job import Job
from asyncdist.inspect.why import AFTER_S, Why
from asyncdist.world.live import title

EXIT_CODES: Final[Mapping[str, int]] = {"healthy": 0, "unknown": 2}
"""By kind of verdict; 1 for all others."""
ROWS_SHOWN: Final = 64
"""Ranks that `doctor` shows on a line each: a screen or two."""


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """The arguments of both commands, and the jobs they are about, by name."""

    @functools.wraps(command)
    def with_jobs(target: Target, folder: Path | None, group: str, after_s: float, as_json: bool) -> None:
        jobs = _jobs(target, folder, group)
        looks = {name: Why(job, after_s) for name, job in jobs.items()}
        command(looks, as_json)
        codes = {EXIT_CODES.get(look.verdict().kind, 1) for look in looks.values()}
        click.get_current_context().exit(1 if 1 in codes else max(codes))

    options = (
        click.argument(
            "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), required=False, metavar="[FOLDER]"
        ),
        job_options,
        click.option(
            "--after",
            "after_s",
            type=click.FloatRange(min=0),
            default=AFTER_S,
            show_default=True,
            help="Seconds that an operation must have waited to count.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    )
    for option in reversed(options):
        with_jobs = option(with_jobs)
    return with_jobs


def _jobs(target: Target, folder: Path | None, group: str) -> dict[str, Job]:
    """Those of the dumps, or those that run. To find none ends the command with 2, as all that cannot be told."""
    if folder is not None:
        try:
            return {"": Job.read(folder)}
        except (ValueError, OSError) as error:
            raise click.UsageError(str(error)) from error
    try:
        worlds = live_worlds(target, group)
    except click.ClickException as error:
        raise click.UsageError(error.message) from error
    if not worlds:
        raise click.UsageError("no job runs there; give a folder of dumps, or --store of a running job")
    several = len(worlds) > 1
    return {
        title(world.job, world.name) if several else "": Job(world.documents.values(), world.size) for world in worlds
    }


@click.command("why", short_help="Say why a job hangs, or is slow, in a sentence.")
@_options
def why_command(looks: Mapping[str, Why], as_json: bool) -> None:
    """Say why a job hangs, in one sentence that names rank, operation and line of code.

    FOLDER has the dumps of its ranks: rank_0.json and so on, as `asyncdist run --dump-dir` leaves them. Without one the
    ranks of a running job are asked: that of the store given, or those of this user on this host. The exit code is 0 if
    nothing is wrong, 1 if something is, 2 if that cannot be told.
    """
    verdicts = {name: look.verdict() for name, look in looks.items()}
    if as_json:
        click.echo(json.dumps([{"job": name, **asdict(verdict)} for name, verdict in verdicts.items()]))
    else:
        for name, verdict in verdicts.items():
            click.echo(printable((f"{name}: " if name else "") + verdict.sentence))


@click.command("doctor", short_help="Say what is wrong with a job, and what each of its ranks does.")
@_options
def doctor_command(looks: Mapping[str, Why], as_json: bool) -> None:
    """Say what is wrong with a job, then what each rank does, and who comes last to the collectives of each group.

    Arguments and exit codes are those of `asyncdist why`.
    """
    if as_json:
        click.echo(json.dumps([_report(name, look) for name, look in looks.items()]))
        return
    for name, look in looks.items():
        verdict, rows = look.verdict(), look.rows()
        click.echo(printable((f"{name}: " if name else "") + verdict.sentence) + "\n")
        first = sorted(rows, key=lambda row: row["rank"] not in verdict.ranks)[:ROWS_SHOWN]
        for line in rank_lines(sorted(first, key=lambda row: row["rank"])):
            click.echo(line)
        if len(rows) > ROWS_SHOWN:
            click.echo(f"and {len(rows) - ROWS_SHOWN} ranks more; --json shows all")
        for line in (*map(str, look.stragglers()), *(f"not read: {each}" for each in look.job.unread)):
            click.echo(printable(line))


def _report(name: str, look: Why) -> dict[str, Any]:
    late = list(map(asdict, look.stragglers()))
    report = {"job": name, "verdict": asdict(look.verdict()), "ranks": look.rows(), "stragglers": late}
    return report | {"unread": look.job.unread}
