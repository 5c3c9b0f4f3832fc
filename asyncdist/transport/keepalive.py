"""Keepalive: whether the hosts of peers are still there, as the kernels know it.

A process that ends closes its connections, and its peers hear of it at once. A host that loses its power or its network
says nothing. So the kernel probes connections that are idle; and those with data under way, which it would send again
for a quarter of an hour, are watched: it is asked now and then when anything was acknowledged.

Acknowledging is done by the peer's kernel, not by its process: a rank that computes for an hour without returning to
its loop, has no room left for messages, or is stopped in a debugger, is there. (TCP_USER_TIMEOUT would not do: it also
ends connections to a live peer whose receive window stays closed, and such a rank, with a large message on its way to
it, looks just like that.)
"""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

DEFAULT_KEEPALIVE_S: Final = 30.0
"""Longer than a switch takes to start again, or a virtual machine to move."""
MIN_KEEPALIVE_S: Final = 1.0
"""The kernel counts whole seconds."""
MAX_KEEPALIVE_S: Final = 86400.0
"""A day; the kernel takes no more than nine hours between two probes."""
PATH_SILENT_S: Final = 2.0
"""Of several connections of a pair, the one that is silent for so long is given up: three packets lost in a row (0.2 +
0.4 + 0.8 s until each is sent again) do not suffice, and what it carried waits no longer."""
UNLIMITED: Final = (15, 5, 6)
"""Without a limit: seconds idle before the first probe, seconds between two, how many may stay unanswered."""

_INFO: Final = struct.Struct("<3xB20xI28xI")
"""Of Linux's tcp_info: probes without an answer, segments not acknowledged, milliseconds since the last one was."""
_CAN_ASK: Final = sys.platform == "linux" and hasattr(socket, "TCP_INFO")


def keepalive_from_environ(environ: Mapping[str, str]) -> float:
    """Read ASYNCDIST_KEEPALIVE_S: seconds, 0 for no limit. Raises ValueError."""
    text = environ.get("ASYNCDIST_KEEPALIVE_S", "").strip()
    if not text:
        return DEFAULT_KEEPALIVE_S
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = -1.0
    if limit_s and not MIN_KEEPALIVE_S <= limit_s <= MAX_KEEPALIVE_S:
        raise ValueError(
            f"ASYNCDIST_KEEPALIVE_S={text!r}: give seconds from {MIN_KEEPALIVE_S:g} to {MAX_KEEPALIVE_S:g}, or 0 for "
            "no limit"
        )
    return limit_s


def set_keepalive(sock: socket.socket, limit_s: float) -> None:
    """Have the kernel end an idle TCP connection whose other host has answered nothing for about `limit_s`."""
    idle_s, interval_s, probes = UNLIMITED
    if limit_s:
        idle_s = max(1, round(limit_s / 3))
        interval_s = max(1, round(limit_s / 6))
        probes = max(1, round((limit_s - idle_s) / interval_s))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle: int = getattr(socket, "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE")
    sock.setsockopt(socket.IPPROTO_TCP, idle, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)


@dataclass
class _Watched:
    """One connection: since when something is to be acknowledged, and nothing has been."""

    sock: socket.socket
    on_silent: Callable[[Exception], None]
    waiting_since_s: float = math.inf


class KeepaliveWatch:
    """Of one mesh. A connection's `on_silent(error)` is called once, from the loop, when its host counts as gone.

    On systems that do not say what has been acknowledged it does nothing, and the kernel's own limits hold.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._loop = loop
        self._limit_s = limit_s if _CAN_ASK else 0.0
        self._watched: dict[object, _Watched] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: object, sock: socket.socket, on_silent: Callable[[Exception], None]) -> None:
        """Watch the TCP socket of `connection`, until `remove`."""
        if self._limit_s:
            self._watched[connection] = _Watched(sock, on_silent)
            if self._timer is None:
                self._timer = self._loop.call_later(self._limit_s / 6, self._look)

    def remove(self, connection: object) -> None:
        """Watch it no more. Idempotent."""
        self._watched.pop(connection, None)
        if not self._watched and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        now_s = self._loop.time()
        self._timer = self._loop.call_later(self._limit_s / 6, self._look)
        for connection, watched in list(self._watched.items()):
            if connection in self._watched and self._is_silent(watched, now_s):
                self.remove(connection)
                watched.on_silent(self._silence())

    def explained(self, error: Exception) -> Exception:
        """Return what broke a connection, in the words of `_look` where the kernel's own probes were unanswered."""
        return self._silence() if isinstance(error, OSError) and error.errno == errno.ETIMEDOUT else error

    def _silence(self) -> TimeoutError:
        lasted = f" for {self._limit_s:g} s" if self._limit_s else ""
        return TimeoutError(
            f"its host has acknowledged nothing{lasted}, so it is down or cut off (ASYNCDIST_KEEPALIVE_S)"
        )

    def _is_silent(self, watched: _Watched, now_s: float) -> bool:
        try:
            probes, unacknowledged, silent_ms = _INFO.unpack(
                watched.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            )
        except OSError:
            return False  # it is being closed
        if not probes and not unacknowledged:
            watched.waiting_since_s = math.inf
        elif now_s - silent_ms / 1000 > watched.waiting_since_s or watched.waiting_since_s == math.inf:
            watched.waiting_since_s = now_s  # what we wait for may have been sent just now, whatever came before
        return now_s - watched.waiting_since_s >= self._limit_s
