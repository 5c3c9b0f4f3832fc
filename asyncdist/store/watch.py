"""Watch: the changes of the keys with a prefix, one event after the other, without gaps."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from asyncdist.errors import DistStoreError
from asyncdist.store.base import decoded_key, encoded_key
from asyncdist_server.wire import messages
from asyncdist_server.wire.key_text import shown

Kind = Literal["set", "delete", "expire"]
KINDS: Final[dict[int, Kind]] = {
    messages.EVENT_SET: "set",
    messages.EVENT_DELETE: "delete",
    messages.EVENT_EXPIRE: "expire",
}


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change of a key: `kind` is "set", "delete", or "expire" for a key whose lease ended by itself.

    `value` is what was set, empty otherwise; `revision` grows from event to event of one store.
    """

    kind: Kind
    key: str
    value: bytes
    revision: int


class Watch(AsyncIterator[WatchEvent]):
    """The changes of keys that begin with a prefix, in order. Made by `store.watch`; read it from one task at a time.

        async with store.watch("workers/") as watch:
            async for event in watch: ...

    Nothing is missed: the watch begins where it was made, before whatever this store object is asked after that, and
    before whatever anybody does once it is entered. It goes on after a lost connection where it was. It asks the
    daemon for more when all it got was read, so that reading slowly costs nobody else anything. The daemon remembers a
    bounded number of events; a reader that falls further behind, or a daemon that was restarted without its data, is
    told by `WatchCompactedError`: look at the keys, and watch anew.

    Cancelling `anext` loses no event. `close` ends the iteration, also one that is under way.
    """

    def __init__(
        self, ask: Callable[[tuple[Any, ...]], asyncio.Future[Any]], prefix: str, from_revision: int | None
    ) -> None:
        self._ask = ask
        self._prefix = encoded_key(prefix)
        self._strip = 0
        self._revision = from_revision
        self._events: deque[tuple[int, int, bytes, bytes]] = deque()
        self._reading = False
        self._closed: Callable[[], Exception] | None = None  # makes what each reader is told
        self._reply: asyncio.Future[Any] | None = self._ask((self._prefix, self._revision))

    def __repr__(self) -> str:
        return f"<Watch of '{shown(self._prefix)}' at revision {self.revision}>"

    @property
    def revision(self) -> int | None:
        """What to give as `from_revision` to go on behind the last event read; None before it is known."""
        return self._events[0][0] if self._events else self._revision

    async def __anext__(self) -> WatchEvent:
        if self._reading:
            raise RuntimeError("two tasks read one watch; give each its own")
        self._reading = True
        try:
            while not self._events and self._closed is None:
                await self._more()
        finally:
            self._reading = False
        if self._closed is not None:
            raise self._closed()
        revision, kind, key, value = self._events.popleft()
        return WatchEvent(KINDS[kind], decoded_key(key)[self._strip :], value, revision)

    async def _more(self) -> None:
        """Take the next answer, all of it or, when cancelled, nothing."""
        if self._reply is None:
            self._reply = self._ask((self._prefix, self._revision))
        reply = self._reply
        try:
            # The answer that says where the watch begins must survive: asked again, it would begin later.
            answer = await (asyncio.shield(reply) if self._revision is None else reply)
        except asyncio.CancelledError:
            if self._revision is not None:
                self._reply = None
            task = asyncio.current_task()
            if self._closed is None or (task is not None and task.cancelling()):
                raise
            return
        except DistStoreError:
            self._reply = None
            raise
        self._reply = None
        self._revision, events = answer
        self._events.extend(events)

    def close_with(self, error: Callable[[], Exception]) -> None:
        """End the iteration with `error()`."""
        if self._closed is None:
            self._closed = error
        if self._reply is not None:
            self._reply.cancel()

    async def close(self) -> None:
        """End the iteration. May be called twice."""
        self.close_with(StopAsyncIteration)

    def strip(self, count: int) -> Self:
        """Show keys without their first `count` characters."""
        self._strip += count
        return self

    async def __aenter__(self) -> Self:
        if self._revision is None and self._closed is None:
            await self._more()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
