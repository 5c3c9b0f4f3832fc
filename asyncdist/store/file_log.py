"""The file behind FileStore: an append-only log that several processes write in turn, under one `flock`.

    b"asyncdist file store v1\\n"
    repeat: length u32, crc32 u32 (both little-endian), payload = msgpack

The first record is `["open", world_size]`, then come `["join", member, host, pid, start]`, `["leave", member]` and the
store's own changes; `["all", [record...]]` holds several of them, which count together or not at all. Nothing is ever
rewritten, so readers need no lock: they stop at a record that is not yet complete. A writer that was killed leaves an
incomplete tail, which the next writer cuts off. Everything here is synchronous and short; waiting for the lock is the
caller's business.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import secrets
import socket
import stat
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgpack

from asyncdist.errors import DistStoreError

__all__ = ["FileLog", "ProcessIdentity", "Record", "is_gone", "this_process"]

MAGIC: Final = b"asyncdist file store v"
HEADER: Final = MAGIC + b"1\n"
Record: TypeAlias = tuple[Any, ...]

RECORD_HEAD: Final = struct.Struct("<II")
READ_CHUNK_BYTES: Final = 1 << 20
"""One read of the file: large enough that a system call is cheap, small enough that memory stays bounded by records."""

FILE_MODE: Final = 0o600


@dataclass(slots=True)
class Members:
    """Who has joined and who has left, as the log tells it."""

    world_size: int | None = None
    joined: int = 0
    present: dict[str, ProcessIdentity] = field(default_factory=dict)

    def apply(self, record: Record) -> bool:
        """Take notice of `record`; return whether it was about members."""
        match record:
            case ["open", int(world_size)]:
                self.world_size = world_size
            case ["join", str(member), str(host), int(pid), int(start)]:
                self.joined += 1
                self.present[member] = ProcessIdentity(host, pid, start)
            case ["leave", str(member)]:
                self.present.pop(member, None)
            case _:
                return False
        return True


class FileLog:
    """One open log. Methods raise DistStoreError, naming the path, for what the file or the system refuses."""

    def __init__(self, path: str | os.PathLike[str], world_size: int) -> None:
        self.path = os.fspath(path)
        self._world_size = world_size
        self._member = secrets.token_hex(8)
        self._members = Members()
        self._offset = 0  # of the first byte after the last complete record read
        self._joined = False
        self._pid = os.getpid()
        self._fd = self._open()
        try:
            self._refuse_foreign(at_least=0)
        except BaseException:
            self.abandon()
            raise

    @property
    def joined(self) -> bool:
        """Whether this log counts us as a member."""
        return self._joined

    @property
    def closed(self) -> bool:
        """Whether the file was given up."""
        return self._fd < 0

    def try_lock(self) -> bool:
        """Take the exclusive lock if it is free; False if somebody else holds it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._error(f"cannot be locked: {error.strerror}") from error
        return True

    def unlock(self) -> None:
        """Give the lock back."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def join(self) -> list[Record]:
        """Become a member and return the changes recorded so far. The lock must be held.

        Raises DistStoreError if the file is foreign or was left behind by a run that did not end cleanly.
        """
        while os.fstat(self._fd).st_nlink == 0:  # the last member left between our opening it and our locking it
            os.close(self._fd)
            self._fd = self._open()
            if not self.try_lock():
                return []
        if os.fstat(self._fd).st_size < len(HEADER):
            self._refuse_foreign(at_least=0)
            os.ftruncate(self._fd, 0)
            self._write(HEADER)
        self._refuse_foreign(at_least=len(HEADER))
        self._offset = len(HEADER)
        changes = self.read(locked=True)
        if self._members.world_size is None:
            self.append([("open", self._world_size)])
        self._refuse_stale(self._members.world_size or -1)
        me = this_process()
        self.append([("join", self._member, me.host, me.pid, me.start)])
        self._joined = True
        return changes

    def read(self, *, locked: bool) -> list[Record]:
        """Return the changes recorded since the last call, other members' and our own.

        Without the lock, an incomplete record is still being written. With the lock, a killed writer has left it.
        """
        status = os.fstat(self._fd)
        if status.st_nlink == 0:
            raise self._error("was deleted while it was in use")
        if status.st_size <= self._offset:
            return []
        data = bytearray()
        try:
            while chunk := os.pread(self._fd, READ_CHUNK_BYTES, self._offset + len(data)):
                data += chunk
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror}") from error
        records, used, intact = decode_records(data)
        if not intact and locked:
            raise self._error("is damaged (a record's checksum is wrong): delete it")
        # what is not complete is read again next time: its writer may die, and another's record take its place
        self._offset += used
        if locked and os.fstat(self._fd).st_size > self._offset:
            os.ftruncate(self._fd, self._offset)
        return [record for record in records if not self._members.apply(record)]

    def append(self, records: list[Record]) -> None:
        """Add `records` at the end, all or none. The lock must be held and everything before be read.

        `read` does not return them: whoever appends knows them already.
        """
        # In one record: if the disk is full its beginning is cut off again, and a reader may have read that before.
        data = encode_record(records[0] if len(records) == 1 else ("all", records))
        self._write(data)
        self._offset += len(data)
        for record in records:
            self._members.apply(record)

    def leave(self) -> None:
        """Stop being a member; the last one removes the file. The lock must be held."""
        if not self._joined:
            return
        self.read(locked=True)
        self._joined = False
        self._members.present.pop(self._member, None)
        complete = self._world_size < 1 or self._members.joined >= self._world_size
        if complete and not self._members.present:
            self._remove()
        else:
            self.append([("leave", self._member)])

    def _remove(self) -> None:
        """Delete our file; one that another run put in its place since is not ours."""
        try:
            if os.path.samestat(os.fstat(self._fd), os.lstat(self.path)):
                os.unlink(self.path)
        except FileNotFoundError:
            pass

    def abandon(self) -> None:
        """Close the file without leaving: after a fork, or when nothing else is possible."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def leave_at_exit(self) -> None:
        """Leave if the lock is free right now; for an owner that was dropped without being closed."""
        if self._fd < 0 or self._pid != os.getpid():
            return
        try:
            if self.try_lock():
                self.leave()
        except (OSError, DistStoreError):
            pass  # nobody is left to hear it; the next user of the file is told that it is stale
        finally:
            self.abandon()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(self.path, flags, FILE_MODE)
        except OSError as error:
            reason = "is a symbolic link" if error.errno == errno.ELOOP else f"cannot be opened: {error.strerror}"
            raise self._error(reason) from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            os.close(fd)
            raise self._error("is not a regular file of this user")
        return fd

    def _refuse_foreign(self, at_least: int) -> None:
        """Raise unless the file begins as ours does; a file still shorter than `at_least` bytes is refused too."""
        head = os.pread(self._fd, len(HEADER), 0)
        if len(head) >= at_least and HEADER.startswith(head):
            return
        if head.startswith(MAGIC):
            raise self._error("was written by another version of asyncdist")
        raise self._error("is not a file store's file; it is left as it was")

    def _refuse_stale(self, world_size: int) -> None:
        members = self._members
        gone = [who for who in members.present.values() if is_gone(who)]
        if gone:
            raise self._error(
                f"was left behind by a run that did not end cleanly (process {gone[0].pid} is gone without closing "
                "its store): delete it and start again"
            )
        if world_size > 0 and self._world_size > 0 and world_size != self._world_size:
            raise self._error(f"was made for a world size of {world_size}, not {self._world_size}")
        if 0 < world_size <= members.joined:
            raise self._error(
                f"was already joined by all {world_size} processes of its world: it is another run's, or a rank was "
                "started twice"
            )
        self._world_size = world_size

    def _write(self, data: bytes) -> None:
        start = os.fstat(self._fd).st_size
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            os.ftruncate(self._fd, start)
            raise self._error(f"cannot be written: {error.strerror}") from error

    def _error(self, problem: str) -> DistStoreError:
        return DistStoreError(f"FileStore: {self.path} {problem}")


