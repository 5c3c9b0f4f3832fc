"""Connecting to one peer: which socket to try, when to try again, when to give up. Callbacks only, no task."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from asyncdist.concurrency import trace as events
from asyncdist.errors import ConnectTimeoutError, RemoteProtocolError
from asyncdist.transport.addresses import PeerAddress, endpoint_text, unix_text
from asyncdist.transport.config import LATE_S, TransportConfig
from asyncdist.transport.connections.connection import set_stream_options
from asyncdist.transport.connections.handshake import Handshake
from asyncdist.transport.context import MeshContext
from asyncdist.transport.protocol.hello import (
    PATH_TRANSPORT,
    SHARED_MEMORY_TRANSPORT,
    STREAM_TRANSPORT,
    STRIPED_TRANSPORT,
    DialerHello,
    Verdict,
)
from asyncdist.transport.socket_dir import path_of

if TYPE_CHECKING:
    from asyncdist.transport.connections.link import Link

MAX_SILENCE_S: Final = 300.0
"""Longest one connection is left to a silent peer before another is made, in case only the connection is dead."""
ATTEMPT_TIMEOUT_S: Final = 10.0
"""Longest wait for one endpoint to accept before the next is tried: three SYN retransmissions (1 + 2 + 4 s) fit."""
SAME_HOST_REFUSALS: Final = 2
"""Rounds in which this very kernel refused before a peer of this host counts as gone. A rank listens before it
publishes its address and stops only when it ends, so on one host a refusal is no question of patience."""


@dataclass(frozen=True, slots=True)
class Target:
    """One socket address to try, for which path of a pair, and from which address (empty: as the kernel likes)."""

    family: socket.AddressFamily
    address: Any
    label: str
    transport: int = STREAM_TRANSPORT
    path: int = 0
    source: str = ""


def choose_targets(
    own_host_id: str, peer: PeerAddress, config: TransportConfig, ips: Sequence[str] = (), first: int = 0
) -> tuple[list[Target], str]:
    """Sockets to try in turn, and, if there are none, why.

    Of several interfaces the `first` is tried first. Each is connected to the peer's at the same place, from its
    address in `ips`.
    """
    same_host = peer.host_id == own_host_id
    targets = []
    unix = peer.unix if config.uses_unix and same_host else b""
    if unix and config.socket_dir:
        unix = path_of(config.socket_dir, unix) or b""
    if unix:
        transport = SHARED_MEMORY_TRANSPORT if config.shares_memory else STREAM_TRANSPORT
        targets.append(Target(socket.AF_UNIX, unix, f"unix {unix_text(unix)}", transport))
    if config.uses_tcp and (same_host or not peer.loopback):
        transport = STRIPED_TRANSPORT if config.streams > 1 else STREAM_TRANSPORT
        places = list(range(len(peer.endpoints)))
        used = max(1, min(config.interfaces, len(places)))
        places[:used] = [(first + number) % used for number in places[:used]]
        for number, place in enumerate(places):
            endpoint = peer.endpoints[place]
            family = socket.AF_INET6 if ":" in endpoint[0] else socket.AF_INET
            source = ips[place] if used > 1 and place < min(used, len(ips)) else ""
            label = f"tcp {endpoint_text(endpoint)}"
            targets.append(Target(family, endpoint, label, transport, number % config.streams, source))
    if targets:
        return targets, ""
    if not config.uses_tcp:
        other = f"the transport is {config.transport}, but it is on another host"
        why = "it has no Unix socket" if same_host else other
    elif peer.endpoints:
        why = (
            f"it is on another host and advertises only loopback ({peer}): set MASTER_ADDR to an address other hosts "
            "can reach, or ASYNCDIST_SOCKET_IFNAME to an interface"
        )
    else:
        why = f"it has no TCP address ({peer})"
    return [], why


class Dialer:
    """Tries `address` until the hello ends in OK, the peer is known to be gone, or time is up.

    Time is up `connect_timeout_s` after `started_s` (loop time) for a peer that cannot be reached, and
    `silent_timeout_s` for one whose kernel accepts connections while the process says nothing.
    """

    def __init__(
        self, context: MeshContext, link: Link, peer_rank: int, address: PeerAddress, started_s: float
    ) -> None:
        self.peer_rank = peer_rank
        self.failures = 0
        self.last_error: Exception | None = None
        self._context = context
        self._link = link
        self._address = address
        self._started_s = started_s
        self._targets: list[Target] = []
        self._next = 0
        self._rounds = 0
        self._refused_rounds = 0
        self._round_refused = False
        self._reached = False  # in the last whole round, or in this one already
        self._round_reached = False
        self._silences = 0
        self._attempt: _Attempt | None = None
        self._retry: asyncio.TimerHandle | asyncio.Handle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._paused = False
        self._expired = False

    @property
    def in_flight(self) -> bool:
        """Whether an attempt is under way right now, rather than being waited for."""
        return self._attempt is not None

    def start(self, *, paused: bool = False) -> None:
        """Begin, or be ready to `resume`."""
        loop, config = self._context.loop, self._context.config
        self._targets, why = choose_targets(
            self._context.host_id,
            self._address,
            config,
            self._context.ips,
            hash((self._context.identity.rank, self.peer_rank)),  # numbers: the same each time, and spread well
        )
        self._expire_at(self._started_s + config.connect_timeout_s)
        self._paused = paused
        if not self._targets:
            self._retry = loop.call_soon(
                self._give_up, ConnectionError(f"rank {self.peer_rank} cannot be reached: {why}")
            )
        elif not paused:
            self._begin_round()

    def path_target(self, number: int) -> Target:
        """Where to connect one more path of the pair: over the interface that comes next after those before it."""
        targets = [target for target in self._targets if target.transport == STRIPED_TRANSPORT]
        target = targets[number % min(len(targets), self._context.config.interfaces)]
        return replace(target, transport=PATH_TRANSPORT, path=number)

    @property
    def unreached(self) -> bool:
        """Whether no kernel took a connection in the last round: no process listens, or the host is down or cut off."""
        return self._rounds > 0 and not self._reached

    def pause(self) -> None:
        """Drop the attempt under way and start none until `resume`."""
        self._paused = True
        self._drop_attempt()

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._paused:
            self._paused = False
            if self._targets:
                self._begin_round()

    def stop(self) -> None:
        """End without a word to the link. Idempotent."""
        self._drop_attempt()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _drop_attempt(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close()

    def _begin_round(self) -> None:
        self._retry = None
        self._next = 0
        self._round_refused = True
        self._round_reached = False
        self._try_next()

    def _try_next(self) -> None:
        self._retry = None
        self._attempt = _Attempt(self, self._context, self._targets[self._next])
        self._attempt.start()

    def attempt_connected(self) -> float:
        """Called by the attempt under way when the peer's kernel accepted; returns how long to wait for its words."""
        self._reached = self._round_reached = True
        return min(MAX_SILENCE_S, self._context.config.hello_timeout_s * float(2 ** min(self._silences, 16)))

    def attempt_failed(self, error: Exception) -> None:
        """Called by the attempt under way."""
        self._attempt = None
        self.failures += 1
        if self._reached and isinstance(error, TimeoutError):
            self._silences += 1
        self.last_error = error
        target = self._targets[self._next]
        if events.tracing("net"):
            events.emit("net", "dial_failed", rank=self.peer_rank, target=target.label, error=repr(error))
        self._round_refused &= isinstance(error, ConnectionRefusedError | FileNotFoundError)
        self._next += 1
        self._link.dial_attempt_failed()
        if self._deadline is None or self._paused:
            return
        if self._next < len(self._targets):
            if target.family == socket.AF_UNIX and not self._rounds:
                events.info("rank %d: %s does not connect (%s); using TCP", self.peer_rank, target.label, error)
            self._retry = self._context.loop.call_soon(self._try_next)
            return
        self._end_round(error)

    def _end_round(self, error: Exception) -> None:
        self._rounds += 1
        self._reached = self._round_reached
        self._refused_rounds = self._refused_rounds + 1 if self._round_refused else 0
        same_host = self._address.host_id == self._context.host_id
        gone = same_host and self._refused_rounds >= SAME_HOST_REFUSALS
        if gone:
            self._give_up(ConnectionRefusedError(f"it takes no connections any more: it has ended ({error})"))
        elif isinstance(error, RemoteProtocolError):
            self._give_up(error)
        elif self._expired and not self._reached:
            self._time_is_up(self._context.config.connect_timeout_s)
        else:
            self._wait()

    def attempt_answered(self, handshake: Handshake[DialerHello]) -> None:
        """Called by the attempt under way when the peer's verdict came."""
        verdict = handshake.hello.verdict
        if verdict is Verdict.OK and not handshake.taken_back:
            self._link.dial_agreed(handshake)
            return
        self._drop_attempt()
        if verdict is Verdict.OK:  # this loop was busy for so long: nothing was sent yet, so nothing is lost
            self.attempt_failed(ConnectionResetError("the peer had given this connection up before it was confirmed"))
            return
        if verdict is Verdict.LEAVING:
            self.stop()
            self._link.dial_met_leaver()
        elif verdict is Verdict.LOST:
            self._give_up(ConnectionResetError("it had already declared this rank lost"))
        else:
            self._rounds += 1
            self.last_error = ConnectionError("the peer prefers its own connection, which has not come")
            self._wait()

    def _wait(self) -> None:
        config = self._context.config
        delay_s = min(config.backoff_limit_s, config.backoff_first_s * 2 ** min(self._rounds - 1, 16))
        self._retry = self._context.loop.call_later(delay_s * random.uniform(0.5, 1.0), self._begin_round)

    def _expire_at(self, due_s: float) -> None:
        self._due_s = due_s
        self._deadline = self._context.loop.call_at(due_s, self._expire)

    def _expire(self) -> None:
        """The connect timeout has passed; a peer that was reached has until the silent timeout."""
        config = self._context.config
        now_s = self._context.loop.time()
        late_s = now_s - self._due_s
        if late_s > LATE_S:  # the peer may have answered long since
            self._expire_at(now_s + late_s)
            return
        remaining_s = self._started_s + config.silent_timeout_s - now_s
        if not self._expired and (self._paused or self._reached) and remaining_s > 0:
            self._expire_at(now_s + remaining_s)
        else:
            self._time_is_up(config.silent_timeout_s if self._expired else config.connect_timeout_s)
        self._expired = True

    def _time_is_up(self, timeout_s: float) -> None:
        error = ConnectTimeoutError(
            f"no connection to rank {self.peer_rank} at {self._address} within {timeout_s:g} s"
            + (f": {self.last_error}" if self.last_error else "")
        )
        error.__cause__ = self.last_error
        self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.stop()
        self._link.dial_failed(error)


