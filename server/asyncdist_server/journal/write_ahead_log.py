"""What SQLite does not say of a write-ahead log that it finds: that it is damaged, or cut short.

SQLite reads the log up to the first frame that is not as it was written, and takes all that follows for a write that
was cut off. Of a journal only the last transaction can be that, as each is synced before the next one begins. Where a
whole transaction and more follow, what had been acknowledged would be dropped without a word.

The file's format is described at https://www.sqlite.org/fileformat2.html#walformat
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import Final

from asyncdist_server.journal.data_directory import open_file, write_durably
from asyncdist_server.journal.journal import JournalError

_HEADER: Final = struct.Struct(">8I")
"""Magic number, version, page size, number of checkpoints, two salts, two checksums."""
_FRAME: Final = struct.Struct(">6I")
"""Number of the page, how many there are then (0 but at the end of a transaction), two salts, two checksums; then the
page. A log that begins anew has other salts, by which frames from before are known."""


def frame_offset(frames: int, page_bytes: int) -> int:
    """Return where the frame behind the first `frames` begins in the file."""
    return _HEADER.size + frames * (_FRAME.size + page_bytes)


def more_follows(path: Path, frames: int, page_bytes: int) -> bool:
    """Return whether more than one transaction is behind the first `frames`, which are all that can be read."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        first = file.read(_FRAME.size)
        if len(first) < _FRAME.size:
            return False
        salts = _salts(header, first)
        one_ended = False
        file.seek(frame_offset(frames, page_bytes))
        while len(head := file.read(_FRAME.size)) == _FRAME.size:
            page, commit, *found, _, _ = _FRAME.unpack(head)
            if page and found == salts:
                if one_ended:
                    return True
                one_ended = bool(commit)
            file.seek(page_bytes, 1)
    return False


def _salts(header: bytes, first_frame: bytes) -> list[int]:
    """Return the salts of the frames that count: the header's, unless it is damaged."""
    magic, *_, salt1, salt2, checksum1, checksum2 = _HEADER.unpack(header)
    words = struct.unpack(f"{'<>'[magic & 1]}6I", header[:24])
    s1 = s2 = 0
    for even, odd in zip(words[::2], words[1::2], strict=True):
        s1 = (s1 + even + s2) & 0xFFFFFFFF
        s2 = (s2 + odd + s1) & 0xFFFFFFFF
    if (s1, s2) == (checksum1, checksum2):
        return [salt1, salt2]
    return list(_FRAME.unpack(first_frame)[2:4])


_sync: Final = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


class AcknowledgedRow:
    """The number of the last row that was acknowledged, noted in the file `path` beside the journal.

    A write-ahead log that is cut off at the end of a transaction looks whole. So this note says how far the journal
    went, once that is on the disk and never before. The journal's `incarnation` is part of the note's checksum.
    """

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
