"""Clients that wait for one key each on a connection of their own: asyncdist's protocol, torch's, and Redis'.

Bare protocols without a library behind them: ten thousand of them are to cost the machine no more than the server does.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from typing import Final, cast

from asyncdist_server.torch.wire import FIRST_BYTE, VALIDATE_MAGIC, Query
from asyncdist_server.wire import messages
from asyncdist_server.wire.auth import AuthenticationError, ClientHandshake, store_context

PING_NONCE: Final = 0x01020304
NAMESPACE: Final = "bench"


class Fleet:
    """The waiting connections of one process: how many are open, wait and were woken, and when the last one was."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.opened = self.armed = self.woken = self.lost = 0
        self.last_woken_ns = 0
        self.changed = asyncio.Event()
        self._wanted, self._enough = "opened", size  # what is being waited for

    def note_woken(self) -> None:
        self.woken += 1
        self.last_woken_ns = time.perf_counter_ns()
        self._note()

    def note_armed(self) -> None:
        """Count a connection whose wait the server has taken in."""
        self.armed += 1
        self._note()

    def note_opened(self) -> None:
        self.opened += 1
        self._note()

    def note_lost(self) -> None:
        self.lost += 1
        self._note()

    def _note(self) -> None:
        if getattr(self, self._wanted) + self.lost >= self._enough:
            self.changed.set()

    async def until(self, name: str, count: int, timeout_s: float) -> bool:
        """Wait until so many connections are `name` or lost; false if one is lost or it took too long."""
        self._wanted, self._enough = name, count
        try:
            async with asyncio.timeout(timeout_s):
                while getattr(self, name) + self.lost < count:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return False
        return not self.lost


class WaitingClient(asyncio.Protocol):
    """One connection; each wire says how it opens, waits and is woken."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.transport: asyncio.Transport
        self.gone = False
        """Whether nothing can be said any more."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by name
        self.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it, unless it was closed here."""
        if not self.gone:
            self.gone = True
            self.fleet.note_lost()

    def close(self) -> None:
        if not self.gone:
            self.gone = True
            self.transport.abort()

    def begin(self) -> None:
        """Say what comes first."""
        raise NotImplementedError

    def arm(self, key: bytes) -> None:
        """Wait for `key`, and ask for a sign that the server knows."""
        raise NotImplementedError

    def set(self, key: bytes) -> None:
        """Wake everybody who waits for `key`."""
        raise NotImplementedError


class NativeClient(WaitingClient):
    """asyncdist's own protocol."""

    def begin(self) -> None:
        self._handshake: ClientHandshake | None = ClientHandshake(None, store_context(NAMESPACE))
        self._reader = messages.FrameReader()
        self._encoder = messages.Encoder()
        self._welcomed = False
        self._last_id = self._received = self._waiting_id = 0
        self.transport.write(self._handshake.start())

    def data_received(self, data: bytes) -> None:
        if self._handshake is not None:
            try:
                self.transport.write(self._handshake.receive(data))
            except AuthenticationError:
                self.transport.abort()  # refused
                return
            if not self._handshake.done:
                return
            data = self._handshake.leftover
            self._handshake = None
            self.transport.write(self._encoder.hello(messages.Hello(os.urandom(messages.CLIENT_ID_BYTES))))
        for payload in self._reader.feed(data):
            if not self._welcomed:
                messages.decode_welcome(payload)
                self._welcomed = True
                self.fleet.note_opened()
                continue
            self._received += 1
            for request_id, code, _ in messages.decode_replies(payload):
                if request_id == self._waiting_id and code == messages.OK:
                    self.fleet.note_woken()
                elif request_id == self._waiting_id + 1:
                    self.fleet.note_armed()

    def _ask(self, *requests: tuple[object, ...]) -> None:
        numbered = [(self._last_id + number, *request) for number, request in enumerate(requests, 1)]
        self._last_id += len(requests)
        self.transport.write(self._encoder.requests(self._received, numbered))

    def arm(self, key: bytes) -> None:
        self._waiting_id = self._last_id + 1
        self._ask((messages.WAIT, (key,), None), (messages.PING,))

    def set(self, key: bytes) -> None:
        self._ask((messages.SET, key, b"go"))


def _blob(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


class TorchClient(WaitingClient):
    """torch's TCPStore protocol."""

    def begin(self) -> None:
        """Say the magic number, and see that the server is there."""
        self._asked = ["opened"]
        self.transport.write(bytes([FIRST_BYTE]) + struct.pack("<I", VALIDATE_MAGIC) + self._ping())

    def _ping(self) -> bytes:
        return bytes([Query.PING]) + struct.pack("<I", PING_NONCE)

    def data_received(self, data: bytes) -> None:
        """Take the echoes of pings, and the zero byte that ends a wait."""
        pong = struct.pack("<I", PING_NONCE)
        while data:
            if data.startswith(pong):
                data = data[len(pong) :]
                (self.fleet.note_opened if self._asked.pop() == "opened" else self.fleet.note_armed)()
            else:
                data = data[1:]
                self.fleet.note_woken()

    def arm(self, key: bytes) -> None:
        """Wait, and ping meanwhile."""
        self._asked.append("armed")
        self.transport.write(bytes([Query.WAIT]) + struct.pack("<Q", 1) + _blob(key) + self._ping())

    def set(self, key: bytes) -> None:
        self.transport.write(bytes([Query.SET]) + _blob(key) + _blob(b"go"))


class RedisClient(WaitingClient):
    """Redis, which has no waiting for a key: a channel to which everybody subscribes, and one message."""

    def begin(self) -> None:
        self._buffer = b""
        self.transport.write(b"PING\r\n")

    def data_received(self, data: bytes) -> None:
        """Look for the three answers that can come; they never begin or end within one another."""
        self._buffer += data
        for sign, note in (
            (b"+PONG\r\n", self.fleet.note_opened),
            (b"subscribe\r\n", self.fleet.note_armed),
            (b"$2\r\ngo\r\n", self.fleet.note_woken),
        ):
            _, found, rest = self._buffer.rpartition(sign)
            if found:
                self._buffer = rest
                note()

    def arm(self, key: bytes) -> None:
        self.transport.write(b"SUBSCRIBE " + key + b"\r\n")

    def set(self, key: bytes) -> None:
        self.transport.write(b"PUBLISH " + key + b" go\r\n")


WIRES: Final[dict[str, type[WaitingClient]]] = {"native": NativeClient, "torch": TorchClient, "redis": RedisClient}