class PathDialer:
    """Connects one path of a pair that is connected already, as often as it is lost, until it is stopped."""

    def __init__(
        self,
        context: MeshContext,
        peer_rank: int,
        target: Target,
        on_open: Callable[[Handshake[DialerHello]], None],
    ) -> None:
        self.peer_rank = peer_rank
        self._context = context
        self._target = target
        self._on_open = on_open
        self._failures = 0
        self._attempt: _Attempt | None = None
        self._retry: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Connect it soon."""
        config = self._context.config
        delay_s = min(config.backoff_limit_s, config.backoff_first_s * 2 ** min(self._failures, 16))
        self._retry = self._context.loop.call_later(delay_s * random.uniform(0.5, 1.0), self._try)

    def stop(self) -> None:
        """End without a word. Idempotent."""
        if self._retry is not None:
            self._retry.cancel()
        if self._attempt is not None:
            self._attempt.close()

    def _try(self) -> None:
        self._attempt = _Attempt(self, self._context, self._target)
        self._attempt.start()

    def attempt_connected(self) -> float:
        """Called by the attempt; returns how long to wait for the peer's words, whose loop may be busy."""
        return min(MAX_SILENCE_S, self._context.config.hello_timeout_s * float(2 ** min(self._failures, 16)))

    def attempt_failed(self, error: Exception) -> None:
        """Called by the attempt."""
        if events.tracing("net"):
            events.emit("net", "dial_failed", rank=self.peer_rank, target=self._target.label, error=repr(error))
        self._attempt = None
        self._failures += 1
        self.begin()

    def attempt_answered(self, handshake: Handshake[DialerHello]) -> None:
        """Called by the attempt when the peer's verdict came."""
        if handshake.hello.verdict is Verdict.OK and not handshake.taken_back:
            self._attempt = None
            self._failures = 0
            handshake.send(handshake.hello.confirm())
            self._on_open(handshake)
        else:
            handshake.close()
            self.attempt_failed(ConnectionError("the peer does not take this connection now"))


