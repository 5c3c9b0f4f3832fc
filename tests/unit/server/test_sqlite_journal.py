"""The journal's file: what was committed is read back, damage is told, and no failed write is tried again."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncdist_server.journal import sqlite_journal, write_ahead_log
from asyncdist_server.journal.batch import CLEAN, VALUES, Batch
from asyncdist_server.journal.data_directory import DataDirectory, holder
from asyncdist_server.journal.journal import JournalError
from asyncdist_server.journal.sqlite_journal import (
    BACKUP_SPARE_BYTES,
    CHECKPOINT_BYTES,
    FORMAT,
    SqliteJournal,
    connect,
    read_file,
)
from asyncdist_server.journal.write_ahead_log import AcknowledgedRow

NOTE = "journal.sqlite-acknowledged"
Rows = list[tuple[int, int, int, int, Any]]


def batch(first_row: int, *values: bytes, keep_from: int = 1, flags: int = 0) -> Batch:
    parts: list[Any] = [[(VALUES, "job", [(b"key", value, 0)])] for value in values]
    return Batch(first_row, 40 + first_row, flags, keep_from, parts)


def opened(path: Path, connect: Callable[[Path], Any] = connect) -> tuple[SqliteJournal, Rows]:
    journal, rows = SqliteJournal(DataDirectory(path), connect), []

    def row(*found: Any) -> None:
        rows.append(found)

    try:
        journal.read(row)
    except JournalError:
        journal.abandon()
        raise
    return journal, rows


def written(path: Path, count: int = 5, close: bool = True) -> None:
    """Leave a journal with `count` rows, in its write-ahead log unless it is closed as a daemon ends in order."""
    shutil.copytree(made(count, close), path, dirs_exist_ok=True)


@functools.cache
def made(count: int, close: bool) -> Path:
    """One to copy: to make it takes a process of its own, as one that is not closed is left by nothing but its end."""
    path = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, path)
    program = (
        "import sys, os; from pathlib import Path\n"
        "from test_sqlite_journal import batch, opened\n"
        "journal, _ = opened(Path(sys.argv[1]))\n"
        f"for number in range(1, {count} + 1):\n"
        f"    journal.write(batch(number, b'v%d' % number * 400, flags=int({close} and number == {count})))\n"
        f"journal.close() if {close} else None\n"
        "os._exit(0)"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", program, str(path / "data")]
    subprocess.run(command, check=True, env={"PYTHONPATH": paths}, timeout=20)
    return path / "data"


@pytest.fixture(autouse=True)
def nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is abandoned stays open for as long as the process lives: these tests would leave hundreds of files so."""
    abandoned: list[tuple[Any, DataDirectory]] = []
    abandon = SqliteJournal.abandon

    def noted(journal: SqliteJournal) -> None:
        abandoned.append((journal._connection, journal._directory))
        abandon(journal)

    monkeypatch.setattr(SqliteJournal, "abandon", noted)
    yield
    for connection, directory in abandoned:
        if connection is not None:
            connection.close()
        directory.close()


def values(rows: Rows) -> list[bytes]:
    return [row[4][0][2][0][1] for row in rows]


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


# ---- damaged files


def test_a_lost_tail_of_the_write_ahead_log_loses_only_what_was_in_it(tmp_path: Path) -> None:
    """Cut at every length: the rows that are whole come back, in order, and nothing else."""
    written(tmp_path / "data", close=False)
    wal = (tmp_path / "data" / "journal.sqlite-wal").read_bytes()
    counts = []
    for cut in range(0, len(wal), 997):
        copy = tmp_path / f"cut-{cut}"
        shutil.copytree(tmp_path / "data", copy)
        (copy / "journal.sqlite-wal").write_bytes(wal[:cut])
        (copy / "identity").unlink()  # a crash before the journal was there is a crash before anybody was served
        (copy / NOTE).unlink()
        journal, rows = opened(copy)
        assert values(rows) == [b"v%d" % number * 400 for number in range(1, len(rows) + 1)]
        counts.append(len(rows))
        journal.close()
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] >= 4


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


