"""Tells the ranks of this host which ranks the launchers have lost, and which are stopped.

The launcher runs no code of the user's, so it always hears of a lost host in time; its ranks hear of it over a Unix
socket. Whoever connects gets a line of JSON for each loss: `{"ranks": [[first, last + 1], ...], "why": text}`; and
one whenever others are stopped than before, or none: `{"stopped": [rank, ...]}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Final

from asyncdist_server.serving.sockets import peer_credentials

_BACKLOG: Final = 4096
"""As many ranks as a node may have: all connect at one moment, and one that is refused hears of no loss."""


class Losses:
    """The socket, until `close`. `address` is its name, where `@` stands for the zero byte of an abstract one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._folder: str | None = None
        if sys.platform == "linux":  # nothing is left behind after kill -9
            self.address = f"@asyncdist-{secrets.token_hex(16)}"
        else:
            self._folder = tempfile.mkdtemp(prefix="asyncdist-")
            self.address = os.path.join(self._folder, "losses")
        self._told: list[bytes] = []
        self._stopped = b""
        self._ranks: dict[socket.socket, int] = {}  # and their processes
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address.replace("@", "\0", 1) if self._folder is None else self.address)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)

    @property
    def processes(self) -> Iterable[int]:
        """Those that have connected: of all ranks of the attempt that have begun to use asyncdist."""
        return self._ranks.values()

    def tell(self, ranks: Sequence[tuple[int, int]], why: str) -> None:
        """Tell all ranks of the attempt that these ranges of ranks are lost; ranks that connect later are told too."""
        line = json.dumps({"ranks": ranks, "why": why}).encode() + b"\n"
        self._told.append(line)
        for rank in self._ranks:
            _send(rank, line)

    def tell_stopped(self, ranks: Sequence[int]) -> None:
        """Tell all ranks of the attempt which ones are stopped now; ranks that connect later are told too."""
        self._stopped = json.dumps({"stopped": ranks}).encode() + b"\n"
        for rank in self._ranks:
            _send(rank, self._stopped)

    def forget(self) -> None:
        """Forget the losses of the last attempt, and disconnect its ranks: another attempt begins."""
        self._told.clear()
        self._stopped = b""
        while self._ranks:
            self._ranks.popitem()[0].close()

    def close(self) -> None:
        """Stop listening."""
        self.forget()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            rank, _ = self._listener.accept()
            pid, user = peer_credentials(rank)
            if user != os.geteuid():  # an abstract name has no owner
                return rank.close()
            rank.setblocking(False)
            self._ranks[rank] = pid
            for line in filter(None, (*self._told, self._stopped)):
                _send(rank, line)


def _send(rank: socket.socket, line: bytes) -> None:
    with contextlib.suppress(OSError):  # it has ended, or reads nothing: a few lines always fit
        rank.send(line)
