"""Backups: the daemon's side, the caller's side, and the commands `asyncdist-server backup|restore|verify`.

To get a backup of a running daemon, a process puts an empty file `request-<id>` into the directory of backups and sends
the daemon SIGUSR1. The daemon answers with the file `answer-<id>`. So only a user who may write to the data directory
gets a backup, and only the daemon's one connection touches the journal. A SIGUSR1 without a request makes a backup too.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import secrets
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import click

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.journal.data_directory import (
    FILE_MODE,
    RESTORED,
    DataDirectory,
    holder,
    make_directory,
    open_file,
    remove_database,
    sync_directory,
    write_durably,
)
from asyncdist_server.journal.group_commit import GroupCommit
from asyncdist_server.journal.journal import JournalError
from asyncdist_server.journal.replay import Replay
from asyncdist_server.journal.sqlite_journal import SqliteJournal, read_file, void_what_clients_know
from asyncdist_server.ops.privileges import become_owner, opened_before_becoming_owner
from asyncdist_server.wire.key_text import escaped
from asyncdist_server.wire.messages import INCARNATION_BYTES

if TYPE_CHECKING:
    from asyncdist_server.serving.daemon import StoreServer

BACKUP_TIMEOUT_S: Final = 60.0
"""How long a daemon may take: the largest store it can hold is copied in a fraction of that."""
POLL_S: Final = 0.05
"""How often one who asked for a backup looks for the answer."""
UNREAD_S: Final = 60.0
"""After so long an answer is removed, with the next backup: who asked was killed before reading it."""


def backup_name() -> str:
    """Return a new name that sorts by time."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%dT%H%M%S.%fZ}.sqlite"


class BackupRequests:
    """Makes backups of a running daemon when it gets the signal. Used on the daemon's loop.

    All that asks the disk is done by threads, as the loop serves clients meanwhile.
    """

    def __init__(self, server: StoreServer, gate: GroupCommit, directory: Path) -> None:
        self._server = server
        self._gate = gate
        self._backups = directory.absolute() / "backups"
        self._task: asyncio.Task[None] | None = None
        self._again = False

    def notice(self) -> None:
        """Look for requests, now or after those under way; without one, make a backup all the same."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._answer(), name="backup")
        else:
            self._again = True

    def listen(self) -> None:
        """Begin to take requests."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.notice)
        self._gate.journal.announce()

    async def close(self) -> None:
        """Wait until what was begun is done."""
        if self._task is not None:
            await self._task

    async def _answer(self) -> None:
        while True:
            self._again = False
            try:
                requests = await asyncio.to_thread(_requests, self._backups)
                answer = await self._back_up()
                for request in requests:
                    problem = await asyncio.to_thread(_tell, request, answer)
                    if problem:
                        self._server.events.error("backup_failed", reason=problem)
            except (OSError, RuntimeError) as error:  # the process has no descriptor left, or no thread
                reason = f"cannot look for requests in {self._backups}: {error}"
                self._server.events.error("backup_failed", reason=reason)
            if not self._again:
                return

    async def _back_up(self) -> dict[str, str]:
        path = self._backups / backup_name()
        try:
            await self._gate.backup(path)
        except JournalError as error:
            self._server.events.error("backup_failed", reason=str(error))
            return {"error": str(error)}
        self._server.events.info("backup", path=str(path))
        return {"path": str(path)}


def _requests(backups: Path) -> list[Path]:
    """Return the requests that are there, and remove the answers that no process reads any more."""
    for answer in backups.glob("answer-*"):
        with contextlib.suppress(OSError):
            if time.time() - answer.stat().st_mtime > UNREAD_S:
                answer.unlink()
    return sorted(backups.glob("request-*"))


def _tell(request: Path, answer: dict[str, str]) -> str:
    """Write the answer to a request, unless it was withdrawn; returns why that failed, or an empty text.

    That the request is gone, and no answer there, says that there is none.
    """
    problem = ""
    try:
        if request.exists():
            write_durably(request.with_name(request.name.replace("request", "answer")), json.dumps(answer).encode())
    except OSError as error:
        problem = f"cannot answer {request}: {error.strerror}"
    with contextlib.suppress(OSError):
        request.unlink(missing_ok=True)
    return problem


