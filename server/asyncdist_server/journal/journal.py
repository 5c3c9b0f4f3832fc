"""What the daemon needs of a journal, and what a change has survived that it acknowledges.

`sqlite_journal` is the one implementation. A journal is used from one thread. `read` comes first; a method that fails
raises `JournalError`, and then nothing may be called any more but `abandon`: after a failed write it is unknown what
the disk has, and trying again would hide it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

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

MAX_DELAY_MS: Final = 60_000
"""Longest delay of the relaxed mode: a job that can lose more than a minute wants no journal."""
MAX_JOURNALED_VALUE_BYTES: Final = 512 * 1024 * 1024
"""Longest value with a journal: SQLite holds no more than 1e9 bytes in a row."""
_RELAXED: Final = re.compile(r"relaxed:([0-9]{1,9})\Z")


class Durability(NamedTuple):
    """What an acknowledged change has survived: a mode of `--durability`.

    `delay_s` is None unless answers go out before the disk has the change.
    """

    name: str = "memory"
    delay_s: float | None = None

    @property
    def journaled(self) -> bool:
        """Whether there is a journal at all."""
        return self.name != "memory"


MEMORY: Final = Durability()
"""Everything is gone when the daemon ends."""
DURABLE: Final = Durability("durable")
"""Whatever a client was told is on the disk."""


def parse_durability(text: str) -> Durability:
    """Return the mode called `memory`, `durable` or `relaxed:<ms>`. Raises `ValueError`."""
    for mode in (MEMORY, DURABLE):
        if text == mode.name:
            return mode
    match = _RELAXED.match(text)
    if match is None or not 0 < int(match[1]) <= MAX_DELAY_MS:
        raise ValueError(
            f"the durability is memory, durable, or relaxed:<ms> with 1 to {MAX_DELAY_MS} milliseconds, not {text!r}"
        )
    return Durability(f"relaxed:{int(match[1])}", int(match[1]) / 1000)