def test_every_damaged_byte_is_found_or_harmless(tmp_path: Path) -> None:
    written(tmp_path / "data")
    size = (tmp_path / "data" / "journal.sqlite").stat().st_size
    found = 0
    for offset in range(0, size, 131):
        copy = tmp_path / f"damaged-{offset}"
        shutil.copytree(tmp_path / "data", copy)
        damage(copy / "journal.sqlite", offset)
        try:
            journal, rows = opened(copy)
        except JournalError:
            found += 1
            continue
        assert values(rows) == [b"v%d" % number * 400 for number in range(1, 6)]
        journal.close()
    assert found > size // 131 // 8  # much of a small file is unused


DAMAGES: dict[str, Callable[[bytearray, random.Random], None]] = {}
"""Ways in which a file is damaged in a random place."""


def way(do: Callable[[bytearray, random.Random], None]) -> Callable[[bytearray, random.Random], None]:
    DAMAGES[do.__name__] = do
    return do


def place(data: bytearray, dice: random.Random) -> slice:
    """As often at the beginning of the file as anywhere."""
    first = dice.randrange(dice.choice((len(data), min(4096, len(data)))))
    return slice(first, min(len(data), first + dice.choice((1, 8, 100, 1024, 4096))))


@way
def bits_are_turned(data: bytearray, dice: random.Random) -> None:
    for _ in range(dice.randint(1, 4)):
        data[place(data, dice).start] ^= 1 << dice.randrange(8)


@way
def bytes_are_zero(data: bytearray, dice: random.Random) -> None:
    where = place(data, dice)
    data[where] = bytes(where.stop - where.start)


@way
def bytes_are_others(data: bytearray, dice: random.Random) -> None:
    where = place(data, dice)
    data[where] = dice.randbytes(where.stop - where.start)


@way
def bytes_are_there_twice(data: bytearray, dice: random.Random) -> None:
    where = place(data, dice)
    data[where.start : where.start] = data[where]


@way
def the_end_is_gone(data: bytearray, dice: random.Random) -> None:
    del data[place(data, dice).start :]


@way
def pages_are_exchanged(data: bytearray, dice: random.Random) -> None:
    one, other = (slice(first, first + 4096) for first in dice.choices(range(0, len(data), 4096), k=2))
    data[one], data[other] = data[other], data[one]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("closed", [True, False])
def test_whatever_is_damaged_is_told_in_a_sentence_or_harmless(tmp_path: Path, damage: str, closed: bool) -> None:
    """With the file and what to do; and as a backup it is told, too."""
    dice = random.Random(f"{damage} {closed}")
    written(tmp_path / "data", 12, closed)
    names = ["journal.sqlite"] * 3 + sorted(path.name for path in (tmp_path / "data").iterdir() if path.is_file())
    for number in range(40):
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / "data", copy)
        path = copy / dice.choice(names)
        contents = bytearray(path.read_bytes())
        DAMAGES[damage](contents, dice)
        path.write_bytes(contents)
        shutil.copy(copy / "journal.sqlite", tmp_path / "backup")
        with contextlib.suppress(JournalError):
            read_file(tmp_path / "backup", lambda *row: None)
        said = ""
        try:
            journal, rows = opened(copy)
        except JournalError as error:
            said = str(error)
        else:
            assert len(rows) == 12
            journal.close()
        if said:
            assert re.search(rf"{copy}/(journal\.sqlite|identity)", said)
            assert re.search(r"restore a backup|put it back|the file back|put a backup|version of .* knows up to", said)


def test_a_changed_value_is_named_by_its_row(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / "journal.sqlite"
    path.write_bytes(path.read_bytes().replace(b"v3v3v3", b"v3v4v3"))
    with pytest.raises(JournalError, match=r"row 3 has a wrong checksum; restore a backup"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("DELETE FROM log WHERE number = 3", "rows 3 to 3 are missing"),
        ("UPDATE log SET contents = (SELECT contents FROM log WHERE number = 2) WHERE number = 3", "row 3 has a wrong"),
        ("UPDATE log SET contents = 'text' WHERE number = 1", "row 1 has a wrong checksum"),
        ("UPDATE store SET incarnation = x'00'", "is not the journal that was made in"),
        ("PRAGMA user_version = 6", "has format 6, this version of asyncdist-server knows up to 5"),
        ("PRAGMA application_id = 1", "is not a journal of asyncdist-server"),
        ("DROP TABLE log", "no such table"),
    ],
)
def test_a_changed_file_is_refused(tmp_path: Path, change: str, complaint: str) -> None:
    written(tmp_path)
    db = sqlite3.connect(tmp_path / "journal.sqlite")
    db.execute(change)
    db.commit()
    db.close()
    with pytest.raises(JournalError, match=complaint):
        opened(tmp_path)