def encode_record(record: Record) -> bytes:
    """Return the bytes of one record."""
    payload: bytes = msgpack.packb(record)
    return RECORD_HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def decode_records(data: bytes | bytearray) -> tuple[list[Record], int, bool]:
    """Return the complete records of `data`, the bytes they take, and whether what follows is merely incomplete."""
    records: list[Record] = []
    offset = 0
    while len(data) - offset >= RECORD_HEAD.size:
        length, checksum = RECORD_HEAD.unpack_from(data, offset)
        begin = offset + RECORD_HEAD.size
        if len(data) - begin < length:
            break
        payload = bytes(data[begin : begin + length])
        if zlib.crc32(payload) != checksum:
            return records, offset, False
        match msgpack.unpackb(payload, use_list=False):
            case ["all", [*together]]:
                records += together
            case record:
                records.append(record)
        offset = begin + length
    return records, offset, True


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process of some host; `start` (ticks since boot, 0 if unknown) tells it from a later one with its pid."""

    host: str
    pid: int
    start: int


def this_process() -> ProcessIdentity:
    """Return the identity of the calling process."""
    pid = os.getpid()
    state = read_state(pid)
    return ProcessIdentity(this_host(), pid, state[1] if state else 0)


def is_gone(process: ProcessIdentity) -> bool:
    """Return whether `process` is known to have ended; False for a process of another host: nothing is known of it."""
    if process.host != this_host():
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    state = read_state(process.pid)
    if state is None:
        return False
    letter, start = state
    return letter in "ZX" or (process.start != 0 and start != process.start)


@functools.cache
def this_host() -> str:
    """Name the set of processes whose pids mean the same to each other: one boot of one host, one pid namespace."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass  # no Linux: the host name alone, as other programs' pid files do
    return " ".join(parts)


def read_state(pid: int) -> tuple[str, int] | None:
    """Return the state letter and start time of `pid`, or None where /proc does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return fields[0], int(fields[19])
