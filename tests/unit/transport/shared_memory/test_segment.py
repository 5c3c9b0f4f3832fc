"""Segments: sealed by their owner, checked and read-only at their readers, gone with their last user."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import socket
import sys
from pathlib import Path

import pytest
from mesh_world import open_fds

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.fork import SocketSet
from asyncdist.transport.shared_memory.segment import (
    MAX_SEGMENT_BYTES,
    PAGE_BYTES,
    AttachedSegment,
    Segment,
    segments_available,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="segments are Linux's memfds")
F_ADD_SEALS = 1033
SEALS = {"seal": 1, "shrink": 2, "grow": 4, "future write": 16}


@pytest.fixture
def fds() -> SocketSet:
    return SocketSet(lambda: None)


def test_what_the_owner_writes_the_reader_sees(fds: SocketSet) -> None:
    own = Segment(PAGE_BYTES + 1, fds)
    assert own.size == len(own.view) == 2 * PAGE_BYTES
    peer = AttachedSegment(os.dup(own.fd), own.size)
    own.view[5:8] = b"new"
    assert peer.view[4:9] == b"\0new\0"
    assert peer.view.readonly
    with pytest.raises(TypeError):
        peer.view[0] = 1
    own.release()
    assert peer.view[5:8] == b"new", "it stays as long as somebody has it mapped"
    peer.release()


def test_a_reader_can_neither_write_nor_truncate(fds: SocketSet) -> None:
    own = Segment(PAGE_BYTES, fds)
    fd = os.dup(own.fd)
    with pytest.raises(OSError, match="not permitted"):
        os.write(fd, b"x")
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(fd, b"x", 0)
    for size in (0, PAGE_BYTES // 2, PAGE_BYTES * 2):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, size)
    with pytest.raises(OSError, match="not permitted"):
        mmap.mmap(fd, PAGE_BYTES)
    with pytest.raises(OSError, match="not permitted"):
        fcntl.fcntl(fd, F_ADD_SEALS, 0)
    with pytest.raises(OSError, match="not permitted"):
        os.posix_fallocate(fd, 0, 2 * PAGE_BYTES)
    own.view[0] = 7  # its owner still can
    os.close(fd)
    own.release()


@pytest.mark.parametrize("missing", SEALS)
def test_a_segment_that_lacks_a_seal_is_refused(missing: str) -> None:
    fd = os.memfd_create("peer", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE_BYTES)
    fcntl.fcntl(fd, F_ADD_SEALS, sum(bit for name, bit in SEALS.items() if name != missing))
    gc.collect()
    before = open_fds()
    with pytest.raises(RemoteProtocolError, match="not sealed"):
        AttachedSegment(fd, PAGE_BYTES)
    assert fd not in open_fds()
    assert len(open_fds()) == len(before) - 1


@pytest.mark.parametrize(
    ("size", "why"),
    [
        (0, "bytes: at most"),
        (-1, "bytes: at most"),
        (MAX_SEGMENT_BYTES + 1, "bytes: at most"),
        (MAX_SEGMENT_BYTES, "were announced"),
        (PAGE_BYTES - 1, "were announced"),
        (PAGE_BYTES + 1, "were announced"),
    ],
)
def test_a_size_that_is_not_the_segments_is_refused(fds: SocketSet, size: int, why: str) -> None:
    own = Segment(PAGE_BYTES, fds)
    with pytest.raises(RemoteProtocolError, match=why):
        AttachedSegment(os.dup(own.fd), size)
    own.release()


def test_what_is_no_memfd_is_refused() -> None:
    left, right = socket.socketpair()
    read, write = os.pipe()
    for fd in (os.dup(left.fileno()), read, os.open("/dev/zero", os.O_RDWR), os.open("/proc/self/exe", os.O_RDONLY)):
        with pytest.raises(RemoteProtocolError, match=r"no memfd|not sealed"):
            AttachedSegment(fd, PAGE_BYTES)
    os.close(write)
    left.close()
    right.close()


def test_no_room_for_a_mapping_is_our_own_trouble(fds: SocketSet, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Segment(PAGE_BYTES, fds)
    fd = os.dup(own.fd)

    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(OSError, match="Too many"):
        AttachedSegment(fd, PAGE_BYTES)
    with pytest.raises(OSError, match="Too many"):
        Segment(PAGE_BYTES, fds)
    monkeypatch.undo()
    own.release()


def test_nothing_is_left() -> None:
    fds = SocketSet(lambda: None)
    gc.collect()
    before = open_fds()
    own = Segment(PAGE_BYTES, fds, "a test of leaks")
    peer = AttachedSegment(os.dup(own.fd), own.size)
    assert "memfd:a test of leaks" in Path("/proc/self/maps").read_text()
    view = peer.view[:10]
    own.close()
    own.close()
    del own, peer
    gc.collect()
    assert view == bytes(10), "a view keeps the mapping"
    del view
    gc.collect()
    assert open_fds() == before
    assert "memfd:a test of leaks" not in Path("/proc/self/maps").read_text()


def test_segments_are_there() -> None:
    assert segments_available()
