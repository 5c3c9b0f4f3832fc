"""How the launchers of an elastic job meet, again and again, with those that are there.

They are members of a job of the store's: a launcher that is silent for too long is out of it, node ranks are those of
the store's epochs, so that survivors keep their order and come first. A run of a job id has a name of its own, which is
that of the store's job. Keys under `launch/<job id>/`, beside those of jobs with a fixed number of nodes:

    elastic           name of the run that goes on; empty when it is over
    runs              counter; names the runs of this job id apart
    rounds/<run>      counter; numbers the rounds of a run, whatever became of the members

and `over` among those of the store's job: JSON of how the run ended, for nodes that still wait for a place in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from asyncdist.errors import (
    ConnectTimeoutError,
    DistError,
    LaunchError,
    LeaseLostError,
    StoreTimeoutError,
    WatchCompactedError,
)
from asyncdist.launch.failure import Record
from asyncdist.launch.rendezvous.job_store import Outage
from asyncdist.launch.rendezvous.links import PRESENCE_GRACE_S, LinkHost, Presence, beside, first_done
from asyncdist.launch.rendezvous.round import Round, shown
from asyncdist.store.member import default_name
from asyncdist.store.prefix_store import PrefixStore

if TYPE_CHECKING:
    from asyncdist.launch.config import LaunchConfig
    from asyncdist.store.base import Store
    from asyncdist.store.member import Membership

_LEAVE_TIMEOUT_S: Final = 5.0
"""Leaving is tried for this long; the others notice a silent launcher by themselves."""

_EXPEL_TIMEOUT_S: Final = 1.0
"""A member that cannot be taken out at once goes when its lease ends."""

_MAY_BE_HOSTED: Final = (
    ". If a launcher of the job hosted it, the job ends with that launcher; a standing daemon (asyncdist-server, "
    "ASYNCDIST_STORE) does not"
)

_REACH_TIMEOUT_S: Final = 5.0
"""A store that says nothing for this long, after this node was out of touch for longer, is lost."""


@dataclass(frozen=True, slots=True)
class Outcome(Record):
    """How a run ended: the launchers' exit code, and why in words if it is not 0."""

    exitcode: int
    text: str = ""