def version_of(path: Path) -> int:
    db = sqlite3.connect(path)
    try:
        found: int = db.execute("PRAGMA user_version").fetchone()[0]
        return found
    finally:
        db.close()


@pytest.mark.parametrize("version", range(1, FORMAT))
def test_an_older_format_goes_on_as_this_one_from_the_first_write_on(tmp_path: Path, version: int) -> None:
    """What was written under it is read; who knows only that refuses the file once there is more, and not before."""
    written(tmp_path)
    path = tmp_path / "journal.sqlite"
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {version}")
    db.close()
    journal, rows = opened(tmp_path)
    assert len(rows) == 5
    copy = tmp_path / "copy.sqlite"
    journal.backup(copy, lambda: None)
    journal.close()
    assert version_of(path) == version_of(copy) == version
    journal, _ = opened(tmp_path)
    journal.write(batch(6, b"more"))
    journal.close()
    assert version_of(path) == FORMAT


@pytest.mark.parametrize("name", ["journal.sqlite", "journal.sqlite-wal", NOTE])
@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_file_that_lost_its_name_is_noticed_by_the_next_write(tmp_path: Path, name: str, how: str) -> None:
    """Nobody may be told that a change is on the disk where no restart finds it."""
    journal, _ = opened(tmp_path)
    journal.write(batch(1, b"a"))
    journal.write(batch(2, b"b"))
    path = tmp_path / name
    contents = path.read_bytes()
    path.unlink()
    if how == "replaced":
        (tmp_path / "other").write_bytes(contents)  # while the old one is open nobody gets its number
        (tmp_path / "other").rename(path)
    with pytest.raises(JournalError, match=f"{path} was removed or replaced while the daemon used it"):
        journal.write(batch(3, b"c"))
    journal.abandon()


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    written(tmp_path, 50)
    path = tmp_path / "journal.sqlite"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(JournalError, match="restore a backup"):
        opened(tmp_path)


@pytest.mark.parametrize("empty", [True, False])
def test_a_journal_that_is_gone_is_not_an_empty_store(tmp_path: Path, empty: bool) -> None:
    written(tmp_path)
    path = tmp_path / "journal.sqlite"
    if empty:
        path.write_bytes(b"")
    else:
        path.unlink()
    with pytest.raises(JournalError, match=r"gone or empty; restore a backup .*, or remove the directory"):
        opened(tmp_path)


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"notes\n" * 200)
    with pytest.raises(JournalError, match="file is not a database"):
        opened(tmp_path)


# ---- a write-ahead log that a kill left


def advice(refused: pytest.ExceptionInfo[JournalError]) -> str:
    """The command that a refusal names last."""
    return str(refused.value).rpartition(": ")[2]


