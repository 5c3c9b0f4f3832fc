"""The directory in which a daemon keeps its data: one daemon at a time, files that only their owner can read.

lock                 who uses it; locked as long as that process lives
identity             says that there was a journal, and which
journal.sqlite       the journal, with a -wal beside it while a daemon runs or after it was killed, and always with a
                     note of its last row that was acknowledged
backups/             what `asyncdist-server backup` made
unfinished           the name of the backup that is being made there, so that a kill leaves nothing for ever
backups/request-*    a process that waits for a backup, and backups/answer-* what it is told

What a kill leaves of the last two, and of files half written, is removed by the next process that has the directory.

It is used by the user to whom it belongs, and no other can write to it: a user who could put a link in the place of a
file there could have the daemon write elsewhere. What root does there, it does as that user: `ops.privileges`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any, Final

from asyncdist_server.journal.journal import JournalError

DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600
"""Values may be secrets: only the daemon's user reads them."""
RESTORED: Final = ".restored.sqlite"
"""The journal-to-be while a backup is restored."""
_UNFINISHED: Final = re.compile(r"\.[\w.-]+\.sqlite\.tmp")
_LEFT: Final = (
    "backups/request-*",
    "backups/answer-*",
    "backups/.answer-*",
    ".identity-*",
    ".unfinished-*",
    ".journal.*-*",
)
"""What a kill leaves of a request for a backup, of its answer, and of files that `write_durably` writes."""
_HOLDER: Final = re.compile(rb"([1-9][0-9]{0,9})( listens)?\n")
_SUFFIXES: Final = ("", "-journal", "-wal", "-shm")
"""A file of SQLite's, and what may be beside it after a kill."""


class DataDirectory:
    """A data directory that this process has to itself until `close`.

    Raises `JournalError` if another process has it, or if it cannot be made or written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        try:
            self.path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            self._require_own()
            make_directory(self.backups)
            self._lock = open_file(self.path / "lock")
        except OSError as error:
            raise JournalError(f"cannot use the data directory {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = "".join(os.pread(self._lock, 64, 0).decode(errors="replace").split()[:1])
            os.close(self._lock)
            raise JournalError(
                f"the data directory {self.path} is in use by process {holder or 'unknown'}; every daemon needs one of "
                "its own"
            ) from error
        try:
            self._say(b"%d\n" % os.getpid())
            remove_database(self.path / RESTORED)
            self.remove_unfinished()
            for pattern in _LEFT:
                for left in self.path.glob(pattern):
                    with contextlib.suppress(OSError):  # as there
                        left.unlink()
        except OSError as error:
            os.close(self._lock)
            raise JournalError(f"cannot write to the data directory {self.path}: {error.strerror}") from error

    def _require_own(self) -> None:
        """Raise `JournalError` if others than this user can put something in the place of a file."""
        found, user = self.path.stat(), os.geteuid()
        if found.st_uid != user:
            raise JournalError(
                f"the data directory {self.path} belongs to user {found.st_uid}, not to user {user}: run this as "
                f"user {found.st_uid}, or name a directory of user {user}"
            )
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise JournalError(
                f"others can write to the data directory {self.path} (mode {stat.S_IMODE(found.st_mode):04o}): "
                f"`chmod go-w {self.path}`, or name a directory in it, which is made with mode {DIRECTORY_MODE:04o}"
            )

    def _say(self, text: bytes) -> None:
        """Leave `text` for those who find the directory locked; on a full disk there is room for what was there."""
        os.pwrite(self._lock, text, 0)
        os.ftruncate(self._lock, len(text))

    @property
    def journal(self) -> Path:
        """The journal's file."""
        return self.path / "journal.sqlite"

    @property
    def backups(self) -> Path:
        """Where backups are put."""
        return self.path / "backups"

    @property
    def identity(self) -> dict[str, Any] | None:
        """What is known of the journal that was made here, None if none was."""
        try:
            found = json.loads((self.path / "identity").read_text())
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise JournalError(f"cannot read {self.path / 'identity'}: make it readable for this user") from error
        except (OSError, ValueError) as error:
            raise JournalError(f"cannot read {self.path / 'identity'}: {error}; restore a backup") from error
        if not isinstance(found, dict):
            raise JournalError(f"{self.path / 'identity'} is not what a daemon wrote; restore a backup")
        return found

    def identify(self, incarnation: bytes) -> None:
        """Say from now on that there is a journal here, and which."""
        write_durably(self.path / "identity", json.dumps({"incarnation": incarnation.hex()}).encode())

    def begin_backup(self, path: Path) -> Path:
        """Return where to write the backup `path` until it is whole. What others write in its directory is not touched.

        `remove_unfinished` comes last, here or, after a kill, in the next process that has the data directory.
        """
        self.remove_unfinished()
        unfinished = path.with_name(f".{path.name}.tmp")
        write_durably(self.path / "unfinished", os.fsencode(unfinished.name))
        return unfinished

    def remove_unfinished(self) -> None:
        """Remove what is left of a backup that was not finished, if anything."""
        note = self.path / "unfinished"
        try:
            name = note.read_text(errors="replace")
        except FileNotFoundError:
            return
        if _UNFINISHED.fullmatch(name):
            with contextlib.suppress(OSError):  # a directory that can only be read now: no reason not to serve
                remove_database(self.backups / name)
        note.unlink()

    def listen(self) -> None:
        """Say that this process makes backups when it gets SIGUSR1, which may end any other."""
        self._say(b"%d listens\n" % os.getpid())

    def close(self) -> None:
        """Let another process use the directory. May be called twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def holder(path: Path) -> tuple[int, bool] | None:
    """Return the process that has the data directory `path` and whether it listens to SIGUSR1; None if none has it."""
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        said = _HOLDER.match(os.pread(lock, 64, 0))
        return (int(said[1]), bool(said[2])) if said else (0, False)
    finally:
        os.close(lock)
    return None


def open_file(path: Path) -> int:
    """Return a descriptor of a file that only its owner reads, made if it is not there."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)


def make_directory(path: Path) -> None:
    """Make a directory that only its owner reads, if it is not there."""
    path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)


def remove_database(path: Path) -> None:
    """Remove a file of SQLite's that no process uses, if it is there, and what is beside it."""
    for suffix in _SUFFIXES:
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Have the names in a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, contents: bytes) -> None:
    """Write a file that is there as a whole or not at all."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)
