"""`asyncdist why` and `doctor`: what is wrong with a job that runs, or that has left dumps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from asyncdist.cli.live import job_options, live_worlds
from asyncdist.cli.network import network_of_job, show_network
from asyncdist.cli.rank_lines import printable, rank_lines
from asyncdist.cli.store_target import Target
from asyncdist.concurrency.loop import run
from asyncdist.errors import DistError
from asyncdist.inspect.endpoint import ALL, NETWORK, SPEEDS
from asyncdist.inspect.job import Job
from asyncdist.inspect.network import Network
from asyncdist.inspect.why import AFTER_S, Why
from asyncdist.world.live import title

EXIT_CODES: Final[Mapping[str, int]] = {"healthy": 0, "unknown": 2}
"""By kind of verdict; 1 for all others."""
ROWS_SHOWN: Final = 64
"""Ranks that `doctor` shows on a line each: a screen or two."""


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """The arguments of both commands, which say what jobs they are about."""
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
        command = option(command)
    return command


def _exit(kinds: Iterable[str]) -> None:
    """By the kinds of all verdicts and problems."""
    codes = {EXIT_CODES.get(kind, 1) for kind in kinds}
    click.get_current_context().exit(1 if 1 in codes else max(codes, default=0))


def _jobs(target: Target, folder: Path | None, group: str, question: bytes = ALL) -> dict[str, Job]:
    """Those of the dumps, or those that run. To find none ends the command with 2, as all that cannot be told."""
    if folder is not None:
        try:
            return {"": Job.read(folder)}
        except (ValueError, OSError) as error:
            raise click.UsageError(str(error)) from error
    try:
        worlds = live_worlds(target, group, question)
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
def why_command(target: Target, folder: Path | None, group: str, after_s: float, as_json: bool) -> None:
    """Say why a job hangs, in one sentence that names rank, operation and line of code.

    FOLDER has the dumps of its ranks: rank_0.json and so on, as `asyncdist run --dump-dir` leaves them. Without one the
    ranks of a running job are asked: that of the store given, or those of this user on this host. The exit code is 0 if
    nothing is wrong, 1 if something is, 2 if that cannot be told.
    """
    verdicts = {name: Why(job, after_s).verdict() for name, job in _jobs(target, folder, group).items()}
    if as_json:
        click.echo(json.dumps([{"job": name, **asdict(verdict)} for name, verdict in verdicts.items()]))
    else:
        for name, verdict in verdicts.items():
            click.echo(printable((f"{name}: " if name else "") + verdict.sentence))
    _exit(verdict.kind for verdict in verdicts.values())


@click.command("doctor", short_help="Say what is wrong with a job, and what each of its ranks does.")
@_options
@click.option("--network", is_flag=True, help="Also have the ranks dial each other, and say who reaches whom.")
@click.option("--bandwidth", is_flag=True, help="The same, and have the hosts send each other some MiB.")
@click.option("--join", is_flag=True, help="The same before a job: run it as the ranks of one, by `asyncdist run`.")
def doctor_command(
    target: Target,
    folder: Path | None,
    group: str,
    after_s: float,
    as_json: bool,
    network: bool,
    bandwidth: bool,
    join: bool,
) -> None:
    """Say what is wrong with a job, then what each rank does, and who comes last to the collectives of each group.

    Arguments and exit codes are those of `asyncdist why`. With --network the ranks of a running job dial each other,
    for two seconds at most, also where their event loops hang. Before a job, `asyncdist run --nnodes 3 --rdzv-endpoint
    HOST:PORT -m asyncdist doctor --network --join` on each host does that.
    """
    network |= bandwidth | join
    if network and folder is not None:
        raise click.UsageError("--network asks ranks that run, and a folder of dumps has none")
    question = SPEEDS if bandwidth else NETWORK if network else ALL
    jobs = _joined(bandwidth) if join else _jobs(target, folder, group, question)
    looks = {} if join else {name: Why(job, after_s) for name, job in jobs.items()}
    networks = {name: Network(job) for name, job in jobs.items()} if network else {}
    if as_json:
        reports = {name: _report(name, look) for name, look in looks.items()}
        for name, each in networks.items():
            reports.setdefault(name, {"job": name})["network"] = each.report()
        click.echo(json.dumps(list(reports.values())))
    else:
        for name, each in networks.items():
            show_network(name, each)
        _show(looks)
    kinds = [look.verdict().kind for look in looks.values()]
    _exit(kinds + [problem.kind for each in networks.values() for problem in each.problems()])


def _joined(measure: bool) -> dict[str, Job]:
    """On rank 0, the job that this process is a rank of. Other ranks end here once rank 0 has asked."""
    if not os.environ.get("RANK"):
        raise click.UsageError("--join is for ranks: asyncdist run ... -m asyncdist doctor --network --join")
    try:
        job = run(network_of_job(measure))
    except (DistError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    return click.get_current_context().exit(0) if job is None else {"": job}


def _show(looks: Mapping[str, Why]) -> None:
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
