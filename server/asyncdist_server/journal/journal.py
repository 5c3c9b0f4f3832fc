"""What the daemon needs of a journal, whatever it is kept in; `sqlite_journal` is the one it has.

A journal is used from one thread. `read` comes first; a method that fails raises `JournalError`, and then nothing may
be called any more but `abandon`: after a failed write nobody knows what the disk has, and trying again would hide it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import msgpack

from asyncdist_server.journal.batch import CLEAN, Batch, Section

RowReader = Callable[[int, int, int, int, "list[Section]"], None]
"""Called with number, size, revision, flags and sections of a row; `Replay.row` is one."""


class JournalError(Exception):
    """The journal cannot be read or written; the text says what failed, on which file, and what to do."""


class Journal(Protocol):
    """Where batches are kept."""

    incarnation: bytes
    """Which store this is; known once the journal was read."""
    description: str
    """What it is kept in, for people."""

    def read(self, row: RowReader) -> None:
        """Open the journal, make it if there is none, and give every row to `row`, oldest first."""

    def write(self, batch: Batch) -> None:
        """Return once `batch` is on the disk, all of it or, after an error, perhaps none."""

    def tidy(self) -> None:
        """Do what need not delay an answer."""

    def announce(self) -> None:
        """Say, to those who look, that this process makes a backup when it gets SIGUSR1."""

    def backup(self, path: Path, between: Callable[[], None]) -> None:
        """Write a copy to the new file `path`. `between` is called now and then and may write."""

    def close(self) -> None:
        """Close the journal in order."""

    def abandon(self) -> None:
        """Leave everything as it is, for good."""


def encode(batch: Batch) -> list[bytes]:
    """Return the contents of the rows of a batch."""
    last = len(batch.parts) - 1
    payloads = []
    for index, sections in enumerate(batch.parts):
        flags = (batch.flags & ~CLEAN if index == 0 else 0) | (batch.flags & CLEAN if index == last else 0)
        payloads.append(msgpack.packb((batch.revision, flags, sections)))
    return payloads


def decode(payload: bytes) -> tuple[int, int, list[Any]]:
    """Return revision, flags and sections of a row. Raises `ValueError` for what `encode` cannot have made."""
    message = msgpack.unpackb(payload, use_list=False)
    if type(message) is not tuple or len(message) != 3:
        raise ValueError("not a batch")
    return message


ROW_OVERHEAD_BYTES: Final = 32
"""What a row costs besides its contents: number, checksum, its place in a page (estimated)."""
