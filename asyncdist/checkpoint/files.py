"""The files of a checkpoint, as threads read and write them.

```
folder/saved-00000012/index.json     what is where; written last
folder/saved-00000012/rank-0.bin     pieces of arrays, one after the other
folder/.saved-00000013.part/         one that is being written, or was when its writers ended
```

A checkpoint gets its name when all that it holds is on the disk, so one that has a name is whole. Each block of a piece
has a checksum (CRC-32) in the index.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from asyncdist.errors import DistError

BLOCK_BYTES: Final = 4 << 20
"""What one checksum covers, and so the least that is read where a rank needs a part of a piece."""

CACHED_BYTES: Final = 256 << 10
"""So much is read or written at once, as its checksum is taken while it is in the processor's cache."""

_INDEX: Final = "index.json"
_NAME: Final = "saved-"
VERSION: Final = 1


class CheckpointError(DistError):
    """A checkpoint cannot be written or read; the message says which, on which rank, and why."""


class Piece(NamedTuple):
    """Bytes `start` to `start + nbytes` of the array `name`, at `offset` of `file`; a checksum for each block."""

    name: str
    start: int
    nbytes: int
    file: str
    offset: int
    checksums: list[int]


def checkpoints_in(folder: Path) -> list[int]:
    """The numbers of the checkpoints in `folder`, the oldest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(name[len(_NAME) :]) for name in names if name.startswith(_NAME) and name[len(_NAME) :].isdigit())


def place_of(folder: Path, number: int) -> Path:
    """Where a checkpoint is once it is whole."""
    return folder / f"{_NAME}{number:08}"


def begin(folder: Path, number: int) -> Path:
    """Make room for a checkpoint and return it; what writers that were killed have left is removed."""
    if place_of(folder, number).exists():
        raise CheckpointError(f"{place_of(folder, number)} is there already")
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f".{_NAME}*"):
        discard(left)
    unfinished = folder / f".{_NAME}{number:08}.part"
    unfinished.mkdir()
    return unfinished


def discard(unfinished: Path) -> None:
    """Remove a checkpoint that will not be finished."""
    shutil.rmtree(unfinished, ignore_errors=True)


def write_pieces(path: Path, pieces: Iterable[tuple[str, int, memoryview]]) -> list[Piece]:
    """Write (array, start, bytes) into a new file, which is on the disk when this returns."""
    written = []
    with path.open("xb", buffering=0) as file:
        offset = 0
        for name, start, data in pieces:
            checksums = []
            for block in _cut(data, BLOCK_BYTES):
                checksum = 0
                for part in _cut(block, CACHED_BYTES):
                    checksum = zlib.crc32(part, checksum)
                    _write_all(file, part)
                checksums.append(checksum)
                if len(checksums) % 8 == 0:
                    os.fdatasync(file.fileno())
            written.append(Piece(name, start, data.nbytes, path.name, offset, checksums))
            offset += data.nbytes
        os.fsync(file.fileno())
    return written


def commit(unfinished: Path, folder: Path, number: int, index: dict[str, Any]) -> Path:
    """Write the index, and give the checkpoint its name."""
    with (unfinished / _INDEX).open("x") as file:
        json.dump({"version": VERSION, **index}, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(unfinished)
    final = place_of(folder, number)
    unfinished.rename(final)
    _sync_folder(folder)
    return final


def remove_old(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; each loses its name first, so that none is left in part."""
    for number in checkpoints_in(folder)[:-keep]:
        nameless = folder / f".{_NAME}{number:08}.old"
        place_of(folder, number).rename(nameless)
        discard(nameless)


def read_index(folder: Path, number: int) -> dict[str, Any]:
    """The index of a checkpoint. Raises CheckpointError for one of another version or that is damaged."""
    path = place_of(folder, number) / _INDEX
    try:
        index: dict[str, Any] = json.loads(path.read_text())
        version = index["version"]
        index["pieces"] = [Piece(*piece) for piece in index["pieces"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no index of a checkpoint: {error}") from None
    if version != VERSION:
        raise CheckpointError(f"{path} has version {version}, and this asyncdist reads version {VERSION}")
    return index


def read_range(place: Path, pieces: Sequence[Piece], start: int, target: memoryview) -> None:
    """Fill `target` with the bytes of an array from `start` on; `pieces` are all of that array.

    Raises CheckpointError where a file is short, or a checksum says that it is not what was written.
    """
    stop = start + target.nbytes
    for piece in pieces:
        first, last = max(start, piece.start), min(stop, piece.start + piece.nbytes)
        if first < last:
            with (place / piece.file).open("rb", buffering=0) as file:
                _read_piece(file, piece, first - piece.start, target[first - start : last - start], place)


def _read_piece(file: Any, piece: Piece, start: int, target: memoryview, place: Path) -> None:
    for number in range(start // BLOCK_BYTES, -(-(start + target.nbytes) // BLOCK_BYTES)):
        begun = number * BLOCK_BYTES
        nbytes = min(BLOCK_BYTES, piece.nbytes - begun)
        first, last = max(start, begun), min(start + target.nbytes, begun + nbytes)
        whole = last - first == nbytes
        block = target[first - start : last - start] if whole else memoryview(bytearray(nbytes))
        file.seek(piece.offset + begun)
        checksum = 0
        for part in _cut(block, CACHED_BYTES):
            checksum = zlib.crc32(part[: _read_all(file, part)], checksum)  # of a short file another one
        if checksum != piece.checksums[number]:
            raise CheckpointError(
                f"{place / piece.file} is damaged: bytes {begun} to {begun + nbytes} of what it holds of "
                f"{piece.name!r} are not what was written"
            )
        if not whole:
            target[first - start : last - start] = block[first - begun : last - begun]


def _cut(data: memoryview, nbytes: int) -> Iterator[memoryview]:
    for begun in range(0, data.nbytes, nbytes):
        yield data[begun : begun + nbytes]


def _write_all(file: Any, data: memoryview) -> None:
    while data.nbytes:
        data = data[file.write(data) :]


def _read_all(file: Any, room: memoryview) -> int:
    done = 0
    while done < room.nbytes and (count := file.readinto(room[done:])):
        done += count
    return done


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
