"""The answer to one store request, still to come, and the exception for each way it can fail."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator, Mapping
from typing import Any, ClassVar, Final, Protocol

from asyncdist.errors import (
    DistStoreError,
    LeaseLostError,
    QueueEmptyError,
    StoreLimitError,
    StoreTimeoutError,
    WatchCompactedError,
)
from asyncdist.store.arguments import decoded_key
from asyncdist.store.lookout import Lookout
from asyncdist_server.wire import messages
from asyncdist_server.wire.key_text import shown

__all__ = [
    "TAKING",
    "WAITING",
    "NonBlockingPop",
    "Reply",
    "ReplyOwner",
    "describe",
    "end_quietly",
    "failure",
    "settle",
    "timeout_ms",
    "undoing",
]

WAITING: Final = frozenset(
    {messages.GET, messages.WAIT, messages.MULTI_GET, messages.QUEUE_POP, messages.WATCH, messages.LOCK, messages.JOIN}
)
"""Operations that wait for other clients; the last element of their requests is `timeout_ms`."""

TAKING: Final = frozenset({messages.QUEUE_POP, messages.LOCK, messages.JOIN})
"""Those that take something which somebody else could have: what was taken for nobody is given back."""

SHOWN_KEYS: Final = 5
"""Most keys of a request that an error message shows."""

CONVERSIONS: Final[Mapping[int, Callable[[Any], Any]]] = {
    messages.MULTI_GET: list,
    messages.LIST_KEYS: lambda page: (page[0], list(map(decoded_key, page[1]))),
}
"""Operations whose value on the wire is not what the caller gets."""


class ReplyOwner(Protocol):
    """Whoever will settle a reply."""

    @property
    def lookout(self) -> Lookout | None:
        """Who looks for a reply that is awaited, if anybody does."""

    def withdraw(self, reply: Reply) -> None:
        """Take notice that nobody waits for `reply` any more, and make sure that it takes nothing from a queue."""


class Reply(asyncio.Future[Any]):
    """A future that tells its owner when it is cancelled.

    `request` is the request as on the wire, (id, operation, arguments...); `deadline` the loop's time at which the
    owner gives up by itself. A done-callback instead of `cancel` would cost a turn of the loop per request.
    """

    __slots__ = ("deadline", "owner", "request")

    empty_is_error: ClassVar[bool] = False
    deadline: float
    owner: ReplyOwner
    request: tuple[Any, ...]

    def __await__(self) -> Generator[Any, None, Any]:
        lookout = self.owner.lookout
        if lookout is not None and not self.done() and lookout.seek(self):
            yield
        return (yield from super().__await__())

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the waiting and withdraw the request where that is possible."""
        if not super().cancel(msg):
            return False
        self.owner.withdraw(self)
        return True


class NonBlockingPop(Reply):
    """The reply to `queue_pop(block=False)`, whose expiry is `QueueEmptyError`."""

    __slots__ = ()

    empty_is_error = True


def settle(reply: Reply, code: int, value: Any, where: str) -> None:
    """Give `reply`, which must not be done, the outcome that the reply code and value of the wire mean."""
    if code == messages.OK:
        convert = CONVERSIONS.get(reply.request[1])
        reply.set_result(value if convert is None else convert(value))
    elif code == messages.CANCELLED:
        asyncio.Future.cancel(reply)
    else:
        reply.set_exception(failure(reply, code, value, where))


def failure(reply: Reply, code: int, value: Any, where: str) -> DistStoreError:
    """Return the exception for a reply code other than OK."""
    what = f"{where}: {describe(reply.request)}"
    if code == messages.TIMEOUT:
        if reply.empty_is_error:
            return QueueEmptyError(f"{what}: the queue is empty")
        if isinstance(value, str):
            return StoreTimeoutError(f"{what} timed out after {reply.request[-1] / 1000:g} s: {value}", [])
        missing = ", ".join(map(shown, value))
        text = f"{what} timed out after {reply.request[-1] / 1000:g} s, still missing: {missing}"
        return StoreTimeoutError(text, list(map(decoded_key, value)))
    if code == messages.LIMIT:
        return StoreLimitError(f"{what}: {value}")
    kinds = {messages.COMPACTED: WatchCompactedError, messages.LEASE_LOST: LeaseLostError}
    return kinds.get(code, DistStoreError)(f"{what}: {value}")


def undoing(request: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    """Return the request, without an id, that undoes one of an operation in `TAKING` whose result was `value`."""
    if request[1] == messages.QUEUE_POP:
        return messages.QUEUE_RETURN, request[2], value
    if request[1] == messages.LOCK:
        return messages.UNLOCK, request[2], value
    return messages.LEAVE, request[2], request[-2]


def describe(request: tuple[Any, ...]) -> str:
    """Return operation and keys of `request`, for messages."""
    name = messages.OPERATION_NAMES[request[1]]
    keys = request[2] if len(request) > 2 else ()
    if not isinstance(keys, tuple | bytes) or (keys and request[1] == messages.KEEP_ALIVE):
        return f"{name}()"
    if isinstance(keys, bytes):
        return f"{name}('{shown(keys)}')"
    some = ", ".join(f"'{shown(key)}'" for key in keys[:SHOWN_KEYS])
    more = f", ... {len(keys)} keys" if len(keys) > SHOWN_KEYS else ""
    return f"{name}({some}{more})"


def timeout_ms(timeout_s: float | None) -> int | None:
    """Return a time-out as the wire has it: whole milliseconds, rounded up, so that nothing expires early."""
    if timeout_s is None:
        return None
    return min(math.ceil(timeout_s * 1000), messages.MAX_TIMEOUT_MS)


def end_quietly(reply: Reply, error: Exception) -> None:
    """Fail `reply`; whoever closed the store knows, so an abandoned reply is nothing to complain about."""
    reply.set_exception(error)
    reply.exception()
