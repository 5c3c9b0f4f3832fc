"""StoreDialer: tries to connect to the daemon until a connection is open and proven, or the time is over."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import secrets
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, TypeAlias

from asyncdist.concurrency.deadline import Deadline
from asyncdist.concurrency.tasks import telling
from asyncdist.concurrency.trace import emit, info, tracing, warn
from asyncdist.errors import ConnectTimeoutError, DistStoreError
from asyncdist.store.credentials import TLSConfig
from asyncdist.store.pipeline import StoppingError
from asyncdist.store.store_connection import (
    OTHER_ADDRESS_MS,
    UNACKNOWLEDGED_MS,
    ByteStream,
    StoreRefusedError,
    open_stream,
    prove,
)
from asyncdist_server.serving.sockets import format_address
from asyncdist_server.wire.auth import AuthenticationError, ClientHandshake, Refusal, http_answer
from asyncdist_server.wire.messages import (
    CLIENT_ID_BYTES,
    STOPPING,
    Encoder,
    FrameReader,
    Hello,
    HelloRefused,
    ProtocolError,
    Welcome,
    decode_replies,
    decode_welcome,
)

__all__ = ["Dialled", "StoreDialer"]

_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], asyncio.Semaphore]] = (
    weakref.WeakKeyDictionary()
)

ATTEMPT_TIMEOUT_S: Final = 10.0
"""One try to connect and shake hands: twice what the daemon allows for the handshake."""

SILENCE_S: Final = 3.0
"""After so much silence on a connection the dialer asks whether an HTTP server is there. Even a busy store
answers within a second."""

NO_STORE_ANSWERS: Final = "connected, but no store answers there"

FIRST_BACKOFF_S: Final = 0.02
MAX_BACKOFF_S: Final = 2.0
MAX_DOUBLINGS: Final = 10
"""Between two tries; jittered by half, so that a thousand clients of a restarted daemon do not come in step. Where the
daemon, or this process, was too busy to shake hands, up to as long as the try has lasted: all would fail again."""

MAX_HANDSHAKES: Final = 256
"""With one daemon at a time, from one event loop: thousands that go on in step would all last longer than the daemon
allows, and none would succeed."""

TRANSIENT_REFUSALS: Final = frozenset({Refusal.TIMEOUT, Refusal.TOO_MANY_CONNECTIONS})
"""Refusals that trying again may cure."""

SILENT_CLOSES: Final = 3
"""So many connections in a row that were closed without a word are logged. It may be a proxy whose daemon is away, a
daemon that stops, or another program: the client cannot know."""


ToRetry: TypeAlias = Callable[[], tuple[int, ...]]
"""Returns the ids of requests that were sent on the last connection and have no answer."""


class Dialled(NamedTuple):
    """A connection on which the daemon has answered: the stream, its welcome, and the reader of what follows."""

    stream: ByteStream
    welcome: Welcome
    reader: FrameReader


class StoreDialer:
    """The address of a client's daemon, the token and TLS for it, and the tries to connect to it."""

    def __init__(
        self, host: str, port: int, token: str | None, tls: TLSConfig | ssl.SSLContext | None, context: bytes
    ) -> None:
        self.host = host
        self.port = port
        self.token = token
        """If none was given: the token that was proven to the first daemon. All later daemons must have it."""
        self.own_user_only = False
        """Whether a store on loopback must have this user's token, where none was given."""
        self.client_id = secrets.token_bytes(CLIENT_ID_BYTES)
        self.ends_with = ""
        """The name of the process with which the daemon ends for good; empty if there is none. If it is set, `connect`
        fails at once when a connection was lost and nothing listens there any more."""
        self.on_end: Callable[[bool], None] | None = None
        """Called when `connect` fails so, with whether the daemon has said that it stops."""
        self.tls = tls
        self.silence_s = SILENCE_S
        """See `SILENCE_S`; also the time-out of asking."""
        self.tries = 0
        """Tries since the daemon's last answer, at which `TCPClient` sets this to 0; the next pause grows with them."""
        self.lost: Exception | None = None
        """Why the last connection broke."""
        self.context = context
        self.unacknowledged_ms = OTHER_ADDRESS_MS if "," in host else UNACKNOWLEDGED_MS
        self._turn_of_address = -1
        self._attempt: asyncio.Timeout | None = None  # one try to connect

    @property
    def where(self) -> str:
        """The daemon's name in errors."""
        return f"store {format_address((self.host, self.port))}"

    async def connect(self, until: Deadline, to_retry: ToRetry, on_connected: Callable[[Dialled], None]) -> None:
        """Try to connect until the deadline `until`, and give the connection to `on_connected`.

        `to_retry` returns the ids that the hello names. Raises ConnectTimeoutError; DistStoreError where another try is
        of no use. Cancelling closes the connection that was begun.
        """
        trouble = Trouble()
        with telling(lambda: self._look_who_is_silent(trouble), self.silence_s):
            await self._dial_until(until, to_retry, on_connected, trouble)

    async def _dial_until(
        self, until: Deadline, to_retry: ToRetry, on_connected: Callable[[Dialled], None], trouble: Trouble
    ) -> None:
        loop = asyncio.get_running_loop()
        deadline = math.inf if until.at_s is None else until.at_s
        if self.tries:  # the last connection broke before it was of any use
            await self._pause(deadline)
        while True:
            attempt_until = deadline
            try:
                async with self._turn(deadline):
                    attempt_until = min(deadline, loop.time() + ATTEMPT_TIMEOUT_S)
                    async with asyncio.timeout_at(attempt_until) as self._attempt:
                        dialled = await self._dial(Hello(self.client_id, to_retry(), client_name()), trouble)
                        self.tries += 1  # until the connection gives its first answer
                        on_connected(dialled)
                return
            except StoreRefusedError as error:
                raise DistStoreError(f"{self.where}: {error}") from None
            except TimeoutError:
                if not trouble.text or attempt_until < deadline:  # a try cut short at the end says less than others
                    trouble.note(NO_STORE_ANSWERS if trouble.connected_at < math.inf else "it does not answer")
            except OSError as error:
                if self.ends_with and isinstance(error, ConnectionRefusedError):
                    if self.on_end is not None:
                        loop.call_soon(self.on_end, isinstance(self.lost, StoppingError))
                    what = f"it has ended with {self.ends_with}, which hosted it"
                    raise DistStoreError(f"{self.where}: {what}{self._before()}") from None
                if trouble.note_error(error):
                    info("%s: %s; still trying", self.where, trouble)
            if trouble.stranger:
                raise DistStoreError(f"{self.where}: {NO_STORE_ANSWERS}: {trouble.stranger}")
            if tracing("store"):
                emit("store", "dial_failed", where=self.where, problem=trouble.text)
            await self._pause(deadline, trouble.lasted_s)
            if loop.time() >= deadline:
                problem = f"{trouble}{self._before()}"
                if trouble.text == NO_STORE_ANSWERS:
                    raise ConnectTimeoutError(f"{self.where}: {problem} within {until.given_s:g} s")
                raise ConnectTimeoutError(f"{self.where}: could not connect within {until.given_s:g} s: {problem}")

    @asynccontextmanager
    async def _turn(self, deadline: float) -> AsyncIterator[None]:
        """Wait until no more than `MAX_HANDSHAKES` are under way with this daemon. Raises TimeoutError."""
        of_loop = _turns.setdefault(asyncio.get_running_loop(), {})
        turns = of_loop.setdefault((self.host, self.port), asyncio.Semaphore(MAX_HANDSHAKES))
        async with asyncio.timeout_at(None if deadline == math.inf else deadline):
            await turns.acquire()
        try:
            yield
        finally:
            turns.release()

    def _before(self) -> str:
        return "" if self.lost is None else f" (before: {self.lost})"

    async def _pause(self, deadline: float, busy_s: float = 0.0) -> None:
        """Wait before the next try, longer each time, until a connection gave an answer; see `MAX_DOUBLINGS`."""
        pause_s = min(FIRST_BACKOFF_S * 2 ** min(self.tries, MAX_DOUBLINGS), MAX_BACKOFF_S) * random.uniform(0.5, 1.0)
        pause_s = max(pause_s, random.uniform(0.0, busy_s))
        self.tries += 1
        await asyncio.sleep(min(pause_s, deadline - asyncio.get_running_loop().time()))

    async def _look_who_is_silent(self, trouble: Trouble) -> None:
        """Once a connection was silent for `silence_s`, ask whether an HTTP server is there: it speaks when asked.

        Where a daemon was met before, one is not asked for; else some time later, as thousands may wait for one daemon.
        """
        loop = asyncio.get_running_loop()
        while loop.time() < trouble.connected_at + self.silence_s:  # noqa: ASYNC110 - tries come and go meanwhile
            await asyncio.sleep(self.silence_s / 2)
        if self.lost is None:
            await asyncio.sleep(random.uniform(0.0, self.silence_s))
            trouble.stranger = await self._ask_for_http()
        if not trouble.stranger:
            warn("%s: %s, for %g s by now; still trying", self.where, NO_STORE_ANSWERS, self.silence_s)
        elif self._attempt is not None:
            with contextlib.suppress(RuntimeError):  # it is over: this is seen before the next one
                self._attempt.reschedule(loop.time())

    async def _ask_for_http(self) -> str:
        """Return what an HTTP server there answers, for people; empty if there is none."""
        try:
            async with asyncio.timeout(self.silence_s):
                stream = await open_stream(self.host, self.port, None)
                try:
                    await stream.send(b"HEAD / HTTP/1.0\r\n\r\n")
                    return http_answer(await stream.receive())
                finally:
                    stream.close()
        except OSError:  # time-outs are such
            return ""

    async def _dial(self, hello: Hello, trouble: Trouble) -> Dialled:
        """Connect, prove the token and say hello, once; `trouble` notes when the connection is open.

        Raises OSError for a failure that may pass, StoreRefusedError for one that will not.
        """
        try:
            trouble.connected_at = math.inf
            self._turn_of_address += 1  # where there are several, the one that was connected may be lost
            turn, bound_ms = self._turn_of_address, self.unacknowledged_ms
            stream = await open_stream(
                self.host, self.port, self.tls, trouble.note_connected, turn=turn, unacknowledged_ms=bound_ms
            )
            try:
                handshake = await prove(stream, self.token, self.context, own_user_only=self.own_user_only)
                dialled = Dialled(stream, *await _introduce(stream, handshake, hello))
            except BaseException:
                stream.close()
                raise
        except AuthenticationError as error:
            if error.refusal in TRANSIENT_REFUSALS:
                raise ConnectionError(str(error)) from error
            raise StoreRefusedError(str(error)) from error
        except HelloRefused as error:
            raise StoreRefusedError(f"it refuses this client: {error}") from error
        except ProtocolError as error:
            raise StoreRefusedError(f"it does not keep to asyncdist's store protocol: {error}") from error
        self.token = handshake.token
        return dialled


