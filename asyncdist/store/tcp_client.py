"""TCPClient: a client of the store daemon, which connects again whenever the connection breaks."""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
from collections.abc import Callable
from typing import Any, Final, Self

from asyncdist.concurrency.deadline import Deadline, Timeout
from asyncdist.concurrency.loop import close_in_forked_child, prepare_fork
from asyncdist.concurrency.tasks import uninterrupted
from asyncdist.concurrency.trace import emit, info, tracing
from asyncdist.errors import ClosedError, DistError
from asyncdist.store.credentials import TLSConfig
from asyncdist.store.dialer import Dialled, StoreDialer
from asyncdist.store.pipeline import Pipeline
from asyncdist.store.reply import Reply
from asyncdist.store.request_store import CoordinatingStore
from asyncdist.store.store_connection import Connection
from asyncdist_server.wire import messages

RECONNECT_TIMEOUT_S: Final = 60.0
"""How long a lost connection is tried again. Half of what the daemon remembers a client for, so that a reconnect that
succeeds can still retry exactly once."""

CLOSE_TIMEOUT_S: Final = 2.0
"""How long closing waits for answers to what was issued before, and tries to connect again where that needs it."""


class TCPClient(CoordinatingStore):
    """The requests of a `TCPStore` and the connection that carries them.

    `TCPStore` has the documentation for users. `dialer.port` may be set until the first connection is made.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str | None,
        tls: TLSConfig | ssl.SSLContext | None,
        context: bytes,
        timeout: Timeout,
        on_incarnation_change: Callable[[], None] | None,
    ) -> None:
        super().__init__(timeout)
        self.dialer = StoreDialer(host, port, token, tls, context)
        self.on_incarnation_change = on_incarnation_change
        self._loop: asyncio.AbstractEventLoop  # set with the pipeline
        self._pipeline: Pipeline | None = None
        self._connection: Connection | None = None
        self._connector: asyncio.Task[DistError | None] | None = None
        self._flush_scheduled = False
        self._watch: asyncio.TimerHandle | None = None
        self._watch_at = math.inf
        self._closed = False
        self._closing: asyncio.Future[None] | None = None

    @property
    def host(self) -> str:
        """Where the daemon is."""
        return self.dialer.host

    @property
    def port(self) -> int:
        """Where the daemon listens."""
        return self.dialer.port

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.host!r}, {self.port})"

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    async def __aenter__(self) -> Self:
        return await self.open_by(Deadline.after(self._timeout_s, asyncio.get_running_loop().time()))

    async def open_by(self, deadline: Deadline) -> Self:
        """Open as `async with` does, with a deadline of the running loop's clock that the caller has set before."""
        self._raise_if_closed()
        self._bind()
        if self._connection is None:
            connector = self._reconnect(deadline)
            try:
                await asyncio.wait([connector])
            except asyncio.CancelledError:
                self._abandon()
                await uninterrupted(asyncio.wait([connector]))  # it is cancelled, and has nothing more to wait for
                raise
            self._raise_if_closed()
            try:
                error = connector.result()
                if error is not None:
                    raise error
            except BaseException:
                self._abandon()
                raise
        return self

    # ---- requests

    def _request(
        self,
        operation: int,
        arguments: tuple[Any, ...],
        timeout_s: float | None,
        size_bytes: int = 0,
        kind: type[Reply] = Reply,
    ) -> asyncio.Future[Any]:
        if self._closed:
            raise ClosedError(f"{self!r} is closed")
        pipeline = self._pipeline
        if pipeline is None or asyncio.get_running_loop() is not self._loop:
            pipeline = self._bind()
        reply = pipeline.submit(operation, arguments, timeout_s, size_bytes, kind)
        if not self._flush_scheduled:
            self._schedule_flush()
        if reply.deadline < self._watch_at:
            self._watch_until(reply.deadline)
        return reply

    def _give_back(self, reply: Reply) -> None:
        if self._connection is not None and self._pipeline is not None:
            self._pipeline.give_back(reply.request, reply.result())
            self._schedule_flush()

    def _bind(self) -> Pipeline:
        """Bind this client to the running loop; RuntimeError if it is bound to another loop."""
        loop = asyncio.get_running_loop()
        if self._pipeline is None:
            self._loop = loop
            self._pipeline = Pipeline(loop, self.dialer.where, self._schedule_flush)
            close_in_forked_child(self)
            prepare_fork(loop)
        elif self._loop is not loop:
            raise RuntimeError(f"{self!r} belongs to another event loop")
        return self._pipeline

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._connection is not None:
            self._connection.send()
        elif not self._closed and self._connector is None:
            self.dialer.tries = 0
            self._reconnect_within(
                RECONNECT_TIMEOUT_S if self._timeout_s is None else min(self._timeout_s, RECONNECT_TIMEOUT_S)
            )

    def _on_frame(self, payload: memoryview) -> None:
        assert self._pipeline is not None
        self.dialer.tries = 0
        self._pipeline.on_replies(payload)
        if self._pipeline.has_unsent:
            self._schedule_flush()

    # ---- time

    def _watch_until(self, deadline: float) -> None:
        """Set the timer, which is one for all requests as almost none ever expires, to `deadline`."""
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self._loop.call_at(deadline, self._on_watch)
        self._watch_at = deadline

    def _on_watch(self) -> None:
        assert self._pipeline is not None
        self._watch = None
        self._watch_at = math.inf
        soonest = self._pipeline.expire(max(self._loop.time(), 0.0))
        if soonest < math.inf:
            self._watch_until(soonest)

    # ---- connection

    def _reconnect_within(self, timeout_s: float) -> None:
        self._reconnect(Deadline.after(timeout_s, self._loop.time()))

    def _reconnect(self, deadline: Deadline) -> asyncio.Task[DistError | None]:
        """Start connecting, unless that is under way."""
        if self._connector is None:
            self._connector = self._loop.create_task(self._dial(deadline), name=f"{self!r} connects")
            self._connector.add_done_callback(self._on_connector_done)
        return self._connector

    def _on_connector_done(self, connector: asyncio.Task[DistError | None]) -> None:
        self._connector = None
        if not connector.cancelled() and not self._closed and self._pipeline is not None:
            error = connector.exception() or connector.result()
            if error is not None:
                self._pipeline.fail_all(str(error))
            elif self._connection is None:
                self._schedule_flush()  # it broke again before this was called

    async def _dial(self, until: Deadline) -> DistError | None:
        """Connect, with new tries until the deadline; return the error if all tries failed."""
        assert self._pipeline is not None
        try:
            await self.dialer.connect(until, self._pipeline.to_retry, self._use)
        except DistError as error:
            return error
        return None

    def _use(self, dialled: Dialled) -> None:
        """Take a connection into use."""
        assert self._pipeline is not None
        pipeline, (stream, welcome, reader) = self._pipeline, dialled
        next_frame = pipeline.next_frame
        self._connection = Connection(self._loop, stream, reader, next_frame, self._on_frame, self._on_lost)
        pipeline.lookout.connected(self._connection, stream.socket)
        changed = pipeline.on_welcome(welcome)
        if tracing("store"):
            emit("store", "connected", where=self.dialer.where, resumed=welcome.resumed, changed=changed)
        if self.dialer.lost is not None:  # before the first connection the daemon can have granted nothing
            self.lease_keeper.connected()
        self._connection.send()
        if changed:
            info("%s: it came back without its data", self.dialer.where)
            if self.on_incarnation_change is not None:
                self._loop.call_soon(self.on_incarnation_change)

    def _on_lost(self, error: Exception) -> None:
        assert self._pipeline is not None
        self._connection = None
        self.dialer.lost = error
        self._pipeline.on_lost()
        if tracing("store"):
            emit("store", "connection_lost", where=self.dialer.where, error=error)
        if self._closed:
            return
        self.lease_keeper.connection_lost()
        info("%s: connection lost (%s), connecting again", self.dialer.where, error)
        if isinstance(error, messages.ProtocolError):
            self._pipeline.fail_all(f"the store broke the connection off: {error}")
        if self._connector is None:
            self._reconnect_within(RECONNECT_TIMEOUT_S)

    # ---- closing

    async def close(self) -> None:
        """Wait, bounded, for the answers to what was issued, take leave of the daemon and close the connection.

        A broken connection is made anew for that, within the same two seconds, if a request has no answer or the daemon
        may not know that the last item of a queue has arrived. Waiting verbs end at once with `ClosedError`. Cancelling
        closes the connection without further waiting.
        """
        if self._closed:
            if self._closing is not None:
                await asyncio.shield(self._closing)
            return
        self._closed = True
        if self._pipeline is None:
            return
        self._closing = self._loop.create_future()
        try:
            self._pipeline.close_waits(self._closed_error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._take_leave(self._pipeline)
        finally:
            connector = self._connector
            self._abandon()
            try:
                if connector is not None:
                    await uninterrupted(asyncio.wait([connector]))  # it is cancelled, and has nothing more to wait for
            finally:
                self._closing.set_result(None)

    async def _take_leave(self, pipeline: Pipeline) -> None:
        while self._connection is not None or await self._returned(pipeline):
            if self._connection is not None:
                self._connection.send()
                await pipeline.drained()
            if self._connection is not None:
                pipeline.submit(messages.GOODBYE, (), None, 0, Reply).set_result(None)
                self._connection.send()
                await pipeline.drained()
                if not pipeline.at_stake:
                    return

    async def _returned(self, pipeline: Pipeline) -> bool:
        """Connect again if there was a connection and something is lost without one."""
        if self.dialer.lost is None or not pipeline.at_stake:
            return False
        if self._connector is not None:  # it may be between two tries, for longer than there is time
            self._connector.cancel()
            await asyncio.wait([self._connector])
            self.dialer.tries = 0
        connector = self._reconnect(Deadline.after(CLOSE_TIMEOUT_S, asyncio.get_running_loop().time()))
        await asyncio.wait([connector])
        return connector.result() is None

    def _abandon(self) -> None:
        """Give everything up at once."""
        self._closed = True
        self.lease_keeper.close()
        if self._watch is not None:
            self._watch.cancel()
        if self._connector is not None:
            self._connector.cancel()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._pipeline is not None:
            self._pipeline.close_all(self._closed_error)

    def close_after_fork(self) -> None:
        """Close this process's copy of the connection; for a forked child."""
        self._closed = True
        if self._connection is not None:
            self._connection.close_after_fork()
            self._connection = None

    def _closed_error(self) -> ClosedError:
        return ClosedError(f"{self!r} was closed")

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise self._closed_error()
