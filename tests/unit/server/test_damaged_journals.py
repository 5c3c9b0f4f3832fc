"""A journal whose files were damaged, exchanged or removed: a sentence says so, or nothing is lost."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from fewer_cases import examples
from sqlite_journal_kit import NOTE, batch, damages_found, opened, values, written

from asyncdist_server.journal.journal import JournalError
from asyncdist_server.journal.sqlite_journal import FORMAT, read_file

pytestmark = pytest.mark.usefixtures("nothing_stays_open")


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


def test_every_damaged_byte_is_found_or_harmless(tmp_path: Path) -> None:
    written(tmp_path / "data")
    size = (tmp_path / "data" / "journal.sqlite").stat().st_size
    found = damages_found(tmp_path / "data", "journal.sqlite", range(0, size, 131))
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
    for number in range(examples(20)):
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
