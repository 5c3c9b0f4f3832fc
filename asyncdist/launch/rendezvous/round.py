"""One round of an elastic job: the nodes that have met agree on a plan, and on how it ends.

Keys in the job's store, under `job/<run>/round/<epoch>/`; they vanish after the job's last launcher has gone:

    node/<rank>    JSON: how many workers, which host, which restarts and rounds the node knows of
    plan           JSON, by node 0: what all of them do, and where the store of the launchers is
    void           nodes met that are in a round already, as the store had lost its data: all meet again

Keys in that store, under the round's number, beside those of `Links`. So a round needs the job's store to begin only:

    stop           JSON: why all nodes stop their workers; the first word counts
    end/<rank>     JSON: how the node's workers ended
    conclusion     JSON: what follows, drawn by the first that has seen every node's end, or its loss
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar

from asyncdist.errors import DistError, DistStoreError, LeaseLostError, StoreTimeoutError, WatchCompactedError
from asyncdist.launch.failure import Conclusion, End, Record, conclude
from asyncdist.launch.rendezvous.links import PRESENCE_GRACE_S, LinkPlace, Links, OnLost, Presence, beside
from asyncdist.store.member import MemberEvent

if TYPE_CHECKING:
    from asyncdist.launch.rendezvous.rounds import Rounds
    from asyncdist.store.base import Store
    from asyncdist.store.member import Membership

_MEMBERS: Final = "members/"
_KINDS: Final[dict[str, Literal["joined", "left", "lost"]]] = {"set": "joined", "delete": "left", "expire": "lost"}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry(Record):
    """What a node brings along; `link` are the fields of the `LinkPlace` where its launcher answers."""

    nproc: int
    host: str
    restarts: int
    after: int = -1
    link: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan(Record):
    """What all nodes of a round do: its number in the run, restarts until now, each node's workers and its link."""

    number: int
    restarts: int
    nprocs: tuple[int, ...]
    links: tuple[LinkPlace, ...]

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """What node 0 wrote."""
        fields = json.loads(text)
        return cls(
            fields["number"],
            fields["restarts"],
            tuple(fields["nprocs"]),
            tuple(LinkPlace(**each) for each in fields["links"]),
        )


@dataclass(frozen=True, slots=True)
class Stop(Record):
    """Why all nodes stop their workers: one "failed", or a node "joined", "left" or was "lost"."""

    kind: Literal["failed", "joined", "left", "lost"]
    text: str


