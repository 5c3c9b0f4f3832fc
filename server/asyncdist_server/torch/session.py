"""One torch client, without I/O: bytes of torch's TCPStore in, bytes out, the engine in between.

It is driven exactly as `session.Session` is. Semantics are torch's, without the faults of its servers: a waiting client
goes on only while all its keys are there, an item of a queue goes to one client, barriers may be used again. Requests
behind a wait are run while it waits, as torch's servers do; torch's client sends none but the cancellation.

The wire has no reply that means an error, so whatever breaks a limit, an addition to a text for example, closes the
connection, as torch's server does; the daemon's log says why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from asyncdist_server.engine.clients import TURN_WORK_BYTES, Client, Reply
from asyncdist_server.engine.namespace import Namespace
from asyncdist_server.engine.operations import parse_number
from asyncdist_server.engine.replies import PIECE_BYTES
from asyncdist_server.engine.replies import SMALL_BYTES as SMALL_INPUT_BYTES
from asyncdist_server.engine.session import TURN_BYTES, TURN_REQUESTS
from asyncdist_server.engine.state import StoreState
from asyncdist_server.torch.namespaces import JOB_KEY_STARTS, MAX_JOBS, Barrier, TorchNamespace, job_of
from asyncdist_server.torch.requests import REQUESTS
from asyncdist_server.torch.wire import (
    MAX_VECTOR_KEYS,
    SMALL_BYTES,
    STOP_WAITING,
    VALIDATE_MAGIC,
    WAIT_CANCELED,
    Query,
    TorchReader,
    encode_length,
    read_small,
)
from asyncdist_server.wire.auth import Refusal
from asyncdist_server.wire.messages import CANCEL, GET, OK, QUEUE_POP, QUEUE_RETURN, WAIT, ProtocolError

_QUEUE_POP: Final = int(Query.QUEUE_POP)


class TorchSession:
    """The state of one torch client's connection. See the module's docstring."""

    protocol: Final = "torch"
    """The name of what this speaks, for metrics."""
    rank: Final = None
    """torch's protocol does not tell it."""

    __slots__ = (
        "_begun",
        "_between",
        "_claim",
        "_jobs",
        "_last_id",
        "_on_output",
        "_output",
        "_reader",
        "_running",
        "_waits",
        "address",
        "buffered",
        "busy",
        "cause",
        "client",
        "closing",
        "engine",
        "error",
        "job",
        "namespace",
        "now",
        "open",
        "operation",
        "popped",
        "ran",
        "reply_bytes",
        "stored",
    )

    def __init__(self, namespace: TorchNamespace, on_output: Callable[[], None], address: str = "") -> None:
        self.namespace = namespace
        self.engine = namespace.engine
        self.now = 0.0  # when this session, or another on its behalf, was called last
        self._on_output = on_output
        self._reader = TorchReader(namespace.engine.limits)
        self._output: deque[bytes] = deque()
        self._begun = 0  # how much of the first of these was taken
        self._running = False
        self._last_id = 0
        self._jobs: set[bytes] = set()
        # Blocked requests by their id: what must be undone when they end, the key of a queue or a barrier.
        self._waits: dict[int, bytes | Barrier | None] = {}
        self._claim: bytes | None = None  # the queue of which an item is kept for this client
        self._between = False  # whether the next bytes begin a request
        self.client: Client
        self.stored: Namespace
        """The keys and queues of this port; read here, changed by the engine only."""
        self.address = address
        """Where the client is, for people."""
        self.job = namespace.name  # as people know the namespace
        self.open = False
        """Whether the client has said the magic number."""
        self.busy = False
        """Whether received requests are waiting for `resume`."""
        self.buffered = 0
        """Bytes received and not yet run."""
        self.reply_bytes = 0
        """Bytes of replies not yet taken."""
        self.ran = 0
        """Requests run."""
        self.operation = 0
        """The engine's operation that the last of them asked for."""
        self.cause = ""
        """Why the connection closes in one word, to be counted."""
        self.closing = False
        """Whether the connection is to be closed once the output is written."""
        self.error = ""
        """Why the session closes, for the log."""
        self.popped = PoppedItems()
        """What goes back if the client ends without having read it."""

    @property
    def has_output(self) -> bool:
        """Whether `take_output` would return anything."""
        return bool(self._output)

    # ---- what the connection calls

    def receive(self, data: bytes, now: float) -> None:
        """Take the next bytes from the client and run what they complete; never raises for what they say."""
        self.now = now
        left = TURN_REQUESTS
        if self._between:  # nearly always; nearly all requests are small, and come alone or in pairs
            start, limits, client = 0, self.engine.limits, self.client
            client.work_bytes = 0
            self._running = True
            try:
                while (found := read_small(data, start, limits)) is not None:
                    request, start = found
                    self._run(request)
                    if start == len(data):
                        return
                    left = left - 1 if client.work_bytes < TURN_WORK_BYTES else 0
                    if not left or self.reply_bytes >= TURN_BYTES:
                        break
            except ProtocolError as error:
                self._stop(str(error))
            finally:
                self._running = False
            data = data[start:]
        elif self.open:
            self.client.work_bytes = 0
        if not self.closing:
            self._reader.feed(data)
            self._run_more(left)

    def resume(self, now: float) -> None:
        """Run more of the requests received, for one turn."""
        self.now = now
        self.client.work_bytes = 0
        self._run_more(TURN_REQUESTS)

    def _run_more(self, left: int) -> None:
        """Run what the reader has, that many requests at most."""
        self._running = True
        try:
            while left > 0 and self.reply_bytes < TURN_BYTES and not self.closing:
                request = self._reader.next()
                if request is None:
                    break
                if self.open:
                    self._run(request)
                else:
                    self._begin(request[1])
                left = left - 1 if self.client.work_bytes < TURN_WORK_BYTES else 0
        except ProtocolError as error:
            self._stop(str(error))
        finally:
            self._running = False
        before, self.buffered = self.buffered, self._reader.buffered
        if not self.namespace.take_input(self.buffered - before) and self.buffered > SMALL_INPUT_BYTES:
            self.fail_limit("torch's clients sent too much unfinished input")
        self.busy = not self.closing and self._reader.ready
        self._between = self.open and not self.closing and self._reader.idle

    def take_output(self) -> list[bytes]:
        """Return what to send now, as pieces in order: all there is, or about `PIECE_BYTES` of it."""
        output: list[bytes] = []
        waiting, size = self._output, 0
        while waiting and size < PIECE_BYTES:
            whole = waiting[0]
            piece = whole[self._begun : self._begun + PIECE_BYTES - size]
            self._begun += len(piece)
            if self._begun == len(whole):
                waiting.popleft()
                self._begun = 0
            output.append(piece)
            size += len(piece)
        self.reply_bytes -= size
        if self.popped and not waiting:
            self.popped.sent(bool(output), self._last_id, self.engine.state, self.client)
        return output

    def waiting_values(self) -> list[bytes]:
        """Return the replies not yet taken."""
        return list(self._output)

    def refuse(self, refusal: Refusal, detail: str = "") -> None:
        """Close before the client is validated: nothing can be said in this protocol, `detail` is for the log."""
        self.cause = refusal.name.lower()
        self._stop(detail or refusal.name.lower().replace("_", " "))

    def end_unproven(self) -> None:
        """Nothing: this protocol has no proof."""

    def say_stopping(self) -> None:
        """Nothing: this protocol has no word for it."""

    def fail_limit(self, message: str) -> None:
        """Close because this connection exceeds a bound of the daemon."""
        self.cause = "memory"
        self._stop(message)

    def close(self, now: float) -> None:
        """Withdraw the client from the engine; the connection is gone. A second call does nothing."""
        self._stop(self.error)
        if not self.open or self.client.closed:
            return
        self.now = now
        self.popped.end(self._last_id, self.engine.state, self.client)
        self._end_waits()
        self.drop_claim(now)
        while self.popped:  # what the client was never sent, or cannot have read, goes back to the heads of its queues
            key, item = self.popped.pop()
            self.ask(QUEUE_RETURN, key, item)
            self.namespace.offer(self, key, now)
        self.engine.close(self.client, now)
        self.namespace.leave(self, (*self._jobs, b""), now)

    # ---- what requests and the namespace call, the latter on behalf of another client

    def ask(self, *request: Any) -> Reply:
        """Run one request that does not block and return the engine's reply."""
        self._last_id += 1
        self.ran += 1
        self.operation = request[0]
        reply = self.engine.request(self.client, (self._last_id, *request), self.now)
        assert reply is not None
        return reply

    def release(self, request_id: int, now: float) -> None:
        """Let the client go on that waits by this id."""
        self.now = now
        self._end_wait(request_id)
        self.say(STOP_WAITING)

    def pop(self, key: bytes) -> None:
        """Send an item of a queue that has one."""
        item = self.must(self.ask(QUEUE_POP, key, 0))
        self.say_string(item)
        self.popped.append((key, item))

    def take_claim(self, key: bytes, now: float) -> None:
        """Have an item of the queue `key` kept for this client, unless one is: torch waits for one at a time."""
        if self._claim is None:
            self._claim = key
            self.namespace.claim(self, key, now)

    def drop_claim(self, now: float) -> None:
        """Leave the item that is kept for this client to others."""
        if self._claim is not None:
            key, self._claim = self._claim, None
            self.now = now
            self.namespace.give_back(self, key, now)

    # ---- requests

    def _run(self, request: tuple[Any, ...]) -> None:
        query = request[0]
        if self._claim is not None and (query != _QUEUE_POP or request[1] != self._claim):
            self.drop_claim(self.now)
        REQUESTS[query](self, *request[1:])

    def _begin(self, magic: int) -> None:
        if magic != VALIDATE_MAGIC:
            raise ProtocolError(f"a torch client began with {magic:#x} instead of its magic number")
        self.client = self.engine.open(self.namespace.name, self._deliver)
        self.client.max_keys = MAX_VECTOR_KEYS
        self.client.name, self.client.address = "torch", self.address
        self.stored = self.client.namespace
        self.open = True
        self.namespace.enter(self)

    # ---- waiting

    def wait(self, keys: tuple[bytes, ...]) -> None:
        """Answer once all `keys` are there."""
        self.name_jobs(*keys)
        if len(keys) == 1:
            self._wait_for_one(keys[0])
        elif self._block(WAIT, keys, None):
            self.say(STOP_WAITING)

    def _wait_for_one(self, key: bytes) -> None:
        """Wait for a value, or an item that no other client is about to pop: torch's blocking pop begins so."""
        namespace = self.namespace
        if key in self.stored.values:
            self.say(STOP_WAITING)
        elif namespace.free_items(self, key) > 0:
            self.take_claim(key, self.now)
            self.say(STOP_WAITING)
        elif not self._block(GET, key, key):  # GET sees values only
            namespace.wait_for_item(self, self._last_id, key)

    def barrier(self, key: bytes, world_size: int) -> None:
        """Answer once `world_size` clients wait in the barrier `key`."""
        self.name_jobs(key)
        stored = self.stored.values.get(key, b"0")
        self.client.work_bytes += len(stored)
        if parse_number(stored) is None:
            raise ProtocolError(f"barrier on a value that is not a number: {stored[:40]!r}")
        barrier = self.namespace.arrive(self, key, world_size, self.now)
        if barrier is None:
            self.say(STOP_WAITING)
            return
        self._last_id += 1
        request_id = self._last_id
        self._waits[request_id] = barrier
        barrier.waiting[self, request_id] = None
        # For the engine's limits and its list of waits. No client sets this key, and nothing follows if one does.
        shown = (b"barrier " + key)[: self.engine.limits.key_bytes]
        reply = self.engine.request(self.client, (request_id, GET, shown, None), self.now)
        if reply is not None:
            self.must(reply)

    def _block(self, operation: int, keys: bytes | tuple[bytes, ...], undo: bytes | Barrier | None) -> bool:
        """Begin to wait; true if there is no need to."""
        self._last_id += 1
        reply = self.engine.request(self.client, (self._last_id, operation, keys, None), self.now)
        if reply is not None:
            self.must(reply)
            return True
        self._waits[self._last_id] = undo
        return False

    def cancel_wait(self) -> None:
        """Wait for nothing any more; answered even if there was nothing."""
        self._end_waits()
        self.say(WAIT_CANCELED)

    def _end_waits(self) -> None:
        while self._waits:  # leaving a barrier sets its key, which may end another of these
            self._end_wait(next(iter(self._waits)))

    def _end_wait(self, request_id: int) -> None:
        """Wait no longer by this id, and say nothing."""
        undo = self._waits.pop(request_id)
        self.ask(CANCEL, request_id)
        if isinstance(undo, Barrier):
            self.namespace.give_up(self, request_id, undo)
        elif undo is not None:
            self.namespace.stop_waiting(self, request_id, undo)

    def _deliver(self, reply: Reply) -> None:
        """Take the reply to a request that was blocked. Those withdrawn here are no longer among the waits."""
        request_id = reply[0]
        undo = self._waits.get(request_id)
        if request_id not in self._waits or isinstance(undo, Barrier):
            return
        del self._waits[request_id]
        if undo is not None:
            self.namespace.stop_waiting(self, request_id, undo)
        self.say(STOP_WAITING)

    # ---- replies

    def do(self, operation: int, key: bytes, *arguments: Any) -> Any:
        """Run one request about one key and return its value."""
        if key.startswith(JOB_KEY_STARTS):
            self.name_jobs(key)
        return self.must(self.ask(operation, key, *arguments))

    def must(self, reply: Reply) -> Any:
        """Return the value of a reply; any but OK closes the connection, as nothing else can be said."""
        if reply[1] != OK:
            raise ProtocolError(str(reply[2]))
        return reply[2]

    def name_jobs(self, *keys: bytes) -> None:
        """Count this client among those of the jobs that `keys` name."""
        for job in filter(None, map(job_of, keys)):
            if job not in self._jobs:
                if len(self._jobs) >= MAX_JOBS:
                    raise ProtocolError(f"one connection names more than {MAX_JOBS} jobs")
                self._jobs.add(job)
                self.namespace.enter(self, job)

    def say(self, data: bytes) -> None:
        """Send `data`."""
        self._output.append(data)
        self.reply_bytes += len(data)
        if not self._running and len(self._output) == 1:
            self._on_output()

    def say_string(self, value: bytes) -> None:
        """Send `value` behind its length."""
        if len(value) < SMALL_BYTES:
            self.say(encode_length(len(value)) + value)
        else:
            self.say(encode_length(len(value)))
            self.say(value)

    def _stop(self, reason: str) -> None:
        self.closing = True
        self.busy = self._between = False
        self._reader = TorchReader(self.engine.limits)  # the old one may hold most of a request
        self.namespace.take_input(-self.buffered)
        self.buffered = 0
        self.error = reason


