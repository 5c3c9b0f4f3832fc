"""Connection: what one connection to a peer is to its link, whatever carries its bytes."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.protocol.peer import PeerCore

__all__ = ["MAX_CALL_FRAMES", "Connection"]

MAX_CALL_FRAMES: Final = 256
"""Frames handled in one callback: at some 3 us each, more would hold the loop for over a millisecond."""


class Connection(ABC):
    """Moves bytes between `core` and its peer until either side ends it; its socket tells when the peer has gone.

    `on_end(connection, error)` is called once, from the loop, with everything closed: `error` is None if the peer left
    (its GOODBYE came) or if we had said goodbye and it hung up. It is not called after `abort`.
    """

    __slots__ = (
        "_core",
        "_get_buffer",
        "_leaving",
        "_loop",
        "_on_end",
        "_shut",
        "_sock",
        "_updated",
        "bytes_received",
        "bytes_sent",
        "label",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        core: PeerCore,
        label: str,
        on_end: Callable[[Connection, Exception | None], None],
    ) -> None:
        self.label = label
        self.bytes_received = 0
        self.bytes_sent = 0
        self._loop = loop
        self._sock: socket.socket | None = sock
        self._core = core
        self._on_end = on_end
        self._get_buffer = core.get_buffer
        self._updated = core.buffer_updated
        self._leaving = False
        self._shut = False

    @abstractmethod
    def start(self) -> None:
        """Let bytes flow; what the core has queued goes out as soon as it can."""

    def leave(self) -> None:
        """Say goodbye behind everything posted, shut the sending side and read to the end; `on_end` follows then."""
        if self._sock is not None and not self._leaving:
            self._leaving = True
            self._say_goodbye()

    def abort(self) -> None:
        """Close everything now. Idempotent; calls nothing back."""
        self._release()

    @abstractmethod
    def forget(self) -> None:
        """In a forked child: the descriptors are closed already, and the loop must not be touched."""

    def _say_goodbye(self) -> None:
        self._core.goodbye()
        self._shut_when_done()

    def _took(self) -> None:
        """Something was read: it may have been the peer's goodbye, or all that ours waited for."""
        if self._core.left:
            self._end(None)
        elif self._leaving:
            self._shut_when_done()

    def _fail(self, error: Exception) -> None:
        """What came cannot be taken; unless the peer is to blame, the fault is ours and the loop hears of it."""
        if not isinstance(error, RemoteProtocolError):
            self._loop.call_exception_handler(
                {"message": f"a frame from {self.label} could not be handled", "exception": error}
            )
        self._end(error)

    def _shut_when_done(self) -> None:
        if self._sock is not None and self._core.goodbye_sent and not self._shut:
            self._shut = True
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                self._loop.call_soon(self._end, error)

    def _end(self, error: Exception | None) -> None:
        """Close and tell. After our goodbye it does not matter how the peer hangs up."""
        if self._release():
            said = self._core.goodbye_sent
            self._on_end(self, None if said and not isinstance(error, RemoteProtocolError) else error)

    @abstractmethod
    def _release(self) -> bool:
        """Close everything; False if that was done before."""