class Round:
    """This node's part in one round. Its methods raise DistError once this node is no member any more."""

    def __init__(self, member: Membership, presence: Presence, rounds: Rounds) -> None:
        self._member = member
        self._presence = presence
        self._rounds = rounds
        self._outage = rounds.outage
        self._lost_after_s = rounds.lost_after_s
        self._store = member.store
        self._keys = f"round/{member.epoch}/"
        self._restarts = rounds.outage.restarts  # of the store, when this node became a member of it
        self._is_member = asyncio.Event()
        self._is_member.set()
        self._links: Links | None = None
        self._root = ""
        self._all_know = False  # that a node is gone, so that they meet again whatever this one says
        self._on_stop: Callable[[Stop], None] = lambda why: None
        self._on_lost: OnLost = lambda node, why: None
        self._void = False
        self._followed = False  # what the membership tells of the others
        self._news = asyncio.Event()
        self._lost: DistError | None = None
        self.rank = member.rank
        self.members = tuple(member.members)
        self.gone: dict[int, Literal["left", "lost"]] = {}
        """Nodes that have left or were lost, and which of it."""
        self.silent: list[str] = []
        """Names of those for which the store would wait, as it has not missed them yet."""
        self._killed: set[str] = set()

    def described(self, rank: int) -> str:
        """A node as people know it."""
        return f"node {rank} ({shown(self.members[rank])})"

    @asynccontextmanager
    async def watched(
        self, on_stop: Callable[[Stop], None], on_lost: OnLost = lambda node, why: None
    ) -> AsyncIterator[None]:
        """While inside, follow what becomes of the other nodes; `on_stop` is called when workers must be stopped.

        It is called again if this node is found to be no member any more. `on_lost(node, why)` is called before that if
        the launchers' connections tell that a node is lost; of this one if the others are.
        """

        self._on_stop, self._on_lost = on_stop, on_lost
        async with beside(
            self._while_store_answers(self._watch_members),
            self._while_store_answers(self._watch_presence),
            self._watch_lease(),
            self._watch_void(),
        ):
            yield

    @asynccontextmanager
    async def linked(self, plan: Plan | None) -> AsyncIterator[bool]:
        """While inside, the launchers reach each other without the job's store. False if a node went before that."""
        if plan is None:
            yield False
            return
        try:
            links = await self._link(plan)
            if links is None or not links.met:
                yield False
                return
            async with beside(links.watch(self._on_gone), self._watch_stop(), self._watch_outage()):
                yield not self.gone
        except BaseException:
            self._all_know = True  # cancelled, or no member any more: no node waits for this one's words
            raise
        finally:
            if self._links is not None:
                await self._links.leave(self.gone, last=self.rank == 0 and not self._all_know)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if self._may_speak else 0):
                        await self._links.store.close()

    async def _link(self, plan: Plan) -> Links | None:
        """Connect to the launcher of node 0; None if a node went meanwhile."""
        self._root = f"{plan.number}/"
        try:
            store = await self._while_member(self._rounds.host.open(plan.links[0]), until=lambda: bool(self.gone))
            if store is None:
                return None
            self._links = Links(
                store,
                self.rank,
                len(self.members),
                grace_s=min(PRESENCE_GRACE_S, self._lost_after_s),
                lost_after_s=self._lost_after_s,
                root=self._root,
                places=plan.links,
                open=self._rounds.host.open,
            )
            await self._while_member(self._links.meet(), until=lambda: bool(self.gone))
        except DistError:  # perhaps as the launcher of node 0, which hosts that store, has just been killed
            if self._lost is not None or not await self._somebody_went():
                raise
        return self._links

    async def _somebody_went(self) -> bool:
        """Whether a launcher is gone, of which the job's store may tell a moment later."""
        try:
            async with asyncio.timeout(self._lost_after_s):
                await self._while_member(asyncio.Event().wait(), until=lambda: bool(self.gone))
        except TimeoutError:
            return False
        return True

    def _is_lost(self, error: DistError) -> None:
        """This node is no member any more."""
        if self._lost is None:
            self._lost = error
            self._news.set()
            self._on_stop(Stop("lost", f"this node is no longer part of the job: {error}"))

    async def agree(self, entry: Entry) -> Plan | None:
        """Return what all nodes do; None if they must meet again before that."""
        entry = replace(entry, link=asdict(await self._rounds.host.place()))
        await self._while_member(self._store.set(f"{self._keys}node/{self.rank}", entry.to_json()))
        if self.rank == 0:
            keys = [f"{self._keys}node/{rank}" for rank in range(len(self.members))]
            texts = await self._while_member(self._store.multi_get(keys, timeout=None), until=self._is_off)
            if texts is None:
                return None
            entries = [Entry.from_json(text) for text in texts]
            number = await self._while_member(self._rounds.next_number())
            assert number is not None  # as there is no `until`
            plan = Plan(
                max(number, *(each.after + 1 for each in entries)),  # the counter is gone when the store lost its data
                max(each.restarts for each in entries),
                tuple(each.nproc for each in entries),
                tuple(LinkPlace(**each.link) for each in entries),
            )
            await self._while_member(self._store.set(self._keys + "plan", plan.to_json()))
            return plan
        text = await self._while_member(self._store.get(self._keys + "plan", timeout=None), until=self._is_off)
        if text is None:
            return None
        return Plan.from_json(text)

    def _is_off(self) -> bool:
        """Whether the nodes must meet again before they have begun."""
        return bool(self.gone) or self._void

    async def share_stopped(self, look: Callable[[], Sequence[int]], tell: Callable[[Sequence[int]], None]) -> None:
        """See `Links.share_stopped`; inside `linked`."""
        assert self._links is not None
        await self._links.share_stopped(look, tell)

    async def stop(self, why: Stop) -> None:
        """Let all nodes stop their workers, if they can be told; this one does in any case."""
        if not await self._say("stop", why):
            self._on_stop(why)

    async def decree(self, conclusion: Conclusion) -> None:
        """Conclude the round without asking anybody, if the others can be told."""
        await self._say("conclusion", conclusion)

    async def end(self, end: End) -> None:
        """Say how this node's workers ended, if the others can be told."""
        await self._say(f"end/{self.rank}", end)

    async def _say(self, key: str, word: Record) -> bool:
        """Write a word for all nodes, unless there is one; return whether there is one."""
        return self._links is not None and self._may_speak and await self._links.say(key, word)

    @property
    def _may_speak(self) -> bool:
        """Whether the launcher of node 0 is there, which keeps what all say."""
        return self._links is not None and (self.rank == 0 or 0 not in self.gone)

    @property
    def _words(self) -> Store:
        assert self._links is not None
        return self._links.store

    async def conclude(self, end: End, restarts: int, max_restarts: int) -> Conclusion:
        """Say how this node's workers ended, and wait, without limit, for every node to say it or to be lost."""
        while self._may_speak:
            try:
                found = await self._while_member(self._conclude(end, restarts, max_restarts), until=self._new_loss())
            except DistError:
                if self._lost is None:
                    await self._on_gone(None, "it cannot be reached")
                break
            if found is not None:
                self._all_know = bool(self.gone) and found.kind == "again"
                return found
        self._all_know = True
        if self._lost is not None:
            raise self._lost
        return Conclusion("again")  # a node is gone that has not said how its workers ended

    async def _conclude(self, end: End, restarts: int, max_restarts: int) -> Conclusion:
        await self._words.set(f"{self._root}end/{self.rank}", end.to_json())
        ends = await self._all_ends()
        gone = [rank for rank in range(len(self.members)) if rank not in ends]
        word = conclude(ends, gone, restarts, max_restarts).to_json()
        return Conclusion.from_json(await self._words.compare_set(self._root + "conclusion", b"", word))

    def _new_loss(self) -> Callable[[], bool]:
        before = len(self.gone)
        return lambda: len(self.gone) > before

    async def _all_ends(self) -> dict[int, End]:
        """The ends of all nodes, once they are known; of no others than those gone if one of these has said nothing."""
        gone = list(self.gone)  # more may go meanwhile, whose ends are waited for all the same
        found: dict[int, bytes] = {}
        for rank in gone:
            with contextlib.suppress(StoreTimeoutError):
                found[rank] = await self._words.get(f"{self._root}end/{rank}", timeout=0)
        if len(found) == len(gone):
            there = [rank for rank in range(len(self.members)) if rank not in gone]
            texts = await self._words.multi_get([f"{self._root}end/{rank}" for rank in there], timeout=None)
            found |= zip(there, texts, strict=True)
        return {rank: End.from_json(text) for rank, text in found.items()}

    async def _while_member(self, wanted: Awaitable[T], until: Callable[[], bool] = lambda: False) -> T | None:
        """Wait for `wanted`; None when `until` holds before. Raises what ended this node's membership."""
        task = asyncio.ensure_future(wanted)
        try:
            while True:
                self._news.clear()
                if self._lost is not None:
                    raise self._lost
                if task.done():
                    return task.result()
                if until():
                    return None
                news = asyncio.create_task(self._news.wait())
                try:
                    await asyncio.wait((task, news), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
                    await asyncio.gather(news, return_exceptions=True)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _while_store_answers(self, watch: Callable[[], Awaitable[None]]) -> None:
        """Run `watch`, and again each time that the job's store has been away, if the round can do without it."""
        while True:
            try:
                await watch()
            except DistError as error:
                forgotten = self._links is not None and self._outage.restarts != self._restarts
                if isinstance(error, LeaseLostError) and not forgotten:
                    return self._is_lost(error)
                if self._links is None and not isinstance(error, WatchCompactedError):
                    return self._is_lost(error)
            await self._outage.over()
            await self._is_member.wait()

    async def _watch_members(self) -> None:
        if not self._followed:
            self._followed = True
            async for news in self._member:
                await self._follow(news)
        async with self._store.watch(_MEMBERS) as watch:
            there = {key.removeprefix(_MEMBERS) for key in await self._store.list_keys(_MEMBERS)}
            for name in sorted(there.symmetric_difference(self.members)):
                await self._follow(MemberEvent("joined" if name in there else "lost", name))
            async for event in watch:
                name = event.key.removeprefix(_MEMBERS)
                await self._follow(MemberEvent(_KINDS[event.kind], name))

    async def _follow(self, event: MemberEvent) -> None:
        if event.member == self._member.name and event.kind == "lost":
            raise LeaseLostError(f"{self._member!r} was taken for lost: the store did not hear from it in time")
        if event.member in self.members:
            if event.kind == "joined":
                return
            rank = self.members.index(event.member)
            self.gone[rank] = kind = "lost" if event.member in self._killed else event.kind
            self._news.set()
            await self.stop(Stop(kind, f"{self.described(rank)} {'left' if kind == 'left' else 'was lost'}"))
        elif (
            event.kind == "joined"
            and len(self.members) - len(self.gone) < self._rounds.most
            and not await self._ending()
        ):
            await self.stop(Stop("joined", f"another node joins ({shown(event.member)})"))

    async def _on_gone(self, node: int | None, why: str) -> None:
        """A launcher is gone, or all others, as the launchers' own connections tell."""
        assert self._links is not None
        others = [rank for rank in range(len(self.members)) if rank != self.rank]
        lost = others if self._links.cut_off else [0 if node is None else node]
        own = self._links.cut_off or lost == [self.rank]
        text = (
            f"this host, {self.described(self.rank)}, {why}" if own else f"{self.described(lost[0])} was lost ({why})"
        )
        self._on_lost(self.rank if own else lost[0], why)
        if not own:
            self.silent.append(self.members[lost[0]])
        if not all(rank in self.gone for rank in lost):
            self.gone |= dict.fromkeys(lost, "lost")
            self._news.set()
            await self.stop(Stop("lost", text))

    async def _ending(self) -> bool:
        """Whether some node's workers have ended: the job is ending, or all are about to meet again in any case."""
        with contextlib.suppress(DistError):
            return self._links is not None and bool(await self._words.list_keys(self._root + "end/"))
        return True  # it cannot be reached: the workers are stopped for that

    async def _watch_presence(self) -> None:
        await self._presence.watch(self._killed.add)

    async def _watch_lease(self) -> None:
        """Wait until this node is no member any more; a store that came back without its data is told anew."""
        while True:
            error: DistError = LeaseLostError(await self._member.wait_lost())
            if self._links is None or self._outage.restarts == self._restarts:
                return self._is_lost(error)
            self._is_member.clear()
            self._restarts = self._outage.restarts
            try:
                self._member = await self._rounds.enter_again()
                if set(self._member.members) != set(self.members):
                    await self._store.set(f"round/{self._member.epoch}/void", b"")
            except DistError as why:
                return self._is_lost(LeaseLostError(f"{error}; {why}"))
            self._is_member.set()  # the nodes that are there now are found, and followed

    async def _watch_void(self) -> None:
        with contextlib.suppress(DistError):  # the wait for the plan fails as well
            await self._store.get(self._keys + "void", timeout=None)
            self._void = True
            self._news.set()

    async def _watch_stop(self) -> None:
        with contextlib.suppress(DistError):  # the watch of the links fails as well
            text = await self._words.get(self._root + "stop", timeout=None)
            self._on_stop(Stop.from_json(text))

    async def _watch_outage(self) -> None:
        await self._outage.watch(self._store, lambda why: self._is_lost(DistStoreError(why)))


def shown(member: str) -> str:
    """A member's name without the number that only makes it unique: host and pid."""
    return member.rpartition(":")[0] or member