def test_a_log_that_is_gone_is_told_until_one_says_to_go_on_without(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    written(first, close=False)
    (first / "journal.sqlite-wal").unlink()
    with pytest.raises(JournalError, match=r"-wal is gone, and with it what was last written to .*journal.sqlite"):
        opened(first)
    shutil.copytree(first, second)  # which nobody uses
    with pytest.raises(JournalError, match=r"-wal is gone") as refused:
        opened(second)
    subprocess.run(advice(refused), shell=True, check=True)
    shutil.copytree(second, tmp_path / "third")
    journal, rows = opened(tmp_path / "third")
    assert rows == []
    journal.close()


def acknowledge(path: Path, number: int) -> None:
    """Have the journal in `path` say that the rows up to `number` were acknowledged."""
    note = AcknowledgedRow(path / NOTE)
    note.read(bytes.fromhex(json.loads((path / "identity").read_text())["incarnation"]))
    note.begin(number)
    note.close()


def cut_short(original: Path, copy: Path, cut: int, acknowledged: int) -> None:
    """Make a copy whose write-ahead log has only `cut` bytes, though so many rows of it were acknowledged."""
    shutil.copytree(original, copy)
    log = copy / "journal.sqlite-wal"
    log.write_bytes(log.read_bytes()[:cut])
    acknowledge(copy, acknowledged)


def test_a_log_that_ends_before_what_was_acknowledged_is_refused_and_no_other_is(tmp_path: Path) -> None:
    """Cut at the end of each of its pages: each way that a transaction, or a part of one, can be missing."""
    whole = tmp_path / "whole"
    written(whole, close=False)
    size, page = (whole / "journal.sqlite-wal").stat().st_size, 4096 + 24
    found = set()
    for cut in range(32, size + 1, page):
        base = tmp_path / f"cut-{cut}"
        cut_short(whole, base, cut, 0)
        try:
            journal, rows = opened(base)
        except JournalError:
            continue  # not even the tables are there
        journal.close()
        found.add(len(rows))
        for acknowledged in range(1, 6):
            copy = tmp_path / f"cut-{cut}-{acknowledged}"
            cut_short(whole, copy, cut, acknowledged)
            if acknowledged > len(rows):
                with pytest.raises(JournalError, match=r"-wal is cut short behind byte \d+: ") as refused:
                    opened(copy)
                assert f"rows up to {acknowledged} that were acknowledged" in str(refused.value)
                assert f"those behind row {len(rows)} are gone; put the file back as it was" in str(refused.value)
            else:
                journal, again = opened(copy)
                assert again == rows
                journal.close()
    assert found == set(range(6))


def test_one_that_was_cut_short_is_whole_again_when_it_is_put_back_or_goes_on_without(tmp_path: Path) -> None:
    whole, cut, back, on = (tmp_path / name for name in ("whole", "cut", "back", "on"))
    written(whole, close=False)
    log = (whole / "journal.sqlite-wal").read_bytes()
    cut_short(whole, cut, len(log) // 2, 5)
    with pytest.raises(JournalError, match="is cut short"):
        opened(cut)
    for copy in (back, on):
        shutil.copytree(cut, copy)  # which nobody uses
    (back / "journal.sqlite-wal").write_bytes(log)
    journal, rows = opened(back)
    assert len(rows) == 5
    journal.close()
    with pytest.raises(JournalError, match="is cut short") as refused:
        opened(on)
    subprocess.run(advice(refused), shell=True, check=True)
    shutil.copytree(on, tmp_path / "third")
    journal, rows = opened(tmp_path / "third")
    assert 0 < len(rows) < 5
    journal.write(batch(len(rows) + 1, b"more"))
    journal.close()
    assert len(opened(tmp_path / "third")[1]) == len(rows) + 1


def test_a_journal_of_an_earlier_version_gets_its_note_when_it_is_read(tmp_path: Path) -> None:
    written(tmp_path, close=False)
    (tmp_path / NOTE).unlink()
    opened(tmp_path)[0].close()
    assert (tmp_path / NOTE).read_bytes().startswith(b"00000000000000000005 ")


@pytest.mark.parametrize("backwards", [False, True])
def test_an_older_copy_of_the_journal_itself_is_refused(tmp_path: Path, backwards: bool) -> None:
    """Also of one that was closed in order, which has no write-ahead log: a backup put there without `restore`."""
    written(tmp_path / "data")
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "data", copy)
    for number in (6, 7):
        journal, _ = opened(tmp_path / "data")
        journal.write(batch(number, b"more", flags=CLEAN))
        journal.close()
    old, new = (copy, tmp_path / "data") if backwards else (tmp_path / "data", copy)
    shutil.copy(old / "journal.sqlite", new / "journal.sqlite")
    if backwards:
        with pytest.raises(
            JournalError, match="had rows up to 7 that were acknowledged, and those behind row 5 are gone"
        ):
            opened(new)
    else:
        assert len(opened(new)[1]) == 7


@pytest.mark.parametrize("how", ["empty", "cut", "changed", "another's"])
def test_a_damaged_note_is_told_until_one_says_to_go_on_without(tmp_path: Path, how: str) -> None:
    written(tmp_path / "data")
    note = tmp_path / "data" / NOTE
    said = note.read_bytes()
    if how == "another's":
        AcknowledgedRow(note).begin(5)  # of a journal without an incarnation
    else:
        note.write_bytes({"empty": b"", "cut": said[:-1], "changed": said.replace(b"5 ", b"4 ")}[how])
    with pytest.raises(JournalError, match=f"{note} is damaged: it does not say which row") as refused:
        opened(tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "copy")  # which nobody uses
    subprocess.run(advice(refused).replace("/data/", "/copy/"), shell=True, check=True)
    assert len(opened(tmp_path / "copy")[1]) == 5


def test_the_note_is_written_when_the_row_is_on_the_disk_and_synced_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is ahead of the journal would have a journal refused that is whole."""
    journal, _ = opened(tmp_path)
    said: list[tuple[str, int]] = []

    def look(name: str) -> None:
        said.append((name, int((tmp_path / NOTE).read_bytes()[:20])))

    synced: list[int] = []
    monkeypatch.setattr(sqlite_journal, "failpoint", look)
    monkeypatch.setattr(write_ahead_log, "_sync", synced.append)
    journal.write(Batch(1, 1, 0, 1, [[], []]))
    assert said == [("begun", 0), ("written", 0), ("committed", 0)]
    assert (tmp_path / NOTE).read_bytes().startswith(b"00000000000000000002 ")
    assert not synced
    for _ in range(2):
        journal.tidy()
        assert len(synced) == 1
    journal.close()


def test_one_that_was_read_by_other_than_a_daemon_is_not_gone(tmp_path: Path) -> None:
    written(tmp_path, close=False)
    for _ in range(3):
        journal, rows = opened(tmp_path)
        assert len(rows) == 5
        journal.close()
    journal, _ = opened(tmp_path)
    journal.write(batch(6, b"last", flags=CLEAN))
    journal.close()
    assert not (tmp_path / "journal.sqlite-wal").exists()
    journal, rows = opened(tmp_path)
    assert len(rows) == 6
    journal.close()


def test_every_damaged_byte_of_it_is_found_or_harmless(tmp_path: Path) -> None:
    written(tmp_path / "data", close=False)
    size = (tmp_path / "data" / "journal.sqlite-wal").stat().st_size
    found = 0
    for offset in [*range(56), *range(56, size, 397)]:  # each of the headers of the file and of the first page
        copy = tmp_path / f"damaged-{offset}"
        shutil.copytree(tmp_path / "data", copy)
        damage(copy / "journal.sqlite-wal", offset)
        try:
            journal, rows = opened(copy)
        except JournalError:
            found += 1
            continue
        assert values(rows) == [b"v%d" % number * 400 for number in range(1, 6)]
        journal.close()
    assert found > size // 397 // 2


def test_one_may_go_on_without_what_is_behind_the_damage(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    written(first, close=False)
    log = first / "journal.sqlite-wal"
    damage(log, log.stat().st_size // 2)
    with pytest.raises(JournalError, match=r"damaged behind byte \d+, and more was written later"):
        opened(first)
    shutil.copytree(first, second)  # which nobody uses
    with pytest.raises(JournalError, match=r"damaged behind byte \d+, and more was written later") as refused:
        opened(second)
    subprocess.run(advice(refused), shell=True, check=True)
    shutil.copytree(second, tmp_path / "third")
    journal, rows = opened(tmp_path / "third")
    assert 0 < len(rows) < 5
    journal.close()


# ---- writes that fail


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


def test_a_backup_holds_what_is_written_while_it_is_made(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path)
    for number in range(1, 400):
        journal.write(batch(number, b"x" * 8000))
    more = iter(range(400, 410))

    def between() -> None:
        number = next(more, None)
        if number is not None:
            journal.write(batch(number, b"new"))

    journal.backup(tmp_path / "backups" / "one.sqlite", between)
    written_meanwhile = next(more, 410) - 400
    assert written_meanwhile > 1
    journal.close()
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / "backups" / "one.sqlite", tmp_path / "copy" / "journal.sqlite")
    copy, rows = opened(tmp_path / "copy")
    assert 0 <= 399 + written_meanwhile - len(rows) <= 1  # the last one may come when all is copied
    copy.close()
    assert [path.name for path in (tmp_path / "backups").iterdir()] == ["one.sqlite"]


def test_a_large_backup_is_synced_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is committed meanwhile waits for each of these: for one at the end it would wait long on a slow disk."""
    journal, _ = opened(tmp_path)
    size = 32
    journal.write(batch(1, *[bytes(1 << 20)] * size))
    synced = [0]
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    journal.backup(tmp_path / "backups" / "one.sqlite", lambda: None)
    monkeypatch.undo()
    journal.close()
    assert max(synced) > (size - 8) << 20
    assert max(later - earlier for earlier, later in itertools.pairwise(synced)) <= 8 << 20


def test_a_backup_that_fails_leaves_nothing_and_the_journal_as_it_is(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path)
    with pytest.raises(JournalError, match="cannot back up"):
        journal.backup(tmp_path / "nowhere" / "one.sqlite", lambda: None)
    journal.write(batch(1, b"a"))
    journal.close()


def killed_in_a_backup(path: Path, failpoint: str) -> list[str]:
    """What is left in the directory of backups."""
    program = (
        "import sys, os, signal; from pathlib import Path\n"
        "from test_sqlite_journal import batch, opened\n"
        "journal, _ = opened(Path(sys.argv[1]))\n"
        "for number in range(1, 400):\n"
        "    journal.write(batch(number, b'x' * 8000))\n"
        "between = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if sys.argv[2] == 'between' else (lambda: None)\n"
        "journal.backup(Path(sys.argv[1]) / 'backups' / 'one.sqlite', between)\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {"PYTHONPATH": paths, "ASYNCDIST_SERVER_FAILPOINT": failpoint}
    done = subprocess.run([sys.executable, "-c", program, str(path), failpoint], env=environment, timeout=60)
    assert done.returncode == -signal.SIGKILL
    return [found.name for found in (path / "backups").iterdir()]


@pytest.mark.parametrize("failpoint", ["between", "backed-up"])
def test_what_a_kill_leaves_of_a_backup_is_removed_at_the_next_start(tmp_path: Path, failpoint: str) -> None:
    """And nothing else: others may keep their files there, daemons that share the directory their unfinished ones."""
    assert ".one.sqlite.tmp" in killed_in_a_backup(tmp_path, failpoint)
    others = [tmp_path / "backups" / name for name in (".two.sqlite.tmp", "one.sqlite.tmp", "zero.sqlite")]
    for other in others:
        other.touch()
    journal, _ = opened(tmp_path)
    assert sorted((tmp_path / "backups").iterdir()) == sorted(others)
    journal.backup(tmp_path / "backups" / "one.sqlite", lambda: None)
    assert sorted((tmp_path / "backups").iterdir()) == sorted([*others, tmp_path / "backups" / "one.sqlite"])
    journal.close()
    assert {path.name for path in tmp_path.iterdir()} >= {"journal.sqlite", "lock", "identity", "backups"}
    assert not (tmp_path / "unfinished").exists()


@pytest.mark.parametrize("named", ["../identity", "/etc/.x.sqlite.tmp", "zero.sqlite", "", "\0.sqlite.tmp"])
def test_only_an_unfinished_backup_is_removed_whatever_the_note_says(tmp_path: Path, named: str) -> None:
    """Root may open a directory that belongs to somebody else."""
    written(tmp_path)
    (tmp_path / "backups" / "zero.sqlite").touch()
    (tmp_path / "unfinished").write_text(named)
    opened(tmp_path)[0].close()
    assert (tmp_path / "backups" / "zero.sqlite").exists()
    assert (tmp_path / "identity").exists()


def test_what_a_kill_leaves_of_a_restore_is_removed(tmp_path: Path) -> None:
    """SQLite would take a journal left beside the next restored file for that one's, and undo what it never did."""
    written(tmp_path)
    left = [tmp_path / f".restored.sqlite{suffix}" for suffix in ("", "-journal")]
    for path in left:
        path.touch()
    opened(tmp_path)[0].close()
    assert not [path for path in left if path.exists()]


@pytest.mark.parametrize(("missing", "refused"), [(0, False), (1, True)])
def test_a_backup_that_would_fill_the_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int, refused: bool
) -> None:
    """A commit that finds no room ends the daemon: worse than to have no backup."""
    journal, _ = opened(tmp_path)
    journal.write(batch(1, b"x" * 100_000))
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        pages = db.execute("PRAGMA page_size").fetchone()[0]

    class Disk:
        f_blocks = 1 << 30
        f_frsize = 1

        @property
        def f_bavail(self) -> int:
            size: int = journal._db.execute("PRAGMA page_count").fetchone()[0] * pages
            return size + BACKUP_SPARE_BYTES - missing

    monkeypatch.setattr(os, "statvfs", lambda path: Disk())
    path = tmp_path / "backups" / "one.sqlite"
    if refused:
        with pytest.raises(JournalError, match=r"no room for a backup .*: it needs \d+ bytes, and \d+ are free"):
            journal.backup(path, lambda: None)
    else:
        journal.backup(path, lambda: None)
    assert path.exists() is not refused
    journal.close()