class JobOverError(Exception):
    """The run ended while this node waited for a place in it."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome


class Rounds:
    """This launcher among those of its job, from round to round. Owns the store client; `say` tells people."""

    def __init__(
        self, store: Store, config: LaunchConfig, say: Callable[[str], None], outage: Outage, host: LinkHost
    ) -> None:
        assert config.min_nodes is not None
        self._store = store
        self._say = say
        self.outage = outage
        self.host = host
        self._job_id = config.job_id
        self._least, self.most = config.min_nodes, config.nnodes
        self._join_timeout_s = config.join_timeout_s
        self._last_call_s = config.last_call_s
        self.lost_after_s = config.lost_after_s
        self._expelled_after_s = config.expelled_after_s
        self._root = f"launch/{config.job_id or 'default'}/"
        self._member: Membership | None = None
        self._presence: Presence | None = None
        self._round: Round | None = None
        self._losses: list[str] = []
        self._hint = "" if config.store is not None else _MAY_BE_HOSTED
        self._patience_s = _REACH_TIMEOUT_S if config.store is None else config.join_timeout_s
        self.run_id = ""

    async def meet(self) -> Round:
        """Wait for the next round.

        Raises JobOverError if the run ends first, LaunchError if there is no place, or too few nodes come, within the
        join time-out, and other DistErrors if this node was lost meanwhile; then `lost` tells what to do.
        """
        if self._round is not None:
            self._losses += [f"{self._round.described(rank)}, {kind}" for rank, kind in self._round.gone.items()]
            await self._expel(self._round.silent)
        await self.outage.wait(self._store, self._patience_s, self._hint)
        if self._member is None:
            self._member = await self._join()
            self._member.outlive_outages()
        else:
            try:
                await self._unless_over(self._member.store, self._member.rejoin(self._join_timeout_s))
            except StoreTimeoutError as error:
                raise LaunchError(self._too_few(error)) from None
        assert self._presence is not None
        self._round = Round(self._member, self._presence, self)
        return self._round

    async def lost(self, error: DistError) -> None:
        """Forget a membership that has ended: the next meeting is a newcomer's. LaunchError if there can be none."""
        member, self._member, self._round = self._member, None, None
        if self._presence is not None:
            self._presence.end()
        await self.outage.wait(self._store, self._patience_s, self._hint)
        if not isinstance(error, LeaseLostError | WatchCompactedError | ConnectTimeoutError):
            raise LaunchError(str(error)) from error
        if member is not None:
            with contextlib.suppress(DistError):
                await member.leave()

    async def finish(self, outcome: Outcome) -> None:
        """Note that the run is over, for launchers that wait and those to come. Every node says the same."""
        if self._member is None or not await self.outage.answers(self._store):
            return
        with contextlib.suppress(DistError, TimeoutError):
            async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                await self._store.compare_set(self._root + "elastic", self.run_id, b"")
                await self._member.store.set("over", outcome.to_json())
                await self._store.delete_key(f"{self._root}rounds/{self.run_id}")

    async def leave(self, *, others_s: float) -> None:
        """Leave the job, after waiting for up to `others_s` until the others have left, and close the store client."""
        try:
            with contextlib.suppress(DistError, TimeoutError):
                async with asyncio.timeout(others_s):
                    if others_s and self._member is not None:
                        await self._wait_alone(self._member)
            with contextlib.suppress(DistError, TimeoutError):
                async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                    if self._member is not None and await self.outage.answers(self._store):
                        await self._member.leave()
        finally:
            await self._store.close()

    async def _wait_alone(self, member: Membership) -> None:
        async with self._store.watch(f"job/{member.job}/members/") as watch:
            while set(await member.store.list_keys("members/")) - {"members/" + member.name}:
                await anext(watch)

    async def _join(self) -> Membership:
        while True:
            run_id = await self._current_run()
            job = quote(run_id, safe="")
            view = PrefixStore(f"job/{job}", self._store)
            self._presence = Presence(self._store, job, default_name(), min(PRESENCE_GRACE_S, self.lost_after_s))
            await self._presence.show()
            try:
                member = await self._unless_over(view, self._enter(self._presence))
            except StoreTimeoutError as error:
                raise LaunchError(self._no_place(error)) from None
            if await self._store.get(self._root + "elastic", timeout=0) == run_id.encode():
                self.run_id = run_id
                return member
            await member.leave()  # the run was over just before, and may be forgotten already
            self._presence.end()

    def _enter(self, presence: Presence) -> Awaitable[Membership]:
        return self._store.join(
            presence.job,
            self._least,
            self.most,
            self._join_timeout_s,
            name=presence.name,
            settle=self._last_call_s,
            grace=self._expelled_after_s,
            bound=False,  # a launcher that is stopped, or whose host is down, breaks no connection
        )

    async def _expel(self, names: Collection[str]) -> None:
        """Take members that are lost out of the run, if the store answers. Bounded; never raises."""
        assert self._presence is not None
        with contextlib.suppress(DistError, TimeoutError):
            async with asyncio.timeout(_EXPEL_TIMEOUT_S):
                await asyncio.gather(*(self._store.expel(self._presence.job, name) for name in names))

    async def enter_again(self) -> Membership:
        """Become a member, by the same name, of a store that came back without its data. Raises DistError."""
        assert self._presence is not None
        found = await self._store.compare_set(self._root + "elastic", b"", self.run_id)
        if found != self.run_id.encode():
            raise LeaseLostError(f"another run of the job has begun: {shown(found.decode())}")
        await self._presence.show()
        self._member = await self._enter(self._presence)
        self._member.outlive_outages()
        return self._member

    async def _current_run(self) -> str:
        """The name of the run that goes on, which begins now if there is none."""
        key, runs, job_id = self._root + "elastic", self._root + "runs", self._job_id
        name = b""
        with contextlib.suppress(StoreTimeoutError):
            name = await self._store.get(key, timeout=0)
        if not name:
            count = await self._store.add(runs, 0) if job_id else 0
            name = await self._store.compare_set(
                key, b"", f"{job_id}-{count}" if count else job_id or secrets.token_hex(4)
            )
        if job_id and name.startswith(job_id.encode()):  # whoever takes part sees to it that the next has another name
            number = int(name[len(job_id.encode()) + 1 :] or 0)
            await self._store.compare_set(runs, str(number), str(number + 1))
        return name.decode()

    async def _unless_over(self, view: Store, joining: Awaitable[Membership]) -> Membership:
        """Wait for a round, unless the run ends before it begins."""
        async with beside(self._tell_who_goes(view)):
            joined, over = await first_done(joining, view.get("over", timeout=None))
        if over.cancelled():
            member: Membership = joined.result()
            return member
        if not joined.cancelled() and joined.exception() is None:  # those who ended the run have gone
            await joined.result().leave()
        raise JobOverError(Outcome.from_json(over.result()))

    async def _tell_who_goes(self, view: Store) -> None:
        """Follow what becomes of the others while this node waits for them, and expel those that were killed."""
        assert self._presence is not None
        killed: set[str] = set()
        before = () if self._round is None else self._round.members
        with contextlib.suppress(DistError):  # the wait for the round fails as well
            async with view.watch("members/") as watch, beside(self._presence.watch(killed.add)):
                async for event in watch:
                    name = event.key.removeprefix("members/")
                    if event.kind == "set" or name == self._presence.name:
                        continue
                    kind = "lost" if event.kind == "expire" or name in killed else "left"
                    who = self._round.described(before.index(name)) if self._round and name in before else shown(name)
                    self._losses.append(f"{who}, {kind}")
                    self._say(f"{who} {'was lost' if kind == 'lost' else kind} while the nodes met")

    async def next_number(self) -> int:
        """A number that no other round of the run has."""
        return await self._store.add(f"{self._root}rounds/{self.run_id}", 1) - 1

    def _too_few(self, error: StoreTimeoutError) -> str:
        lost = f"; gone since this node joined: {'; '.join(self._losses)}" if self._losses else ""
        return f"fewer than {self._least} nodes met within {self._join_timeout_s:g} s, missing: {_missing(error)}{lost}"

    def _no_place(self, error: StoreTimeoutError) -> str:
        if len(error.keys) >= self.most:
            return (
                f"no place in the job became free within {self._join_timeout_s:g} s: {self.most} nodes, the most that "
                f"it may have, are at work ({_missing(error)})"
            )
        return self._too_few(error)


def _missing(error: StoreTimeoutError) -> str:
    return ", ".join(shown(key) if ":" in key else key for key in error.keys)
