"""Rendezvous: how the ranks of a world find each other through a store.

Keys, under `world/<group name>/`, beside those of `attempts`:

| key | set by | meaning |
| --- | --- | --- |
| `<attempt>/terms` | the first to come | the world's id, and size, host and pid all others are compared with |
| `<attempt>/info/<rank>` | every rank | who it is, where it listens and is asked; rank 0's has options for all |
| `<attempt>/joined` | every rank | counter; who makes it reach the world size decides |
| `<attempt>/picklers` | ranks that allow pickle, before they have joined | counter |
| `<attempt>/ready` | one rank | the decision: that the world has formed, and where all listen, or why it has not |
| `<attempt>/here/<rank>`, `.../left/<rank>`, `.../words/<rank>` | every rank | see `attempts` |
| `<attempt>/left` | every rank | counter of exits |
| `<attempt>/gone` | the last to leave | nobody needs the store any more |

Where the store has leases, all of these keys vanish `WORLD_LINGER_S` after the last rank has left, or has been without
a connection for `HOLD_GRACE_S`; see `attempts`.

A rank needs a constant number of requests however large the world is. Each failure is published under `ready`, so
that every rank raises it and none waits for its own time-out. A world that has formed needs the store no more: what its
ranks still ask or tell there is bounded in time, and nobody is taken for lost because the store is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from asyncdist.concurrency import trace as events
from asyncdist.concurrency.deadline import Deadline
from asyncdist.concurrency.tasks import telling, uninterrupted
from asyncdist.errors import (
    ConnectTimeoutError,
    DistError,
    DistStoreError,
    LeaseLostError,
    RemoteProtocolError,
    StoreTimeoutError,
)
from asyncdist.plan.selection.tuning import DEFAULT_TUNING
from asyncdist.store import PrefixStore, Store
from asyncdist.transport.addresses import PeerAddress
from asyncdist.transport.context import Absence
from asyncdist.world.address_book import AddressBook
from asyncdist.world.attempts import LEFT, PUBLISH_LIMIT_S, RESIGNED, Attempts, Presence, unpacked

WORLD_ID_BYTES: Final = 16
GOODBYE_LIMIT_S: Final = 5.0
"""How long a rank's farewell may take in the store, all of it: it is a courtesy and must not hold up an exit."""
AWAY_LIMIT_S: Final = 1.0
"""The same where the store is not connected: a daemon that is restarted is there again, one that is gone never is."""
STAY_NOTICE_S: Final = 0.5
"""How long the rank that hosts the store waits for the others' goodbyes without a word: together they take less."""
LOOK_UP_LIMIT_S: Final = 10.0
"""How long asking the store for an address may take: all are there once the world has formed."""
TELLERS: Final = 2
"""Ranks that say whom they wait for: rank 0, and where that is missing in a standing store, rank 1."""
ASKED_TOGETHER: Final = 1024
"""Keys in one request: some 100 KB of answers, so that a large world does not hold the daemon's loop for long."""

Listen = Callable[[bytes], Awaitable[PeerAddress]]
"""Listens as a rank of the world of that id, which is to be: once in each attempt. Says where."""


@dataclass(frozen=True, slots=True)
class Met:
    """What all ranks agreed on: a random id, the options rank 0 published, and whether everyone allows pickle."""

    world_id: bytes
    epoch: int
    options: dict[str, Any]
    allow_pickle: bool = False
    decider: int = 0
    """The rank that found all others there: the root of the tree along which addresses are told."""
    placement: tuple[int, tuple[int, ...]] | None = None
    """Ranks per host and hosts, as of `Tuning`, where there is more than one host."""


