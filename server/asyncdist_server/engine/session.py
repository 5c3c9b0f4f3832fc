"""One native client, without I/O: bytes in, bytes out, the engine in between.

    session = Session(engine, token, on_output, Encoder())
    session.receive(data, now)      # parses, runs up to TURN_REQUESTS requests
    write(session.take_output())    # a list of byte strings; then close the connection if session.closing
    while session.busy:             # more requests or replies wait; unless the other side is slow, without reading more
        session.resume(now); write(session.take_output())
    session.close(now)              # the connection is gone

`on_output` is called when there is output without a call of the session: another client's request completed a
blocked one of this client. It is called again whenever such replies have grown by `SMALL_BYTES`. It must not
call the session or the engine, only take note.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from asyncdist_server.engine.clients import TURN_WORK_BYTES, value_bytes
from asyncdist_server.engine.engine import Client, Reply, Request, StoreEngine
from asyncdist_server.engine.namespace import TORCH_PREFIX
from asyncdist_server.engine.replies import PIECE_BYTES, SMALL_BYTES, LargeReply
from asyncdist_server.wire.auth import (
    AuthenticationError,
    Refusal,
    ServerHandshake,
    parse_store_context,
    refusal_message,
)
from asyncdist_server.wire.large_frames import LargeFrame, RequestReader
from asyncdist_server.wire.messages import (
    LIMIT,
    OBSERVATIONS,
    OBSERVER_ID,
    PROTOCOL,
    REFUSED,
    STOPPING,
    Encoder,
    HelloRefused,
    ProtocolError,
    Welcome,
    decode_hello,
    decode_requests,
    held_bytes,
)

TURN_REQUESTS: Final = 1024
"""Most requests run before other connections have their turn: about 2 ms."""
TURN_BYTES: Final = 256 * 1024
"""A turn also ends once its replies hold this much, or so much was said: a client that asks for much must also read it,
and a kernel takes a tenth of a millisecond for it."""

VIEW_BYTES: Final = 200
"""What a frame costs besides its bytes (measured)."""

GOLDEN: Final = 2654435769
"""The golden ratio's fraction in 32 bits."""

_CAUSES: Final = {PROTOCOL: "protocol", REFUSED: "superseded", LIMIT: "memory"}


