"""One end of a simulated TCP connection and the two streams of bytes between the ends.

Bytes arrive in order, late, cut anywhere, and no more of them are under way than the buffers hold. What a kernel
notices of a peer that has vanished without a word depends on the socket's options, as on Linux: keepalive ends an idle
connection, unacknowledged data only TCP_USER_TIMEOUT or, much later, the end of retransmission.
"""

from __future__ import annotations

import errno
import math
import socket
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import asyncio

    from asyncdist.testing.hosts import SimulatedHost, SimulatedProcess
    from asyncdist.testing.network import SimulatedNetwork

Options = dict[tuple[int, int], int]

RETRANSMISSION_S: Final = 924.6
"""How long Linux sends unacknowledged data again (tcp_retries2 = 15) where no option says otherwise."""
KEEPALIVE_IDLE_S: Final = 7200
KEEPALIVE_INTERVAL_S: Final = 75
KEEPALIVE_PROBES: Final = 9
"""Linux's defaults, where the option is on and no other says otherwise."""
_USER_TIMEOUT: Final = getattr(socket, "TCP_USER_TIMEOUT", 18)
_IDLE: Final = getattr(socket, "TCP_KEEPIDLE", 4)
_INTERVAL: Final = getattr(socket, "TCP_KEEPINTVL", 5)
_PROBES: Final = getattr(socket, "TCP_KEEPCNT", 6)

_END: Final = b""
"""Marks the end of what the other side sends."""


class EndpointUser(Protocol):
    """Reads and writes at an endpoint."""

    def on_readable(self) -> None:
        """Bytes, the end or an error can be read."""

    def on_writable(self) -> None:
        """There may be room to write, or an error."""


