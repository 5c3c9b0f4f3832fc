"""Single copy: another process's memory read where it is, by `process_vm_readv`. Linux only.

What ranks of one host exchange is otherwise copied into shared memory and out of it again. The kernel lets a process
read another's memory if it might debug it: both belong to one user, and nothing protects either (`man 2 ptrace`,
kernel.yama.ptrace_scope). Whether it does is tried on the `Token` of the other.

A token is random bytes that lie in a process. Every read reads it as well, in the same call, which takes all it reads
from one process: had that ended and its number been given to another, or had it called `exec`, no token would be there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from asyncdist.arrays.host import Array
from asyncdist.arrays.reduction import Kernel
from asyncdist.concurrency import trace as events

PROCESS: Final = (1 << 48) - 1
"""Stands for the memory of the sender's process in place of a segment's number. Offsets in it are addresses."""

TOKEN_BYTES: Final = 16

_GONE: Final = (errno.ESRCH, errno.EFAULT)
"""Errors of reading a token whose process is not there, or is another. A process that is there may cause any other
error, as filters of system calls choose theirs."""

MOVED_BYTES: Final = 8 << 20
"""Memory moved to huge pages at one use of it: that takes some milliseconds, and a loop waits for it."""
BUFFERS_KEPT: Final = 1024
"""Buffers of which it is remembered how much was moved."""
_ALL_MOVED: Final = 1 << 64
_MADV_COLLAPSE: Final = 25
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage")

_PR_SET_PTRACER: Final = 0x59616D61
_PR_SET_PTRACER_ANY: Final = (1 << 8 * ctypes.sizeof(ctypes.c_ulong)) - 1


class Token(NamedTuple):
    """Where in its process it lies, and what it is."""

    address: int
    octets: bytes


class Unreadable(Exception):
    """The memory to be read is not there. `gone`: the process is not there either."""

    def __init__(self, text: str, *, gone: bool) -> None:
        super().__init__(text)
        self.gone = gone


class _Span(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("address", ctypes.c_size_t), ("nbytes", ctypes.c_size_t))


class ProcessMemory:
    """The memory of the process `pid` that `token` is of. For one thread.

    Raises OSError if we may not read it, or it is another process than the one that the token is of.
    """

    def __init__(self, pid: int, token: Token) -> None:
        self._pid = pid
        self.failed = False
        """Whether something of it could not be read."""
        self._octets = token.octets
        self._check = check = ctypes.create_string_buffer(TOKEN_BYTES)
        self._here = (_Span * 2)(_Span(), _Span(ctypes.addressof(check), TOKEN_BYTES))
        self._there = (_Span * 2)(_Span(), _Span(token.address, TOKEN_BYTES))
        self._target, self._source = self._here[0], self._there[0]
        code = self._token_error()
        if code:
            raise OSError(code, os.strerror(code))

    def read(self, address: int, target: int, nbytes: int) -> None:
        """Copy `nbytes`, up to 1 GiB, from `address` there to `target` here.

        Raises Unreadable; `target` may be written then.
        """
        self._source.address, self._source.nbytes = address, nbytes
        self._target.address, self._target.nbytes = target, nbytes
        found = _readv(self._pid, self._here, 2, self._there, 2, 0)
        if found != nbytes + TOKEN_BYTES or self._check.raw != self._octets:
            code = self._error(found, nbytes + TOKEN_BYTES)
            self.failed = True
            gone = self._token_error() in _GONE
            text = f"{nbytes} bytes at {address:#x} of process {self._pid} cannot be read: {os.strerror(code)}"
            raise Unreadable(text, gone=gone)

    def _token_error(self) -> int:
        """Read the token alone: 0, or the number of the error."""
        self._source.nbytes = self._target.nbytes = 0
        return self._error(_readv(self._pid, self._here, 2, self._there, 2, 0), TOKEN_BYTES)

    def _error(self, found: int, nbytes: int) -> int:
        """The number of the error of a read of `nbytes` that found so many bytes, or 0."""
        if found < 0:
            return ctypes.get_errno()
        if found < nbytes:
            return errno.EFAULT
        return 0 if self._check.raw == self._octets else errno.ESRCH


@dataclass(slots=True)
class RemoteBytes:
    """`nbytes` at `address` of another process's memory."""

    memory: ProcessMemory
    address: int
    nbytes: int

    def read(self, start: int, target: Array) -> None:
        """Fill `target`, a contiguous array, with what begins at byte `start`. Raises Unreadable."""
        self.memory.read(self.address + start, target.__array_interface__["data"][0], target.nbytes)

    def reduce(self, start: int, target: Array, staging: Array, kernel: Kernel, left: bool) -> None:
        """Reduce what begins at byte `start` into `target`, `left`: as the left operand. Raises Unreadable.

        It goes through `staging`, bytes for some elements: as long as they are in this core's cache, that costs little.
        """
        size, read, address = len(staging) // target.itemsize, self.memory.read, self.address + start
        elements = staging[: size * target.itemsize].view(target.dtype)
        here = staging.__array_interface__["data"][0]
        for first in range(0, target.size, size):
            part = target[first : first + size]
            source = elements[: part.size]
            read(address + first * target.itemsize, here, part.nbytes)
            if left:
                kernel(source, part, part)
            else:
                kernel(part, source, part)


