"""A directory for Unix sockets, which containers of one host share to reach each other as ranks of one host do.

Abstract socket names end at a network namespace, and most containers have their own; a directory mounted into all of
them is reached from each. Sockets in it are named at random; connecting to one, and passing descriptors over it, proves
that both ends run on one kernel. Paths may differ from container to container: only the last part of a name counts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
from typing import Final

MAX_PATH_BYTES: Final = 107
"""Longest path of a Unix socket: what fits the kernel's address, with its zero byte."""
MAX_SWEPT: Final = 64
"""Sockets of ranks that were killed which one that starts removes, at most: two system calls each."""

PEERS: Final = "asyncdist-"
"""How the names of all sockets here begin."""
_NAME_CHARACTERS: Final = len(PEERS) + 32
_UNBORN: Final = ".new"
"""Ending of a socket that does not listen yet: one that refuses connections is then surely dead."""


def check_directory(directory: str) -> None:
    """Make `directory` if it is missing. Raises ValueError unless it is ours alone to write, and short enough."""
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        found = os.stat(directory)
    except OSError as error:
        raise ValueError(f"ASYNCDIST_SOCKET_DIR={directory!r} cannot be used: {error.strerror}") from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ValueError(
            f"ASYNCDIST_SOCKET_DIR={directory!r} must belong to user {os.geteuid()} and be closed to all others "
            f"(mode 0700); it belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}"
        )
    if len(os.fsencode(os.path.join(directory, _name()))) + len(_UNBORN) > MAX_PATH_BYTES:
        raise ValueError(f"ASYNCDIST_SOCKET_DIR={directory!r} is too long: sockets there need {MAX_PATH_BYTES} bytes")


def directory_id(directory: str) -> str:
    """What is the same wherever `directory` is mounted, on one kernel."""
    found = os.stat(directory)
    return f"{found.st_dev}:{found.st_ino}"


def new_path(directory: str, prefix: str = PEERS) -> bytes:
    """Where to bind a socket whose name begins so; `publish` follows once it listens."""
    return os.fsencode(os.path.join(directory, _name(prefix) + _UNBORN))


def publish(path: bytes) -> bytes:
    """Give a socket that listens its name, and return it. Raises OSError."""
    final = path.removesuffix(_UNBORN.encode())
    os.rename(path, final)
    return final


def path_of(directory: str, name: bytes) -> bytes | None:
    """Where we find what a peer calls `name`; None for what is no such socket: a peer's word opens nothing else."""
    last = os.fsdecode(name).rpartition("/")[2]
    if not name.startswith(b"/") or not last.startswith(PEERS) or last.endswith(_UNBORN) or "\0" in last:
        return None
    path = os.fsencode(os.path.join(directory, last))
    return path if len(path) <= MAX_PATH_BYTES else None


def sweep(directory: str) -> int:
    """Remove sockets of ranks that were killed, some of them; how many."""
    swept = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if swept < MAX_SWEPT and name.startswith(PEERS) and not name.endswith(_UNBORN):
                swept += _remove_if_dead(os.path.join(directory, name))
    return swept


def _remove_if_dead(path: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return True
    return False


def _name(prefix: str = PEERS) -> str:
    return (prefix + secrets.token_hex(16))[:_NAME_CHARACTERS]
