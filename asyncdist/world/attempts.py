"""Attempts to form a world, and the presence of its ranks: what the store knows of both.

Ranks start at different times, and again. So they agree on which attempt to form their world they are in.

| key | set by | meaning |
| --- | --- | --- |
| `over` | every rank that finds an attempt over | how many attempts are over: the next one is under way |
| `alive/<token>` | every process, before it claims a place | the process is connected to the store |
| `<attempt>/claim/<rank>` | a process of that rank | which process has the rank's place in that attempt |
| `<attempt>/ready` | one rank | what became of the attempt, for good |
| `<attempt>/here/<rank>` | the rank, before it counts as joined | the rank's process is connected to the store |
| `<attempt>/left/<rank>` | the rank, before it is here no more | its goodbye: it left in order, or resigned |
| `<attempt>/words/<rank>` | the rank, before its goodbye | why it aborted groups |

An attempt becomes one of three things: a world; a failure, which every rank in it raises; or nothing (`again`), where a
process died waiting: those that are alive go on to the next attempt by themselves. No rank enters an attempt that is
over. A world is over once a process comes for a rank that is in it no more.

A rank that is not here and has said nothing was killed, as a rule: a process that computes, or is stopped, keeps its
connection. But connections break for other reasons too, and a busy process makes no new one. So a rank's absence is a
reason to look. It is a proof only together with another one: that nobody listens where the rank did.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from typing import Any, Final, NamedTuple

import msgpack

from asyncdist.concurrency import trace as events
from asyncdist.errors import DistError, DistStoreError, StoreTimeoutError
from asyncdist.store import Lease, Store
from asyncdist.transport.context import Absence
from asyncdist_server.wire.messages import CLIENT_LINGER_S

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
PUBLISH_LIMIT_S: Final = 2.0
"""How long telling the others about a failure may take before it is raised here."""
ALIVE_S: Final = 0.1
"""How long a process has to be there to count as alive: the store may learn a little late of the end of one."""
ALIVE_POLL_S: Final = 0.01
TOKEN_BYTES: Final = 16
ENDS_KEPT: Final = 8
"""Attempts that failed whose ends are remembered. So many a supervisor makes while a slow rank starts."""


class Presence:
    """Which ranks of a world are here, and what those that are not have said. `who` is this rank in messages."""

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


class _Process(NamedTuple):
    token: str
    who: str


class Attempts:
    """Of one world, as one process sees them; `number` is the attempt that it is in, 0 before the first."""

    def __init__(self, store: Store, rank: int, who: str, presence: Presence) -> None:
        self.number = 0
        self.before = ""
        """Why the attempt before this one failed, as far as this process has seen it."""
        self.token = secrets.token_hex(TOKEN_BYTES)
        self._store = store
        self._rank = rank
        self._who = who
        self._presence = presence

    def key(self, name: str) -> str:
        """The name of a key of this attempt."""
        return f"{self.number}/{name}"

    @property
    def claim(self) -> tuple[str, bytes]:
        """The key of this rank's place, and what stands there if this process has it."""
        return self.key(f"claim/{self._rank}"), msgpack.packb([self.token, self._who])

    async def enter(self, propose_terms: Callable[[], bytes]) -> bytes:
        """Take this rank's place in the attempt under way, or make that the next one.

        Returns the terms of that attempt: those that the first process to come has proposed. Raises DistError where
        another process that is alive has the place; who waits in that attempt is told.

        Requests that do not depend on each other's answers travel together. A process waits for three answers: for its
        leases, for the number of the attempt, and for its place.
        """
        await self._presence.vouch()
        appeared = self._presence.appear(self.token)  # before the number is read: held keys do not vanish
        while True:
            *_, over = await asyncio.gather(*appeared, self._store.add("over", 0))
            appeared, self.number = [], over + 1
            key, mine = self.claim
            # The place comes before the look at the end: an attempt that ends after that look ends with this rank in
            # it. A process without a place may propose terms as well: its attempt is over, or about to be.
            made, ended, terms = await asyncio.gather(
                self._store.compare_set(key, b"", mine),
                self._store.check([self.key("ready")]),
                self._store.compare_set(self.key("terms"), b"", propose_terms()),
            )
            holder = None if made == mine else _process(made)
            end = await self.end() if ended else {}
            if not end:
                if holder is None:
                    return terms
                if not await self._ends(holder):
                    message = self._taken(holder)
                    await self.fail(message)
                    raise DistError(message)
                end = await self.decide({"again": f"{holder.who} ended before the world had formed"})
            if "world_id" in end and holder is not None and not await self._has_left(holder):
                raise DistError(self._taken(holder))
            await self.leave_behind(end)

    async def leave_behind(self, end: dict[str, Any]) -> None:
        """This attempt is over, having ended so."""
        self.before = str(end["failure"]) if "failure" in end else ""
        await self._store.compare_set("over", str(self.number - 1), str(self.number))

    async def end(self) -> dict[str, Any]:
        """What became of this attempt; empty while it is under way."""
        ready = self.key("ready")
        return unpacked(await self._store.get(ready)) if await self._store.check([ready]) else {}

    async def decide(self, decision: dict[str, Any]) -> dict[str, Any]:
        """What becomes of this attempt: `decision`, unless another rank was first."""
        mine = msgpack.packb(decision)
        made = await self._store.compare_set(self.key("ready"), b"", mine)
        if made == mine and "world_id" not in decision:
            await self._sweep()
        return unpacked(made)

    async def fail(self, message: str, *, late: bool = False) -> dict[str, Any] | None:
        """Tell all ranks of this attempt that it has failed. Bounded; None where the store does not answer."""
        try:
            async with asyncio.timeout(PUBLISH_LIMIT_S):
                return await self.decide({"failure": message, "late": late})
        except (DistError, TimeoutError):
            return None  # the others will find out by their own time-out; the failure is raised here either way

    async def has_place(self) -> bool:
        """Whether this process has its rank's place in this attempt. Bounded; False where the store does not answer."""
        if not self.number:
            return False
        key, mine = self.claim
        try:
            async with asyncio.timeout(PUBLISH_LIMIT_S):
                return await self._store.get(key, timeout=0) == mine
        except (DistError, TimeoutError):
            return False

    async def dead(self, processes: Collection[tuple[str, str]]) -> list[str]:
        """Those of `processes` (token and name) that died while they waited, by name."""
        if self._presence.lease is None or await self._store.check([f"alive/{token}" for token, _ in processes]):
            return []
        alive = set(await self._store.list_keys("alive/"))
        return [who for token, who in processes if f"alive/{token}" not in alive]

    async def _has_left(self, holder: _Process) -> bool:
        """Whether the process that has this rank's place is in the world no more."""
        return await self._presence.has_left(self._rank) or await self._ends(holder)

    async def _ends(self, process: _Process) -> bool:
        """Whether `process` is connected to the store no more, or is so in a moment.

        False where the store has no leases: nothing is known of that process.
        """
        if self._presence.lease is None:
            return False
        loop = asyncio.get_running_loop()
        until_s = loop.time() + ALIVE_S
        while await self._store.check([f"alive/{process.token}"]):
            if loop.time() >= until_s:
                return False
            await asyncio.sleep(ALIVE_POLL_S)
        return True

    def _taken(self, holder: _Process) -> str:
        how = "and is alive" if self._presence.lease is not None else "and has not left"
        return (
            f"{self._who} claims a rank that {holder.who} holds already, {how}: two processes were started with the "
            "same rank, or an earlier run of this job is not over (then end it, or set another ASYNCDIST_JOB_ID)"
        )

    async def _sweep(self) -> None:
        """Delete what is left of the attempt before this one, if no world came of it, but for what became of it.

        A rank of it may be slow, and has still to hear that: the ends of the last ones are kept.
        """
        number = self.number - 1
        with contextlib.suppress(StoreTimeoutError):  # it was swept, or never was
            if "world_id" not in unpacked(await self._store.get(f"{number}/ready", timeout=0)):
                left = set(await self._store.list_keys(f"{number}/")) - {f"{number}/ready"}
                left.add(f"{number - ENDS_KEPT}/ready")
                await asyncio.gather(*(self._store.delete_key(key) for key in left))


def _process(data: bytes) -> _Process:
    try:
        token, who = msgpack.unpackb(data)
        return _Process(str(token), str(who))
    except (ValueError, TypeError) as error:
        raise _foreign() from error


def unpacked(data: bytes) -> dict[str, Any]:
    """A record of the rendezvous. Raises DistStoreError for anything else."""
    try:
        value = msgpack.unpackb(data)
    except ValueError as error:
        raise _foreign() from error
    if not isinstance(value, dict):
        raise _foreign()
    return value


def _foreign() -> DistStoreError:
    return DistStoreError("the store holds a rendezvous record that is not ours; is the key prefix shared?")