class Pipe:
    """One direction of a connection. A `None` under way is a reset."""

    def __init__(self, network: SimulatedNetwork, source: Endpoint, target: Endpoint) -> None:
        self._network = network
        self.source = source
        self.target = target
        self.capacity = network.buffer_bytes()
        self.used = 0
        self.arrived = bytearray()
        self.ended = False
        self.starved = False
        self.flying: deque[tuple[float, float, bytes | None]] = deque()  # sent at, arrives at, what
        self._last_arrival = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Take as much of `data` as there is room for."""
        count = min(len(data), self.capacity - self.used)
        if count < len(data):
            self.starved = True
        if count:
            self.used += count
            for piece in self._network.cut_up(bytes(data[:count])):
                self.put(piece)
            self.source.watch_peer()
        return count

    def put(self, piece: bytes | None) -> None:
        """Let bytes, the end or a reset travel."""
        now = self._network.loop.time()
        self._last_arrival = max(self._last_arrival, now + self._network.latency_s(self.source.host, self.target.host))
        self.flying.append((now, self._last_arrival, piece))
        if self._timer is None:
            self._schedule()

    def _schedule(self) -> None:
        self._timer = self._network.call_at(self.flying[0][1], self._arrive) if self.flying else None

    def _arrive(self) -> None:
        self._timer = None
        if self._network.blocked(self.source.host, self.target.host):
            return  # until `go_on`
        _, _, piece = self.flying.popleft()
        self.target.take(piece)
        self.source.heard()
        self._schedule()

    def go_on(self) -> None:
        """Send the bytes again that were lost while the way was blocked."""
        if self.flying and self._timer is None:
            sent_at, _, piece = self.flying.popleft()
            now = self._network.loop.time()
            again = now + self._network.latency_s(self.source.host, self.target.host)
            self._last_arrival = max(self._last_arrival, again)
            self.flying.appendleft((sent_at, again, piece))
            self._schedule()

    def take(self, count: int) -> bytes:
        """Remove and return up to `count` bytes that have arrived; the sender hears that there is room."""
        data = bytes(self.arrived[:count])
        del self.arrived[:count]
        self.used -= len(data)
        if self.starved and self.used <= self.capacity // 2:
            self.starved = False
            self._network.call_later(self._network.latency_s(self.target.host, self.source.host), self._tell_room)
        return data

    def _tell_room(self) -> None:
        if self.source.user is not None:
            self.source.user.on_writable()

    def drop(self) -> None:
        """Lose everything that is under way."""
        self.flying.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Endpoint:
    """A connected socket in the kernel."""

    outgoing: Pipe
    incoming: Pipe
    peer: Endpoint

    def __init__(self, network: SimulatedNetwork, process: SimulatedProcess, name: str, options: Options) -> None:
        self._network = network
        self.process = process
        self.host: SimulatedHost = process.host
        self.name = name
        self.number = network.next_descriptor()
        self.options = options
        self.user: EndpointUser | None = None
        self.error: OSError | None = None
        self.closed = False
        self.fuse = 0
        """After how many more pieces from the peer the connection breaks; 0: never for that reason."""
        self._finished = False
        self._heard_at = network.loop.time()
        self._watch: asyncio.TimerHandle | None = None
        process.endpoints[self] = None

    # ---- what a process does with it

    @property
    def readable(self) -> bool:
        """Whether `receive` has an answer."""
        return bool(self.incoming.arrived) or self.incoming.ended or self.error is not None

    @property
    def writable(self) -> bool:
        """Whether `send` has an answer."""
        return self.error is not None or self.outgoing.used < self.outgoing.capacity

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Send as much as there is room for. Raises BlockingIOError without room, OSError on a broken connection."""
        if self.closed:
            raise OSError(errno.EBADF, "the socket is closed")
        if self.error is not None:
            raise self.error
        if self._finished:
            raise BrokenPipeError(errno.EPIPE, "this side was shut down")
        count = self.outgoing.send(data)
        if not count and len(data):
            raise BlockingIOError(errno.EAGAIN, "no room")
        return count

    def receive(self, count: int) -> bytes:
        """Return up to `count` bytes, none at the end. Raises BlockingIOError before any, OSError when broken."""
        if self.closed:
            raise OSError(errno.EBADF, "the socket is closed")
        if self.incoming.arrived:
            return self.incoming.take(count)
        if self.error is not None:
            raise self.error
        if self.incoming.ended:
            return b""
        raise BlockingIOError(errno.EAGAIN, "nothing yet")

    def finish(self) -> None:
        """Send nothing more."""
        if not self._finished and self.error is None:
            self._finished = True
            self.outgoing.put(_END)

    def close(self) -> None:
        """Give the socket up. The peer sees the end, or a reset if some of its bytes were not read."""
        if self.closed:
            return
        if self.error is None:
            if self.incoming.arrived:
                self.outgoing.put(None)
            else:
                self.finish()
        self.vanish()

    def vanish(self) -> None:
        """End without a message to the peer."""
        self.closed = True
        self.user = None
        self.process.endpoints.pop(self, None)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    # ---- what the network does with it

    def take(self, piece: bytes | None) -> None:
        self._network.trace("arrive", self.name, piece)
        self.heard()
        if piece is None:
            self.fail(ConnectionResetError(errno.ECONNRESET, "the connection was reset by the peer"))
        elif self.closed or self.error is not None:
            if piece != _END or not self._finished:
                self.outgoing.put(None)  # there is no such connection here
        else:
            if piece == _END:
                self.incoming.ended = True
            self.incoming.arrived += piece
            if self.user is not None:
                self.user.on_readable()
            if self.fuse:
                self.fuse -= 1
                if not self.fuse:
                    self._network.call_later(0.0, self._network.break_connection, self)  # once that was read

    def fail(self, error: OSError) -> None:
        """Break the connection on this side."""
        if self.error is not None or self.closed:
            return
        self.error = error
        self.outgoing.drop()
        if self._network.loses_unread(self):
            self.incoming.arrived.clear()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self.peer.watch_peer()
        if self.user is not None:
            self.user.on_readable()
        if self.user is not None:
            self.user.on_writable()

    def heard(self) -> None:
        """Note that the peer gave a sign of life."""
        self._heard_at = self._network.loop.time()

    # ---- a peer that does not answer

    def watch_peer(self) -> None:
        """Set the timer that gives the peer up, if the network stays as it is."""
        if self.closed or self.error is not None:
            return
        due = self._gives_up_at()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if due < math.inf:
            self._watch = self._network.call_at(max(due, self._network.loop.time()), self._look)

    def _gives_up_at(self) -> float:
        reachable = self._network.reach_each_other(self.host, self.peer.host)
        options = self.options
        if reachable and not (self.peer.closed or self.peer.error is not None):
            return math.inf
        if self.outgoing.flying:
            if reachable:
                return math.inf  # it arrives, and will be answered
            user_timeout_s = options.get((socket.IPPROTO_TCP, _USER_TIMEOUT), 0) / 1000
            return self.outgoing.flying[0][0] + (user_timeout_s or RETRANSMISSION_S)
        if not options.get((socket.SOL_SOCKET, socket.SO_KEEPALIVE)):
            return math.inf
        idle_s = options.get((socket.IPPROTO_TCP, _IDLE), KEEPALIVE_IDLE_S)
        if reachable:
            return self._heard_at + idle_s
        interval_s = options.get((socket.IPPROTO_TCP, _INTERVAL), KEEPALIVE_INTERVAL_S)
        return self._heard_at + idle_s + interval_s * options.get((socket.IPPROTO_TCP, _PROBES), KEEPALIVE_PROBES)

    def _look(self) -> None:
        self._watch = None
        if self._gives_up_at() > self._network.loop.time():
            self.watch_peer()
        elif self._network.reach_each_other(self.host, self.peer.host):
            self.fail(ConnectionResetError(errno.ECONNRESET, "the connection was reset by the peer"))
        else:
            self._network.trace("give up", self.name)
            self.fail(TimeoutError(errno.ETIMEDOUT, "the peer does not answer"))


def join(network: SimulatedNetwork, one: Endpoint, other: Endpoint) -> None:
    """Make two endpoints the ends of one connection."""
    one.peer, other.peer = other, one
    one.outgoing = other.incoming = Pipe(network, one, other)
    other.outgoing = one.incoming = Pipe(network, other, one)
