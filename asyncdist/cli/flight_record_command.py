"""`asyncdist flight-record`: dumps of all ranks as torch's Flight Recorder writes them."""

from __future__ import annotations

import pickle
from pathlib import Path

import click

from asyncdist.inspect.flight_record import flight_records
from asyncdist.inspect.job import Job


@click.command("flight-record", short_help="Write dumps for the analyzer of torch.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
def flight_record_command(folder: Path, out: Path) -> None:
    """Write the collectives of the dumps in FOLDER (rank_0.json, ...) to OUT for torch's analyzer.

    It is run so: python -m torch.distributed.flight_recorder.fr_trace OUT
    """
    try:
        job = Job.read(folder)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
    documents = [document for rank, document in job.documents.items() if rank not in job.missing]
    for line in job.unread:
        click.echo(f"not read: {line}", err=True)
    out.mkdir(parents=True, exist_ok=True)
    for rank, record in flight_records(documents).items():
        (out / f"rank_{rank}").write_bytes(pickle.dumps(record))
    click.echo(f"{len(documents)} ranks: python -m torch.distributed.flight_recorder.fr_trace {out}")