class OwnMemory:
    """The memory of this process that others may read, as long as this object exists. For one thread.

    The kernel copies between processes page by page, and small pages take it twice as long as huge ones. numpy asks for
    huge pages for its large arrays, torch and malloc do not. So with `huge_pages` a buffer that is read again is moved
    to huge pages (MADV_COLLAPSE, since Linux 6.1), a part at each use, unless the system is to have none.
    """

    def __init__(self, *, huge_pages: bool = False) -> None:
        self._huge_bytes = _huge_page_bytes() if huge_pages else 0
        self._moved: dict[int, int] = {}
        """By address of a buffer, up to where it was moved to huge pages."""
        self._octets = octets = ctypes.create_string_buffer(secrets.token_bytes(TOKEN_BYTES), TOKEN_BYTES)
        self.token = Token(ctypes.addressof(octets), octets.raw)
        self._found = found = ctypes.create_string_buffer(2)
        self._here = (_Span * 1)(_Span(ctypes.addressof(found), 2))
        self._ends = (_Span * 2)(_Span(0, 1), _Span(0, 1))

    def readable(self, address: int, nbytes: int) -> bool:
        """Whether other processes could read that, by its ends. Memory of a device, mapped whole, they cannot."""
        self._ends[0].address, self._ends[1].address = address, address + nbytes - 1
        return _readv(os.getpid(), self._here, 1, self._ends, 2, 0) == 2

    def use(self, address: int, nbytes: int) -> None:
        """Others are about to read that buffer, and read none of it yet: move a part to huge pages, if some is left."""
        huge = self._huge_bytes
        if nbytes < huge or not huge:
            return
        moved = self._moved
        start = moved.pop(address, 0)
        begin = -(-start // huge) * huge
        end = min((address + nbytes) // huge * huge, begin + MOVED_BYTES)
        if not start:
            end = address  # nobody knows yet whether it is used again
        elif begin < end and madvise(begin, end - begin, _MADV_COLLAPSE):
            events.info("%d bytes at %#x stay in small pages: %s", nbytes, address, os.strerror(ctypes.get_errno()))
            end = _ALL_MOVED
        moved[address] = max(start, end)
        if len(moved) > BUFFERS_KEPT:
            del moved[next(iter(moved))]


def permit_reading() -> None:
    """Have the kernel let all processes of this user read this one where kernel.yama.ptrace_scope is 1.

    They may debug it too, as they may where there is no Yama: nothing else changes (PR_SET_PTRACER in `man 2 prctl`).
    """
    if _prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0) and ctypes.get_errno() != errno.EINVAL:  # as without Yama
        events.info("others cannot be permitted to read this process: %s", os.strerror(ctypes.get_errno()))


def _huge_page_bytes() -> int:
    """The size of a huge page; 0 where the system is to have none, or each takes long to fill."""
    try:
        if "[never]" in (_HUGE_PAGES / "enabled").read_text():
            return 0
        nbytes = int((_HUGE_PAGES / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0
    return nbytes if nbytes <= MOVED_BYTES else 0


def _missing(*_arguments: object) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


def _find(name: str, *arguments: type) -> Callable[..., int]:
    try:
        found: Any = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError, TypeError):  # no Linux
        return _missing
    found.restype, found.argtypes = ctypes.c_ssize_t, arguments
    call: Callable[..., int] = found
    return call


_prctl: Final = _find("prctl", ctypes.c_int, *4 * (ctypes.c_ulong,))
madvise: Final = _find("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_readv: Final = _find("process_vm_readv", ctypes.c_int, *2 * (ctypes.c_void_p, ctypes.c_ulong), ctypes.c_ulong)
