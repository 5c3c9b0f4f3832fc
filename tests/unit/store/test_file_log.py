"""The log behind FileStore: what is appended together is read together, also where the disk has no room for all."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from asyncdist.errors import DistStoreError
from asyncdist.store.file_log import READ_CHUNK_BYTES, FileLog, Record


def join(path: Path) -> FileLog:
    log = FileLog(path, -1)
    assert log.try_lock()
    log.join()
    log.unlock()
    return log


def append(log: FileLog, records: list[Record]) -> None:
    assert log.try_lock()
    try:
        assert log.read(locked=True) == []
        log.append(records)
    finally:
        log.unlock()


def test_a_reader_takes_nothing_of_what_the_disk_had_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = join(tmp_path / "store"), join(tmp_path / "store")
    assert writer.read(locked=False) == reader.read(locked=False) == []
    cut, meanwhile = os.ftruncate, []

    def read_and_cut(descriptor: int, size: int) -> None:
        meanwhile.append(reader.read(locked=False))
        cut(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", read_and_cut)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(writer.path) + 500, limits[1]))  # the signal is ignored
    try:
        with pytest.raises(DistStoreError, match="cannot be written"):
            append(writer, [(1, b"k", bytes(200)), (1, b"l", bytes(200)), (1, b"m", bytes(200))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert meanwhile == [[]]
    append(writer, [(1, b"after", b"v")])
    assert reader.read(locked=False) == [(1, b"after", b"v")]
    reader.abandon()
    writer.abandon()


@pytest.mark.parametrize("count", [1, 2, 200])
def test_what_is_appended_is_read_in_order(tmp_path: Path, count: int) -> None:
    writer, reader = join(tmp_path / "store"), join(tmp_path / "store")
    assert writer.read(locked=False) == []
    records: list[Record] = [(1, b"%d" % number, bytes(READ_CHUNK_BYTES // 50)) for number in range(count)]
    append(writer, records)
    assert reader.read(locked=False) == records
    reader.abandon()
    writer.abandon()
