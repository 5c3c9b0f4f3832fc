"""Connections of the fuzzer: each says what it has to say and hears the daemon out."""

from __future__ import annotations

import asyncio

from fuzz_daemon import TOKEN
from fuzz_frames import HandshakeFrames

from asyncdist_server.wire.auth import AuthenticationError, ClientHandshake, Refusal, store_context
from asyncdist_server.wire.messages import Encoder, FrameReader, Hello, ProtocolError, decode_replies

FUZZED_JOB = "fuzzed"


class Door(asyncio.Protocol):
    """One connection: says what it has to say, and hears the daemon out."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.finished = False
        """Whether this side has said everything: then an end is none of the daemon's making."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write_eof")
        self.transport = transport  # type: ignore[assignment]  # uvloop's is of no class of asyncio's

    def finish(self, data: bytes) -> None:
        """Send the last of it."""
        self.transport.write(data)
        if not self.transport.is_closing():
            self.transport.write_eof()
        self.finished = True

    def fail(self, problem: str) -> None:
        """End the run: this is the daemon's fault."""
        if not self.closed.done():
            self.closed.set_exception(AssertionError(problem))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class NativeDoor(Door):
    """Proves the token, says hello, then the batch, and once its last probe is answered, the last frame.

    `spoil` says which message of the handshake is not what it should be.
    """

    token = TOKEN

    def __init__(
        self,
        client_id: bytes,
        batch: bytes = b"",
        last_probe: int = 0,
        last: bytes = b"",
        spoil: tuple[int, HandshakeFrames] | None = None,
    ) -> None:
        super().__init__()
        self.answered: set[int] = set()
        self.late = False
        """Whether it was refused because this side was too slow: other processes want the cores."""
        self._batch = batch
        self._last_probe = last_probe
        self._last = last
        self._spoil = spoil
        self._stage = 0
        self._handshake: ClientHandshake | None = ClientHandshake(self.token, store_context(FUZZED_JOB, 1))
        self._hello = Encoder().hello(Hello(client_id))
        self._reader = FrameReader()
        self._welcomed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._handshake is not None
        self._say(self._handshake.start())

    def _say(self, message: bytes) -> None:
        """Send the next message of the handshake, or what comes in its place, which is the last then."""
        if self._spoil is not None and self._stage == self._spoil[0]:
            self.finish(self._spoil[1].spoil(message))
        else:
            self.transport.write(message)
        self._stage += 1

    def data_received(self, data: bytes) -> None:
        try:
            if self._handshake is not None:
                if self.finished:
                    return
                answer = self._handshake.receive(data)
                if answer:
                    self._say(answer)
                if not self._handshake.done or self.finished:
                    return
                data, self._handshake = self._handshake.leftover, None
                self._say(self._hello)
                if not self.finished:
                    self.transport.write(self._batch)
            for payload in self._reader.feed(data):
                if self._welcomed:
                    self.answered.update(reply[0] for reply in decode_replies(payload))
                self._welcomed = True
            if self._last_probe in self.answered and not self.finished:
                self.finish(self._last)
        except AuthenticationError as error:
            self.late = error.refusal is Refusal.TIMEOUT
            if not self.late and self._spoil is None:
                self.fail(f"the daemon refuses a client that does no wrong: {error}")
        except ProtocolError as error:
            self.fail(f"the daemon breaks its own protocol: {error}")


class TorchDoor(Door):
    def __init__(self, opening: bytes, batch: bytes) -> None:
        super().__init__()
        self.heard = bytearray()
        self._data = opening + batch

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.finish(self._data)

    def data_received(self, data: bytes) -> None:
        self.heard += data