class Rendezvous:
    """One rank's dealings with the store for one world."""

    def __init__(self, store: Store, rank: int, world_size: int, group_name: str = "") -> None:
        self._store = PrefixStore(f"world/{group_name or 'default'}", store)
        self.rank = rank
        self.world_size = world_size
        self.endpoint: list[Any] = []
        """Where whoever asks what this rank does finds it, see `inspection`; empty for nowhere."""
        self.on_hosted: Callable[[], None] | None = None
        """Called, while others are waited for, once it is known that the store ends with rank 0."""
        self.connections = 1, 1
        """How many interfaces this rank uses, and connections for each pair of ranks; the same on all ranks."""
        self.book = AddressBook(world_size)
        """Where the ranks of the world listen, as far as this one was told."""
        self._attempt: asyncio.Task[Met] | None = None
        self._restarted = False
        self._published: dict[str, bytes] = {}
        self._republishing: asyncio.Task[None] | None = None
        self._farewell_s: float | None = None  # what is left of the time for it, once it has begun
        self._looking: set[asyncio.Timeout] = set()
        self._hurried = False
        self._staying: asyncio.Timeout | None = None
        self._who = f"rank {rank} ({socket.gethostname()} pid {os.getpid()})"
        self.presence = Presence(self._store, rank, world_size, self._who, lambda name: self._attempts.key(name))
        self._attempts = Attempts(self._store, rank, self._who, self.presence)

    async def join(
        self,
        host: str,
        loopback: bool,
        options: dict[str, Any],
        listen: Listen,
        deadline: Deadline,
        *,
        allow_pickle: bool = False,
    ) -> Met:
        """Meet the other ranks; returns when all `world_size` are there.

        `host` identifies this host, `loopback` says that no other host can reach it; rank 0's `options` become
        everybody's; `listen` makes this rank reachable, before the others count on it; `allow_pickle` holds if all gave
        it. Raises DistError where the ranks contradict each other (the same rank twice, other world sizes, loopback
        addresses across hosts), what `listen` raises, and ConnectTimeoutError naming the ranks that did not come.
        Cancelling tells the others, bounded, that this rank does not come, and it may join again.
        """
        while True:
            self._restarted = False
            joining = self._join(host, loopback, options, listen, deadline, allow_pickle)
            attempt = self._attempt = asyncio.create_task(joining)
            try:
                return await attempt
            except (asyncio.CancelledError, Exception):
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    await uninterrupted(self._withdraw())
                    raise
                await asyncio.sleep(0)  # the news of a restart may be behind the failure it caused
                if not self._restarted:
                    self.presence.disappear()
                    raise
                events.info("%s: the store lost what it knew; joining again", self._who)
            finally:
                self._attempt = None

    def store_restarted(self) -> None:
        """The store came back without its data: join again, or publish again what the others may ask for."""
        self._restarted = True
        self.presence.disappear()
        if self._attempt is not None:
            self._attempt.cancel()
        elif self._published and self._republishing is None:
            self._republishing = asyncio.create_task(self._publish_again())

    async def _withdraw(self) -> None:
        """Joining was cancelled: nobody is to wait for this rank. Bounded."""
        if await self._attempts.has_place():
            end = await self._attempts.fail(f"{self._who} gave up joining: it was cancelled")
            if end is not None and "world_id" in end:
                await self.resign()  # a world was formed, with this rank
        self.presence.disappear()

    async def _publish_again(self) -> None:
        try:
            await self.presence.vouch()
            await asyncio.gather(*self.presence.appear(self._attempts.token), *self.presence.arrive())
            await self._store.compare_set("over", b"", str(self._attempts.number - 1))
            await self._store.multi_set(list(self._published), list(self._published.values()))
        except DistError as error:
            events.info("%s could not publish its address again: %s", self._who, error)
        finally:
            self._republishing = None

    async def _join(
        self, host: str, loopback: bool, options: dict[str, Any], listen: Listen, deadline: Deadline, allow_pickle: bool
    ) -> Met:
        while True:
            self._store.set_timeout(deadline.remaining_s(_now()))
            try:
                terms = unpacked(await self._attempts.enter(lambda: self._terms(host, loopback)))
                if self._attempts.before:
                    events.warn("%s waits in a new attempt%s", self._who, self._before())
                await self._compare(terms, host, loopback)
                world_id: bytes = terms["world_id"]
                address = await self._listen(listen, world_id)
                with self._asked_for_the_end(deadline) as ready:
                    if await self._present(options, address, allow_pickle) == self.world_size:
                        await self._conclude(world_id, allow_pickle)
                    end = await self._hear_the_end(ready, deadline)
            except LeaseLostError as error:  # the store may come back as another one: news of that end this attempt
                end = {"again": f"{self._who} lost its connection to the store: {error}"}
                if self._attempts.number:
                    end = await self._attempts.decide(end)
            if "world_id" in end:
                break
            if "failure" in end:
                kind = ConnectTimeoutError if end.get("late") is True else DistError
                raise kind(f"{self._who}: {end['failure']}{self._before()}")
            events.info("%s goes on to the next attempt: %s", self._who, end.get("again"))
        self._published[self._key("ready")] = msgpack.packb({"world_id": world_id})
        events.info("%s joined a world of %d (attempt %d)", self._who, self.world_size, self._attempts.number)
        all_allow = allow_pickle and end["allow_pickle"] is True
        if end["addresses"]:
            self.book = AddressBook(self.world_size, end["addresses"])
        return Met(world_id, self._attempts.number, end["options"], all_allow, end["decider"], end.get("placement"))

    async def _listen(self, listen: Listen, world_id: bytes) -> PeerAddress:
        try:
            return await listen(world_id)
        except Exception as error:
            await self._attempts.fail(f"{self._who} cannot be in the world: {error}")
            raise

    async def _present(self, options: dict[str, Any], address: PeerAddress, allow_pickle: bool) -> int:
        """Say who this rank is and where it listens, and what it allows; returns how many ranks have joined then."""
        info: dict[str, Any] = {"who": self._who, "token": self._attempts.token, "address": address.to_bytes()}
        if self.endpoint:
            info["endpoint"] = self.endpoint
        if not self.rank:
            info["options"] = options
        key, packed = self._key(f"info/{self.rank}"), msgpack.packb(info)
        self._published = {key: packed, **dict([self._attempts.claim])}
        said: list[Awaitable[Any]] = [*self.presence.arrive(), self._store.set(key, packed)]
        if allow_pickle:
            said.append(self._store.add(self._key("picklers"), 1))
        said.append(self._store.add(self._key("joined"), 1))  # last: whoever counts this rank finds the rest
        joined: int = (await asyncio.gather(*said))[-1]
        return joined

    async def _conclude(self, world_id: bytes, allow_pickle: bool) -> None:
        """All have come: the world has formed, unless one of them has died waiting."""
        infos = [unpacked(info) for info in await self._all("info")]
        dead = await self._attempts.dead([(info["token"], info["who"]) for info in infos])
        if dead:
            await self._attempts.decide({"again": f"{', '.join(dead)} ended before the world had formed"})
            return
        all_allow = allow_pickle and await self._store.add(self._key("picklers"), 0) == self.world_size
        self.book = AddressBook(self.world_size, [info["address"] for info in infos])
        decision = {
            "world_id": world_id,
            "allow_pickle": all_allow,
            "options": infos[0]["options"],
            "decider": self.rank,
            "placement": self._placement(),
            "addresses": self.book.packed() if self.book.told_at_once else [],
        }
        await self._attempts.decide(decision)

    def _placement(self) -> tuple[int, tuple[int, ...]] | None:
        """Which ranks are together, by what their addresses say; None where all are."""
        try:
            hosts = self.book.hosts()
        except RemoteProtocolError:  # whoever connects to that rank will see
            return None
        placed = DEFAULT_TUNING.placed(hosts)
        return (placed.ranks_per_host, placed.hosts) if len(set(hosts)) > 1 else None

    async def _all(self, kind: str) -> list[bytes]:
        """What every rank has set of that kind."""
        keys = [self._key(f"{kind}/{rank}") for rank in range(self.world_size)]
        parts = [keys[first : first + ASKED_TOGETHER] for first in range(0, len(keys), ASKED_TOGETHER)]
        return [value for part in await asyncio.gather(*map(self._store.multi_get, parts)) for value in part]

    @contextlib.contextmanager
    def _asked_for_the_end(self, deadline: Deadline) -> Iterator[asyncio.Future[bytes]]:
        """Ask what becomes of this attempt before what is inside is answered, so that one write carries both."""
        ready = asyncio.ensure_future(self._store.get(self._key("ready"), timeout=deadline.remaining_s(_now())))
        ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # what is inside may fail first
        try:
            yield ready
        finally:
            ready.cancel()

    async def _hear_the_end(self, asked: asyncio.Future[bytes], deadline: Deadline) -> dict[str, Any]:
        """Wait for what becomes of this attempt. Raises ConnectTimeoutError where that takes too long."""
        ready: bytes | None = None
        hearing = None if self.on_hosted is None else asyncio.create_task(self._hear_who_hosts(self.on_hosted))
        try:
            with contextlib.suppress(StoreTimeoutError), telling(lambda: self._tell_who_is_missing(deadline)):
                ready = await asked
        finally:
            if hearing is not None:
                hearing.cancel()
        return await self._give_up() if ready is None else unpacked(ready)

    async def _hear_who_hosts(self, on_hosted: Callable[[], None]) -> None:
        with contextlib.suppress(DistError):
            options = unpacked(await self._store.get(self._key("info/0"), timeout=None)).get("options")
            if isinstance(options, dict) and options.get("rank 0 hosts") is True:
                on_hosted()

    async def addresses(self, ranks: Sequence[int]) -> dict[int, PeerAddress]:
        """Where `ranks` listen. What this rank was not told yet it asks the store for, all in one request, bounded.

        Raises DistStoreError where the store does not say.
        """
        asked = [rank for rank in ranks if self.book.get(rank) is None]
        if asked:
            try:
                async with asyncio.timeout(LOOK_UP_LIMIT_S) as looking:
                    self._looking.add(looking)
                    infos = await self.infos(asked)
                for rank, info in zip(asked, infos, strict=True):
                    self.book.learn(rank, [info["address"]])
            except (DistError, TimeoutError) as error:
                if not self.book.complete:
                    why = str(error) or f"the store did not answer within {LOOK_UP_LIMIT_S:g} s"
                    raise DistStoreError(why) from error
            finally:
                self._looking.discard(looking)
        return {rank: address for rank in ranks if (address := self.book.get(rank)) is not None}

    async def infos(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """What these ranks have told the store of themselves. Raises DistError."""
        return [unpacked(info) for info in await self._store.multi_get([self._key(f"info/{rank}") for rank in ranks])]

    def learn(self, first: int, addresses: Sequence[bytes]) -> bool:
        """Another rank tells where `first` and those after it listen. Returns whether now, at last, all is known."""
        known = self.book.complete
        self.book.learn(first, addresses)
        complete = self.book.complete and not known
        if complete:
            for looking in self._looking:  # the store need not answer any more
                if not looking.expired():
                    looking.reschedule(_now())
        return complete

    # The end.

    @contextlib.asynccontextmanager
    async def _farewell(self) -> AsyncIterator[None]:
        """Bound what is inside, and all that is said in parting together. Raises TimeoutError."""
        if self._farewell_s is None:
            self._farewell_s = GOODBYE_LIMIT_S if self._store.is_connected else AWAY_LIMIT_S
        began_s = _now()
        try:
            async with asyncio.timeout(self._farewell_s):
                yield
        finally:
            self._farewell_s = max(0.0, self._farewell_s - (_now() - began_s))

    async def words_of(self, rank: int) -> tuple[bytes, Absence]:
        """What a rank that takes no connection has left to say, and what became of it. Bounded."""
        return await self.presence.words_of(rank)

    async def leave_words(self, words: bytes) -> bool:
        """Publish what whoever finds this rank gone should know; before it is gone. Bounded; raises no DistError.

        Returns whether the store has it.
        """
        key = self._key(f"words/{self.rank}")
        self._published[key] = words
        try:
            async with asyncio.timeout(PUBLISH_LIMIT_S), self._farewell():
                await self._store.set(key, words)
        except (DistError, TimeoutError) as error:
            events.info("%s could not leave word in the store: %s", self._who, error)
            return False
        return True

    async def leave(self, goodbye: bytes = LEFT) -> None:
        """Say goodbye; the last one to leave takes the attempt's keys away. Bounded; never raises a DistError."""
        self._published.clear()
        said: list[asyncio.Future[Any]] = []
        try:
            async with self._farewell():
                if self._republishing is not None:
                    await self._republishing
                # Issued together, so answered together: who hosts the store may stop it after any of them. Nothing may
                # follow, as closing the store would wait for its answer.
                said.append(asyncio.ensure_future(self._store.set(self._key(f"left/{self.rank}"), goodbye)))
                said.append(asyncio.ensure_future(self._store.add(self._key("left"), 1)))
                self.presence.disappear()
                _, count = await asyncio.gather(*said)
                if count == self.world_size:
                    await self._clean_up()
        except (DistError, TimeoutError) as error:
            events.info("%s could not say goodbye in the store: %s", self._who, error)
        finally:
            self.presence.disappear()

    async def resign(self) -> None:
        """Leave a world that was formed, but that this rank cannot be in: whoever looks for it is told so at once."""
        await self.leave(RESIGNED)

    async def wait_for_goodbyes(self, lost: Collection[int]) -> None:
        """Wait, bounded, until every rank but the `lost` has said goodbye: for the rank that hosts the store."""
        keys = [f"left/{rank}" for rank in range(self.world_size) if rank not in lost] if lost else ["gone"]
        try:
            async with asyncio.timeout(0 if self._hurried else GOODBYE_LIMIT_S) as self._staying:
                with telling(lambda: self._tell_who_stays(lost), STAY_NOTICE_S):
                    await self._store.wait([self._key(name) for name in keys], None)
        except (DistError, TimeoutError) as error:
            events.info("%s stops hosting the store before every rank has left: %s", self._who, error)
        finally:
            self._staying = None

    def hurry(self) -> None:
        """Whoever leaves is in a hurry, or the store may be cut off: wait for no goodbyes, nor long for the store."""
        self._hurried = True
        self._farewell_s = min(AWAY_LIMIT_S, AWAY_LIMIT_S if self._farewell_s is None else self._farewell_s)
        if self._staying is not None and not self._staying.expired():
            self._staying.reschedule(_now())

    async def _tell_who_stays(self, lost: Collection[int]) -> None:
        with contextlib.suppress(DistError):
            left = await self._ranks_with("left/")
            stay = [rank for rank in range(self.world_size) if rank not in left and rank not in lost]
            if stay:
                events.warn(
                    "%s keeps the store for up to %g s, as others have not said goodbye: rank %s; Ctrl-C ends it",
                    *(self._who, GOODBYE_LIMIT_S, _spell(stay)),
                )

    def _key(self, name: str) -> str:
        return self._attempts.key(name)

    def _terms(self, host: str, loopback: bool) -> bytes:
        """The id that the world is to have if this rank comes first, and what the other ranks are compared with."""
        mine = {
            "world_id": secrets.token_bytes(WORLD_ID_BYTES),
            "world_size": self.world_size,
            "host": host,
            "loopback": loopback,
            "connections": self.connections,
            "who": self._who,
        }
        packed: bytes = msgpack.packb(mine)
        return packed

    async def _compare(self, theirs: dict[str, Any], host: str, loopback: bool) -> None:
        """Compare this rank with the first that came. Raises DistError, on every rank, where they contradict."""
        message = None
        if theirs["world_size"] != self.world_size:
            message = (
                f"{self._who} was started with world_size {self.world_size}, "
                f"but {theirs['who']} with {theirs['world_size']}"
            )
        elif tuple(theirs["connections"]) != self.connections:
            message = (
                f"{self._who} has {_spell_connections(*self.connections)}, "
                f"but {theirs['who']} has {_spell_connections(*theirs['connections'])}: ASYNCDIST_SOCKET_IFNAME (or "
                "GLOO_SOCKET_IFNAME) has to choose as many on every rank, and ASYNCDIST_STREAMS to be the same"
            )
        elif theirs["host"] != host and (theirs["loopback"] or loopback):
            local = theirs["who"] if theirs["loopback"] else self._who
            message = (
                f"{self._who} and {theirs['who']} are on different hosts, but {local} can be reached over loopback "
                "only: set MASTER_ADDR to an address of that host the others can reach, or ASYNCDIST_SOCKET_IFNAME"
            )
        if message is not None:
            await self._attempts.fail(message)
            raise DistError(message)

    async def _give_up(self) -> dict[str, Any]:
        """The time is over: name who is missing, tell everybody, unless the decision came meanwhile."""
        self._store.set_timeout(PUBLISH_LIMIT_S)
        try:
            missing = await self._missing()
        except DistError as error:
            raise DistStoreError(f"{self._who}: the store stopped answering while ranks were joining") from error
        came = self.world_size - len(missing)
        message = f"{came} of {self.world_size} ranks joined in time; missing: rank {_spell(missing)}"
        end = await self._attempts.fail(message, late=True)
        if end is not None and "failure" not in end:
            return end
        raise ConnectTimeoutError(f"{self._who}: {message}{self._before()}")

    def _before(self) -> str:
        before = self._attempts.before
        return f"; the attempt before this one failed: {before}" if before else ""

    async def _missing(self) -> list[int]:
        came = await self._ranks_with(
            "here/" if self.presence.lease is not None else "info/"
        )  # who has died is missing too
        return [rank for rank in range(self.world_size) if rank not in came]

    async def _ranks_with(self, kind: str) -> set[int]:
        return {int(key.rpartition("/")[2]) for key in await self._store.list_keys(self._key(kind))}

    async def _tell_who_is_missing(self, deadline: Deadline) -> None:
        """Of all ranks one or two: the question takes as long as the world is large."""
        if self.rank >= TELLERS:
            return
        with contextlib.suppress(DistError):
            missing = await self._missing()
            if missing:
                limit = "" if deadline.given_s is None else f", for up to {deadline.given_s:g} s in all"
                came = self.world_size - len(missing)
                events.warn(
                    "%s: %d of %d ranks are here; waiting for rank %s%s%s",
                    *(self._who, came, self.world_size, _spell(missing), limit, self._before()),
                )

    async def _clean_up(self) -> None:
        names = [f"{kind}/{rank}" for kind in ("info", "claim") for rank in range(self.world_size)]
        names += ["terms", "joined", "picklers"]
        words = await self._store.list_keys(self._key("words/"))
        names += [f"words/{key.rpartition('/')[2]}" for key in words]
        over = {"again": "that world has ended"}
        await self._store.set(self._key("ready"), msgpack.packb(over))
        await self._attempts.leave_behind(over)
        await asyncio.gather(*(self._store.delete_key(self._key(name)) for name in names))
        await self._store.set(self._key("gone"), b"1")  # last: who hosts the store stops it now


def _spell_connections(interfaces: int, streams: int) -> str:
    several = f"{interfaces} network interfaces" if interfaces > 1 else "1 network interface"
    return f"{several} and {streams} connection{'s' if streams > 1 else ''} for each pair of ranks"


def _spell(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")


def _now() -> float:
    return asyncio.get_running_loop().time()
