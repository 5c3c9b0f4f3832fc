"""Rendezvous: how the ranks of a world find each other through a store.

Keys, under `world/<group name>/`:

| key | set by | meaning |
| --- | --- | --- |
| `joins/<rank>` | every rank | how often this rank has joined: its value after the join is the epoch |
| `<epoch>/terms` | the first to come | world size, host and pid all others are compared with |
| `<epoch>/info/<rank>` | every rank | who it is; rank 0's also carries options for all |
| `<epoch>/address/<rank>` | every rank, once it listens | where its peers reach it |
| `<epoch>/joined` | every rank | counter; who makes it reach the world size decides |
| `<epoch>/picklers` | ranks that allow pickle, before they have joined | counter |
| `<epoch>/ready` | one rank | the decision: the world id and what all allow, or why the world could not be formed |
| `<epoch>/here/<rank>`, `.../left/<rank>`, `.../words/<rank>` | every rank | see `attendance` |
| `<epoch>/left` | every rank | counter of exits |
| `<epoch>/gone` | the last to leave | nobody needs the store any more |

Where the store has leases, all of these keys vanish `WORLD_LINGER_S` after the last rank has left, or has been without
a connection for `HOLD_GRACE_S`.

A rank needs a constant number of requests however large the world is. Each failure is published under `ready`, so
that every rank raises it and none waits for its own time-out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from asyncdist import events
from asyncdist.attendance import LEFT, RESIGNED, Attendance
from asyncdist.deadline import Deadline
from asyncdist.errors import ConnectTimeoutError, DistError, DistStoreError, StoreTimeoutError
from asyncdist.patience import telling
from asyncdist.store import Lease, PrefixStore, Store
from asyncdist.transport.addresses.address import PeerAddress
from asyncdist.uninterrupted import uninterrupted
from asyncdist_server.messages import CLIENT_LINGER_S

__all__ = ["WORLD_ID_BYTES", "Met", "Rendezvous"]

WORLD_ID_BYTES: Final = 16
GOODBYE_LIMIT_S: Final = 5.0
"""How long leaving may take in the store: a goodbye is a courtesy and must not hold up an exit."""
HOLD_GRACE_S: Final = CLIENT_LINGER_S
"""How long a rank that lost its connection still counts: as long as the store takes it up where it was."""
WORLD_LINGER_S: Final = 60.0
"""How long a world without ranks is remembered: those of its next run find its epoch, and no stale addresses."""
PUBLISH_LIMIT_S: Final = 2.0
"""How long telling the others about a failure may take before it is raised here."""
TELLERS: Final = 2
"""Ranks that say whom they wait for: rank 0, and where that is missing in a standing store, rank 1."""


@dataclass(frozen=True, slots=True)
class Met:
    """What all ranks agreed on: a random id, the options rank 0 published, and whether everyone allows pickle."""

    world_id: bytes
    epoch: int
    options: dict[str, Any]
    allow_pickle: bool = False


class Rendezvous:
    """One rank's dealings with the store for one world."""

    def __init__(self, store: Store, rank: int, world_size: int, group_name: str = "") -> None:
        self._store = PrefixStore(f"world/{group_name or 'default'}", store)
        self.rank = rank
        self.world_size = world_size
        self.on_hosted: Callable[[], None] | None = None
        """Called, while others are waited for, once it is known that the store ends with rank 0."""
        self._epoch = 0
        self._attempt: asyncio.Task[Met] | None = None
        self._restarted = False
        self._published: dict[str, bytes] = {}
        self._lease: Lease | None = None
        self._republishing: asyncio.Task[None] | None = None
        self._who = f"rank {rank} ({socket.gethostname()} pid {os.getpid()})"
        self.attendance = Attendance(self._store, rank, world_size, self._who, self._key)

    async def join(
        self, host: str, loopback: bool, options: dict[str, Any], deadline: Deadline, *, allow_pickle: bool = False
    ) -> Met:
        """Meet the other ranks; returns when all `world_size` are there.

        `host` identifies this host, `loopback` says that no other host can reach it; rank 0's `options` become
        everybody's; `allow_pickle` holds if all gave it. Raises DistError where the ranks contradict each other (the
        same rank twice, other world sizes, loopback addresses across hosts), and ConnectTimeoutError naming the ranks
        that did not come. Cancelling tells the others, bounded, that this rank does not come, and it may join again.
        """
        while True:
            self._restarted = False
            attempt = self._attempt = asyncio.create_task(self._join(host, loopback, options, deadline, allow_pickle))
            try:
                return await attempt
            except (asyncio.CancelledError, DistError):
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    await uninterrupted(self._withdraw())
                    raise
                await asyncio.sleep(0)  # the news of a restart may be behind the failure it caused
                if not self._restarted:
                    self._release()
                    raise
                events.info("%s: the store lost what it knew; joining again", self._who)
            finally:
                self._attempt = None

    def store_restarted(self) -> None:
        """The store came back without its data: join again, or publish again what the others may ask for."""
        self._restarted = True
        self._release()
        if self._attempt is not None:
            self._attempt.cancel()
        elif self._published and self._republishing is None:
            self._republishing = asyncio.create_task(self._publish_again())

    async def _withdraw(self) -> None:
        """Joining was cancelled: nobody is to wait for this rank. Bounded."""
        decision: bytes | None = None
        if self._epoch:
            decision = await self._publish_failure(f"{self._who} gave up joining: it was cancelled")
        if decision is not None and "failure" not in _unpack(decision):
            await self.resign()  # a world was formed, with this rank
        self._release()

    async def _publish_again(self) -> None:
        try:
            await self._hold()
            await self.attendance.appear()
            await self._store.multi_set(list(self._published), list(self._published.values()))
        except DistError as error:
            events.info("%s could not publish its address again: %s", self._who, error)
        finally:
            self._republishing = None

    async def _join(
        self, host: str, loopback: bool, options: dict[str, Any], deadline: Deadline, allow_pickle: bool
    ) -> Met:
        self._store.set_timeout(deadline.remaining_s(_now()))
        await self._hold()
        self._epoch = await self._claim_rank()
        await self._agree_on_terms(host, loopback)
        await self.attendance.appear()
        info = msgpack.packb({"who": self._who, "options": options})
        await self._store.set(self._key(f"info/{self.rank}"), info)
        if allow_pickle:
            await self._store.add(self._key("picklers"), 1)
        if await self._store.add(self._key("joined"), 1) == self.world_size:
            all_allow = allow_pickle and await self._store.add(self._key("picklers"), 0) == self.world_size
            await self._decide({"world_id": secrets.token_bytes(WORLD_ID_BYTES), "allow_pickle": all_allow})
        ready: bytes | None = None
        hearing = None if self.on_hosted is None else asyncio.create_task(self._hear_who_hosts(self.on_hosted))
        try:
            with contextlib.suppress(StoreTimeoutError), telling(lambda: self._tell_who_is_missing(deadline)):
                ready = await self._store.get(self._key("ready"), timeout=deadline.remaining_s(_now()))
        finally:
            if hearing is not None:
                hearing.cancel()
        if ready is None:
            ready = await self._give_up()
        decision = _unpack(ready)
        if "failure" in decision:
            kind = ConnectTimeoutError if decision.get("late") is True else DistError
            raise kind(f"{self._who}: {decision['failure']}")
        leader = _unpack(await self._store.get(self._key("info/0")))
        events.info("%s joined a world of %d (epoch %d)", self._who, self.world_size, self._epoch)
        all_allow = allow_pickle and decision.get("allow_pickle") is True
        return Met(decision["world_id"], self._epoch, leader["options"], all_allow)

    async def _hear_who_hosts(self, on_hosted: Callable[[], None]) -> None:
        with contextlib.suppress(DistError):
            options = _unpack(await self._store.get(self._key("info/0"), timeout=None)).get("options")
            if isinstance(options, dict) and options.get("rank 0 hosts") is True:
                on_hosted()

    async def _hold(self) -> None:
        """Let the world's keys live as long as this rank does, where the store can."""
        with contextlib.suppress(NotImplementedError):
            if self._lease is None or self._lease.lost:
                self._lease = await self._store.lease(HOLD_GRACE_S, bound=True)
            await self._store.hold("", self._lease, linger=WORLD_LINGER_S)

    def _release(self) -> None:
        """Hold the keys no longer, and be here no more. Not waited for: who hosts the store may stop it at once."""
        self.attendance.disappear()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.abandon()

    async def publish(self, address: PeerAddress) -> None:
        """Tell the others where this rank listens."""
        self._published[self._key(f"address/{self.rank}")] = address.to_bytes()
        await self._store.multi_set(list(self._published), list(self._published.values()))

    async def addresses(self, ranks: Sequence[int]) -> dict[int, PeerAddress]:
        """Fetch the addresses of `ranks` in one request, which waits for those not published yet."""
        found = await self._store.multi_get([self._key(f"address/{rank}") for rank in ranks])
        return {rank: PeerAddress.from_bytes(data) for rank, data in zip(ranks, found, strict=True)}

    async def leave_words(self, words: bytes) -> bool:
        """Publish what whoever finds this rank gone should know; before it is gone. Bounded; raises no DistError.

        Returns whether the store has it.
        """
        key = self._key(f"words/{self.rank}")
        self._published[key] = words
        try:
            async with asyncio.timeout(PUBLISH_LIMIT_S):
                await self._store.set(key, words)
        except (DistError, TimeoutError) as error:
            events.info("%s could not leave word in the store: %s", self._who, error)
            return False
        return True

    async def leave(self, goodbye: bytes = LEFT) -> None:
        """Say goodbye; the last one to leave takes the epoch's keys away. Bounded; never raises a DistError."""
        self._published.clear()
        try:
            async with asyncio.timeout(GOODBYE_LIMIT_S):
                if self._republishing is not None:
                    await self._republishing
                # Issued together, so answered together: who hosts the store may stop it after any of them. Nothing may
                # follow, as closing the store would wait for its answer.
                flag = self._store.set(self._key(f"left/{self.rank}"), goodbye)
                count = self._store.add(self._key("left"), 1)
                self._release()
                await flag
                if await count == self.world_size:
                    await self._clean_up()
        except (DistError, TimeoutError) as error:
            events.info("%s could not say goodbye in the store: %s", self._who, error)
        finally:
            self._release()

    async def resign(self) -> None:
        """Leave a world that was formed, but that this rank cannot be in: whoever looks for it is told so at once."""
        with contextlib.suppress(DistError, TimeoutError):
            async with asyncio.timeout(PUBLISH_LIMIT_S):
                await self.publish(PeerAddress(""))
        await self.leave(RESIGNED)

    async def wait_for_goodbyes(self, lost: Collection[int]) -> None:
        """Wait, bounded, until every rank but the `lost` has said goodbye: for the rank that hosts the store."""
        keys = [f"left/{rank}" for rank in range(self.world_size) if rank not in lost] if lost else ["gone"]
        try:
            await self._store.wait([self._key(name) for name in keys], GOODBYE_LIMIT_S)
        except DistError as error:
            events.info("%s stops hosting the store before every rank has left: %s", self._who, error)

    def _key(self, name: str) -> str:
        return f"{self._epoch}/{name}"

    async def _claim_rank(self) -> int:
        counter = f"joins/{self.rank}"
        self._epoch = 0
        claim = asyncio.ensure_future(self._store.add(counter, 1))
        try:
            epoch = await asyncio.shield(claim)
            holder = await self._holder_in(epoch - 1) if epoch > 1 else ""
        except asyncio.CancelledError:
            self._epoch = 0
            if not self._restarted:
                await uninterrupted(self._take_back(counter, claim))
            raise
        if not holder:
            return epoch
        await self._store.add(counter, -1)
        message = (
            f"{self._who} claims a rank that {holder} holds already: two processes were started with the same rank, "
            "or an earlier run of this job died without a goodbye (then set ASYNCDIST_JOB_ID to a fresh value)"
        )
        await self._publish_failure(message)
        raise DistError(message)

    async def _holder_in(self, epoch: int) -> str:
        """Who holds our rank in a world of that epoch; empty if nobody does any more."""
        self._epoch = epoch
        if await self.attendance.has_left(self.rank) or "failure" in await self._decision():
            return ""
        known = await self._store.check([self._key(f"info/{self.rank}")])
        return _unpack(await self._store.get(self._key(f"info/{self.rank}")))["who"] if known else "another process"

    async def _take_back(self, counter: str, claim: asyncio.Future[int]) -> None:
        """Cancelled while it was not known whether the rank is ours: claim it no longer. Bounded."""
        with contextlib.suppress(DistError, TimeoutError):
            async with asyncio.timeout(PUBLISH_LIMIT_S):
                await claim
                await self._store.add(counter, -1)

    async def _agree_on_terms(self, host: str, loopback: bool) -> None:
        mine = {"world_size": self.world_size, "host": host, "loopback": loopback, "who": self._who}
        theirs = _unpack(await self._store.compare_set(self._key("terms"), b"", msgpack.packb(mine)))
        message = None
        if theirs["world_size"] != self.world_size:
            message = (
                f"{self._who} was started with world_size {self.world_size}, "
                f"but {theirs['who']} with {theirs['world_size']}"
            )
        elif theirs["host"] != host and (theirs["loopback"] or loopback):
            local = theirs["who"] if theirs["loopback"] else self._who
            message = (
                f"{self._who} and {theirs['who']} are on different hosts, but {local} can be reached over loopback "
                "only: set MASTER_ADDR to an address of that host the others can reach, or ASYNCDIST_SOCKET_IFNAME"
            )
        if message is not None:
            await self._publish_failure(message)
            raise DistError(message)

    async def _decision(self) -> dict[str, Any]:
        if not await self._store.check([self._key("ready")]):
            return {}
        return _unpack(await self._store.get(self._key("ready")))

    async def _decide(self, decision: dict[str, Any]) -> bytes:
        return await self._store.compare_set(self._key("ready"), b"", msgpack.packb(decision))

    async def _publish_failure(self, message: str, *, late: bool = False) -> bytes | None:
        try:
            async with asyncio.timeout(PUBLISH_LIMIT_S):
                return await self._decide({"failure": message, "late": late})
        except (DistError, TimeoutError):
            return None  # the others will find out by their own time-out; the failure is raised here either way

    async def _give_up(self) -> bytes:
        """The time is over: name who is missing, tell everybody, unless the decision came meanwhile."""
        self._store.set_timeout(PUBLISH_LIMIT_S)
        try:
            missing = await self._missing()
        except DistError as error:
            raise DistStoreError(f"{self._who}: the store stopped answering while ranks were joining") from error
        came = self.world_size - len(missing)
        message = f"{came} of {self.world_size} ranks joined in time; missing: rank {_spell(missing)}"
        ready = await self._publish_failure(message, late=True)
        if ready is not None and "failure" not in _unpack(ready):
            return ready
        raise ConnectTimeoutError(f"{self._who}: {message}")

    async def _missing(self) -> list[int]:
        present = await self._store.list_keys(self._key("info/"))
        came = {int(key.rpartition("/")[2]) for key in present}
        return [rank for rank in range(self.world_size) if rank not in came]

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
                    "%s: %d of %d ranks are here; waiting for rank %s%s",
                    *(self._who, came, self.world_size, _spell(missing), limit),
                )

    async def _clean_up(self) -> None:
        names = [f"{kind}/{rank}" for kind in ("info", "address") for rank in range(self.world_size)]
        names += ["terms", "joined", "picklers"]
        words = await self._store.list_keys(self._key("words/"))
        names += [f"words/{key.rpartition('/')[2]}" for key in words]
        await asyncio.gather(*(self._store.delete_key(self._key(name)) for name in names))
        await self._store.set(self._key("gone"), b"1")  # last: who hosts the store stops it now


def _spell(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")


def _now() -> float:
    return asyncio.get_running_loop().time()


def _unpack(data: bytes) -> dict[str, Any]:
    try:
        value = msgpack.unpackb(data)
    except ValueError as error:
        raise DistStoreError(
            "the store holds a rendezvous record that is not ours; is the key prefix shared?"
        ) from error
    if not isinstance(value, dict):
        raise DistStoreError("the store holds a rendezvous record that is not ours; is the key prefix shared?")
    return value
