"""Membership: one process's part in a job whose members come and go."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from asyncdist.concurrency.deadline import INHERIT, Timeout, timeout_seconds
from asyncdist.concurrency.tasks import telling
from asyncdist.concurrency.trace import warn
from asyncdist.errors import DistError, LeaseLostError
from asyncdist.store.base import decoded_key, encoded_key
from asyncdist.store.lease import Lease
from asyncdist.store.prefix_store import PrefixStore
from asyncdist.store.reply import timeout_ms
from asyncdist.store.watch import Watch
from asyncdist_server.wire import messages
from asyncdist_server.wire.key_text import shown

if TYPE_CHECKING:
    from asyncdist.fleet import Worlds
    from asyncdist.store.request_store import CoordinatingStore

__all__ = ["DEFAULT_SETTLE_S", "MemberEvent", "Membership"]

DEFAULT_SETTLE_S: Final = 3.0
"""How long a round with enough members waits for more: processes of one launch start within a second or two."""


@dataclass(frozen=True, slots=True)
class MemberEvent:
    """What happened to another member: it "joined" and waits for the next round, "left", or was "lost"."""

    kind: Literal["joined", "left", "lost"]
    member: str


class Membership(AsyncIterator[MemberEvent]):
    """This process as a member of a job. Made by `store.join`; leaves at the end of `async with`.

        async with await store.join("train", 2, 8, timeout=60) as member:
            print(member.epoch, member.rank, member.members)
            async for event in member:            # somebody was lost, or came anew
                await member.rejoin(timeout=60)   # meets everyone still there: next epoch, new ranks

    Ranks: members of the previous epoch keep their order and come first, so that rank 0 knows the job's state as long
    as anybody does; new ones follow in the order of their names, numbers in names counting as numbers.
    A round needs every living member of the previous one: each must `rejoin`, leave or be lost.
    """

    def __init__(self, store: CoordinatingStore, job: str, least: int, most: int, settle_s: float, name: str) -> None:
        self._ask = store.ask
        self._watch_from = store.watch
        self._default_timeout_s = store.timeout
        self._arguments = (encoded_key(job), encoded_key(name), least, most)
        self._prefix = f"job/{job}/members/"
        self._lease: Lease | None = None
        self._watch: Watch | None = None
        self._ended = False
        self._worlds: Worlds | None = None
        self.job = job
        self.name = name
        self.most = most
        """The most members that a round may have."""
        self.settle_s = settle_s
        self.left = False
        """Whether this process has left, or is leaving."""
        self.epoch = 0
        """How many rounds the job has had; all members of a round have the same."""
        self.rank = -1
        """This member's rank in the epoch."""
        self.members: Sequence[str] = ()
        """The names of all members, by rank."""
        self.store = PrefixStore(f"job/{job}", store)
        """Keys of the job, for all its members; they vanish when the last has gone. `members/` is the daemon's."""

    def __repr__(self) -> str:
        return (
            f"<Membership '{shown(self.name)}' in '{shown(self.job)}': rank {self.rank} of {len(self.members)}, "
            f"epoch {self.epoch}>"
        )

    async def rejoin(self, timeout: Timeout = INHERIT, *, settle: Timeout = INHERIT) -> Self:
        """Wait for the next epoch with all members still there; returns this object with its new epoch and rank.

        `settle` is as of `Store.join`, and what that was given by default. Raises StoreTimeoutError, whose `keys` name
        the members that did not come, and LeaseLostError, as where another process has joined under this name. After an
        error, or when cancelled, this process is no member any more.
        """
        timeout_s = timeout_seconds(timeout, self._default_timeout_s)
        if self._lease is None or self._ended:
            raise LeaseLostError(f"{self!r} is no member any more")
        settle_s = timeout_seconds(settle, self.settle_s) or 0.0
        arguments = (*self._arguments, timeout_ms(settle_s), self._lease.id)
        try:
            self._lease.raise_if_lost()
            answer = await self._ask(messages.JOIN, arguments, timeout_s)
        except LeaseLostError as error:
            self._abandon()
            raise await self._why_lost(str(error)) from error
        except BaseException:
            self._abandon()
            raise
        self.epoch, self.rank, members, revision = answer
        self.members = tuple(map(decoded_key, members))
        watch, self._watch = self._watch, self._watch_from(self._prefix, revision + 1)
        if watch is not None:
            await watch.close()
        return self

    async def __anext__(self) -> MemberEvent:
        while True:
            watch = self._watch
            if watch is None:
                raise StopAsyncIteration
            try:
                event = await anext(watch)
            except StopAsyncIteration:
                if watch is not self._watch:
                    continue  # joined again meanwhile
                raise
            member = event.key.removeprefix(self._prefix)
            if member != self.name:
                kinds: dict[str, Literal["joined", "left", "lost"]] = {"set": "joined", "delete": "left"}
                return MemberEvent(kinds.get(event.kind, "lost"), member)
            if event.kind == "expire":
                raise await self._why_lost(f"{self!r} was taken for lost: the store did not hear from it in time")
            if event.kind == "delete" and not self._ended:
                raise LeaseLostError(f"{self!r} was expelled by another member")

    def outlive_outages(self) -> None:
        """See `Lease.outlive_outages`."""
        assert self._lease is not None
        self._lease.outlive_outages()

    async def _why_lost(self, why: str) -> LeaseLostError:
        """Return the error for the loss of this member: another process may have its place."""
        try:
            await self._ask(messages.GET, (encoded_key(self._prefix + self.name),), 0)
        except DistError:
            return LeaseLostError(why)
        return LeaseLostError(
            f"{self!r} was replaced: another process joined under its name while its connection was lost"
        )

    def worlds(
        self, backend: str | None = None, timeout: Timeout = INHERIT, *, finish: Timeout = 1.0, **options: Any
    ) -> Worlds:
        """Iterate over the process groups of the members that are there: a new one whenever members come or go.

            async for world in (worlds := member.worlds()):
                with contextlib.suppress(dist.PeerLostError, dist.GroupAbortedError):
                    while not worlds.changing:
                        await world.all_reduce(x)

        A member's rank in the group is its rank in the epoch; `members` has the names. The group is the default group
        of the context. A world ends when a member is lost or leaves; when newcomers have waited for `settle` seconds
        (see `Store.join`) and there is room for them; and when a member asks for the next one. `worlds.changing` then
        says why. If a member was lost, operations of the group fail at once. Else the turn, which is the body of the
        loop, has `finish` seconds to come to an end. After that operations fail with GroupAbortedError, whose text says
        that a new world forms and why, or with PeerLostError (`left`), if the other member has ended its turn first.

        The next iteration leaves the old world in order, so that all members finish what one of them has finished, and
        waits without limit until all members have ended their turns and at least `min` are there; cancelling that ends
        the membership. The last world ends with the membership, and `leave` ends the iteration. Raises LeaseLostError
        as `rejoin` does, and as `init_process_group` where this member cannot be in a world; `backend`, `timeout` and
        `options` are for that function. Read events by the worlds or by the membership, not by both. A process may be
        in worlds of several memberships.
        """
        from asyncdist.fleet import Worlds

        self._worlds = Worlds(self, timeout_seconds(finish, None), backend=backend, timeout=timeout, **options)
        return self._worlds

    async def wait_lost(self) -> str:
        """Wait until this process is no member any more, or may not be, and return why; may be cancelled."""
        return "it never joined" if self._lease is None else await self._lease.wait_lost()

    async def leave(self) -> None:
        """Leave the job; the others are told. May be called twice. DistStoreError if the store cannot be told."""
        self.left = True
        try:
            await self._end_worlds(None)
        finally:
            if not self._ended:
                self._ended = True
                await self._stop_watching()
                if self._lease is not None and not self._lease.lost:
                    await self._lease.revoke()

    async def _end_worlds(self, error: BaseException | None) -> None:
        if self._worlds is not None:
            await self._worlds.end(error, for_good=True)

    async def _stop_watching(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.close()

    def _abandon(self) -> None:
        self._ended = True
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close_with(StopAsyncIteration)
        if self._lease is not None:
            self._lease.abandon()

    async def enter(self, store: CoordinatingStore, grace_s: float, bound: bool, timeout: Timeout) -> Self:
        """Join for the first time."""
        self._lease = await store.lease_keeper.granted(grace_s, bound, store.timeout)
        with telling(self._tell_whose_name):
            return await self.rejoin(timeout)

    async def _tell_whose_name(self) -> None:
        """Warn where another process is the member of this name, which a wrong configuration may have started."""
        assert self._lease is not None
        with contextlib.suppress(DistError):
            if await self._ask(messages.GET, (encoded_key(self._prefix + self.name),), 0) != b"%d" % self._lease.id:
                warn(
                    "join('%s'): waiting for another process that is the member %s to go",
                    shown(self.job),
                    shown(self.name),
                )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            try:
                await self._end_worlds(error)
            finally:
                await self.leave()
        except DistError:
            if kind is None:
                raise


def default_name() -> str:
    """Return a name for this process that no other has, and that sorts processes of one host together."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
