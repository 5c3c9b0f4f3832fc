"""One torch client, without I/O: bytes of torch's TCPStore in, bytes out, the engine in between.

It is driven exactly as `session.Session` is. Semantics are torch's, without the faults of its servers: a waiting client
goes on only while all its keys are there, an item of a queue goes to one client, barriers may be used again. Requests
behind a wait are run while it waits, as torch's servers do; torch's client sends none but the cancellation.

The wire has no reply that means an error, so whatever breaks a limit, an addition to a text for example, closes the
connection, as torch's server does; the daemon's log says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from asyncdist_server.auth import Refusal
from asyncdist_server.engine import Client, Reply
from asyncdist_server.messages import (
    ADD,
    APPEND,
    CANCEL,
    CHECK,
    COMPARE_SET,
    DELETE,
    GET,
    LIST_KEYS,
    MULTI_GET,
    MULTI_SET,
    NUM_KEYS,
    OK,
    QUEUE_LEN,
    QUEUE_POP,
    QUEUE_PUSH,
    SET,
    TIMEOUT,
    WAIT,
    ProtocolError,
)
from asyncdist_server.operations import INT64_MAX, INT64_MIN, parse_number
from asyncdist_server.session import TURN_BYTES, TURN_REQUESTS
from asyncdist_server.torch_namespaces import JOB_KEY_STARTS, Barrier, TorchNamespace, job_of
from asyncdist_server.torch_wire import (
    MAX_VECTOR_KEYS,
    STOP_WAITING,
    VALIDATE_MAGIC,
    WAIT_CANCELED,
    Query,
    TorchReader,
    encode_integer,
    encode_length,
    encode_nonce,
)

_EMPTY: Final = encode_length(0)
_VALIDATE: Final = int(Query.VALIDATE)
_QUEUE_POP: Final = int(Query.QUEUE_POP)
SMALL_BYTES: Final = 4096
"""A string below this is joined with its length: a copy costs less than one more piece to send."""


class TorchSession:
    """The state of one torch client's connection. See the module's docstring."""

    __slots__ = (
        "_claim",
        "_engine",
        "_jobs",
        "_last_id",
        "_namespace",
        "_now",
        "_on_output",
        "_output",
        "_reader",
        "_running",
        "_waits",
        "client",
        "closing",
        "error",
        "open",
        "reply_bytes",
    )

    def __init__(self, namespace: TorchNamespace, on_output: Callable[[], None]) -> None:
        self._namespace = namespace
        self._engine = namespace.engine
        self._on_output = on_output
        self._reader = TorchReader(namespace.engine.limits)
        self._output: list[bytes] = []
        self._running = False
        self._now = 0.0
        self._last_id = 0
        self._jobs: set[bytes] = set()
        # Blocked requests by their id: what must be undone when they end, the key of a queue or a barrier.
        self._waits: dict[int, bytes | Barrier | None] = {}
        self._claim: bytes | None = None  # the queue of which an item is kept for this client
        self.client: Client
        self.open = False
        """Whether the client has said the magic number."""
        self.reply_bytes = 0
        """Bytes of replies not yet taken."""
        self.closing = False
        """Whether the connection is to be closed once the output is written."""
        self.error = ""
        """Why the session closes, for the log."""

    @property
    def has_output(self) -> bool:
        """Whether `take_output` would return anything."""
        return bool(self._output)

    @property
    def busy(self) -> bool:
        """Whether received requests are waiting for `resume`."""
        return not self.closing and self._reader.ready

    @property
    def buffered(self) -> int:
        """Bytes received and not yet run."""
        return self._reader.buffered

    # ---- what the connection calls

    def receive(self, data: bytes, now: float) -> None:
        """Take the next bytes from the client and run what they complete; never raises for what they say."""
        if not self.closing:
            self._reader.feed(data)
            self.resume(now)

    def resume(self, now: float) -> None:
        """Run more of the requests received, for one turn."""
        self._now = now
        self._running = True
        budget = TURN_REQUESTS
        try:
            while budget > 0 and self.reply_bytes < TURN_BYTES and not self.closing:
                request = self._reader.next()
                if request is None:
                    return
                budget -= 1
                self._run(request)
        except ProtocolError as error:
            self._stop(str(error))
        finally:
            self._running = False

    def take_output(self) -> list[bytes]:
        """Return everything to send now, as pieces in order."""
        output, self._output = self._output, []
        self.reply_bytes = 0
        return output

    def refuse(self, refusal: Refusal) -> None:
        """Close before the client is validated: nothing can be said in this protocol."""
        self._stop(refusal.name.lower().replace("_", " "))

    def fail_limit(self, message: str) -> None:
        """Close because this connection exceeds a bound of the daemon."""
        self._stop(message)

    def close(self, now: float) -> None:
        """Withdraw the client from the engine; the connection is gone. A second call does nothing."""
        self._stop(self.error)
        if not self.open or self.client.closed:
            return
        self._now = now
        self._end_waits()
        self.drop_claim(now)
        self._engine.close(self.client, now)
        for job in (*self._jobs, b""):
            self._namespace.leave(self, job, now)

    # ---- what the namespace calls, on behalf of another client

    def ask(self, *request: Any) -> Reply:
        """Run one request that does not block and return the engine's reply."""
        self._last_id += 1
        reply = self._engine.request(self.client, (self._last_id, *request), self._now)
        assert reply is not None
        return reply

    def release(self, request_id: int, now: float) -> None:
        """Let the client go on that waits by this id."""
        self._now = now
        self._end_wait(request_id)
        self._say(STOP_WAITING)

    def take_claim(self, key: bytes, now: float) -> None:
        """Have an item of the queue `key` kept for this client, instead of any that is."""
        self.drop_claim(now)
        self._claim = key
        self._namespace.claim(self, key, now)

    def drop_claim(self, now: float) -> None:
        """Leave the item that is kept for this client to others."""
        if self._claim is not None:
            key, self._claim = self._claim, None
            self._now = now
            self._namespace.give_back(self, key, now)

    # ---- requests

    def _run(self, request: tuple[Any, ...]) -> None:
        query = request[0]
        if not self.open:
            if query != _VALIDATE or request[1] != VALIDATE_MAGIC:
                raise ProtocolError("a torch client must begin with its magic number")
            self._begin()
            return
        if self._claim is not None and (query != _QUEUE_POP or request[1] != self._claim):
            self.drop_claim(self._now)
        _RUN[query](self, *request[1:])

    def _begin(self) -> None:
        self.client = self._engine.open(self._namespace.name, self._deliver)
        self.client.max_keys = MAX_VECTOR_KEYS
        self.open = True
        self._namespace.enter(self)

    def _validate(self, magic: int) -> None:
        raise ProtocolError("a torch client sent its magic number twice")

    def _ping(self, nonce: int) -> None:
        self._say(encode_nonce(nonce))

    def _set(self, key: bytes, value: bytes) -> None:
        self._do(SET, key, value)

    def _append(self, key: bytes, value: bytes) -> None:
        self._do(APPEND, key, value)

    def _multi_set(self, keys: tuple[bytes, ...], values: tuple[bytes, ...]) -> None:
        self._name(*keys)
        self._must(self.ask(MULTI_SET, keys, values))

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> None:
        self._say_string(self._do(COMPARE_SET, key, expected, desired))

    def _get(self, key: bytes) -> None:
        self._name(key)
        _, code, value = self.ask(GET, key, 0)
        self._say_string(value if code == OK else b"")

    def _multi_get(self, keys: tuple[bytes, ...]) -> None:
        self._name(*keys)
        reply = self.ask(MULTI_GET, keys, 0)
        if reply[1] != TIMEOUT:
            for value in self._must(reply):
                self._say_string(value)
            return
        for key in keys:  # some are missing; torch's server has the others, and an empty text for each of those
            _, code, value = self.ask(GET, key, 0)
            if self.reply_bytes > self._engine.limits.frame_bytes:
                raise ProtocolError("the values of one request are more than one reply may have")
            self._say_string(value if code == OK else b"")

    def _add(self, key: bytes, amount: int) -> None:
        self._name(key)
        reply = self.ask(ADD, key, amount)
        if reply[1] == OK:
            self._say(encode_integer(reply[2]))
            return
        number = parse_number(self.client.namespace.values.get(key, b"0"))
        if number is None or INT64_MIN <= number + amount <= INT64_MAX:
            raise ProtocolError(reply[2])
        total = (number + amount - INT64_MIN) % 2**64 + INT64_MIN  # torch's counters wrap
        self._must(self.ask(SET, key, b"%d" % total))
        self._say(encode_integer(total))

    def _check(self, keys: tuple[bytes, ...]) -> None:
        self._name(*keys)
        self._say(b"\x00" if self._must(self.ask(CHECK, keys)) else b"\x01")

    def _num_keys(self) -> None:
        self._say(encode_integer(self._must(self.ask(NUM_KEYS))))

    def _delete(self, key: bytes) -> None:
        self._say(encode_integer(self._do(DELETE, key)))

    def _list_keys(self) -> None:
        keys = self._must(self.ask(LIST_KEYS, b""))
        self._say(encode_integer(len(keys)))
        self._say(b"".join([part for key in keys for part in (encode_length(len(key)), key)]))

    # ---- queues

    def _queue_push(self, key: bytes, item: bytes) -> None:
        self._do(QUEUE_PUSH, key, item)
        self._namespace.offer(self, key, self._now)

    def _queue_pop(self, key: bytes) -> None:
        self._name(key)
        if self._namespace.free_items(self, key) > 0:
            self._say(encode_integer(self._must(self.ask(QUEUE_LEN, key))))
            self._say_string(self._must(self.ask(QUEUE_POP, key, 0)))
        else:
            self._say(encode_integer(0))
        self.drop_claim(self._now)

    def _queue_len(self, key: bytes) -> None:
        self._say(encode_integer(self._do(QUEUE_LEN, key)))

    # ---- waiting

    def _wait(self, keys: tuple[bytes, ...]) -> None:
        self._name(*keys)
        if len(keys) == 1:
            self._wait_for_one(keys[0])
        elif self._block(WAIT, keys, None):
            self._say(STOP_WAITING)

    def _wait_for_one(self, key: bytes) -> None:
        """Wait for a value or for an item that nobody else is about to pop: torch's blocking pop begins like this."""
        namespace = self._namespace
        if key not in self.client.namespace.values and namespace.free_items(self, key) > 0:
            self.take_claim(key, self._now)
            self._say(STOP_WAITING)
        elif self._block(GET, key, key):  # GET sees values only
            self._say(STOP_WAITING)
        else:
            namespace.wait_for_item(self, self._last_id, key)

    def _barrier(self, key: bytes, world_size: int) -> None:
        self._name(key)
        stored = self.client.namespace.values.get(key, b"0")
        if parse_number(stored) is None:
            raise ProtocolError(f"barrier on a value that is not a number: {stored[:40]!r}")
        barrier = self._namespace.arrive(self, key, world_size, self._now)
        if barrier is None:
            self._say(STOP_WAITING)
            return
        self._last_id += 1
        request_id = self._last_id
        self._waits[request_id] = barrier
        barrier.waiting[self, request_id] = None
        # For the engine's limits and lists of who waits for what. Nobody sets this key, and nothing follows if he does.
        shown = (b"barrier " + key)[: self._engine.limits.key_bytes]
        reply = self._engine.request(self.client, (request_id, GET, shown, None), self._now)
        if reply is not None:
            self._must(reply)

    def _block(self, operation: int, keys: bytes | tuple[bytes, ...], undo: bytes | Barrier | None) -> bool:
        """Begin to wait; true if there is no need to."""
        self._last_id += 1
        reply = self._engine.request(self.client, (self._last_id, operation, keys, None), self._now)
        if reply is not None:
            self._must(reply)
            return True
        self._waits[self._last_id] = undo
        return False

    def _cancel_wait(self) -> None:
        self._end_waits()
        self._say(WAIT_CANCELED)

    def _end_waits(self) -> None:
        for request_id in list(self._waits):
            self._end_wait(request_id)

    def _end_wait(self, request_id: int) -> None:
        """Wait no longer by this id, and say nothing."""
        undo = self._waits.pop(request_id)
        self.ask(CANCEL, request_id)
        if isinstance(undo, Barrier):
            self._namespace.give_up(self, request_id, undo)
        elif undo is not None:
            self._namespace.stop_waiting(self, request_id, undo)

    def _deliver(self, reply: Reply) -> None:
        """Take the reply to a request that was blocked. Those withdrawn here are no longer among the waits."""
        request_id = reply[0]
        undo = self._waits.get(request_id)
        if request_id not in self._waits or isinstance(undo, Barrier):
            return
        del self._waits[request_id]
        if undo is not None:
            self._namespace.stop_waiting(self, request_id, undo)
        self._say(STOP_WAITING)

    # ---- replies

    def _do(self, operation: int, key: bytes, *arguments: Any) -> Any:
        """Run one request about one key and return its value."""
        if key.startswith(JOB_KEY_STARTS):
            self._name(key)
        return self._must(self.ask(operation, key, *arguments))

    def _must(self, reply: Reply) -> Any:
        """Return the value of a reply; any but OK closes the connection, as nothing else can be said."""
        if reply[1] != OK:
            raise ProtocolError(str(reply[2]))
        return reply[2]

    def _name(self, *keys: bytes) -> None:
        """Count this client to the jobs that `keys` name."""
        for key in keys:
            if key.startswith(JOB_KEY_STARTS):
                job = job_of(key)
                if job is not None and job not in self._jobs:
                    self._jobs.add(job)
                    self._namespace.enter(self, job)

    def _say(self, data: bytes) -> None:
        self._output.append(data)
        self.reply_bytes += len(data)
        if not self._running and len(self._output) == 1:
            self._on_output()

    def _say_string(self, value: bytes) -> None:
        if len(value) < SMALL_BYTES:
            self._say(encode_length(len(value)) + value)
        else:
            self._say(encode_length(len(value)))
            self._say(value)

    def _stop(self, reason: str) -> None:
        self.closing = True
        self.error = reason


_RUN: Final[Mapping[int, Callable[..., None]]] = {
    Query.VALIDATE: TorchSession._validate,
    Query.SET: TorchSession._set,
    Query.COMPARE_SET: TorchSession._compare_set,
    Query.GET: TorchSession._get,
    Query.ADD: TorchSession._add,
    Query.CHECK: TorchSession._check,
    Query.WAIT: TorchSession._wait,
    Query.GETNUMKEYS: TorchSession._num_keys,
    Query.DELETE_KEY: TorchSession._delete,
    Query.APPEND: TorchSession._append,
    Query.MULTI_GET: TorchSession._multi_get,
    Query.MULTI_SET: TorchSession._multi_set,
    Query.CANCEL_WAIT: TorchSession._cancel_wait,
    Query.PING: TorchSession._ping,
    Query.QUEUE_PUSH: TorchSession._queue_push,
    Query.QUEUE_POP: TorchSession._queue_pop,
    Query.QUEUE_LEN: TorchSession._queue_len,
    Query.LIST_KEYS: TorchSession._list_keys,
    Query.BARRIER: TorchSession._barrier,
}