class _Attempt:
    """One connect and hello at one target."""

    def __init__(self, dialer: Dialer | PathDialer, context: MeshContext, target: Target) -> None:
        self._dialer = dialer
        self._context = context
        self._target = target
        self._sock: socket.socket | None = None
        self._handle: asyncio.Handle | None = None
        self._handshake: Handshake[DialerHello] | None = None

    def start(self) -> None:
        """Connect; every outcome is reported from the loop."""
        loop = self._context.loop
        try:
            self._sock = self._context.sockets.add(socket.socket(self._target.family, socket.SOCK_STREAM))
            self._sock.setblocking(False)
            set_stream_options(self._sock, self._context.config.keepalive_s)
            if self._target.source:
                self._sock.bind((self._target.source, 0))
            code = self._sock.connect_ex(self._target.address)
        except (OSError, ValueError, OverflowError) as error:
            failure = error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))
            self._handle = loop.call_soon(self._fail, failure)
            return
        if code == 0:
            self._handle = loop.call_soon(self._connected)
        elif code == errno.EINPROGRESS:
            loop.add_writer(self._sock.fileno(), self._writable)
            self._handle = loop.call_later(
                ATTEMPT_TIMEOUT_S, self._fail, TimeoutError("the connection is not answered")
            )
        else:
            if code == errno.EAGAIN:  # a Unix socket whose backlog is full for the moment
                self._dialer.attempt_connected()
            self._handle = loop.call_soon(self._fail, OSError(code, os.strerror(code)))

    def close(self) -> None:
        """Drop everything, reporting nothing. Idempotent."""
        self._stop_connecting()
        if self._handshake is not None:
            self._handshake.close()
        elif self._sock is not None:
            self._context.sockets.close(self._sock)
        self._sock = None

    def _stop_connecting(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._sock is not None and self._handshake is None and self._sock.fileno() >= 0:
            self._context.loop.remove_writer(self._sock.fileno())

    def _writable(self) -> None:
        assert self._sock is not None
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._fail(OSError(code, os.strerror(code)))
        else:
            self._connected()

    def _connected(self) -> None:
        self._stop_connecting()
        assert self._sock is not None
        try:
            own, peer = self._sock.getsockname(), self._sock.getpeername()
        except OSError as error:
            self._fail(error)
            return
        if self._sock.family != socket.AF_UNIX and own == peer:
            self._fail(ConnectionRefusedError("the socket connected to itself, so nobody listens there"))
            return
        target = self._target
        hello = DialerHello(self._context.identity, self._dialer.peer_rank, target.transport, target.path)
        self._handshake = handshake = Handshake(
            self._context, self._sock, hello, self._target.label, self._step, self._hello_failed
        )
        handshake.start(self._dialer.attempt_connected())

    def _step(self, handshake: Handshake[DialerHello]) -> None:
        if handshake.hello.verdict is not None:
            self._dialer.attempt_answered(handshake)

    def _hello_failed(self, _handshake: Handshake[DialerHello], error: Exception) -> None:
        self._sock = None
        self._dialer.attempt_failed(error)

    def _fail(self, error: Exception) -> None:
        self.close()
        self._dialer.attempt_failed(error)
