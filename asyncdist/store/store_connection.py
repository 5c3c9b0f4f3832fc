"""Connection: frames in both directions between a client and the daemon, on a raw socket or inside TLS."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Final

from asyncdist.concurrency.loop import forget_closed
from asyncdist.store.byte_stream import ByteStream
from asyncdist_server.wire.messages import FrameReader, ProtocolError
from asyncdist_server.wire.tls import TLSStream

__all__ = ["Connection"]

RECEIVE_BYTES: Final = 64 * 1024
"""What one read takes at most: hundreds of replies, or a slice of a large value. Each connection has such a buffer, and
a process that simulates many ranks has many connections."""


class Connection:
    """Moves frames between a connected stream and its owner.

    `next_frame` is asked for what to send, and only when the socket takes it, so that nothing piles up here.
    `on_frame` gets each frame's payload, valid until it returns. `on_lost` is called once, not by `close`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stream: ByteStream,
        reader: FrameReader,
        next_frame: Callable[[], bytes | None],
        on_frame: Callable[[memoryview], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._socket = stream.socket
        self._tls = stream.tls
        self._reader = reader
        self._next_frame = next_frame
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._unsent: memoryview | None = None
        self._fd = self._socket.fileno()
        loop.add_reader(self._fd, self._on_readable)

    def send(self) -> None:
        """Send what there is to send, as far as the socket takes it now; the rest follows by itself."""
        if self._unsent is not None or self._fd < 0:
            return
        try:
            while (frame := self._next_frame()) is not None:
                if not self._start_sending(frame if self._tls is None else self._tls.encrypt(frame)):
                    return
        except OSError as error:
            self._lose(error)

    def _start_sending(self, data: bytes) -> bool:
        """Send; false if some of it has to wait until the socket takes it."""
        sent = self._send_some(data)
        if sent == len(data):
            return True
        self._unsent = memoryview(data)[sent:]
        self._loop.add_writer(self._fd, self._on_writable)
        return False

    def _send_some(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    def _on_writable(self) -> None:
        assert self._unsent is not None
        try:
            self._unsent = self._unsent[self._send_some(self._unsent) :]
        except OSError as error:
            self._lose(error)
            return
        if not self._unsent:
            self._unsent = None
            self._loop.remove_writer(self._fd)
            self.send()

    def poll(self) -> bool:
        """Take what has come, without waiting to be told; false once the connection is gone."""
        if self._fd >= 0:
            self._on_readable()
        return self._fd >= 0

    def _on_readable(self) -> None:
        try:
            count = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error)
            return
        if not count:
            self._lose(ConnectionResetError("the store closed the connection"))
            return
        data: memoryview | bytes = self._buffer[:count]
        if self._tls is not None:
            try:
                data = self._decrypt(self._tls, count)
            except OSError as error:  # those of TLS are such
                self._lose(error)
                return
        try:
            for payload in self._reader.feed(data):
                self._on_frame(payload)
            if self._reader.error is not None and self._fd >= 0:
                raise self._reader.error
        except (ProtocolError, ConnectionResetError) as error:
            self._lose(error)
            return
        if self._tls is not None and self._tls.ended and self._fd >= 0:
            self._lose(ConnectionResetError("the store closed the connection"))

    def _decrypt(self, tls: TLSStream, count: int) -> bytes:
        """Return what the first `count` bytes of the buffer say, and send what TLS answers to them."""
        plain = tls.receive(self._buffer[:count])
        records = tls.take_records()
        if records and self._unsent is not None:
            self._unsent = memoryview(b"".join((self._unsent, records)))
        elif records:
            self._start_sending(records)
        return plain

    def _lose(self, error: Exception) -> None:
        self.close()
        self._on_lost(error)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            if self._tls is not None and self._unsent is None:
                with contextlib.suppress(OSError):
                    self._socket.send(self._tls.close())  # that nothing follows; the end of the socket says it too
            self._socket.close()
            self._fd = -1

    def close_after_fork(self) -> None:
        """Close this process's copy, and then have the loop forget it: its selector is still shared with the parent."""
        if self._fd >= 0:
            self._socket.close()
            if self._thread == threading.get_ident():
                forget_closed(self._loop, (self._fd,))
            self._fd = -1
