"""Descriptors of one owner, and their end in a forked child.

A child made by fork shares its parent's connections: bytes it sent or read there would corrupt the parent's streams. So
it closes its copies of all descriptors at once. It does nothing else with them: `shutdown` would act on the connection
itself, and the loop's epoll set is shared with the parent. Where the child goes on in the loop's thread, the loop is
told to forget them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable

from asyncdist.concurrency.loop import close_in_forked_child, forget_closed, place_of, prepare_fork


class SocketSet:
    """All descriptors a mesh has open; `on_fork` is called in a forked child after they were closed there.

    `loop` is the one that watches them, and runs in this thread.
    """

    def __init__(self, on_fork: Callable[[], None], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._place = place_of(loop)
        self._sockets: set[socket.socket] = set()
        self._descriptors: set[int] = set()
        self._on_fork = on_fork
        close_in_forked_child(self)
        if loop is not None:
            prepare_fork(loop)

    def __del__(self) -> None:
        """The loop was closed before the mesh. Sockets close themselves then; numbers of descriptors do not."""
        for fd in self._descriptors:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __len__(self) -> int:
        return len(self._sockets)

    def add(self, sock: socket.socket) -> socket.socket:
        """Own `sock` and return it."""
        self._sockets.add(sock)
        return sock

    def close(self, sock: socket.socket) -> None:
        """Close `sock`; its readers and writers must be gone from the loop."""
        self._sockets.discard(sock)
        sock.close()

    def add_fd(self, fd: int) -> int:
        """Own a descriptor that is no socket, and return it."""
        self._descriptors.add(fd)
        return fd

    def close_fd(self, fd: int) -> None:
        """Close such a descriptor; its reader must be gone from the loop. Nothing happens if a fork closed it."""
        if fd in self._descriptors:
            self._descriptors.discard(fd)
            os.close(fd)

    def close_after_fork(self) -> None:
        """Close the child's descriptors. The socket objects are detached, so that they cannot close a reused number."""
        closed = {fd for fd in (sock.detach() for sock in self._sockets) if fd >= 0} | self._descriptors
        for fd in closed:
            os.close(fd)
        self._sockets.clear()
        self._descriptors.clear()
        self._on_fork()
        if self._loop is not None and self._place.thread == threading.get_ident():
            forget_closed(self._loop, closed)  # last, as readers go with it: theirs would act on the parent's memory