async def _introduce(stream: ByteStream, handshake: ClientHandshake, hello: Hello) -> tuple[Welcome, FrameReader]:
    """Say hello and read the welcome. Raises ConnectionResetError if the daemon says right behind it that it stops."""
    reader = FrameReader()
    await stream.send(Encoder().hello(hello))
    payloads = reader.feed(handshake.leftover)
    while not payloads:
        payloads = reader.feed(await stream.receive())
    welcome, unasked = decode_welcome(payloads[0]), payloads[1:]
    while reader.buffered and reader.error is None and not unasked:
        unasked = reader.feed(await stream.receive())
    if unasked and any(reply[:2] == (0, STOPPING) for reply in decode_replies(unasked[0])):
        raise ConnectionResetError("it is stopping")
    if unasked or reader.error is not None:
        raise ProtocolError("it answers what it was not asked")
    return welcome, FrameReader(welcome.limits.frame_bytes)


class Trouble:
    """Why the tries to connect have failed so far, for the error text."""

    def __init__(self) -> None:
        self.text = ""
        """Why the last try failed; empty before the first."""
        self._silent_closes = 0  # in a row
        self.connected_at = math.inf
        """When the connection was opened that has not answered yet, on the loop's clock; infinity without one."""
        self.lasted_s = 0.0
        """How long the last try had an open connection; that is long where the daemon is busy."""
        self.stranger = ""
        """The answer of a server there that is no store."""

    def __str__(self) -> str:
        if self._silent_closes < SILENT_CLOSES:
            return self.text
        return f"{self.text} {self._silent_closes} times in a row: a proxy whose daemon is away, or no asyncdist store"

    def note(self, text: str) -> None:
        """Note why a try failed."""
        self.lasted_s = max(0.0, asyncio.get_running_loop().time() - self.connected_at)
        self.text = text
        self._silent_closes = 0

    def note_connected(self) -> None:
        """Note that a connection was opened now."""
        self.connected_at = asyncio.get_running_loop().time()

    def note_error(self, error: OSError) -> bool:
        """Note the error of a try. Returns true once: when `SILENT_CLOSES` connections in a row were just closed."""
        cut = isinstance(error, ConnectionAbortedError | ConnectionResetError | BrokenPipeError)
        closes = self._silent_closes + 1 if cut else 0
        refused = isinstance(error, ConnectionRefusedError)
        self.note("nothing listens there" if refused else str(error) or type(error).__name__)
        self._silent_closes = closes
        self.connected_at = math.inf
        return closes == SILENT_CLOSES


def client_name() -> str:
    """Return the name by which the daemon lists this process: host and pid."""
    return f"{socket.gethostname()} pid {os.getpid()}"
