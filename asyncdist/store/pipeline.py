"""Pipeline: the requests of a client that have no answer yet: ids, frames to send, retries. No sockets, no timers.

Requests get their ids, and are sent, in call order. A request stays in `_pending` until it is answered. So after a
broken connection it can be sent again under the same id. The daemon answers a change that it has applied before from
memory. The contract is in `asyncdist_server.wire.messages`.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from typing import Any, Final

from asyncdist.concurrency.spin import spin_us_from_environ
from asyncdist.errors import DistStoreError, StoreLimitError, StoreTimeoutError
from asyncdist.store.base import decoded_key
from asyncdist.store.reply import (
    TAKING,
    WAITING,
    Lookout,
    Reply,
    describe,
    end_quietly,
    record_wait,
    settle,
    timeout_ms,
    undoing,
)
from asyncdist_server.wire import messages

__all__ = ["EXPIRY_GRACE_S", "Pipeline", "StoppingError"]

EXPIRY_GRACE_S: Final = 1.0
"""The daemon ends a wait on time and says which keys are missing; this long after, the client ends it by itself."""

GIVE_BACK_PAUSE_S: Final = 0.5
"""Before an item that nobody wants any more is offered again to a store that was full."""

FRAME_REQUESTS: Final = 4096
"""Most requests in a frame: with keys of the longest kind, half of the longest frame."""


class StoppingError(ConnectionResetError):
    """The daemon says that it stops, in order."""


class Pipeline:
    """The requests of one client over all its connections.

    `where` names the daemon in errors; `on_unsent` is called when there is something to send that nobody submitted.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, where: str, on_unsent: Callable[[], None]) -> None:
        self.lookout = Lookout(loop, spin_us_from_environ(os.environ), lambda: len(self._outbox) == 1)
        self._loop = loop
        self._on_unsent = on_unsent
        self._where = where
        self._limits = messages.Limits()
        self._incarnation: bytes | None = None
        self._encode = messages.Encoder().requests
        self._pending: dict[int, Reply] = {}  # all that have no answer, in the order of their ids
        self._outbox: list[tuple[Any, ...]] = []  # those not yet sent on this connection
        self._outbox_bytes = 0
        self._withdrawn = 0  # of those in the outbox
        self._last_id = 0
        self._last_sent = 0  # on this connection
        self._last_ever_sent = 0
        self._connected = False
        self._in_flight = 0
        self._received = 0  # reply frames on this connection
        self._confirm = False  # whether the daemon is to be told of them even if there is nothing to ask
        # An answer to this request, or to a later one, shows that the daemon knows of the last item; 0: it does.
        self._proof_id = 0
        self._drained: asyncio.Future[None] | None = None
        self._closed = False

    # ---- requests

    def submit(
        self, operation: int, arguments: tuple[Any, ...], timeout_s: float | None, size_bytes: int, kind: type[Reply]
    ) -> Reply:
        """Queue a request and return its reply. Raises StoreLimitError for what no frame could hold."""
        self._last_id = request_id = self._last_id + 1
        reply = kind(loop=self._loop)
        reply.owner = self
        deadline = math.inf if timeout_s is None else self._loop.time() + timeout_s
        if operation in WAITING:
            reply.request = request = (request_id, operation, *arguments, timeout_ms(timeout_s))
            deadline += EXPIRY_GRACE_S
        else:
            reply.request = request = (request_id, operation, *arguments)
        reply.deadline = deadline
        record_wait(reply, self._loop)
        if size_bytes > self._limits.frame_bytes - messages.FRAME_SLACK_BYTES:
            raise StoreLimitError(
                f"{self._where}: {describe(request)} has {size_bytes} bytes, the daemon's limit is "
                f"{self._limits.frame_bytes - messages.FRAME_SLACK_BYTES}"
            )
        self._pending[request_id] = reply
        self._outbox.append(request)
        self._outbox_bytes += size_bytes
        return reply

    @property
    def idle(self) -> bool:
        """Whether nothing is unanswered."""
        return not self._pending

    @property
    def at_stake(self) -> bool:
        """Whether anything would be lost, or an item come to two clients, if the daemon was never reached again."""
        return bool(self._proof_id) or any(
            not reply.done() or reply.request[1] in TAKING for reply in self._pending.values()
        )

    @property
    def has_unsent(self) -> bool:
        """Whether `next_frame` may have something."""
        return self._confirm or bool(self._outbox)

    def next_frame(self) -> bytes | None:
        """Return the next requests to send as one frame, None if there are none that may be sent now.

        Only between `on_welcome` and `on_lost`.
        """
        if self._withdrawn:
            self._drop_withdrawn()
        batch = self._outbox
        if not batch:
            return self._confirmation()
        room = self._limits.in_flight - self._in_flight
        if self._outbox_bytes > messages.FRAME_TARGET_BYTES or len(batch) > min(room, FRAME_REQUESTS):
            batch = self._part_of_outbox(room)
            if not batch:
                return self._confirmation()
        else:
            self._outbox = []
            self._outbox_bytes = 0
        self._in_flight += len(batch)
        self._last_sent = batch[-1][0]
        self._confirm = False
        return self._encode(self._received, batch)

    def _confirmation(self) -> bytes | None:
        """Say that an item of a queue has arrived: else it would go to others, should this client be lost."""
        if not self._confirm:
            return None
        self._confirm = False
        return self._encode(self._received, ())

    def _part_of_outbox(self, room: int) -> list[tuple[Any, ...]]:
        """Take the oldest requests that a frame and the daemon have room for; one alone may be larger than the aim."""
        count = size_bytes = 0
        for request in self._outbox[: min(room, FRAME_REQUESTS)]:
            size_bytes += weight(request)
            if count and size_bytes > messages.FRAME_TARGET_BYTES:
                break
            count += 1
        batch = self._outbox[:count]
        del self._outbox[:count]
        if not self._outbox:
            self._outbox_bytes = 0  # else it stays an upper bound, which is enough to come here again
        return batch

    def withdraw(self, reply: Reply) -> None:
        """Take back a request whose caller has gone: unsent ones vanish, waiting ones are cancelled at the daemon."""
        request = reply.request
        if request[0] not in self._pending:
            return
        if request[0] > max(self._last_sent, self._last_ever_sent):
            del self._pending[request[0]]
            self._withdrawn += 1
            if 2 * self._withdrawn > len(self._outbox):  # looking through it at each would take long where many go
                self._drop_withdrawn()
        elif request[1] in WAITING and self._connected:
            self._cancel_at_daemon(request[0])

    def _drop_withdrawn(self) -> None:
        self._withdrawn = 0
        self._outbox = [request for request in self._outbox if request[0] in self._pending]

    def _cancel_at_daemon(self, request_id: int) -> None:
        reply = self.submit(messages.CANCEL, (request_id,), None, 0, Reply)
        reply.set_result(None)  # nobody waits for it
        self._on_unsent()

    # ---- replies

    def on_replies(self, payload: bytes | memoryview) -> None:
        """Take a frame of replies. Raises ProtocolError for one that breaks the contract, or that says that we did.

        Raises StoppingError for the last one of a daemon that stops.
        """
        replies = messages.decode_replies(payload)
        self._received += 1
        pending = self._pending
        for request_id, code, value in replies:
            reply = pending.pop(request_id, None)
            if reply is None:
                if request_id == 0 and code == messages.STOPPING:
                    raise StoppingError(str(value))
                if request_id == 0:
                    raise messages.ProtocolError(f"it says: {value}")
                continue
            self._in_flight -= 1
            if reply.request[1] == messages.QUEUE_POP and code == messages.OK:
                self._confirm = True
                self._proof_id = self._last_id + 1
            if not reply.done():
                settle(reply, code, value, self._where)
            elif code == messages.OK and reply.request[1] in TAKING:
                self.give_back(reply.request, value)
        if self._proof_id and replies and replies[-1][0] >= self._proof_id:
            self._proof_id = 0
        if self._drained is not None and not pending and not self._drained.done():
            self._drained.set_result(None)

    def give_back(self, request: tuple[Any, ...], value: Any) -> None:
        """Undo what `request` took for a caller that has gone: a popped item goes back to the head of its queue."""
        if self._closed:
            return
        operation, *arguments = undoing(request, value)
        reply = self.submit(operation, tuple(arguments), None, len(value) if isinstance(value, bytes) else 0, Reply)
        reply.add_done_callback(lambda done: self._on_given_back(done, request, value))
        self._on_unsent()

    def _on_given_back(self, reply: asyncio.Future[Any], request: tuple[Any, ...], value: Any) -> None:
        """Try again if the store was full; if it failed otherwise, the queue is gone too."""
        if not reply.cancelled() and isinstance(reply.exception(), StoreLimitError) and not self._closed:
            self._loop.call_later(GIVE_BACK_PAUSE_S, self.give_back, request, value)

    def expire(self, now: float) -> float:
        """End the requests that nobody answered in time; return when to call again, infinity for never."""
        soonest = math.inf
        for reply in list(self._pending.values()):
            if reply.done():
                continue
            if reply.deadline > now:
                soonest = min(soonest, reply.deadline)
                continue
            names = keys_of(reply.request) if reply.request[1] in WAITING else []
            reply.set_exception(
                StoreTimeoutError(f"{self._where}: {describe(reply.request)}: the store did not answer in time", names)
            )
            self.withdraw(reply)
        return soonest

    # ---- connections

    def on_lost(self) -> None:
        """Note that the connection broke: whatever it carried is unanswered again."""
        self._last_ever_sent = max(self._last_ever_sent, self._last_sent)
        self._last_sent = 0
        self._connected = False
        self._in_flight = 0
        self._received = 0
        self._confirm = False
        self.lookout.lost()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def to_retry(self) -> tuple[int, ...]:
        """Return the ids of what to retry with the answer it had, for the hello; forget what nobody waits for any more.

        What takes something is retried even if its caller has gone: if it took an item or a lock, that has to go back.
        """
        self._pending = {
            request_id: reply
            for request_id, reply in self._pending.items()
            if not reply.done() or reply.request[1] in TAKING
        }
        return tuple(
            request_id
            for request_id, reply in self._pending.items()
            if request_id <= self._last_ever_sent and is_remembered(reply.request)
        )

    def on_welcome(self, welcome: messages.Welcome) -> bool:
        """Prepare to send on a new connection; return whether the daemon came back as another incarnation.

        If it does not know us any more, mutations that may have been applied fail; if it is another incarnation, so do
        those never sent, because they were meant for the data that is gone.
        """
        self._limits = welcome.limits
        self._proof_id = 0  # the hello named all requests without an answer
        changed = self._incarnation not in (None, welcome.incarnation)
        self._incarnation = welcome.incarnation
        self._connected = True
        outdated = math.inf if changed else 0 if welcome.resumed else self._last_ever_sent
        why = (
            "the store was restarted without its data"
            if changed
            else "the connection was lost for longer than the store remembers its clients"
        )
        kept: list[Reply] = []
        for request_id, reply in list(self._pending.items()):
            if request_id <= outdated and reply.request[1] in messages.MUTATIONS:
                del self._pending[request_id]
                if not reply.done():
                    sent = "; nobody can tell whether it was applied" if request_id <= self._last_ever_sent else ""
                    what = f"{self._where}: {describe(reply.request)} failed: {why}{sent}"
                    reply.set_exception(DistStoreError(what))
            else:
                kept.append(reply)
        self._refill_outbox(kept)
        return changed

    def _refill_outbox(self, replies: list[Reply]) -> None:
        now = self._loop.time()
        self._outbox = []
        self._outbox_bytes = 0
        for reply in replies:
            request = reply.request
            if request[1] in WAITING and request[-1] is not None:
                # The wait goes on; it does not begin again. The original stays in `reply.request` for messages.
                request = (*request[:-1], timeout_ms(max(0.0, reply.deadline - EXPIRY_GRACE_S - now)))
            self._outbox.append(request)
            self._outbox_bytes += weight(request)
        for reply in replies:
            if reply.done():
                self._cancel_at_daemon(reply.request[0])

    def fail_all(self, why: str) -> None:
        """End everything pending with a DistStoreError."""
        for reply in self._take_pending():
            reply.set_exception(DistStoreError(f"{self._where}: {describe(reply.request)} failed: {why}"))

    def _take_pending(self) -> list[Reply]:
        """Forget all requests; returns the replies that somebody may wait for."""
        pending, self._pending = self._pending, {}
        self._outbox = []
        self._outbox_bytes = 0
        return [reply for reply in pending.values() if not reply.done()]

    # ---- closing

    def close_waits(self, error: Callable[[], Exception]) -> None:
        """End the waiting requests with `error()` and cancel them at the daemon."""
        for reply in list(self._pending.values()):
            if reply.request[1] in WAITING and not reply.done():
                end_quietly(reply, error())
                self.withdraw(reply)

    def close_all(self, error: Callable[[], Exception]) -> None:
        """End everything pending with `error()`, for good."""
        self._closed = True
        for reply in self._take_pending():
            end_quietly(reply, error())

    async def drained(self) -> None:
        """Return once nothing is pending or the connection broke."""
        if self._pending:
            self._drained = self._loop.create_future()
            await self._drained


def is_remembered(request: tuple[Any, ...]) -> bool:
    """Return whether the daemon keeps the answer for a retry: that of a change, and where a watch begins."""
    return request[1] in messages.MUTATIONS or (request[1] == messages.WATCH and request[3] is None)


def keys_of(request: tuple[Any, ...]) -> list[str]:
    """Return the keys a waiting request waits for."""
    keys = (request[2],) if isinstance(request[2], bytes) else request[2]
    return list(map(decoded_key, keys))


def weight(request: tuple[Any, ...]) -> int:
    """Return how many bytes of keys and values `request` holds."""
    total = 0
    for argument in request[2:]:
        if isinstance(argument, bytes):
            total += len(argument)
        elif isinstance(argument, tuple):
            total += sum(len(each) for each in argument if isinstance(each, bytes))
    return total
