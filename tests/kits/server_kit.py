"""Clients for tests of the store daemon: one that talks to a session in memory, one on a blocking socket."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Any

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.session import Session
from asyncdist_server.serving.user_token import find_user_token
from asyncdist_server.torch.session import TorchSession
from asyncdist_server.wire.auth import ClientHandshake, store_context
from asyncdist_server.wire.messages import Encoder, FrameReader, Hello, Welcome, decode_replies, decode_welcome

Reply = tuple[int, int, Any]
CLIENT_ID = b"client-0123456-x"


def everything(session: Session | TorchSession) -> bytes:
    """Return all that a session has to say now, as to a client that reads at once."""
    said = session.take_output()
    while session.has_output:
        said += session.take_output()
    return b"".join(said)


class MemoryClient:
    """A client and the session it talks to; every method returns what the session answered."""

    def __init__(
        self, engine: StoreEngine, token: str | None = None, namespace: str = "job", client_id: bytes = CLIENT_ID
    ) -> None:
        self.engine = engine
        self.now = 0.0
        self.outputs = 0
        self.encoder = Encoder()
        self.reader = FrameReader()
        self.session = Session(engine, token, self._count_output, Encoder())
        self.handshake = ClientHandshake(token, store_context(namespace, 0))
        self.client_id = client_id
        self.received = 0
        self.next_id = 1

    def _count_output(self) -> None:
        self.outputs += 1

    def send(self, data: bytes) -> bytes:
        """Give the session bytes and return all it says, turn after turn."""
        self.session.receive(data, self.now)
        output = everything(self.session)
        while self.session.busy:
            self.session.resume(self.now)
            output += everything(self.session)
        return output

    def prove(self) -> None:
        """Do the handshake."""
        answer = self.handshake.receive(self.send(self.handshake.start()))
        self.handshake.receive(self.send(answer))
        assert self.handshake.done

    def open(self, pending: tuple[int, ...] = ()) -> Welcome:
        """Do handshake and hello."""
        self.prove()
        (payload,) = self.reader.feed(self.send(self.encoder.hello(Hello(self.client_id, pending))))
        return decode_welcome(payload)

    def frame(self, *requests: tuple[Any, ...]) -> bytes:
        """Return requests, given without ids, as one frame."""
        numbered = [(self.next_id + offset, *request) for offset, request in enumerate(requests)]
        self.next_id += len(requests)
        return self.encoder.requests(self.received, numbered)

    def replies(self, data: bytes) -> list[Reply]:
        """Return the replies in what the session said."""
        found: list[Reply] = []
        for payload in self.reader.feed(data):
            self.received += 1
            found += decode_replies(payload)
        return found

    def ask(self, *requests: tuple[Any, ...]) -> list[Reply]:
        """Send requests as one frame and return the replies that come at once."""
        return self.replies(self.send(self.frame(*requests)))


class SocketClient:
    """A blocking client; every read fails after ten seconds."""

    def __init__(
        self,
        port: int,
        token: str | None = None,
        *,
        namespace: str = "job",
        client_id: bytes = CLIENT_ID,
        pending: tuple[int, ...] = (),
    ) -> None:
        self.encoder = Encoder()
        self.reader = FrameReader()
        self.received = 0
        self.next_id = 1
        self._replies: list[Reply] = []
        self.socket = socket.create_connection(("127.0.0.1", port), 10.0)
        try:
            self._handshake(token, namespace)
            self.socket.sendall(self.encoder.hello(Hello(client_id, pending)))
            payloads: list[memoryview] = []
            while not payloads:
                payloads = self.reader.feed(self._read())
            self.welcome = decode_welcome(payloads[0])
        except BaseException:
            self.socket.close()
            raise

    def _handshake(self, token: str | None, namespace: str) -> None:
        own = token or find_user_token()
        handshake = ClientHandshake(own, store_context(namespace), optional=token is None)
        self.socket.sendall(handshake.start())
        while not handshake.done:
            self.socket.sendall(handshake.receive(self._read()))

    def _read(self) -> bytes:
        data = self.socket.recv(1 << 18)
        if not data:
            raise EOFError("the daemon closed the connection")
        return data

    def send(self, *requests: tuple[Any, ...]) -> None:
        """Send requests, given without ids, as one frame."""
        numbered = [(self.next_id + offset, *request) for offset, request in enumerate(requests)]
        self.next_id += len(requests)
        self.socket.sendall(self.encoder.requests(self.received, numbered))

    def reply(self) -> Reply:
        """Return the next reply."""
        while not self._replies:
            for payload in self.reader.feed(self._read()):
                self.received += 1
                self._replies += decode_replies(payload)
        return self._replies.pop(0)

    def ask(self, *request: Any) -> Any:
        """Return the value of one request that must succeed."""
        self.send(request)
        request_id, code, value = self.reply()
        assert (request_id, code) == (self.next_id - 1, 0), (code, value)
        return value

    def closed_by_daemon(self) -> bool:
        """Return whether nothing but the end of the connection is left to read."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def __enter__(self) -> SocketClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
