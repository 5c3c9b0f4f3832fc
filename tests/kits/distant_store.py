"""DistantStore: a store whose verbs take time there and back, so that those of several ranks interleave.

As on one connection, the verbs of one client arrive in the order in which they are called.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from asyncdist.store import HashStore, Store


class DistantStore(Store):
    """A client of the data of `near`; every verb takes a millisecond there and one back, or up to that by chance."""

    def __init__(self, near: HashStore, chance: random.Random | None = None) -> None:
        super().__init__(near.timeout)
        self.near = near
        self._chance = chance
        shared = near._shared
        shared.engine.close(near._client, 0.0)
        near._client = shared.engine.open("", near._deliver, client_id=secrets.token_bytes(16))  # may come back
        self.called: list[str] = []
        """The verbs that were called, in order."""
        self._ahead: asyncio.Future[None] | None = None  # ends when the verb that was called last has arrived

    def set_timeout(self, timeout: Any) -> None:
        super().set_timeout(timeout)
        self.near.set_timeout(timeout)

    async def travel(self) -> None:
        """One way."""
        await asyncio.sleep(0.001 if self._chance is None else self._chance.uniform(0, 0.001))

    async def kill(self) -> None:
        """End as a process does that is killed: no goodbye, so that its leases run out in their own time."""
        await self.near.close()

    async def close(self) -> None:
        self.near._client.leaving = True
        await self.near.close()


def _distant(name: str) -> Callable[..., Awaitable[Any]]:
    def verb(self: DistantStore, *arguments: Any, **options: Any) -> asyncio.Task[Any]:
        loop = asyncio.get_running_loop()
        ahead, arrived = self._ahead, loop.create_future()
        self._ahead = arrived
        self.called.append(name)

        async def carried() -> Any:
            await self.travel()
            if ahead is not None:
                await asyncio.wait([ahead])
            answer = asyncio.ensure_future(getattr(self.near, name)(*arguments, **options))
            await asyncio.sleep(0)  # a coroutine has been issued then
            arrived.set_result(None)
            result = await answer
            await self.travel()
            return result

        task = loop.create_task(carried())
        task.add_done_callback(lambda _: None if arrived.done() else arrived.set_result(None))  # cancelled on the way
        return task

    return verb


for _name in Store.__abstractmethods__ - {"close"} | {"lease", "hold"}:
    setattr(DistantStore, _name, _distant(_name))
DistantStore.__abstractmethods__ = frozenset()
