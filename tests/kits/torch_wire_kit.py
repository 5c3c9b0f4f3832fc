"""Clients of torch's store protocol for tests without torch: one that talks to a session in memory, one on a socket."""

from __future__ import annotations

import os
import socket
import struct
from types import TracebackType

from server_kit import everything

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.torch.namespaces import TORCH_MEMORY_PERCENT, TorchNamespaces
from asyncdist_server.torch.session import TorchSession
from asyncdist_server.torch.wire import Query

PORT = 29500
VALIDATE = bytes.fromhex("00cef7853c")
WAITED = b"\x00"
CANCELED = b"\x01"


def blob(value: bytes) -> bytes:
    """A string with its length."""
    return struct.pack("<Q", len(value)) + value


def number(value: int) -> bytes:
    """An integer."""
    return struct.pack("<q", value)


def query(kind: Query, *fields: bytes | int | list[bytes]) -> bytes:
    """A request: byte strings with their lengths, integers, and lists with their counts."""
    request = bytes([kind])
    for field in fields:
        if isinstance(field, int):
            request += number(field)
        elif isinstance(field, bytes):
            request += blob(field)
        else:
            request += number(len(field)) + b"".join(map(blob, field))
    return request


class World:
    """An engine, its torch namespaces, and a clock that tests set."""

    def __init__(
        self,
        engine: StoreEngine | None = None,
        linger_s: float = 0.0,
        memory_percent: int = TORCH_MEMORY_PERCENT,
    ) -> None:
        self.engine = engine or StoreEngine(b"i" * 16)
        self.namespaces = TorchNamespaces(self.engine, linger_s, memory_percent)
        self.now = 0.0

    def client(self, port: int = PORT) -> MemoryTorchClient:
        """A client that has said the magic number."""
        client = MemoryTorchClient(self, port)
        assert client.send(VALIDATE) == b""
        return client

    def advance(self, seconds: float) -> None:
        """Let time pass and do what is due."""
        self.now += seconds
        self.namespaces.expire(self.now)
        self.engine.expire(self.now)


class MemoryTorchClient:
    """A session without a connection; `send` returns what it answers at once, `heard` what it says unasked."""

    def __init__(self, world: World, port: int = PORT) -> None:
        self.world = world
        self.notices = 0
        self.session = TorchSession(world.namespaces.of_port(port), self._notice)

    def _notice(self) -> None:
        self.notices += 1

    def send(self, data: bytes) -> bytes:
        """Give the session bytes and return all it says, turn after turn."""
        self.session.receive(data, self.world.now)
        output = self.heard()
        while self.session.busy:
            self.session.resume(self.world.now)
            output += self.heard()
        return output

    def ask(self, kind: Query, *fields: bytes | int | list[bytes]) -> bytes:
        """Send one request and return the answer that comes at once."""
        assert not self.session.closing
        return self.send(query(kind, *fields))

    def heard(self) -> bytes:
        """What the session has said since."""
        return everything(self.session)

    def leave(self) -> None:
        """Close the connection."""
        self.session.close(self.world.now)


class SocketTorchClient:
    """A blocking client; every read fails after ten seconds."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 10.0)
        nonce = struct.pack("<I", os.getpid())
        self.socket.sendall(VALIDATE + bytes([Query.PING]) + nonce)
        assert self.read(4) == nonce

    def read(self, size: int) -> bytes:
        """Exactly so many bytes; EOFError if the daemon closes."""
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def send(self, kind: Query, *fields: bytes | int | list[bytes]) -> None:
        """Send one request."""
        self.socket.sendall(query(kind, *fields))

    def string(self) -> bytes:
        """Read a string."""
        return self.read(struct.unpack("<Q", self.read(8))[0])

    def get(self, key: bytes) -> bytes:
        """Torch's get without the wait."""
        self.send(Query.GET, key)
        return self.string()

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def __enter__(self) -> SocketTorchClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
