"""The journal's file: what was committed is read back, and no failed write is tried again."""

from __future__ import annotations

import resource
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlite_journal_kit import NOTE, batch, opened, values

from asyncdist_server.journal.batch import CLEAN
from asyncdist_server.journal.data_directory import DataDirectory, holder
from asyncdist_server.journal.journal import JournalError
from asyncdist_server.journal.sqlite_journal import CHECKPOINT_BYTES, SqliteJournal, connect

pytestmark = pytest.mark.usefixtures("nothing_stays_open")


def test_rows_come_back(tmp_path: Path) -> None:
    journal, rows = opened(tmp_path)
    assert rows == []
    journal.write(batch(1, b"a", b"b"))
    journal.write(batch(3, b"c"))
    incarnation = journal.incarnation
    journal.close()
    journal, rows = opened(tmp_path)
    assert values(rows) == [b"a", b"b", b"c"]
    assert [row[0] for row in rows] == [1, 2, 3]
    assert rows[2][2] == 43
    assert journal.incarnation == incarnation
    journal.write(batch(4, b"d", keep_from=3))
    journal.close()
    journal, rows = opened(tmp_path)
    assert values(rows) == [b"c", b"d"]
    journal.close()


def test_only_its_owner_reads_it(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path / "data")
    journal.write(batch(1, b"a"))
    files = [path for path in (tmp_path / "data").iterdir() if path.is_file()]
    assert {path.name for path in files} == {"lock", "identity", "journal.sqlite", "journal.sqlite-wal", NOTE}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    journal.close()


def test_a_second_daemon_is_refused(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path)
    with pytest.raises(JournalError, match=r"in use by process \d+; every daemon needs one of its own"):
        DataDirectory(tmp_path)
    assert holder(tmp_path) is not None
    journal.close()
    assert holder(tmp_path) is None
    DataDirectory(tmp_path).close()


def test_another_program_is_kept_out(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path)
    journal.write(batch(1, b"a"))
    program = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('SELECT * FROM log')"
    command = [sys.executable, "-c", program, str(tmp_path / "journal.sqlite")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert "database is locked" in found.stderr
    journal.close()


class Faulty:
    """A connection whose `fail`-th COMMIT fails, and that counts what is asked of it after."""

    def __init__(self, path: Path, fail: int, error: Exception) -> None:
        self._real = connect(path)
        self._left = fail
        self._error = error
        self.after_failure: list[str] = []
        self.failed = False

    def execute(self, statement: str, *parameters: Any) -> Any:
        if self.failed:
            self.after_failure.append(statement)
        if statement == "COMMIT":
            self._left -= 1
            if not self._left:
                self.failed = True
                raise self._error
        return self._real.execute(statement, *parameters)

    def close(self) -> None:
        self._real.close()


def sqlite_error(name: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("it went wrong")
    error.sqlite_errorname = name
    return error


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (sqlite_error("SQLITE_FULL"), "make room on the disk"),
        (sqlite_error("SQLITE_IOERR_FSYNC"), "look at the disk and the system's log"),
        (sqlite_error("SQLITE_READONLY"), "make it writable"),
        (sqlite_error("SQLITE_CANTOPEN"), "with an inode left on its disk"),
        (OSError(5, "Input/output error"), "look at the disk"),
    ],
)
def test_a_failed_commit_is_told_and_never_tried_again(tmp_path: Path, error: Exception, advice: str) -> None:
    connections: list[Faulty] = []

    def faulty(path: Path) -> Any:
        connections.append(Faulty(path, 4, error))  # the first one makes the tables
        return connections[0]

    journal, _ = opened(tmp_path, faulty)
    journal.write(batch(1, b"a"))
    journal.write(batch(2, b"b"))
    with pytest.raises(JournalError, match=f"cannot write to {tmp_path}/journal.sqlite: .*{advice}"):
        journal.write(batch(3, b"c"))
    journal.abandon()
    journal.abandon()
    assert connections[0].after_failure == []


def fill(journal: SqliteJournal) -> None:
    for number in range(1, 200):
        journal.write(batch(number, b"x" * 2000))


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    def small(path: Path) -> sqlite3.Connection:
        db = connect(path)
        db.execute("PRAGMA max_page_count = 20")
        return db

    journal, _ = opened(tmp_path, small)
    with pytest.raises(JournalError, match=r"database or disk is full \(SQLITE_FULL\); make room"):
        fill(journal)
    journal.abandon()


def test_a_limit_of_the_system_is_told(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(JournalError, match="cannot write to"):
            fill(journal)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    journal.abandon()


def test_the_write_ahead_log_is_emptied_now_and_then(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path)
    journal.write(batch(1, b"x" * (CHECKPOINT_BYTES - 100_000)))
    journal.tidy()
    assert (tmp_path / "journal.sqlite").stat().st_size < 100_000
    journal.write(batch(2, b"x" * 100_000, flags=CLEAN))
    journal.tidy()
    assert (tmp_path / "journal.sqlite").stat().st_size > CHECKPOINT_BYTES
    journal.close()
    assert not (tmp_path / "journal.sqlite-wal").exists()
