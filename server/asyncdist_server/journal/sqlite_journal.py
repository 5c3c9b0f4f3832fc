"""The journal in an SQLite file: one connection, used by one thread, which keeps everybody else out.

Every batch is one transaction in WAL mode with synchronous=FULL: when COMMIT returns, the write-ahead log is on the
disk. Rows are numbered without gaps and carry a checksum over number and contents, so that a row that was damaged,
lost or moved is found when the journal is read. After a failed write or fsync the connection is not touched again.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import secrets
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgpack

from asyncdist_server.journal.batch import CLEAN, ROLLED_BACK, Batch
from asyncdist_server.journal.data_directory import DataDirectory, open_file, sync_directory
from asyncdist_server.journal.journal import ROW_OVERHEAD_BYTES, JournalError, RowReader, decode, encode
from asyncdist_server.journal.journal_thread import failpoint
from asyncdist_server.journal.write_ahead_log import AcknowledgedRow, frame_offset, more_follows
from asyncdist_server.wire.messages import INCARNATION_BYTES

APPLICATION_ID: Final = 0x61646A6C
"""What says in the file's header that it is a journal of this daemon ("adjl")."""
FORMAT: Final = 5
"""Format 1 has no pieces of values, and of histories no time; 2 does not say which items have arrived, 3 not which
replies, 4 not how old the store is. All are read, and go on as format 5."""
READABLE_FORMATS: Final = (1, 2, 3, 4, FORMAT)
CHECKPOINT_BYTES: Final = 16 * 1024 * 1024
"""After so much the write-ahead log is copied into the main file: so seldom that it costs little."""
PAGE_BYTES: Final = 4096
PAGES_OF_A_COMMIT: Final = 3
"""Pages that a commit writes beside those of its rows (measured)."""
BACKUP_STEP_PAGES: Final = 256
"""How much of a backup is copied between two looks at what else is to be written: a few milliseconds' worth."""
BACKUP_SYNC_STEPS: Final = 4
"""After this many pages the copy is synced: to sync all of it at the end would keep commits waiting."""
BACKUP_SPARE_BYTES: Final = 2 * CHECKPOINT_BYTES
"""What a backup leaves free on the disk: the write-ahead log grows meanwhile, and so does the journal."""

Connect = Callable[[Path], sqlite3.Connection]


def connect(path: Path) -> sqlite3.Connection:
    """Open an SQLite file, with transactions only where they are asked for."""
    return sqlite3.connect(path, isolation_level=None, timeout=0.0)


