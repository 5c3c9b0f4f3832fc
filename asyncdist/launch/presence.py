"""Which launchers of an elastic job are connected to the store, so that one that was killed is given up at once.

A launcher that is stopped, or whose host is down, breaks no connection: its silence tells, much later. Keys, among
those of the store's job: `here/<member>`, bound to the launcher's connection, set before it joins and gone only after
it has left, so that a member without one was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from asyncdist.errors import DistError
from asyncdist.store.prefix_store import PrefixStore

if TYPE_CHECKING:
    from asyncdist.store.base import Store
    from asyncdist.store.lease import Lease

__all__ = ["PRESENCE_GRACE_S", "Presence"]

PRESENCE_GRACE_S: Final = 1.0
"""A launcher only waits, and makes a broken connection anew within milliseconds; one that does not was killed (a daemon
that comes back waits longer for its clients). One that was merely slow finds itself expelled, and joins anew."""

_HERE: Final = "here/"
_MEMBERS: Final = "members/"


class Presence:
    """One launcher's presence, for as long as it is the member `name` of the store's `job`, and that of the others."""

    def __init__(self, store: Store, job: str, name: str, grace_s: float = PRESENCE_GRACE_S) -> None:
        self._store = store
        self._view = PrefixStore(f"job/{job}", store)
        self._grace_s = grace_s
        self._lease: Lease | None = None
        self.job = job
        self.name = name

    async def show(self) -> None:
        """Let the others see this launcher from now on."""
        self._lease = await self._store.lease(self._grace_s, bound=True)
        self._lease.outlive_outages()
        await self._view.set(_HERE + self.name, b"", lease=self._lease)

    def end(self) -> None:
        """Be seen no more."""
        if self._lease is not None:
            self._lease.abandon()

    async def watch(self, on_killed: Callable[[str], None]) -> None:
        """Expel members that were killed, until cancelled; `on_killed` is called with the name of each before that.

        Raises DistError when the store cannot tell any more.
        """
        async with self._view.watch(_HERE) as watch:
            members, here = await asyncio.gather(self._names(_MEMBERS), self._names(_HERE))
            for name in members - here:
                await self._has_gone(name, on_killed)
            async for event in watch:
                if event.kind != "set":
                    await self._has_gone(event.key.removeprefix(_HERE), on_killed)

    async def _names(self, start: str) -> set[str]:
        return {key.removeprefix(start) for key in await self._view.list_keys(start)}

    async def _has_gone(self, name: str, on_killed: Callable[[str], None]) -> None:
        if name == self.name:  # connected again, too late, and nobody was there to expel it
            await self.show()
            return
        on_killed(name)
        with contextlib.suppress(DistError):  # then its silence tells
            await self._store.expel(self.job, name)
