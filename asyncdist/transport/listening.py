"""Sockets that a rank listens on, for its peers and for whoever asks what it does."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Final

from asyncdist.transport.addresses import unix_text
from asyncdist.transport.socket_dir import PEERS, new_path, publish, sweep

BACKLOG: Final = 4096
"""Ranks of a large world may all dial one of them in the same instant; the kernel cuts this to its own limit."""


def listen_tcp(ip: str, ports: Sequence[int] | None) -> socket.socket:
    """Listen on a free port of `ports`, or on any: tried from a random one on, as ranks of a host start at once.

    The socket does not block. Raises OSError.
    """
    ports = ports or (0,)
    first = random.randrange(len(ports))
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    for port in (*ports[first:], *ports[:first]):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if port:  # one that a rank used a minute ago is free
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            _listen(sock, (ip, port))
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE or not port:
                raise
        else:
            return sock
    where = f"ASYNCDIST_PORT_RANGE={ports[0]}-{ports[-1]}"
    raise OSError(errno.EADDRINUSE, f"cannot listen on {ip}: every port of {where} is in use")


def listen_unix(directory: str, prefix: str = PEERS) -> tuple[socket.socket, bytes, Callable[[], None]]:
    """Listen on a Unix socket nobody can guess; returns it, its name, and what removes its file. Raises OSError.

    In `directory`, if there is one; else abstract on Linux, so that nothing is left behind after kill -9; else in a
    directory of mode 0700. The name begins with `prefix`.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        if directory:
            sweep(directory)
            path = new_path(directory, prefix)
            _listen(sock, path)
            name = publish(path)
            remove = functools.partial(_unlink, name)
        elif sys.platform == "linux":
            name = b"\0" + prefix.encode() + secrets.token_hex(16).encode()
            _listen(sock, name)
            remove = functools.partial(_unlink, b"")
        else:
            folder = tempfile.mkdtemp(prefix=prefix)
            name = os.fsencode(os.path.join(folder, "peer"))
            remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
            _listen(sock, name)
        undo.pop_all()
    return sock, name, remove


def _unlink(path: bytes) -> None:
    if path:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _listen(sock: socket.socket, address: tuple[str, int] | bytes) -> None:
    try:
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        where = unix_text(address) if isinstance(address, bytes) else address[0]
        raise OSError(error.errno, f"cannot listen on {where}: {error.strerror}") from None
