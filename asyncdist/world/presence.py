"""Attendance: which ranks of a world are there, as the store knows, and what those that are not have said.

Four keys of each process, beside those of the rendezvous:

| key | |
| --- | --- |
| `alive/<token>` | the process is connected to the store; set before the process claims a rank's place |
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
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

from asyncdist.concurrency import trace as events
from asyncdist.errors import DistError
from asyncdist.store import Lease, Store
from asyncdist.transport.absence import Absence
from asyncdist_server.wire.messages import CLIENT_LINGER_S

__all__ = ["HERE_GRACE_S", "LEFT", "RESIGNED", "WORDS_LIMIT_S", "WORLD_LINGER_S", "Attendance"]

HOLD_GRACE_S: Final = CLIENT_LINGER_S
"""How long a rank that lost its connection still counts: as long as the store takes it up where it was."""
WORLD_LINGER_S: Final = 60.0
"""How long a world without ranks is remembered: those of its next run find its attempt, and no stale addresses."""
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
        self._hold: Lease | None = None  # outlives a broken connection, so that the world's keys do

    async def vouch(self) -> None:
        """Get the leases of this process, in one round trip, if the store has leases."""
        self.disappear()
        with contextlib.suppress(NotImplementedError):
            graces_s = HOLD_GRACE_S, HERE_GRACE_S
            grants = [asyncio.ensure_future(self._store.lease(grace_s, bound=True)) for grace_s in graces_s]
            try:
                self._hold, self.lease = await asyncio.gather(*grants)
            except BaseException:
                for grant in grants:
                    grant.add_done_callback(_abandon)
                raise

    def appear(self, token: str) -> list[Awaitable[Any]]:
        """Issue that the world's keys live as long as this process, and that the process of that token is alive.

        Nothing is issued where the store has no leases.
        """
        if self._hold is None or self.lease is None:
            return []
        return [
            self._store.hold("", self._hold, linger=WORLD_LINGER_S),
            self._store.set(f"alive/{token}", b"", lease=self.lease),
        ]

    def arrive(self) -> list[Awaitable[Any]]:
        """Issue that this rank is here in the attempt under way; nothing where the store has no leases."""
        return [] if self.lease is None else [self._store.set(self._key(f"here/{self._rank}"), b"", lease=self.lease)]

    def disappear(self) -> None:
        """Hold the keys no longer, and be here no more. Not waited for: who hosts the store may stop it at once."""
        for lease in (self.lease, self._hold):
            if lease is not None:
                lease.abandon()
        self.lease = self._hold = None

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


def _abandon(grant: asyncio.Future[Lease]) -> None:
    if not grant.cancelled() and grant.exception() is None:
        grant.result().abandon()


def _rank_of(key: str) -> int:
    return int(key.rpartition("/")[2])
