"""Attendance: which ranks of a world are there, as the store knows, and what those that are not have said.

Three keys of each rank, beside those of the rendezvous:

| key | |
| --- | --- |
| `here/<rank>` | there as long as the connection of its process to the store; set before the rank counts as joined |
| `left/<rank>` | its goodbye: it left in order, or resigned; set before it is not here any more |
| `words/<rank>` | why it aborted groups, set before its goodbye |

Who is not here and has said nothing was killed, as a rule: a process that computes, or is stopped, keeps its
connection. But connections break for other reasons too, and one that is busy makes no new one. So this is a reason to
look, and a proof only together with another one: that nobody listens where the rank did.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Final

from asyncdist.concurrency import trace as events
from asyncdist.errors import DistError
from asyncdist.store import Lease, Store
from asyncdist.transport.absence import Absence

__all__ = ["HERE_GRACE_S", "LEFT", "RESIGNED", "WORDS_LIMIT_S", "Attendance"]

HERE_GRACE_S: Final = 0.001
"""How long a process counts after its connection to the store broke. Its successor may come at once, and must not take
it for alive; and who was killed is to be named within a second. One whose connection is made anew loses little: if it
joins, it goes on to the next attempt, and later others look where it listens before they believe that it is gone."""
WORDS_LIMIT_S: Final = 0.5
"""How long asking for a leaver's last words may take: who is gone is to be named within a second."""
LEFT: Final = b"1"
RESIGNED: Final = b"2"
"""What a goodbye says: its rank closed its group; or it could not be in the world, and its peers have lost it."""


class Attendance:
    """Of one world; `key` gives the names of its keys, `who` is this rank in messages."""

    def __init__(self, store: Store, rank: int, world_size: int, who: str, key: Callable[[str], str]) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._who = who
        self._key = key
        self.lease: Lease | None = None
        """Ends with the connection of this process to the store; None where the store has no leases."""

    async def vouch(self) -> None:
        """Have a lease from now on, if the store has leases."""
        self.disappear()
        with contextlib.suppress(NotImplementedError):
            self.lease = await self._store.lease(HERE_GRACE_S, bound=True)

    async def appear(self) -> None:
        """Be here from now on, if the store has leases."""
        if self.lease is not None:
            await self._store.set(self._key(f"here/{self._rank}"), b"", lease=self.lease)

    def disappear(self) -> None:
        """Be here no more."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.abandon()

    async def has_left(self, rank: int) -> bool:
        """Whether `rank` has said goodbye."""
        return await self._store.check([self._key(f"left/{rank}")])

    async def words_of(self, rank: int) -> tuple[bytes, Absence]:
        """What `rank` has left to say, empty if nothing, and what became of it. Bounded; never raises a DistError."""
        words, goodbye = self._key(f"words/{rank}"), self._key(f"left/{rank}")
        absence = Absence.NONE
        try:
            async with asyncio.timeout(WORDS_LIMIT_S):  # in the opposite order of that in which the rank says it
                if self.lease is not None and not await self._store.check([self._key(f"here/{rank}")]):
                    absence = Absence.CUT_OFF
                if await self._store.check([goodbye]):
                    absence = Absence.LEFT if await self._store.get(goodbye) == LEFT else Absence.RESIGNED
                return await self._store.get(words) if await self._store.check([words]) else b"", absence
        except (DistError, TimeoutError) as error:
            events.info("%s could not ask why rank %d is gone: %s", self._who, rank, error)
            return b"", Absence.UNKNOWN

    async def absences(self) -> AsyncGenerator[int]:
        """Ranks that are not here: first those of now, then each when it goes.

        Raises DistError when the store cannot tell any more, NotImplementedError if it never can.
        """
        async with self._store.watch(self._key("here/")) as watch:
            here = {_rank_of(key) for key in await self._store.list_keys(self._key("here/"))}
            for rank in set(range(self._world_size)) - here:
                yield rank
            async for event in watch:
                if event.kind != "set":
                    yield _rank_of(event.key)


def _rank_of(key: str) -> int:
    return int(key.rpartition("/")[2])