class SqliteJournal:
    """The journal in `directory`; satisfies `journal.Journal`."""

    def __init__(self, directory: DataDirectory, connect: Connect = connect) -> None:
        self._directory = directory
        self._path = directory.journal
        self._connect = connect
        self._connection: sqlite3.Connection | None = None
        self._since_checkpoint = 0
        self._outdated = False  # an earlier version can still go on with the file
        self._log_path = self._path.with_name(f"{self._path.name}-wal")
        self._clean = False  # whether a daemon ended in order after the last row
        self._acknowledged = AcknowledgedRow(self._path.with_name(f"{self._path.name}-acknowledged"))
        self._paths = (str(self._path), str(self._log_path), str(self._acknowledged.path))
        self._files: dict[str, tuple[int, int]] = {}  # device and inode of each
        self.incarnation = b""
        self.description = f"SQLite {sqlite3.sqlite_version} in {self._path}"

    # ---- opening

    def read(self, row: RowReader) -> None:
        """Open or make the file, and give every row to `row`, oldest first."""

        last = 0

        def note(number: int, size: int, revision: int, flags: int, sections: list[Any]) -> None:
            nonlocal last
            last = number
            self._clean = bool(flags & CLEAN)
            row(number, size, revision, flags, sections)

        try:
            self._open()
            end = self._check_log()
            _read_rows(self._db, self._path, note)
            acknowledged = self._acknowledged.read(self.incarnation)
            if last < acknowledged:
                raise JournalError(
                    f"{self._log_path} is cut short behind byte {end}: {self._path} had rows up to {acknowledged} that "
                    f"were acknowledged, and those behind row {last} are gone; put the file back as it was, or "
                    f"{_RESTORE}, or, to go on without them: rm {self._acknowledged.path}"
                )
            self._checkpoint("TRUNCATE")
            self._acknowledged.begin(last)
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            raise self._error("read", error) from error

    @property
    def _db(self) -> sqlite3.Connection:
        assert self._connection is not None
        return self._connection

    def _open(self) -> None:
        identity = self._directory.identity
        if identity is not None and not (self._path.exists() and self._path.stat().st_size):
            raise JournalError(
                f"there was a journal in {self._directory.path}, but {self._path} is gone or empty; {_RESTORE}, or "
                "remove the directory to begin with an empty store"
            )
        if identity is not None and not self._log_path.exists() and not _ended_in_order(self._path):
            raise JournalError(
                f"{self._log_path} is gone, and with it what was last written to {self._path}, which was not closed in "
                f"order; put it back, or {_RESTORE}, or, to go on without it: "
                f"touch {self._log_path} && rm -f {self._acknowledged.path}"
            )
        os.close(open_file(self._path))
        self._connection = db = self._connect(self._path)
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        if identity is None and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            self._create(db)
        _check_kind(db, self._path)
        self._set_up(db)
        self.incarnation = _incarnation(db, self._path)
        if identity is None:
            self._directory.identify(self.incarnation)
        elif identity.get("incarnation") != self.incarnation.hex():
            raise JournalError(
                f"{self._path} is not the journal that was made in {self._directory.path}; use `asyncdist-server "
                "restore` to put a backup in its place"
            )

    def _check_log(self) -> int:
        """Return where in the write-ahead log ends what SQLite reads; raise `JournalError` if there is more."""
        (page_bytes,) = self._db.execute("PRAGMA page_size").fetchone()
        _, frames, _ = self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        end = min(frame_offset(max(frames, 0), page_bytes), self._log_path.stat().st_size)
        if more_follows(self._log_path, max(frames, 0), page_bytes):
            raise JournalError(
                f"{self._log_path} is damaged behind byte {end}, and more was written later; {_RESTORE}, or, to go on "
                f"without all that follows: truncate -s {end} {self._log_path} && rm -f {self._acknowledged.path}"
            )
        return end

    def _create(self, db: sqlite3.Connection) -> None:
        sync_directory(self._path.parent)
        db.execute("BEGIN")
        db.execute("CREATE TABLE store (incarnation BLOB NOT NULL)")
        db.execute("CREATE TABLE log (number INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, contents BLOB NOT NULL)")
        db.execute("INSERT INTO store VALUES (?)", (secrets.token_bytes(INCARNATION_BYTES),))
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {FORMAT}")
        db.execute("COMMIT")

    def _set_up(self, db: sqlite3.Connection) -> None:
        mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise JournalError(f"{self._path} cannot have a write-ahead log ({mode}); use a directory on a local disk")
        for setting in ("synchronous = FULL", "fullfsync = ON", "checkpoint_fullfsync = ON"):
            db.execute(f"PRAGMA {setting}")
        self._outdated = db.execute("PRAGMA user_version").fetchone()[0] != FORMAT
        db.execute("PRAGMA secure_delete = OFF")  # some builds overwrite what was deleted
        db.execute("PRAGMA wal_autocheckpoint = 0")  # `tidy` does it, and looks at the result

    # ---- writing

    def write(self, batch: Batch) -> None:
        """Return once `batch` is on the disk."""
        try:
            db = self._db
            failpoint("begun")
            db.execute("BEGIN IMMEDIATE")
            if self._outdated:
                db.execute(f"PRAGMA user_version = {FORMAT}")  # with the first row that older versions would misread
            size = 0
            for number, contents in enumerate(encode(batch), batch.first_row):
                db.execute("INSERT INTO log VALUES (?, ?, ?)", (number, checksum(number, contents), contents))
                size += len(contents) + ROW_OVERHEAD_BYTES
            db.execute("DELETE FROM log WHERE number < ?", (batch.keep_from,))
            failpoint("written")
            db.execute("COMMIT")
            failpoint("committed")
            self._outdated = False
            self._clean = bool(batch.flags & CLEAN)
            self._require_files()
            self._acknowledged.note(batch.next_row - 1)
        except (sqlite3.Error, OSError) as error:
            raise self._error("write to", error) from error
        batch.bytes = size
        self._since_checkpoint += (size // PAGE_BYTES + PAGES_OF_A_COMMIT) * PAGE_BYTES

    def _require_files(self) -> None:
        """Raise `JournalError` if what was written went to files that have no name now: no restart would find it."""
        for path in self._paths:
            try:
                found = os.stat(path)
            except FileNotFoundError:
                here = (0, 0)
            else:
                here = (found.st_dev, found.st_ino)
            if not here[1] or self._files.setdefault(path, here) != here:
                raise JournalError(
                    f"{path} was removed or replaced while the daemon used it: what changed since may be lost; keep "
                    "the data directory where nothing cleans up"
                )

    def tidy(self) -> None:
        """Copy the write-ahead log into the main file when it is long; have the note of its end on the disk."""
        try:
            if self._since_checkpoint >= CHECKPOINT_BYTES:
                self._checkpoint("PASSIVE")
            self._acknowledged.sync()
        except (sqlite3.Error, OSError) as error:
            raise self._error("write to", error) from error

    def _checkpoint(self, mode: str) -> None:
        busy, in_log, copied = self._db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        if busy or in_log != copied:
            raise JournalError(f"{self._path}: {in_log - copied} pages could not be copied from its write-ahead log")
        self._since_checkpoint = 0
        failpoint("checkpointed")

    def announce(self) -> None:
        """Say that this process makes a backup when it gets SIGUSR1."""
        self._directory.listen()

    def backup(self, path: Path, between: Callable[[], None]) -> None:
        """Write a copy to the new file `path`; rows written meanwhile are in it."""
        try:
            self._require_room(path)
            temporary = self._directory.begin_backup(path)
            steps = itertools.count(1)

            def step(status: int, remaining: int, total: int) -> None:
                if next(steps) % BACKUP_SYNC_STEPS == 0:
                    os.fsync(descriptor)
                between()

            descriptor = open_file(temporary)
            try:
                with contextlib.closing(sqlite3.connect(temporary)) as copy:
                    self._db.backup(copy, pages=BACKUP_STEP_PAGES, progress=step)
                    copy.execute("PRAGMA journal_mode = DELETE")  # one file, without a -wal beside it
            finally:
                os.close(descriptor)  # not before: that gives SQLite's locks of the file up
            failpoint("backed-up")
            temporary.replace(path)
            sync_directory(path.parent)
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"cannot back up {self._path} to {path}: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                self._directory.remove_unfinished()

    def _require_room(self, path: Path) -> None:
        """Raise `JournalError` if a copy would fill the disk: commits made meanwhile would fail, and end the daemon."""
        pages, page_bytes = (self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
        disk = os.statvfs(path.parent)
        free, needed = disk.f_bavail * disk.f_frsize, pages * page_bytes + BACKUP_SPARE_BYTES
        if disk.f_blocks and free < needed:  # some file systems do not tell
            raise JournalError(
                f"no room for a backup of {self._path} in {path.parent}: it needs {needed} bytes, and {free} are free"
            )

    # ---- closing

    def close(self) -> None:
        """Close the file; what its write-ahead log holds is copied into it.

        SQLite removes the log. If no daemon has ended in order, an empty one stays: that none is there says it has.
        """
        if self._connection is not None:
            try:
                self._checkpoint("TRUNCATE")
                self._acknowledged.close()
                self._connection.close()
                if not self._clean:
                    os.close(open_file(self._log_path))
                    sync_directory(self._directory.path)
            except (sqlite3.Error, OSError) as error:
                raise self._error("close", error) from error
            self._connection = None
        self._directory.close()

    def abandon(self) -> None:
        """Leave the file as it is. The directory stays locked as long as this process lives."""
        if self._connection is not None:
            # It must never be closed, not even by the end of the interpreter: that would write again.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
            self._connection = None

    def _error(self, doing: str, error: Exception) -> JournalError:
        return describe_error(doing, self._path, error)


_RESTORE: Final = "restore a backup with `asyncdist-server restore`"
_CHECK_DISK: Final = "look at the disk and the system's log, then start the daemon again"
_ADVICE: Final[dict[str, str]] = {
    "SQLITE_FULL": "make room on the disk, then start the daemon again",
    "SQLITE_CORRUPT": _RESTORE,
    "SQLITE_ERROR": _RESTORE,  # a table or a column is not there
    "SQLITE_NOTADB": _RESTORE,
    "SQLITE_BUSY": "another program has it open",
    "SQLITE_READONLY": "make it writable for this user, then start the daemon again",
    "SQLITE_CANTOPEN": "make it readable and writable for this user, with an inode left on its disk (`df -i`), then "
    "start the daemon again",
}


def describe_error(doing: str, path: Path, error: Exception) -> JournalError:
    """Return the error to raise for one of SQLite or the system: what failed, on which file, what to do."""
    damaged = isinstance(error, UnicodeDecodeError)  # SQLite's message shows what it found
    name = "SQLITE_CORRUPT" if damaged else getattr(error, "sqlite_errorname", None)
    advice = next((text for start, text in _ADVICE.items() if (name or "").startswith(start)), _CHECK_DISK)
    return JournalError(f"cannot {doing} {path}: {error}{f' ({name})' if name else ''}; {advice}")


def read_file(path: Path, row: RowReader, name: str = "") -> None:
    """Give every row of a backup to `row`, oldest first. Raises `JournalError`, which calls the file `name`."""
    named = Path(name or path)
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            _check_kind(db, named)
            _read_rows(db, named, row)
        finally:
            db.close()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise describe_error("read", named, error) from error


def _ended_in_order(path: Path) -> bool:
    """Return whether the last row of a journal without a write-ahead log says so; true if what it says is damaged."""
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)  # else SQLite begins a log
    try:
        _check_kind(db, path)
        last = db.execute("SELECT contents FROM log ORDER BY number DESC LIMIT 1").fetchone()
        return last is not None and bool(decode(last[0])[1] & CLEAN)
    except (ValueError, TypeError, IndexError):
        return True
    finally:
        db.close()


def void_what_clients_know(path: Path, incarnation: bytes) -> None:
    """Turn a backup into the journal of a store of its own. Raises `sqlite3.Error`."""
    db = connect(path)
    try:
        last = db.execute("SELECT number, contents FROM log ORDER BY number DESC LIMIT 1").fetchone()
        number, revision = (last[0] + 1, decode(last[1])[0]) if last else (1, 0)
        contents = msgpack.packb((revision, ROLLED_BACK | CLEAN, []))
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN")
        db.execute("UPDATE store SET incarnation = ?", (incarnation,))
        db.execute("INSERT INTO log VALUES (?, ?, ?)", (number, checksum(number, contents), contents))
        db.execute("COMMIT")
    finally:
        db.close()


def _check_kind(db: sqlite3.Connection, path: Path) -> None:
    kind, version = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    if kind != APPLICATION_ID:
        raise JournalError(f"{path} is not a journal of asyncdist-server, or its beginning is damaged; {_RESTORE}")
    if version not in READABLE_FORMATS:
        raise JournalError(f"{path} has format {version}, this version of asyncdist-server knows up to {FORMAT}")


def _incarnation(db: sqlite3.Connection, path: Path) -> bytes:
    found = db.execute("SELECT incarnation FROM store").fetchall()
    if len(found) != 1 or type(found[0][0]) is not bytes:
        raise JournalError(f"{path} is damaged: it does not say which store it is; {_RESTORE}")
    incarnation: bytes = found[0][0]
    return incarnation


def _read_rows(db: sqlite3.Connection, path: Path, row: RowReader) -> None:
    problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise JournalError(f"{path} is damaged ({problem}); {_RESTORE}")
    expected = None
    for number, found, contents in db.execute("SELECT number, checksum, contents FROM log ORDER BY number"):
        if expected is not None and number != expected:
            raise JournalError(f"{path} is damaged: rows {expected} to {number - 1} are missing; {_RESTORE}")
        if type(contents) is not bytes or found != checksum(number, contents):
            raise JournalError(f"{path} is damaged: row {number} has a wrong checksum; {_RESTORE}")
        try:
            row(number, len(contents) + ROW_OVERHEAD_BYTES, *decode(contents))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise JournalError(f"row {number} of {path} makes no sense ({error!r}); {_RESTORE}") from error
        expected = number + 1


def checksum(number: int, contents: bytes) -> int:
    """Return the checksum of a row."""
    return zlib.crc32(contents, zlib.crc32(number.to_bytes(8, "big")))