class PoppedItems(list[tuple[bytes, bytes]]):
    """Queue and item of each pop whose answer one client may not have, oldest first.

    A client has read what it was sent if it asks for something more, or ends its connection in order: a kernel resets
    one whose process ends with something unread. `last_id` is always that of the client's last request.
    """

    __slots__ = ("_sent", "_sent_at", "unread")

    def __init__(self) -> None:
        super().__init__()
        self._sent = 0  # how many of the first are on their way
        self._sent_at = 0  # since the request of that id
        self.unread = False
        """Whether the client ended without having read what it was sent last."""

    def sent(self, anything: bool, last_id: int, state: StoreState, client: Client) -> None:
        """Note that all output was taken, and whether there was any."""
        if anything or last_id != self._sent_at:
            del self[: self._sent]
            self._sent = len(self)
            self._sent_at = last_id
            self._charge(sum(len(key) + len(item) for key, item in self), state, client)

    def end(self, last_id: int, state: StoreState, client: Client) -> None:
        """Keep those only that the client does not have."""
        if not self.unread or last_id != self._sent_at:
            del self[: self._sent]
        self._charge(0, state, client)

    def _charge(self, size: int, state: StoreState, client: Client) -> None:
        """Charge the store for the items that are on their way, and no longer for those that were."""
        grown_bytes = size - client.remembered_bytes
        state.remember(grown_bytes)
        if client.namespace.share is not None:
            client.namespace.share.bytes += grown_bytes
        client.remembered_bytes = size
