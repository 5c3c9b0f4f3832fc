"""Journals in files: made once and copied, opened, and damaged."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from asyncdist_server.journal.batch import VALUES, Batch
from asyncdist_server.journal.data_directory import DataDirectory
from asyncdist_server.journal.journal import JournalError
from asyncdist_server.journal.sqlite_journal import SqliteJournal, connect

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
        "from sqlite_journal_kit import batch, opened\n"
        "journal, _ = opened(Path(sys.argv[1]))\n"
        f"for number in range(1, {count} + 1):\n"
        f"    journal.write(batch(number, b'v%d' % number * 400, flags=int({close} and number == {count})))\n"
        f"journal.close() if {close} else None\n"
        "os._exit(0)"
    )
    command = [sys.executable, "-c", program, str(path / "data")]
    subprocess.run(command, check=True, env={"PYTHONPATH": os.pathsep.join(sys.path)}, timeout=20)
    return path / "data"


def values(rows: Rows) -> list[bytes]:
    return [row[4][0][2][0][1] for row in rows]


def damages_found(data: Path, name: str, offsets: Iterable[int]) -> int:
    """Damage one byte of a file of a journal of five rows at a time; how many are found. The others change nothing."""
    found = 0
    for offset in offsets:
        copy = data.parent / f"damaged-{offset}"
        shutil.copytree(data, copy)
        damage(copy / name, offset)
        try:
            journal, rows = opened(copy)
        except JournalError:
            found += 1
            continue
        assert values(rows) == [b"v%d" % number * 400 for number in range(1, 6)]
        journal.close()
    return found


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)
