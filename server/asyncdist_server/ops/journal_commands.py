"""`asyncdist-server backup|restore|verify`: what people do with the data directory of a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.journal.journal import JournalError
from asyncdist_server.journal.replay import Replay
from asyncdist_server.journal.sqlite_journal import read_file
from asyncdist_server.ops import backups
from asyncdist_server.ops.privileges import become_owner, opened_before_becoming_owner

BACKUP_TIMEOUT_S: Final = 60.0
"""How long a daemon may take: the largest store it can hold is copied in a fraction of that."""

_data_dir = click.option(
    "--data-dir",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    envvar="ASYNCDIST_SERVER_DATA_DIR",
    show_envvar=True,
    help="The daemon's data directory.",
)


@click.command()
@_data_dir
@click.option("--timeout", default=BACKUP_TIMEOUT_S, help="Seconds to wait for a running daemon.")
def backup(data_dir: Path, timeout: float) -> None:
    """Copy the data to a new file in DATA_DIR/backups. Prints its name; the daemon may run or not."""
    try:
        become_owner(data_dir)
        click.echo(str(backups.back_up(data_dir, timeout)))
    except JournalError as error:
        raise click.ClickException(str(error)) from error


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_data_dir
def restore(file: Path, data_dir: Path) -> None:
    """Put the backup FILE in the place of the data. The daemon must not run; what was there is kept beside it."""
    try:
        with opened_before_becoming_owner(file, data_dir) as opened:
            old = backups.restore(opened, data_dir)
    except JournalError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"restored {file}" + (f"; the old journal is in {old}" if old is not None else ""))


@click.command()
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--data-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    envvar="ASYNCDIST_SERVER_DATA_DIR",
    help="The data of a daemon that does not run, instead of a backup.",
)
def verify(file: Path | None, data_dir: Path | None) -> None:
    """Check a backup, or the data of a stopped daemon. Reads all of it, and says what it holds."""
    replay = Replay()
    try:
        if file is not None:
            become_owner(file.parent)
            read_file(file, replay.row)
        elif data_dir is not None:
            become_owner(data_dir)
            with backups.unattended(data_dir) as journal:
                journal.read(replay.row)
        else:
            raise click.UsageError("give a FILE or --data-dir")
    except JournalError as error:
        raise click.ClickException(str(error)) from error
    engine = StoreEngine(b"")
    replay.fill(engine, 0.0)
    found = engine.statistics()
    click.echo(
        f"{file or data_dir}: sound, {found['namespaces']} namespaces, {found['keys']} keys, {found['queues']} queues, "
        f"{found['leases']} leases, revision {replay.revision}"
    )
