"""The number of the last row that was acknowledged, in a few bytes beside the journal.

A write-ahead log that is cut off at the end of a transaction looks whole: nothing in it says that there was more. So
the journal says outside of it how far it went, once that is on the disk, and never before.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Final

from asyncdist_server.journal.data_directory import open_file, write_durably
from asyncdist_server.journal.journal import JournalError

__all__ = ["AcknowledgedRow"]

_sync: Final = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


class AcknowledgedRow:
    """The note in the file `path`, of one journal: `incarnation` is part of its checksum."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._incarnation = b""
        self._descriptor = -1
        self._noted = self._synced = 0

    def read(self, incarnation: bytes) -> int:
        """Return the number, 0 if there is no note. Raises `JournalError` if it is damaged."""
        self._incarnation = incarnation
        try:
            said = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        number = said[:20]
        if not number.isdigit() or said != self._text(int(number)):
            raise JournalError(
                f"{self.path} is damaged: it does not say which row was acknowledged last; restore a backup with "
                f"`asyncdist-server restore`, or, to go on without knowing whether any is missing: rm {self.path}"
            )
        return int(number)

    def begin(self, number: int) -> None:
        """Note `number` in a file that is there, as a whole, from now on."""
        write_durably(self.path, self._text(number))
        self._noted = self._synced = number
        self._descriptor = open_file(self.path)

    def note(self, number: int) -> None:
        """Note that the rows up to `number` are on the disk.

        The end of this process leaves the note as it is then; a power cut may leave one from before the last `sync`.
        """
        os.pwrite(self._descriptor, self._text(number), 0)
        self._noted = number

    def sync(self) -> None:
        """Have the note on the disk. To do that with each row would halve the rate of commits."""
        if self._synced != self._noted:
            _sync(self._descriptor)
            self._synced = self._noted

    def close(self) -> None:
        """Have the note on the disk as it is."""
        if self._descriptor >= 0:
            self.sync()
            os.close(self._descriptor)
            self._descriptor = -1

    def _text(self, number: int) -> bytes:
        digits = b"%020d" % number
        return b"%b %08x\n" % (digits, zlib.crc32(self._incarnation, zlib.crc32(digits)))
