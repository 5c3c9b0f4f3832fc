"""`asyncdist flight-record`: dumps of all ranks as torch's Flight Recorder writes them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import click

from asyncdist.inspect import dumps
from asyncdist.inspect.flight_record import flight_records


@click.command("flight-record", short_help="Write dumps for the analyzer of torch.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
def flight_record_command(folder: Path, out: Path) -> None:
    """Write the collectives of the dumps in FOLDER (rank_0.json, ...) to OUT for torch's analyzer.

    It is run so: python -m torch.distributed.flight_recorder.fr_trace OUT
    """
    documents = []
    for path in sorted(folder.glob("rank_*.json")):
        if path.stem.removeprefix("rank_").isdigit():  # the first dump of each rank
            found = json.loads(path.read_bytes())
            if found.get("format") != dumps.FORMAT or found.get("version") != dumps.VERSION:
                raise click.ClickException(f"{path} is no dump of version {dumps.VERSION}")
            documents.append(found)
    if not documents:
        raise click.ClickException(f"{folder} has no rank_0.json and so on")
    out.mkdir(parents=True, exist_ok=True)
    for rank, record in flight_records(documents).items():
        (out / f"rank_{rank}").write_bytes(pickle.dumps(record))
    click.echo(f"{len(documents)} ranks: python -m torch.distributed.flight_recorder.fr_trace {out}")