def back_up(directory: Path, timeout_s: float) -> Path:
    """Make a backup of a data directory, by its daemon if one runs, and return where it is. Raises `JournalError`."""
    found = holder(directory)
    if found is not None:
        return _ask(directory, *found, timeout_s)
    with unattended(directory) as journal:
        journal.read(lambda *row: None)
        path = directory.absolute() / "backups" / backup_name()
        journal.backup(path, lambda: None)
    return path


@contextlib.contextmanager
def unattended(directory: Path) -> Iterator[SqliteJournal]:
    """The journal in `directory`, which no daemon uses; what fails leaves it as it is, damage and all.

    Raises `JournalError` if there is none: to open it would make one.
    """
    try:
        (directory / "identity").stat()
    except OSError as error:
        raise JournalError(f"there is no journal in {directory}: {error.strerror}") from error
    journal = SqliteJournal(DataDirectory(directory))
    try:
        yield journal
        journal.close()
    except BaseException:
        journal.abandon()
        raise


def _ask(directory: Path, process: int, listens: bool, timeout_s: float) -> Path:
    if not listens:
        raise JournalError(f"process {process} uses {directory} and takes no requests for backups, or not yet")
    name = secrets.token_hex(8)
    request, answer = (directory / "backups" / f"{kind}-{name}" for kind in ("request", "answer"))
    try:
        os.close(open_file(request))
        os.kill(process, signal.SIGUSR1)
        deadline = time.monotonic() + timeout_s
        while not answer.exists() and request.exists():  # the answer comes before the request goes
            if time.monotonic() > deadline:
                raise JournalError(f"the daemon, process {process}, made no backup within {timeout_s:g} s")
            if (holder(directory) or (0,))[0] != process:
                raise JournalError(f"the daemon, process {process}, stopped before the backup was made")
            time.sleep(POLL_S)
        if not answer.exists():
            raise JournalError(f"the daemon, process {process}, could not answer: its log says why")
        said = {name: escaped(os.fsencode(text)) for name, text in dict(json.loads(answer.read_text())).items()}
        answer.unlink()
    except (OSError, ValueError, TypeError) as error:  # the system refuses to signal another user's process
        raise JournalError(f"cannot ask process {process} for a backup: {error}") from error
    finally:
        request.unlink(missing_ok=True)
    if "path" not in said:
        raise JournalError(said.get("error", f"process {process} did not say where the backup is"))
    return Path(said["path"])


def put_back(backup: BinaryIO, directory: Path) -> Path | None:
    """Put a backup in the place of a journal; returns where the old one is now, None if there was none.

    The store is another incarnation then: clients are told that what they did since is gone. Raises `JournalError` if
    the backup is damaged or a daemon runs.
    """
    place = DataDirectory(directory)
    new = place.path / RESTORED
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(new, flags, FILE_MODE), "wb") as copy:
            shutil.copyfileobj(backup, copy)
        read_file(new, Replay().row, backup.name)
        incarnation = secrets.token_bytes(INCARNATION_BYTES)
        void_what_clients_know(new, incarnation)
        old = _put_aside(place)
        place.identify(incarnation)
        new.replace(place.journal)
        sync_directory(place.path)
    except (OSError, sqlite3.Error) as error:
        raise JournalError(f"cannot restore {backup.name} to {directory}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            remove_database(new)
        place.close()
    return old


def _put_aside(place: DataDirectory) -> Path | None:
    files = [path for path in place.path.glob(f"{place.journal.name}*") if path.is_file()]
    if not files:
        return None
    old = place.path / f"replaced-{backup_name().removesuffix('.sqlite')}"
    make_directory(old)
    for path in files:
        path.replace(old / path.name)
    sync_directory(old)
    return old


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
        click.echo(str(back_up(data_dir, timeout)))
    except JournalError as error:
        raise click.ClickException(str(error)) from error


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_data_dir
def restore(file: Path, data_dir: Path) -> None:
    """Put the backup FILE in the place of the data. The daemon must not run; what was there is kept beside it."""
    try:
        with opened_before_becoming_owner(file, data_dir) as opened:
            old = put_back(opened, data_dir)
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
            with unattended(data_dir) as journal:
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
