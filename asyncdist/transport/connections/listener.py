"""The sockets that peers connect to: accept, hear the hello, hand over the peers that prove theirs.

Peers that connect before `accept` is called wait in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from typing import Final

from asyncdist.concurrency import trace as events
from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.addresses import Endpoint, endpoint_text, unix_text
from asyncdist.transport.connections.connection import set_stream_options
from asyncdist.transport.connections.handshake import Handshake
from asyncdist.transport.context import MeshContext
from asyncdist.transport.listening import listen_tcp, listen_unix
from asyncdist.transport.protocol.hello import ListenerHello

ACCEPT_BATCH: Final = 64
"""Connections accepted in one callback, so that a burst does not hold the loop."""
EXHAUSTED_PAUSE_S: Final = 0.1
"""Wait before accepting again when descriptors or memory ran out; the readiness would otherwise spin the loop."""
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """Listening sockets of one mesh. `on_peer` gets each authenticated hello, still to be answered, and owns it."""

    def __init__(self, context: MeshContext, on_peer: Callable[[Handshake[ListenerHello]], None]) -> None:
        self._context = context
        self._on_peer = on_peer
        self._sockets: list[socket.socket] = []
        self._half_open: set[Handshake[ListenerHello]] = set()
        self._unix = b""
        self._remove_unix: Callable[[], None] = lambda: None
        self._paused = True  # until `accept`
        self._resume: asyncio.TimerHandle | None = None
        self.refused = 0

    def open_tcp(self, ips: Sequence[str]) -> tuple[Endpoint, ...]:
        """Listen on a free port of each address; returns the endpoints. Raises OSError: then `close` is due."""
        return tuple((ip, self._open_port(ip)) for ip in ips)

    def _open_port(self, ip: str) -> int:
        sock = self._context.sockets.add(listen_tcp(ip, self._context.config.ports))
        self._sockets.append(sock)
        return int(sock.getsockname()[1])

    def open_unix(self) -> bytes:
        """Listen on a Unix socket nobody can guess; returns its name. Raises OSError: then `close` is due."""
        sock, self._unix, self._remove_unix = listen_unix(self._context.config.socket_dir)
        self._sockets.append(self._context.sockets.add(sock))
        return self._unix

    def accept(self) -> None:
        """Take connections from now on."""
        self._unpause()

    def close(self) -> None:
        """Close listeners and every connection that has not proven itself. Idempotent."""
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        for sock in self._sockets:
            if sock.fileno() >= 0:
                self._context.loop.remove_reader(sock.fileno())
            self._context.sockets.close(sock)
        self._sockets.clear()
        for handshake in self._half_open:
            handshake.close()
        self._half_open.clear()
        self._remove_unix()

    def _acceptable(self, listening: socket.socket) -> None:
        for _ in range(ACCEPT_BATCH):
            if len(self._half_open) >= self._context.config.max_half_open:
                self._pause()
                return
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    events.info("cannot accept a peer now: %s", error)
                    self._pause()
                    self._resume = self._context.loop.call_later(EXHAUSTED_PAUSE_S, self._unpause)
                    return
                continue  # that connection ended before it was accepted
            self._begin(self._context.sockets.add(sock), address)

    def _begin(self, sock: socket.socket, address: object) -> None:
        sock.setblocking(False)
        label = f"tcp {endpoint_text(address[:2])}" if isinstance(address, tuple) else f"unix {unix_text(self._unix)}"
        try:
            set_stream_options(sock, self._context.config.keepalive_s)
            itself = sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername()
        except OSError:
            itself = True  # gone before it was accepted: as useless as a socket connected to itself
        if itself:
            self._context.sockets.close(sock)
            return
        hello = ListenerHello(self._context.identity)
        handshake = Handshake(self._context, sock, hello, label, self._step, self._failed)
        self._half_open.add(handshake)
        handshake.start(self._context.config.hello_timeout_s)

    def _step(self, handshake: Handshake[ListenerHello]) -> None:
        if handshake.hello.authenticated:
            self._discard(handshake)
            self._on_peer(handshake)

    def _failed(self, handshake: Handshake[ListenerHello], error: Exception) -> None:
        self.refused += 1
        self._discard(handshake)
        if isinstance(error, RemoteProtocolError | TimeoutError):
            rank = self._context.identity.rank
            events.info("rank %d: refused a connection from %s: %s", rank, handshake.label, error)
        elif events.tracing("net"):  # it hung up first: a dial that crossed ours, or a port scan
            events.emit("net", "hello_ended", where=handshake.label, problem=error)

    def _discard(self, handshake: Handshake[ListenerHello]) -> None:
        self._half_open.discard(handshake)
        if self._paused and self._resume is None:
            self._unpause()

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            for sock in self._sockets:
                self._context.loop.remove_reader(sock.fileno())

    def _unpause(self) -> None:
        self._resume = None
        if self._paused and self._sockets:
            self._paused = False
            for sock in self._sockets:
                self._context.loop.add_reader(sock.fileno(), self._acceptable, sock)
