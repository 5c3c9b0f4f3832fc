"""A worker's file: bytes as they came, and what becomes of them when there is no room."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncdist.launch import writers
from asyncdist.launch.streams import Destination, RedirectedStream, StreamPump
from asyncdist.launch.writers import MAX_TAIL_BYTES, FilteredLog, LogFile, WriterThread


class Errors(list[str]):
    """What was told."""

    def tell(self, path: Path, error: OSError) -> None:
        self.append(f"{path.name}: {error.strerror}")


class Disk:
    """`os.write` with room for so many bytes."""

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        self._write: Callable[..., int] = os.write

    def write(self, fd: int, data: memoryview) -> int:
        if not self.room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(fd, data[: self.room_bytes])
        self.room_bytes -= written
        return written


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    class FakeOs:
        def __getattr__(self, name: str) -> Any:
            return small.write if name == "write" else getattr(os, name)

    small = Disk(5)
    monkeypatch.setattr(writers, "os", FakeOs())
    return small


async def test_bytes_arrive_as_they_are_and_the_descriptor_is_closed_after_them(tmp_path: Path) -> None:
    thread, errors = WriterThread("test"), Errors()
    file = LogFile(tmp_path / "x.log", thread, errors.tell)
    data = bytes(range(256)) * 5000 + b"no end of line"
    file.write(data[:7])
    file.write(data[7:])
    file.close()
    assert await thread.close(60)
    assert (tmp_path / "x.log").read_bytes() == data
    assert not errors
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(file.fd)


async def test_a_file_that_exists_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("old")
    (tmp_path / "link.log").symlink_to(tmp_path / "elsewhere")
    for name in ("x.log", "link.log"):
        with pytest.raises(FileExistsError):
            LogFile(tmp_path / name, None, Errors().tell)
    assert (tmp_path / "x.log").read_text() == "old"
    assert not (tmp_path / "elsewhere").exists()


async def test_a_full_disk_is_told_once_and_the_gap_is_marked(tmp_path: Path, disk: Disk) -> None:
    thread, errors = WriterThread("test"), Errors()
    file = LogFile(tmp_path / "x.log", thread, errors.tell)
    for data in (b"1234567", b"lost\n"):  # two of the first and all of the second do not fit
        file._write(data)
    disk.room_bytes = 1000
    file._write(b"again\n")
    file.close()
    assert await thread.close(60)
    assert errors == ["x.log: No space left on device"]
    assert (tmp_path / "x.log").read_bytes() == (
        b"12345\n[asyncdist run: 7 bytes are missing here: No space left on device]\nagain\n"
    )


@pytest.mark.parametrize("excess", [0, 1])
async def test_the_tail_at_its_limit_and_one_past_it(tmp_path: Path, excess: int) -> None:
    file = LogFile(tmp_path / "x.log", None, Errors().tell)
    os.write(file.fd, b"first\n" + b"x" * (MAX_TAIL_BYTES - 13 + excess) + b"\nlast\n\n")
    tail = file.tail()
    assert tail.endswith(b"x\nlast\n\n")
    assert tail.startswith(b"first\nx" if not excess else b"x")
    file.close()


async def test_a_redirected_stream_keeps_its_last_lines(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "x.log", None, Errors().tell)
    destination = Destination(file=file)
    assert destination.for_child() == file.fd
    stream = destination.stream(None, b"[rank 0] ")
    assert isinstance(stream, RedirectedStream)
    os.write(file.fd, b"one\r\ntwo\nthr\xff")
    await stream.drain(60)
    (tmp_path / "x.log").unlink()  # what the script does with its own log
    stream.close()
    stream.close()
    assert stream.tail == [b"one", b"two", b"thr\xff"]


async def test_lines_that_count_are_collected(tmp_path: Path) -> None:
    thread = WriterThread("test")
    file = LogFile(tmp_path / "x.log", thread, Errors().tell)
    filtered = FilteredLog(file, ["rank", "\u00e4"])
    prefix = b"[rank 1] "  # does not count
    filtered.write([prefix + b"one\n", prefix + b"a rank\n", prefix + "\u00e4\n".encode()], len(prefix))
    filtered.close()
    assert await thread.close(60)
    assert (tmp_path / "x.log").read_text() == "[rank 1] a rank\n[rank 1] \u00e4\n"


async def test_a_slow_disk_stops_the_pump_and_loses_nothing(tmp_path: Path) -> None:
    thread = WriterThread("test", high_water_bytes=1)
    file = LogFile(tmp_path / "x.log", thread, Errors().tell)
    reader, writer = os.pipe()
    pump = StreamPump(reader, b"", None, file)
    gate = os.pipe()
    thread.put(lambda data: os.read(gate[0], 1), b"xx")  # the disk hangs
    os.write(writer, b"much\n")
    pump._readable()
    pump._readable()
    assert pump._paused
    assert pump._bytes_read == 0
    os.write(gate[1], b"x")
    os.close(writer)
    await pump.drain(60)
    assert await thread.close(60)
    assert (tmp_path / "x.log").read_text() == "much\n"
    for descriptor in gate:
        os.close(descriptor)


async def test_what_the_pipe_holds_is_kept_when_it_is_closed_in_a_hurry(tmp_path: Path) -> None:
    thread = WriterThread("test")
    file = LogFile(tmp_path / "x.log", thread, Errors().tell)
    reader, writer = os.pipe()
    pump = StreamPump(reader, b"", None, file)
    os.write(writer, b"line\nhalf a li")
    pump.close()
    os.close(writer)
    assert await thread.close(60)
    assert (tmp_path / "x.log").read_bytes() == b"line\nhalf a li"
    assert pump.tail == [b"line", b"half a li"]


async def test_permissions_are_the_users_choice(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        file = LogFile(tmp_path / "x.log", None, Errors().tell)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.log").stat().st_mode) == 0o640
    file.close()
