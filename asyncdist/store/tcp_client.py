"""TCPClient: one connection to the store daemon, made anew whenever it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import secrets
import ssl
from collections.abc import Callable
from typing import Any, ClassVar, Final, Self

from asyncdist.concurrency.deadline import Deadline, Timeout
from asyncdist.concurrency.loop import prepare_fork
from asyncdist.concurrency.tasks import telling, uninterrupted
from asyncdist.concurrency.trace import emit, info, tracing, warn
from asyncdist.errors import ClosedError, ConnectTimeoutError, DistError, DistStoreError
from asyncdist.store.credentials import TLSConfig
from asyncdist.store.fork_safety import close_in_forked_child
from asyncdist.store.pipeline import Pipeline, StoppingError
from asyncdist.store.reply import Reply
from asyncdist.store.request_store import CoordinatingStore
from asyncdist.store.store_connection import Connection, StoreRefusedError, Trouble, ask_for_http, client_name, dial
from asyncdist_server.serving.sockets import format_address
from asyncdist_server.wire import messages

__all__ = ["TCPClient"]

RECONNECT_TIMEOUT_S: Final = 60.0
"""How long a lost connection is tried again. Half of what the daemon remembers a client for, so that a reconnect that
succeeds can still retry exactly once."""

ATTEMPT_TIMEOUT_S: Final = 10.0
"""One try to connect and shake hands: twice what the daemon allows for the handshake."""

SILENCE_S: Final = 3.0
"""After so much silence on a connection the client looks what is there: a store, busy or not, answers in a second."""

NO_STORE_ANSWERS: Final = "connected, but no store answers there"

FIRST_BACKOFF_S: Final = 0.02
MAX_BACKOFF_S: Final = 2.0
"""Between two tries; jittered by half, so that a thousand clients of a restarted daemon do not come in step."""

CLOSE_TIMEOUT_S: Final = 2.0
"""How long closing waits for answers to what was issued before, and tries to connect again where that needs it."""


class TCPClient(CoordinatingStore):
    """The requests of a `TCPStore` and the connection they travel on; what users are told is there.

    The address may be set until the first connection is made.
    """

    silence_s: ClassVar[float] = SILENCE_S
    """How long a connection is silent before the client looks what is there, and how long that may take."""

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
        self.host = host
        self.port = port
        self.on_incarnation_change = on_incarnation_change
        self.ends_with = ""
        """Whose daemon it is, if it ends with a process and comes back no more. Once nobody listens there after the
        connection was lost, requests fail at once."""
        self.on_end: Callable[[bool], None] | None = None
        """Called then, with whether the daemon has said that it stops."""
        self.token = token
        """Where none was given, the one that was proven to the first daemon, which all later ones must have."""
        self.own_user_only = False
        """Whether a store on loopback must have this user's token, where none was given."""
        self._tls = tls
        self._context = context
        self._client_id = secrets.token_bytes(messages.CLIENT_ID_BYTES)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pipeline: Pipeline | None = None
        self._connection: Connection | None = None
        self._connector: asyncio.Task[DistError | None] | None = None
        self._flush_scheduled = False
        self._watch: asyncio.TimerHandle | None = None
        self._watch_at = math.inf
        self._backoff_s = FIRST_BACKOFF_S
        self._attempt: asyncio.Timeout | None = None  # one try to connect
        self._lost = ""  # why the last connection was, for people
        self._stopped = False
        self._closed = False
        self._closing: asyncio.Future[None] | None = None

    @property
    def _where(self) -> str:
        return f"store {format_address((self.host, self.port))}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.host!r}, {self.port})"

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    async def __aenter__(self) -> Self:
        return await self.open_by(Deadline.after(self._timeout_s, asyncio.get_running_loop().time()))

    async def open_by(self, deadline: Deadline) -> Self:
        """Open as `async with` does, until an instant of the running loop's clock that a caller has fixed before."""
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
        """Belong to the running loop from now on; RuntimeError if it is another one's."""
        loop = asyncio.get_running_loop()
        if self._pipeline is None:
            self._loop = loop
            self._pipeline = Pipeline(loop, self._where, self._schedule_flush)
            close_in_forked_child(self)
            prepare_fork(loop)
        elif self._loop is not loop:
            raise RuntimeError(f"{self!r} belongs to another event loop")
        return self._pipeline

    def _schedule_flush(self) -> None:
        assert self._loop is not None
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._connection is not None:
            self._connection.send()
        elif not self._closed and self._connector is None:
            self._backoff_s = FIRST_BACKOFF_S
            self._reconnect_within(
                RECONNECT_TIMEOUT_S if self._timeout_s is None else min(self._timeout_s, RECONNECT_TIMEOUT_S)
            )

    def _on_frame(self, payload: memoryview) -> None:
        assert self._pipeline is not None
        self._backoff_s = FIRST_BACKOFF_S
        self._pipeline.on_replies(payload)
        if self._pipeline.has_unsent:
            self._schedule_flush()

    # ---- time

    def _watch_until(self, deadline: float) -> None:
        """Look for requests without an answer at `deadline`; one timer for all, as almost none ever expires."""
        assert self._loop is not None
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self._loop.call_at(deadline, self._on_watch)
        self._watch_at = deadline

    def _on_watch(self) -> None:
        assert self._loop is not None
        assert self._pipeline is not None
        self._watch = None
        self._watch_at = math.inf
        soonest = self._pipeline.expire(max(self._loop.time(), 0.0))
        if soonest < math.inf:
            self._watch_until(soonest)

    # ---- connection

    def _reconnect_within(self, timeout_s: float) -> None:
        assert self._loop is not None
        self._reconnect(Deadline.after(timeout_s, self._loop.time()))

    def _reconnect(self, deadline: Deadline) -> asyncio.Task[DistError | None]:
        """Start connecting, unless that is under way."""
        assert self._loop is not None
        if self._connector is None:
            self._connector = self._loop.create_task(self._keep_dialling(deadline), name=f"{self!r} connects")
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

    async def _keep_dialling(self, until: Deadline) -> DistError | None:
        """Connect, trying again until that instant; return the error if that did not help."""
        assert self._loop is not None
        deadline = math.inf if until.at_s is None else until.at_s
        trouble = Trouble()
        with telling(lambda: self._look_who_is_silent(trouble), self.silence_s):
            return await self._dial_until(until, deadline, trouble)

    async def _dial_until(self, until: Deadline, deadline: float, trouble: Trouble) -> DistError | None:
        assert self._loop is not None
        loop = self._loop
        if self._backoff_s > FIRST_BACKOFF_S:  # the last connection broke before it was of any use
            await self._pause(deadline)
        while True:
            attempt_until = min(deadline, loop.time() + ATTEMPT_TIMEOUT_S)
            try:
                async with asyncio.timeout_at(attempt_until) as self._attempt:
                    await self._dial(trouble)
                return None
            except StoreRefusedError as error:
                return DistStoreError(f"{self._where}: {error}")
            except TimeoutError:
                if (
                    not trouble.text or attempt_until < deadline
                ):  # a try cut short at the end says less than those before
                    trouble.note(NO_STORE_ANSWERS if trouble.connected_at < math.inf else "it does not answer")
            except OSError as error:
                if self.ends_with and isinstance(error, ConnectionRefusedError):
                    if self.on_end is not None:
                        loop.call_soon(self.on_end, self._stopped)
                    what = f"it has ended with {self.ends_with}, which hosted it"
                    return DistStoreError(f"{self._where}: {what}{self._lost}")
                if trouble.note_error(error):
                    info("%s: %s; still trying", self._where, trouble)
            if trouble.stranger:
                return DistStoreError(f"{self._where}: {NO_STORE_ANSWERS}: {trouble.stranger}")
            if tracing("store"):
                emit("store", "dial_failed", where=self._where, problem=trouble.text)
            await self._pause(deadline)
            if loop.time() >= deadline:
                problem = f"{trouble}{self._lost}"
                if trouble.text == NO_STORE_ANSWERS:
                    return ConnectTimeoutError(f"{self._where}: {problem} within {until.given_s:g} s")
                return ConnectTimeoutError(f"{self._where}: could not connect within {until.given_s:g} s: {problem}")

    async def _look_who_is_silent(self, trouble: Trouble) -> None:
        """Once a connection was silent for long, see whether it is a server of HTTP: that waits to be asked."""
        loop = asyncio.get_running_loop()
        while loop.time() < trouble.connected_at + self.silence_s:  # noqa: ASYNC110 - tries come and go meanwhile
            await asyncio.sleep(self.silence_s / 2)
        trouble.stranger = await ask_for_http(self.host, self.port, self.silence_s)
        if not trouble.stranger:
            warn("%s: %s, for %g s by now; still trying", self._where, NO_STORE_ANSWERS, self.silence_s)
        elif self._attempt is not None:
            with contextlib.suppress(RuntimeError):  # it is over: this is seen before the next one
                self._attempt.reschedule(loop.time())

    async def _pause(self, deadline: float) -> None:
        """Wait before the next try, longer each time, until a connection gave an answer."""
        pause_s = self._backoff_s * random.uniform(0.5, 1.0)
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        await asyncio.sleep(min(pause_s, deadline - asyncio.get_running_loop().time()))

    async def _dial(self, trouble: Trouble) -> None:
        """Make one connection and take it into use."""
        assert self._loop is not None
        pipeline = self._pipeline
        assert pipeline is not None
        hello = messages.Hello(self._client_id, pipeline.to_retry(), client_name())
        connected, self.token, welcome, reader = await dial(  # the last await
            self.host, self.port, self._tls, self.token, self._context, hello, trouble, own_user_only=self.own_user_only
        )
        next_frame = pipeline.next_frame
        self._connection = Connection(self._loop, connected, reader, next_frame, self._on_frame, self._on_lost)
        pipeline.lookout.connected(self._connection, connected.socket)
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)  # until it gives its first answer
        changed = pipeline.on_welcome(welcome)
        if tracing("store"):
            emit("store", "connected", where=self._where, resumed=welcome.resumed, changed=changed)
        if self._lost:  # before the first connection the daemon can have granted nothing
            self.lease_keeper.connected()
        self._connection.send()
        if changed:
            info("%s: it came back without its data", self._where)
            if self.on_incarnation_change is not None:
                self._loop.call_soon(self.on_incarnation_change)

    def _on_lost(self, error: Exception) -> None:
        assert self._pipeline is not None
        self._connection = None
        self._lost = f" (before: {error})"
        self._stopped = isinstance(error, StoppingError)
        self._pipeline.on_lost()
        if tracing("store"):
            emit("store", "connection_lost", where=self._where, error=error)
        if self._closed:
            return
        self.lease_keeper.connection_lost()
        info("%s: connection lost (%s), connecting again", self._where, error)
        if isinstance(error, messages.ProtocolError):
            self._pipeline.fail_all(f"the store broke the connection off: {error}")
        if self._connector is None:
            self._reconnect_within(RECONNECT_TIMEOUT_S)

    # ---- closing

    async def close(self) -> None:
        """Wait, bounded, for the answers to what was issued, take leave of the daemon and close the connection.

        Where the connection is broken and something has no answer, or the daemon may not know that the last item of a
        queue has arrived, it is made anew for that, within the same two seconds. Waiting verbs end at once with
        `ClosedError`. Cancelling it closes the connection without further waiting.
        """
        if self._closed:
            if self._closing is not None:
                await asyncio.shield(self._closing)
            return
        self._closed = True
        if self._pipeline is None or self._loop is None:
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
        if not self._lost or not pipeline.at_stake:
            return False
        if self._connector is not None:  # it may be between two tries, for longer than there is time
            self._connector.cancel()
            await asyncio.wait([self._connector])
            self._backoff_s = FIRST_BACKOFF_S
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