class Session:
    """The state of one connection: handshake, hello, requests, closing. See the module's docstring."""

    protocol: Final = "native"
    """The name of what this speaks, for metrics."""

    __slots__ = (
        "_client",
        "_encoder",
        "_engine",
        "_frame_bytes",
        "_frames",
        "_handshake",
        "_index",
        "_large",
        "_later",
        "_noticed_bytes",
        "_on_output",
        "_output",
        "_reader",
        "_replies",
        "_request",
        "_requests",
        "_running",
        "address",
        "awaits_commits",
        "cause",
        "closing",
        "error",
        "job",
        "operation",
        "ran",
        "rank",
        "reply_bytes",
    )

    def __init__(
        self,
        engine: StoreEngine,
        token: str | None,
        on_output: Callable[[], None],
        encoder: Encoder,
        former_token: str | None = None,
    ) -> None:
        self._engine = engine
        self._on_output = on_output
        self._encoder = encoder
        self._handshake: ServerHandshake | None = ServerHandshake(token, former_token)
        self._reader = RequestReader(engine.limits.frame_bytes)
        self.job = ""
        """The namespace that the client has proven to belong to, empty before."""
        self.rank: int | None = None
        """The client's rank, if it has one."""
        self._client: Client | None = None
        self._frames: deque[memoryview | LargeFrame] = deque()  # whole frames not decoded yet
        self._requests: tuple[Any, ...] = ()  # the decoded frame being run, from _index on
        self._index = self._frame_bytes = 0
        self._replies: list[Reply] = []
        self._output: list[bytes] = []
        self._later: list[Reply] = []  # those before `_replies`, last first, where all were too much to be said at once
        self._large: LargeReply | None = None  # the one before these that is being said
        self._noticed_bytes = 0  # of replies, when `on_output` was called last
        self._running = False
        self._request = engine.request
        self.awaits_commits = False
        """Whether what the client is told may depend on changes that are not on the disk."""
        self.address = ""
        """Where the client is, for people."""
        self.reply_bytes = 0
        """Bytes of values in replies not yet taken."""
        self.closing = False
        """Whether the connection is to be closed once the output is written."""
        self.error = ""
        """Why the session closes, for the log; empty after a goodbye."""
        self.cause = ""
        """Why it closes in one word, to be counted."""
        self.ran = 0
        """Requests run in whole frames."""
        self.operation = 0
        """That of one of them, which stands for all."""

    @property
    def open(self) -> bool:
        """Whether handshake and hello are done."""
        return self._client is not None

    @property
    def has_output(self) -> bool:
        """Whether `take_output` would return anything."""
        return bool(self._replies or self._output or self._later or self._large)

    @property
    def busy(self) -> bool:
        """Whether received requests, or the nonsense behind them, or replies are left for the next turn."""
        if self._later or self._large is not None:
            return True
        return not self.closing and (self._unrun or self._reader.error is not None)

    @property
    def _unrun(self) -> bool:
        return bool(self._frames or self._index < len(self._requests))

    @property
    def buffered(self) -> int:
        """Bytes received and not yet run, with what it takes to hold them: those of a frame, once it is decoded."""
        unrun = self._reader.buffered + (self._frame_bytes if self._index < len(self._requests) else 0)
        return unrun + sum(map(len, self._frames)) + VIEW_BYTES * len(self._frames) if self._frames else unrun

    def receive(self, data: bytes, now: float) -> None:
        """Take the next bytes from the client and run what they complete; never raises for what they say."""
        if self.closing:
            return
        if self._handshake is not None:
            rest = self._authenticate(self._handshake, data)
            if rest is None:
                return
            data = rest
        reader = self._reader
        if reader.error is None:  # else that is told when all that came before it has been run
            self._frames.extend(reader.feed(data))
        self.resume(now)

    def resume(self, now: float) -> None:
        """Run more of the requests received, for one turn."""
        self._running = True
        try:
            if self._client is None and self._frames:
                self._hello(self._frames.popleft(), now)
            if self._client is not None:
                self._run(self._client, now)
            if self._reader.error is not None and not self._unrun:
                raise self._reader.error
        except ProtocolError as error:
            self._fail(PROTOCOL, str(error))
        except HelloRefused as refused:
            self._output.append(self._encoder.refusal(refused.code, str(refused)))
            self.cause = "hello"
            self._stop(str(refused))
        finally:
            self._running = False

    def take_output(self) -> list[bytes]:
        """Return what to send now, as pieces in order: all there is, or about `PIECE_BYTES` of it."""
        output, self._output = self._output, []
        if self._large is None and (self._replies or self._later):
            self._say_next(output)
            if self._client is not None:
                self._engine.frames_sent(self._client, 1, not self._replies and not self._later)
        if self._large is not None:
            output.append(self._large.take())
            if not self._large.left:
                self.reply_bytes -= value_bytes(self._large.reply[2])
                self._large = None
        self._noticed_bytes = self.reply_bytes
        return output

    def _say_next(self, output: list[bytes]) -> None:
        """Put the next frame of replies into `output`, or begin with one reply that is large."""
        most = self._engine.limits.items
        if not self._later:
            replies, self._replies = self._replies, []
            if self.reply_bytes <= PIECE_BYTES and len(replies) <= most:
                self.reply_bytes = 0
                output.append(self._encoder.replies(replies))
                return
            self._later = replies[::-1]
        later = self._later
        replies, size = [], 0
        while later and len(replies) < most:
            reply_bytes = value_bytes(later[-1][2])
            if replies and size + reply_bytes > PIECE_BYTES:
                break
            replies.append(later.pop())
            size += reply_bytes
        if size > PIECE_BYTES:
            self._large = LargeReply(replies[0], self._encoder.pack)
        else:
            self.reply_bytes -= size
            output.append(self._encoder.replies(replies))

    def waiting_values(self) -> list[Any]:
        """Return the values of the replies not yet taken, all of one that is being taken."""
        large = [] if self._large is None else [self._large.reply[2]]
        return [*large, *[reply[2] for reply in self._later], *[reply[2] for reply in self._replies]]

    def refuse(self, refusal: Refusal, detail: str = "") -> None:
        """Tell the client why its connection is closed before it is open: too many of them, or too slow."""
        if self._handshake is not None:
            self._output.append(refusal_message(refusal))
        self.cause = refusal.name.lower()
        self._stop(detail or refusal.name.lower().replace("_", " "))

    def say_stopping(self) -> None:
        """Tell the client that the daemon stops in order."""
        if self._client is not None and not self.closing:
            self._replies.append((0, STOPPING, "the daemon is stopping"))

    def end_unproven(self) -> None:
        """Note that the client has gone, if it did so when it was given the daemon's proof, with a word to guess by."""
        if not self.closing and self._handshake is not None and self._handshake.unanswered:
            self.cause = "proof_not_answered"
            self._stop("it was given the proof of the daemon's token and left without its own")

    def close(self, now: float) -> None:
        """Withdraw the client from the engine; the connection is gone."""
        if self._client is not None:
            self._engine.close(self._client, now)
        self._stop(self.error)

    def _authenticate(self, handshake: ServerHandshake, data: bytes) -> bytes | None:
        """Go on with the handshake; returns what is behind its end, None before that."""
        try:
            self._output.append(handshake.receive(data))
        except AuthenticationError as error:
            self._output.append(error.farewell)
            self.cause = error.refusal.name.lower()
            self._stop(str(error))
            return None
        if not handshake.done:
            return None
        self._handshake = None
        try:
            self.job, self.rank = parse_store_context(handshake.context)
        except ValueError as error:
            self._fail(PROTOCOL, str(error))
            return None
        return handshake.leftover

    def _hello(self, frame: memoryview | LargeFrame, now: float) -> None:
        payload = frame if type(frame) is memoryview else memoryview(frame.rest)
        hello = decode_hello(payload, self._engine.limits.in_flight)
        observes = hello.client_id == OBSERVER_ID
        self._client = self._engine.open(
            self.job,
            self._deliver,
            client_id=None if observes else hello.client_id,
            pending=hello.pending,
            on_superseded=self._superseded,
            now=now,
        )
        self.awaits_commits = not observes
        if observes:
            self._request = self._observe
        self._client.name, self._client.rank, self._client.address = hello.name, self.rank, self.address
        self._client.read_only = self.job.startswith(TORCH_PREFIX)
        welcome = Welcome(self._engine.incarnation, self._client.resumed, self._engine.limits)
        self._output.append(self._encoder.welcome(welcome))

    def _observe(self, client: Client, request: Request, now: float) -> Reply | None:
        """Run a request of a client that only looks."""
        if type(request) is tuple and len(request) > 1 and request[1] not in OBSERVATIONS:
            raise ProtocolError("a client that only looks may ask for nothing else")
        return self._engine.request(client, request, now)

    def _run(self, client: Client, now: float) -> None:
        request = self._request
        replies = self._replies
        budget, client.work_bytes = TURN_REQUESTS, 0
        frame: memoryview | LargeFrame | None = None
        most = self._engine.limits.items
        while budget > 0 and self.reply_bytes < TURN_BYTES and client.work_bytes < TURN_WORK_BYTES:
            index, requests = self._index, self._requests
            if index >= len(requests):
                if index == 2:
                    self.operation = requests[1][1]
                    self.ran += 1
                    self._requests, self._index = (), 0
                elif index:
                    self._frame_ran(requests, index - 1)
                if not self._frames:
                    return
                frame = self._frames.popleft()
                self._frame_bytes = len(frame)
                requests = decode_requests(frame, most) if type(frame) is memoryview else frame.decode(most)
                self._requests = requests
                self._engine.acknowledge(client, requests[0])
                index = self._index = 1
            end = len(requests) if len(requests) - index < budget else index + budget
            while index < end and self.reply_bytes < TURN_BYTES and client.work_bytes < TURN_WORK_BYTES:
                reply = request(client, requests[index], now)
                index += 1
                if reply is not None:
                    replies.append(reply)
                    value = reply[2]
                    if type(value) is bytes:
                        self.reply_bytes += len(value)
                    elif value is not None and type(value) is not int:
                        self.reply_bytes += value_bytes(value)
                    if client.leaving:
                        self._stop("")
                        return
            budget -= index - self._index
            self._index = index
        if frame is not None and self._index < len(self._requests):
            self._frame_bytes += held_bytes(self._requests)  # the rest of it is run in a later turn

    def _frame_ran(self, requests: tuple[Any, ...], count: int) -> None:
        """Keep nothing of a frame while the client is idle, but one request that stands for all.

        Fractions of the multiples of the golden ratio spread evenly over frames, also where all are alike.
        """
        self._requests, self._index = (), 0
        if count:
            self.ran += count
            self.operation = requests[1 + (self.ran * GOLDEN >> 32) % count][1]

    def _deliver(self, reply: Reply) -> None:
        """Take the reply to a request that was blocked."""
        self._replies.append(reply)
        self.reply_bytes += value_bytes(reply[2])
        grown_bytes = self.reply_bytes - self._noticed_bytes
        if not self._running and (len(self._replies) == 1 or grown_bytes > SMALL_BYTES):
            self._noticed_bytes = self.reply_bytes
            self._on_output()

    def _superseded(self) -> None:
        self._fail(REFUSED, "the client connected anew")
        self._on_output()

    def _fail(self, code: int, message: str) -> None:
        """Tell the client why the connection ends, in the form it expects at this point."""
        if self._client is None:
            self._output.append(self._encoder.refusal(code, message))
        else:
            self._replies.append((0, code, message))
        self.cause = _CAUSES[code]
        self._stop(message)

    def fail_limit(self, message: str) -> None:
        """Close because this connection exceeds a bound of the daemon."""
        self._fail(LIMIT, message)

    def _stop(self, reason: str) -> None:
        self.closing = True
        self.error = reason
        self._reader = RequestReader(self._engine.limits.frame_bytes)  # the old one may hold most of a frame
        self._frames.clear()
        self._requests, self._index = (), 0
