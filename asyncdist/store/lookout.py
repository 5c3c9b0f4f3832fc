"""Lookout: for whoever asks a daemon on the same host one thing at a time, looking for the reply instead of sleeping.

To be woken takes about as long as the daemon needs to answer. So a task that has asked alone several times in a row
sends its request when it awaits the reply, and reads the socket until that is there. As soon as requests come from
several tasks, or several in a turn of the loop, they are gathered again, and nobody looks.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Final

from asyncdist.concurrency.spin import CATCH, MAX_SKIPPED, PATIENCE, TURN_S
from asyncdist_server.serving.running import served_here

if TYPE_CHECKING:
    from asyncdist.store.store_connection import Connection

__all__ = ["ALONE", "Lookout", "same_host"]

ALONE: Final = 4
"""Requests of one task, each alone, before it looks for the reply to the next."""


class Lookout:
    """Of one client. `alone()` says whether just one request is waiting to be sent, and none was before it."""

    __slots__ = (
        "_alone",
        "_connection",
        "_last_turn_s",
        "_limit_s",
        "_loop",
        "_misses",
        "_skip",
        "_skipped",
        "_streak",
        "_task",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_us: float, alone: Callable[[], bool]) -> None:
        self._loop = loop
        self._limit_s = CATCH * limit_us * 1e-6
        self._alone = alone
        self._connection: Connection | None = None
        self._task = 0
        self._streak = 0
        self._misses = 0
        self._skip = 0
        self._skipped = 0
        self._last_turn_s = 0.0

    def connected(self, connection: Connection, sock: socket.socket) -> None:
        """Look there from now on, if the daemon is on this host and can run meanwhile."""
        near = self._limit_s > 0 and (os.cpu_count() or 1) > 1 and same_host(sock)
        self._connection = connection if near and not served_here(sock.getpeername()[1]) else None

    def lost(self) -> None:
        """There is no connection any more."""
        self._connection = None

    def seek(self, reply: asyncio.Future[object]) -> bool:
        """Look for `reply`, which is being awaited, if that can pay; whether the task should let the loop turn now."""
        connection = self._connection
        if connection is None:
            return False
        task = id(asyncio.current_task(self._loop))
        if task != self._task or not self._alone():
            self._task, self._streak = task, 0
            return False
        self._streak += 1
        if self._streak <= ALONE:
            return False
        if self._skipped < self._skip:
            self._skipped += 1
            return False
        self._skipped = 0
        until_s = perf_counter() + self._limit_s
        connection.send()
        while connection.poll() and not reply.done():
            if perf_counter() >= until_s:
                self._misses += 1
                if self._misses >= PATIENCE:
                    self._skip = min(2 * self._skip + 1, MAX_SKIPPED)
                return False
        self._misses = self._skip = 0
        now_s = perf_counter()
        if now_s - self._last_turn_s < TURN_S:
            return False
        self._last_turn_s = now_s
        return True


def same_host(sock: object) -> bool:
    """Whether both ends of a connected socket have one address. No for what only plays a socket."""
    if not isinstance(sock, socket.socket):
        return False
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except (OSError, IndexError):
        return False
