"""Backups of a journal that is written meanwhile, and what a kill leaves of one."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sqlite_journal_kit import batch, opened, written

from asyncdist_server.journal.journal import JournalError
from asyncdist_server.journal.sqlite_journal import BACKUP_SPARE_BYTES

pytestmark = pytest.mark.usefixtures("nothing_stays_open")


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
        "from sqlite_journal_kit import batch, opened\n"
        "journal, _ = opened(Path(sys.argv[1]))\n"
        "for number in range(1, 400):\n"
        "    journal.write(batch(number, b'x' * 8000))\n"
        "between = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if sys.argv[2] == 'between' else (lambda: None)\n"
        "journal.backup(Path(sys.argv[1]) / 'backups' / 'one.sqlite', between)\n"
    )
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "ASYNCDIST_SERVER_FAILPOINT": failpoint}
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
