"""One pair of ranks from first use to the end: which of its connections is kept, and what its end means.

Both ranks may dial at the same instant. The lower rank decides, so exactly one connection survives: it never both
confirms its own dial and says OK to the other's. While its first attempt is under way it lets the higher rank's hello
wait; when that attempt fails, or takes too long, it drops it and says OK. The higher rank says OK to every hello of the
lower one and follows: whichever connection is confirmed first is the one.

    idle -> connecting (used here) -> open -> ended (left, lost, or closed here)
    idle -> open (the peer dialed)
"""

from __future__ import annotations

import asyncio
import enum
import socket
from collections.abc import Callable
from typing import Final, Protocol

from asyncdist.concurrency import trace as events
from asyncdist.errors import ClosedError, PeerLostError
from asyncdist.transport.addresses import PeerAddress
from asyncdist.transport.connections.connection import Connection, StreamConnection, limit_unsent, send_unpaced
from asyncdist.transport.connections.dialer import Dialer, PathDialer
from asyncdist.transport.connections.handshake import Handshake
from asyncdist.transport.connections.shm import ShmConnection
from asyncdist.transport.connections.striped import StripedConnection
from asyncdist.transport.context import Absence, MeshContext
from asyncdist.transport.protocol.hello import (
    PATH_TRANSPORT,
    SHARED_MEMORY_TRANSPORT,
    STRIPED_TRANSPORT,
    DialerHello,
    ListenerHello,
    Verdict,
)
from asyncdist.transport.protocol.operations import left_world
from asyncdist.transport.protocol.peer import PeerCore
from asyncdist.transport.spin import lives_here, on_this_host

CROSSED_WAIT_S: Final = 1.0
"""How long the lower rank prefers its own first attempt when the other's hello is already here."""
DOUBT_S: Final = 0.3
"""How long a dial goes on before it is asked whether the peer is gone, which is to be known within a second; then each
time at twice the age, since thousands may be slow at once."""
CONFIRM_TIMEOUT_FACTOR: Final = 2.0
"""The listener waits longer for the confirmation than any dialer waits for the ACK: else a late one would open a
connection that the listener has just given up."""


class LinkState(enum.Enum):
    """Where a pair stands."""

    IDLE = "not connected"
    CONNECTING = "connecting"
    OPEN = "open"
    LEFT = "left"
    LOST = "lost"
    CLOSED = "closed"


class LinkOwner(Protocol):
    """The mesh, as its links see it; called from the loop."""

    @property
    def closing(self) -> bool:
        """Whether the mesh is leaving."""

    def address_wanted(self, rank: int) -> None:
        """Look up where `rank` is; `Link.address_known` or `dial_failed` follows."""

    def link_not_met(self, rank: int, then: Callable[[Absence], None]) -> None:
        """The peer takes no connection: call `then`, now or soon, which may end a link that is not open."""

    def link_open(self, rank: int) -> None:
        """A connection was confirmed; what was posted is about to be written."""

    def link_lost(self, rank: int, error: PeerLostError) -> None:
        """The pair is broken; the link has failed its core already."""

    def link_left(self, rank: int, error: PeerLostError) -> None:
        """The peer said goodbye; the link has failed its core already."""

    def link_ended(self) -> None:
        """Some link has reached its end (called after the two above as well)."""


