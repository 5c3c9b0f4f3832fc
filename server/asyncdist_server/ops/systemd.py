"""Tells systemd how the daemon is: ready, stopping, alive. Says nothing where nobody listens (``NOTIFY_SOCKET``)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Final

BEATS_PER_TIMEOUT: Final = 3
"""Signs of life within the watchdog's time-out, so that a lost or a late one costs nothing."""


class Notifier:
    """Sends states to the service manager; `watch` keeps its watchdog quiet while the event loop runs.

    A socket that does not take a message changes nothing: the daemon serves on.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._timeout_s = _watchdog_timeout_s(environ)
        self._timer: asyncio.TimerHandle | None = None

    def send(self, *states: str) -> None:
        """Send states such as ``READY=1``."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(states).encode(), address)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send signs of life from `loop` from now on, if systemd asks for them."""
        if self._timeout_s is not None:
            self.send("WATCHDOG=1")
            self._timer = loop.call_later(self._timeout_s / BEATS_PER_TIMEOUT, self.watch, loop)

    def close(self) -> None:
        """Send no more signs of life."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _watchdog_timeout_s(environ: Mapping[str, str]) -> float | None:
    """Return the time-out after which systemd restarts the service, None if it does not watch this process."""
    usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 1e6
