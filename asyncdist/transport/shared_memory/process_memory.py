"""Single copy: another process's memory read where it is, by `process_vm_readv`. Linux only.

What ranks of one host exchange is otherwise copied into shared memory and out of it again. The kernel lets a process
read another's memory if it might debug it: both belong to one user, and nothing protects either (`man 2 ptrace`,
kernel.yama.ptrace_scope). Whether it does is tried on the `Token` of the other.

A token is random bytes of a process. Every read reads it as well, in the same call, which takes all it reads from one
process: had that ended and its number been given to another, or had it called `exec`, no token would be there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

__all__ = ["PROCESS", "TOKEN_BYTES", "OwnMemory", "ProcessMemory", "RemoteBytes", "Token", "Unreadable"]

PROCESS: Final = (1 << 48) - 1
"""What stands for the memory of the lender's process where others name a segment. Offsets in it are addresses."""

TOKEN_BYTES: Final = 16

_ALLOWED: Final = (errno.EPERM, errno.ENOSYS, errno.ENOMEM)
"""Why a process that is there may not be read, or cannot."""


class Token(NamedTuple):
    """Where in its process it lies, and what it is."""

    address: int
    octets: bytes


class Unreadable(Exception):
    """What should have been read is not there. `gone`: nor is the process."""

    def __init__(self, text: str, *, gone: bool) -> None:
        super().__init__(text)
        self.gone = gone


class ProcessMemory:
    """The memory of the process `pid` that `token` is of. For one thread.

    Raises OSError if we may not read it, or it is another process than the one that the token is of.
    """

    __slots__ = ("_check", "_here", "_octets", "_pid", "_places", "_there")

    def __init__(self, pid: int, token: Token) -> None:
        self._pid = pid
        self._octets = token.octets
        self._check = check = ctypes.create_string_buffer(TOKEN_BYTES)
        # struct iovec: what is read and the token, here; the same two, there.
        self._places = (ctypes.c_size_t * 8)(
            0, 0, ctypes.addressof(check), TOKEN_BYTES, 0, 0, token.address, TOKEN_BYTES
        )
        self._here = ctypes.addressof(self._places)
        self._there = self._here + ctypes.sizeof(self._places) // 2
        code = self._read(0, 0, 0)
        if code:
            raise OSError(code, os.strerror(code))

    def read(self, address: int, target: int, nbytes: int) -> None:
        """Copy `nbytes` from `address` there to `target` here. Raises Unreadable; `target` may be written then."""
        code = self._read(address, target, nbytes)
        if code:
            still = self._read(0, 0, 0)
            gone = bool(still) and still not in _ALLOWED
            text = f"{nbytes} bytes at {address:#x} of process {self._pid} cannot be read: {os.strerror(code)}"
            raise Unreadable(text, gone=gone)

    def _read(self, address: int, target: int, nbytes: int) -> int:
        """0, or the number of the error."""
        places = self._places
        places[0], places[1], places[4], places[5] = target, nbytes, address, nbytes
        found: int = _readv(self._pid, self._here, 2, self._there, 2, 0)
        if found == nbytes + TOKEN_BYTES:
            return 0 if self._check.raw == self._octets else errno.ESRCH
        return ctypes.get_errno() if found < 0 else errno.EFAULT


class RemoteBytes:
    """`nbytes` at `address` of another process's memory."""

    __slots__ = ("_address", "_memory", "_nbytes")

    def __init__(self, memory: ProcessMemory, address: int, nbytes: int) -> None:
        self._memory = memory
        self._address = address
        self._nbytes = nbytes

    def __len__(self) -> int:
        return self._nbytes

    def read(self, start: int, target: np.ndarray[Any, Any]) -> None:
        """Fill `target`, a contiguous array, with what begins at byte `start`. Raises Unreadable."""
        self._memory.read(self._address + start, target.__array_interface__["data"][0], target.nbytes)


class OwnMemory:
    """What we let others read. For one thread."""

    __slots__ = ("_ends", "_found", "_here", "_there", "token")

    def __init__(self) -> None:
        self.token = _own_token()
        self._found = found = ctypes.create_string_buffer(2)
        self._ends = (ctypes.c_size_t * 6)(ctypes.addressof(found), len(found), 0, 1, 0, 1)
        self._here = ctypes.addressof(self._ends)
        self._there = self._here + ctypes.sizeof(self._ends) // 3

    def lendable(self, address: int, nbytes: int) -> bool:
        """Whether others could read that, going by its ends: memory of a device, which is mapped whole, nobody can."""
        self._ends[2], self._ends[4] = address, address + nbytes - 1
        return _readv(os.getpid(), self._here, 1, self._there, 2, 0) == len(self._found)


def _own_token() -> Token:
    pid = os.getpid()
    if pid not in _tokens:  # a forked child is another process
        _tokens.clear()
        _tokens[pid] = ctypes.create_string_buffer(secrets.token_bytes(TOKEN_BYTES), TOKEN_BYTES)
    token = _tokens[pid]
    return Token(ctypes.addressof(token), token.raw)


_tokens: Final[dict[int, ctypes.Array[ctypes.c_char]]] = {}


def _missing(*_arguments: int) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


def _find() -> Callable[..., int]:
    try:
        readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError, TypeError):  # no Linux
        return _missing
    readv.restype = ctypes.c_ssize_t
    void, count = ctypes.c_void_p, ctypes.c_ulong
    readv.argtypes = [ctypes.c_int, void, count, void, count, count]
    return readv


_readv: Final = _find()