class Link:
    """Connection state of one peer. `core` queues what is posted until a connection is open."""

    def __init__(self, context: MeshContext, owner: LinkOwner, rank: int, core: PeerCore) -> None:
        self.rank = rank
        self.core = core
        self.state = LinkState.IDLE
        self.label = ""
        self._context = context
        self._owner = owner
        self._connection: Connection | None = None
        self._dialer: Dialer | None = None
        self._doubt: asyncio.TimerHandle | None = None
        self._incoming: Handshake[ListenerHello] | None = None
        self._park: asyncio.TimerHandle | None = None
        self._path_dialers: list[PathDialer] = []
        self._coming_paths: set[Handshake[ListenerHello]] = set()
        self._started_s = 0.0

    @property
    def ended(self) -> bool:
        """Whether nothing will ever flow again."""
        return self.state in (LinkState.LEFT, LinkState.LOST, LinkState.CLOSED)

    def request(self) -> None:
        """The peer is needed: connect unless that is done or under way."""
        if self.state is LinkState.IDLE:
            self.state = LinkState.CONNECTING
            self._started_s = self._context.loop.time()
            self._doubt_in(DOUBT_S)
            self._owner.address_wanted(self.rank)

    def address_known(self, address: PeerAddress) -> None:
        """Where the peer listens; dialing begins."""
        if self.state is LinkState.CONNECTING and self._dialer is None:
            self._dialer = Dialer(self._context, self, self.rank, address, self._started_s)
            self._dialer.start(paused=self._incoming is not None)

    def leave(self) -> None:
        """Say goodbye, after everything posted; a link that has nothing to send ends at once.

        A connection the peer may already count on, because we said OK to it, is awaited to say goodbye on it.
        """
        if self._connection is not None:
            self._connection.leave()
        elif not self.ended and not self.core.has_output and (self._incoming is None or self._park is not None):
            self.abort(ClosedError(f"the connection to rank {self.rank} was closed here"))

    def abort(self, error: Exception) -> None:
        """End now, failing what is pending with `error`. Idempotent."""
        if not self.ended:
            self._finish(LinkState.CLOSED, error)
            self._owner.link_ended()

    def break_off(self, cause: Exception) -> None:
        """Declare the peer lost because of `cause`."""
        if not self.ended:
            lost = PeerLostError(f"rank {self._context.identity.rank} lost rank {self.rank}: {cause}", self.rank)
            lost.__cause__ = cause.with_traceback(None)  # kept for long, and no frame is to be kept with it
            self._finish(LinkState.LOST, lost)
            self._owner.link_lost(self.rank, lost)
            self._owner.link_ended()

    def forget(self) -> None:
        """In a forked child: this connection is the parent's."""
        self.state = LinkState.CLOSED
        if self._connection is not None:
            self._connection.forget()

    @property
    def last_error(self) -> str:
        """Why the last attempt of the dial under way failed; empty if none did."""
        dialer = self._dialer
        return "" if dialer is None or dialer.last_error is None else str(dialer.last_error)

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes sent and received so far on the open connection."""
        connection = self._connection
        return (connection.bytes_sent, connection.bytes_received) if connection is not None else (0, 0)

    # -- the peer dials us

    def hello_came(self, handshake: Handshake[ListenerHello]) -> None:
        """The peer has connected and proven its rank: answer now, or hold the answer back."""
        if handshake.hello.transport == PATH_TRANSPORT:
            self._path_comes(handshake)
            return
        unwanted = self._owner.closing and self.state is LinkState.IDLE
        if unwanted or self.ended or self.state is LinkState.OPEN:
            verdict = Verdict.CROSSED
            if unwanted or self.state is LinkState.CLOSED:
                verdict = Verdict.LEAVING
            elif self.ended:
                verdict = Verdict.LOST
            handshake.send(handshake.hello.answer(verdict))
            handshake.close()
            if unwanted:
                self.abort(ClosedError(f"the connection to rank {self.rank} was closed here"))
            return
        self._drop_incoming()  # the peer has one attempt at a time, so it has given that one up
        self._incoming = handshake
        handshake.on_step = self._incoming_step
        handshake.on_failed = self._incoming_failed
        dialer = self._dialer
        if self._decides and dialer is not None and dialer.in_flight and not dialer.failures:
            handshake.set_deadline(CONFIRM_TIMEOUT_FACTOR * self._context.config.hello_timeout_s)
            self._park = self._context.loop.call_later(CROSSED_WAIT_S, self._accept_incoming)
        else:
            self._accept_incoming()

    @property
    def answering(self) -> bool:
        """Whether the peer has dialed us, and may count on that connection already."""
        return self._incoming is not None

    @property
    def _decides(self) -> bool:
        return self._context.identity.rank < self.rank

    def _accept_incoming(self) -> None:
        self._cancel_park()
        handshake = self._incoming
        assert handshake is not None
        if self._decides and self._dialer is not None:
            self._dialer.pause()
        handshake.set_deadline(CONFIRM_TIMEOUT_FACTOR * self._context.config.hello_timeout_s)
        handshake.send(handshake.hello.answer(Verdict.OK))

    def _incoming_step(self, handshake: Handshake[ListenerHello]) -> None:
        if handshake.hello.confirmed:
            self._incoming = None
            self._open(handshake)

    def _incoming_failed(self, _handshake: Handshake[ListenerHello], _error: Exception) -> None:
        self._incoming = None
        self._cancel_park()
        if self._dialer is not None:
            self._dialer.resume()
        elif self.state is LinkState.CONNECTING and not self._owner.closing:
            self._owner.address_wanted(self.rank)  # a look-up may have failed while the peer was being answered
        if self._owner.closing:
            self.leave()

    def _drop_incoming(self) -> None:
        parked = self._park is not None
        self._cancel_park()
        handshake, self._incoming = self._incoming, None
        if handshake is not None:
            if parked:
                verdict = Verdict.LEAVING if self.state is LinkState.CLOSED else Verdict.CROSSED
                handshake.send(handshake.hello.answer(verdict))
            handshake.close()

    def _cancel_park(self) -> None:
        if self._park is not None:
            self._park.cancel()
            self._park = None

    # -- we dial the peer

    def _doubt_in(self, delay_s: float) -> None:
        self._doubt = self._context.loop.call_later(delay_s, self._ask_whether_gone)

    def _ask_whether_gone(self) -> None:
        """The dial takes long: ask whether the peer is gone, on a host that refuses or does not answer."""
        self._doubt_in(self._context.loop.time() - self._started_s)
        self._owner.link_not_met(self.rank, self._heard_whether_gone)

    def _heard_whether_gone(self, absence: Absence) -> None:
        dialer = self._dialer
        if self._incoming is not None:  # it dials us, and what it sent before it left may be here, unread
            return
        if absence is Absence.LEFT:
            self._not_met(None)
        elif dialer is None or dialer.unreached:  # no process answers there
            if absence is Absence.RESIGNED:
                self._not_met(ConnectionRefusedError(absence.value))
            elif absence is Absence.CUT_OFF:
                where = "it listens nowhere" if dialer is None else f"it takes no connections ({dialer.last_error})"
                why = "it has been killed, or its host is down"
                self._not_met(ConnectionRefusedError(f"{where}, and its own to the store has ended: {why}"))

    def dial_agreed(self, handshake: Handshake[DialerHello]) -> None:
        """The peer said OK, and this connection is the first: confirm it."""
        handshake.send(handshake.hello.confirm())
        self._open(handshake)

    def dial_attempt_failed(self) -> None:
        """Our attempt failed, so the other's may survive."""
        if self._park is not None:
            self._accept_incoming()

    def dial_failed(self, error: Exception) -> None:
        """Nothing more will be tried."""

        def heard(absence: Absence) -> None:
            why = error
            if absence is Absence.RESIGNED:
                why = ConnectionRefusedError(absence.value)
            elif absence is Absence.UNKNOWN:
                why = type(error)(f"{error}; {absence.value}")
                why.__cause__ = error.__cause__
            self._not_met(None if absence is Absence.LEFT else why)

        self._owner.link_not_met(self.rank, heard)

    def dial_met_leaver(self) -> None:
        """The peer is leaving and wants no connection any more."""
        self._owner.link_not_met(self.rank, lambda _: self._not_met(None))

    def _not_met(self, error: Exception | None) -> None:
        if self.state is not LinkState.CONNECTING:  # it dialed us meanwhile, or the mesh is closed
            return
        if error is None:
            self._left()
        else:
            self.break_off(error)

    # -- further paths of a pair that is connected

    def _path_comes(self, handshake: Handshake[ListenerHello]) -> None:
        """The peer connects one path more, which it tries again if this is not the time."""
        streams = self._context.config.streams
        wanted = handshake.hello.path < streams and len(self._coming_paths) < streams
        if not (wanted and isinstance(self._connection, StripedConnection)):
            handshake.send(handshake.hello.answer(Verdict.CROSSED))
            handshake.close()
            return
        self._coming_paths.add(handshake)
        handshake.on_step = self._add_path
        handshake.on_failed = lambda handshake, _error: self._coming_paths.discard(handshake)
        handshake.set_deadline(CONFIRM_TIMEOUT_FACTOR * self._context.config.hello_timeout_s)
        handshake.send(handshake.hello.answer(Verdict.OK))

    def _add_path(self, handshake: Handshake[DialerHello] | Handshake[ListenerHello]) -> None:
        """Both sides agree on it."""
        if isinstance(handshake.hello, ListenerHello):
            self._coming_paths.discard(handshake)
        if isinstance(self._connection, StripedConnection):
            self._connection.add(handshake.hello.path, handshake.detach())
        else:
            handshake.close()

    def _path_lost(self, number: int) -> None:
        if self._path_dialers:
            self._path_dialers[number].begin()

    # -- the connection

    def _open(self, handshake: Handshake[DialerHello] | Handshake[ListenerHello]) -> None:
        sock = handshake.detach()
        dialer = self._dialer
        hello = handshake.hello
        self._stop_connecting()
        self.state = LinkState.OPEN
        self.label = handshake.label
        context = self._context
        if hello.transport == SHARED_MEMORY_TRANSPORT:
            shared = ShmConnection(context, sock, self.core, self.label, self._ended, self._memory_refused)
            self.label = shared.label
            self._connection = shared
        elif hello.transport == STRIPED_TRANSPORT:
            if isinstance(hello, DialerHello) and dialer is not None:
                self._path_dialers = [
                    PathDialer(context, self.rank, dialer.path_target(number), self._add_path)
                    for number in range(context.config.streams)
                ]
            self.label = f"{self.label} ({context.config.streams} connections)"
            self._connection = StripedConnection(
                context, sock, self.core, self.label, self._ended, hello.path, self._path_lost
            )
        else:
            self._connection = self._stream(sock)
        events.info("rank %d: connected to rank %d over %s", context.identity.rank, self.rank, self.label)
        self._owner.link_open(self.rank)
        self._start_connection()
        for path_dialer in self._path_dialers[: hello.path] + self._path_dialers[hello.path + 1 :]:
            path_dialer.begin()

    def _stream(self, sock: socket.socket) -> StreamConnection:
        context = self._context
        connection = StreamConnection(context, sock, self.core, self.label, self._ended)
        if on_this_host(sock):
            send_unpaced(sock)
            crowded = lives_here(context.identity.world_id, self.rank)
            context.neighbors.add(connection.poll, connection.catch_up, crowded=crowded)
        else:
            limit_unsent(sock)
            context.keepalive.add(connection, sock, self.break_off)
        return connection

    def _start_connection(self) -> None:
        if self._connection is not None:
            self._connection.start()
        if self._owner.closing and self._connection is not None:
            self._connection.leave()

    def _memory_refused(self, connection: ShmConnection, sock: socket.socket, reason: str) -> None:
        """One side cannot share memory: the socket that was to be its companion carries the frames instead."""
        context = self._context
        if context.config.transport == "shm":
            context.sockets.close(sock)
            self.break_off(ConnectionRefusedError(f"the transport is shm, but memory cannot be shared: {reason}"))
            return
        self.label = connection.socket_label
        events.info(
            "rank %d: no shared memory with rank %d (%s): over %s", context.identity.rank, self.rank, reason, self.label
        )
        self._connection = self._stream(sock)
        self._start_connection()

    def _ended(self, _connection: Connection, error: Exception | None) -> None:
        if error is not None:
            self.break_off(self._context.keepalive.explained(error))
        elif self.core.left:
            self._left()
        else:
            self.abort(ClosedError(f"the connection to rank {self.rank} was closed here"))

    def _left(self) -> None:
        if not self.ended:
            left = left_world(self.rank)
            self._finish(LinkState.LEFT, left)
            self._owner.link_left(self.rank, left)
            self._owner.link_ended()

    def _finish(self, state: LinkState, error: Exception) -> None:
        """Close all sockets first, then fail the core: its sinks may call back into the mesh."""
        self.state = state
        self._stop_connecting()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
            if isinstance(connection, StreamConnection):
                self._context.neighbors.remove(connection.poll)
                self._context.keepalive.remove(connection)
        for path_dialer in self._path_dialers:
            path_dialer.stop()
        self._path_dialers.clear()
        for handshake in self._coming_paths:
            handshake.close()
        self._coming_paths.clear()
        self.core.fail(error)

    def _stop_connecting(self) -> None:
        self._drop_incoming()
        if self._doubt is not None:
            self._doubt.cancel()
            self._doubt = None
        dialer, self._dialer = self._dialer, None
        if dialer is not None:
            dialer.stop()
