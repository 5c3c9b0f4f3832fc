"""What SQLite does not say of a write-ahead log that it finds: that it is damaged before its end.

It reads the log up to the first frame that is not as it was written, and takes all that follows for a write that was
cut off. Of a journal only the last transaction can be that, as each is synced before the next one begins. Where a whole
transaction and more follow, what had been acknowledged would be dropped without a word.

The file's format is described at https://www.sqlite.org/fileformat2.html#walformat
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

__all__ = ["frame_offset", "more_follows"]

_HEADER: Final = struct.Struct(">8I")
"""Magic number, version, page size, number of checkpoints, two salts, two checksums."""
_FRAME: Final = struct.Struct(">6I")
"""Number of the page, how many there are then (0 but at the end of a transaction), two salts, two checksums; then the
page. A log that begins anew has other salts, by which frames from before are known."""


def frame_offset(frames: int, page_bytes: int) -> int:
    """Return where the frame behind so many `frames` begins in the file."""
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
