"""TLS in front of a `Connection`: a protocol to the socket's transport, a transport to the connection.

What a client speaks is known by its first byte. TLS is taken off here. asyncdist's own protocol in the clear is
refused by name. All else is the connection's to judge, in the clear: torch's clients, who have no TLS and are served on
ports of their own, and strangers. The connection has been admitted before, and its one timer bounds the TLS handshake
together with the token's.
"""

from __future__ import annotations

import asyncio
import enum
import ssl
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from asyncdist_server.wire.auth import MAGIC, TLS_HANDSHAKE_BYTE, Refusal
from asyncdist_server.wire.tls import TLSStream, describe_failure

if TYPE_CHECKING:
    from asyncdist_server.serving.connection import Connection


class _Mode(enum.Enum):
    NEW = enum.auto()
    """Nothing has come yet, so what is written now is a refusal, in the clear: a client knows it by its first byte."""
    PLAIN = enum.auto()
    TLS = enum.auto()
    OVER = enum.auto()
    """The end is written, or TLS has failed: what comes is read only to let the client read that."""


class TLSConnection(asyncio.Protocol, asyncio.Transport):
    """The shell around one `Connection` of a daemon with a certificate. See the module's docstring."""

    def __init__(self, connection: Connection, context: ssl.SSLContext) -> None:
        asyncio.Transport.__init__(self)
        self._connection = connection
        self._context = context
        self._mode = _Mode.NEW
        self._tls: TLSStream | None = None
        self._transport: asyncio.Transport

    # ---- a protocol to the socket's transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hand the connection on at once, so that it counts and its time runs."""
        self._transport = cast("asyncio.Transport", transport)
        self._connection.connection_made(self)

    def data_received(self, data: bytes) -> None:
        """Decrypt what came and hand it on."""
        if self._mode is _Mode.NEW:
            self._recognize(data[0])
        if self._tls is not None and self._mode is _Mode.TLS:
            self._receive(self._tls, data)
        elif self._mode is _Mode.PLAIN:
            self._connection.data_received(data)

    def _recognize(self, first_byte: int) -> None:
        if first_byte == TLS_HANDSHAKE_BYTE:
            self._mode = _Mode.TLS
            self._tls = TLSStream(self._context, server_side=True)
        elif first_byte == MAGIC[0]:
            self._connection.refuse(Refusal.TLS_REQUIRED)
            self._mode = _Mode.OVER
        else:
            self._mode = _Mode.PLAIN

    def _receive(self, tls: TLSStream, data: bytes) -> None:
        try:
            plain = tls.receive(data)
        except ssl.SSLError as error:
            self._write_raw(tls.take_records())
            self._mode = _Mode.OVER
            self._connection.refuse(Refusal.MALFORMED, f"TLS failed: {describe_failure(error)}")
            return
        self._write_raw(tls.take_records())
        if plain:
            self._connection.data_received(plain)
        if tls.ended and self._mode is _Mode.TLS and not self._connection.eof_received():
            self.close()

    def eof_received(self) -> bool | None:
        """Pass on that nothing more will come."""
        return self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass on that the connection is gone."""
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pass on that the client reads slowly."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Pass on that it has caught up."""
        self._connection.resume_writing()

    # ---- a transport to the connection

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and write."""
        if self._tls is not None and self._mode is _Mode.TLS:
            # Before the handshake is done there is only one thing to say, a refusal, and no way to say it.
            if self._tls.established:
                self._write_raw(self._tls.encrypt(data))
        elif self._mode is not _Mode.OVER:
            self._transport.write(data)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Encrypt and write, in records as large as can be."""
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        """Say that nothing follows, inside TLS and outside."""
        if self._tls is not None and self._mode is _Mode.TLS:
            self._write_raw(self._tls.close())
        self._mode = _Mode.OVER
        self._transport.write_eof()

    def close(self) -> None:
        """Say that nothing follows and close once that is written."""
        if self._tls is not None and self._mode is _Mode.TLS:
            self._write_raw(self._tls.close())
        self._mode = _Mode.OVER
        self._transport.close()

    def abort(self) -> None:
        """Cut the connection at once."""
        self._transport.abort()

    def pause_reading(self) -> None:
        """Stop reading from the socket."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on reading from the socket."""
        self._transport.resume_reading()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes, encrypted, are not sent yet."""
        return self._transport.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set from how much unsent on writing is paused."""
        self._transport.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what is known of the socket."""
        return self._transport.get_extra_info(name, default)

    def _write_raw(self, records: bytes) -> None:
        if records:
            self._transport.write(records)
