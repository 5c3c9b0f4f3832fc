"""`asyncdist trace`: the timeline of a job."""

from __future__ import annotations

from pathlib import Path

import click

from asyncdist.inspect.job import Job
from asyncdist.inspect.perfetto import trace
from asyncdist.inspect.stragglers import stragglers

STRAGGLERS_SHOWN = 5


@click.command("trace", short_help="Write the timeline of a job for Perfetto.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), default=Path("job.pftrace"))
def trace_command(folder: Path, output: Path) -> None:
    """Write what the dumps in FOLDER (rank_0.json, ...) say as one timeline, to be opened with https://ui.perfetto.dev.

    It also says for whom the others waited most.
    """
    try:
        job = Job.read(folder)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
    for line in job.unread:
        click.echo(f"left out {line}", err=True)
    documents = [job.documents[rank] for rank in sorted(job.documents) if rank not in job.missing]
    with output.open("wb") as file:
        file.writelines(trace(documents))
    click.echo(f"{output}: {len(documents)} ranks; open it with https://ui.perfetto.dev")
    for straggler in stragglers(documents)[:STRAGGLERS_SHOWN]:
        click.echo(str(straggler))
