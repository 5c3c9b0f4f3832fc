"""`asyncdist ps`, `stacks` and `top`: what the ranks of a running job do."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator

import click
from rich.live import Live
from rich.text import Text

from asyncdist.cli.live import job_options, live_worlds
from asyncdist.cli.rank_lines import printable, rank_lines
from asyncdist.cli.store_target import Target
from asyncdist.cli.tables import table_console
from asyncdist.inspect.endpoint import ALL, NOW
from asyncdist.inspect.job import Job
from asyncdist.inspect.why import Why
from asyncdist.world.live import LiveWorld, title

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command("ps", short_help="Show what each rank of a running job does.")
@job_options
@_json_option
def ps_command(target: Target, group: str, as_json: bool) -> None:
    """Show what each rank of running jobs does: a line for each.

    With no store given, by option or environment, these are the jobs of this user on this host. LATE is how long the
    rank's event loop took to turn when it was asked; `>` means that it has not turned yet.
    """
    worlds = _ask(target, group, NOW)
    if as_json:
        click.echo(json.dumps([vars(world) for world in worlds]))
        return
    for world in worlds:
        click.echo("\n".join(_shown(world)))


@click.command("stacks", short_help="Show where the tasks and threads of a running job are.")
@click.argument("rank", type=click.IntRange(min=0), required=False)
@job_options
@_json_option
def stacks_command(target: Target, rank: int | None, group: str, as_json: bool) -> None:
    """Show where each task and thread of RANK, or of all ranks, is: the innermost line first."""
    worlds = _ask(target, group, ALL)
    for world in worlds:
        world.documents = {one: found for one, found in world.documents.items() if rank in (None, one)}
    if as_json:
        click.echo(json.dumps([vars(world) for world in worlds]))
        return
    for world in worlds:
        for one, document in world.documents.items():
            click.echo(
                printable(
                    f"{title(world.job, world.name)}, rank {one} ({document['host']} pid {document['pid']}): "
                    f"{document.get('why', '')}".rstrip()
                )
            )
            for kind in "task", "thread":
                for name, lines in document[f"{kind}s"].items():
                    click.echo(printable(f"  {kind} {name}"))
                    for line in lines:
                        click.echo(printable(f"    {line}"))


@click.command("top", short_help="Watch what the ranks of a running job do.")
@job_options
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds.")
@click.option("--count", type=click.IntRange(min=1), help="Stop after so many looks.")
def top_command(target: Target, group: str, interval: float, count: int | None) -> None:
    """Show what `ps` shows, again and again until interrupted."""
    console = table_console()
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=console.is_terminal, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        looks = 0
        while True:
            worlds = live_worlds(target, group, NOW)
            lines = [line for world in worlds for line in _shown(world)] or ["no job runs here"]
            live.update(Text("\n".join(lines), no_wrap=True), refresh=True)
            looks += 1
            if looks == count:
                return
            time.sleep(interval)


def _ask(target: Target, group: str, question: bytes) -> list[LiveWorld]:
    worlds = live_worlds(target, group, question)
    if not worlds:
        where = "in the store" if target.is_given else "of this user on this host; --store asks a store"
        raise click.ClickException(f"there is no world {group or 'of a job'} {where}")
    return worlds


def _shown(world: LiveWorld) -> Iterator[str]:
    """A title, names of columns, and a line for each rank."""
    here = len(world.documents)
    yield printable(
        f"{title(world.job, world.name)}: {world.size} ranks" + ("" if here == world.size else f", {here} of them here")
    )
    rows = Why(Job(world.documents.values(), world.size)).rows()
    yield from rank_lines([row for row in rows if row["rank"] in world.documents])
