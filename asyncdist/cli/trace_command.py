"""`asyncdist trace`: the timeline of a job."""

from __future__ import annotations

from pathlib import Path

import click

from asyncdist.cli.live import job_options, live_worlds
from asyncdist.cli.rank_lines import printable
from asyncdist.cli.store_target import Target
from asyncdist.inspect.job import Document, Job
from asyncdist.inspect.perfetto import trace
from asyncdist.inspect.stragglers import stragglers
from asyncdist.world.live import title

STRAGGLERS_SHOWN = 5


@click.command("trace", short_help="Write the timeline of a job for Perfetto.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), required=False)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), default=Path("job.pftrace"))
@job_options
def trace_command(target: Target, folder: Path | None, output: Path, group: str) -> None:
    """Write what a job has done of late as one timeline, to be opened with https://ui.perfetto.dev.

    It is read from the dumps in FOLDER (rank_0.json, ...). Without one a running job is asked: that of the store or,
    with no store given, of this user on this host. It also says for whom the others waited most.
    """
    documents = _asked(target, group) if folder is None else _read(folder)
    with output.open("wb") as file:
        file.writelines(trace(documents))
    click.echo(f"{output}: {len(documents)} ranks; open it with https://ui.perfetto.dev")
    for straggler in stragglers(documents)[:STRAGGLERS_SHOWN]:
        click.echo(printable(str(straggler)))


def _read(folder: Path) -> list[Document]:
    try:
        job = Job.read(folder)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
    for line in job.unread:
        click.echo(printable(f"left out {line}"), err=True)
    return [job.documents[rank] for rank in sorted(job.documents) if rank not in job.missing]


def _asked(target: Target, group: str) -> list[Document]:
    worlds = live_worlds(target, group)
    if len(worlds) != 1:
        found = "; ".join(title(world.job, world.name) for world in worlds) or "none"
        raise click.ClickException(
            f"one running job is wanted, and this is what runs: {printable(found)}; say --namespace, --group"
        )
    return [found for found in worlds[0].documents.values() if found.get("entries")]
