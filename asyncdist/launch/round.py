"""One round of an elastic job: the nodes that have met agree on a plan, and on how it ends.

Keys, under `job/<run>/round/<epoch>/` in the launchers' namespace; they vanish after the job's last launcher has gone:

    node/<rank>    JSON: how many workers, which host, which restarts and rounds the node knows of
    plan           JSON, by node 0: what all of them do
    stop           JSON: why all nodes stop their workers; the first word counts
    end/<rank>     JSON: how the node's workers ended
    conclusion     JSON: what follows, drawn by the first that has seen every node's end, or its loss
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from asyncdist.errors import DistError, LeaseLostError, StoreTimeoutError
from asyncdist.launch.beside import beside
from asyncdist.launch.conclusion import Conclusion, End, conclude

if TYPE_CHECKING:
    from asyncdist.launch.presence import Presence
    from asyncdist.store.member import MemberEvent, Membership

__all__ = ["Entry", "Plan", "Round", "Stop", "shown"]

_WORD_TIMEOUT_S: Final = 5.0
"""A word about a loss or a failure is tried for this long; the others notice a silent launcher by themselves."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """What a node brings along."""

    nproc: int
    host: str
    restarts: int
    after: int = -1


@dataclass(frozen=True, slots=True)
class Plan:
    """What all nodes of a round do: its number in the run, restarts until now, and each node's workers."""

    number: int
    restarts: int
    nprocs: tuple[int, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Plan:
        """What node 0 wrote."""
        fields = json.loads(text)
        return cls(fields["number"], fields["restarts"], tuple(fields["nprocs"]))


@dataclass(frozen=True, slots=True)
class Stop:
    """Why all nodes stop their workers: one "failed", or a node "joined", "left" or was "lost"."""

    kind: Literal["failed", "joined", "left", "lost"]
    text: str


class Round:
    """This node's part in one round. Its methods raise DistError once this node is no member any more.

    `draw_number` gives the round a number that no other round of the run has; called on node 0 only.
    """

    def __init__(
        self, member: Membership, presence: Presence, most: int, draw_number: Callable[[], Awaitable[int]]
    ) -> None:
        self._member = member
        self._presence = presence
        self._store = member.store
        self._keys = f"round/{member.epoch}/"
        self._most = most
        self._draw_number = draw_number
        self._news = asyncio.Event()
        self._lost: DistError | None = None
        self.rank = member.rank
        self.members = tuple(member.members)
        self.gone: dict[int, Literal["left", "lost"]] = {}
        """Nodes that have left or were lost, and which of it."""
        self._killed: set[str] = set()

    def described(self, rank: int) -> str:
        """A node as people know it."""
        return f"node {rank} ({shown(self.members[rank])})"

    @asynccontextmanager
    async def watched(self, on_stop: Callable[[Stop], None]) -> AsyncIterator[None]:
        """While inside, follow what becomes of the other nodes; `on_stop` is called when workers must be stopped.

        It is called again if this node is found to be no member any more.
        """

        def on_lost(error: DistError) -> None:
            if self._lost is None:
                self._lost = error
                self._news.set()
                on_stop(Stop("lost", f"this node is no longer part of the job: {error}"))

        async with beside(
            self._watch_members(on_lost),
            self._watch_lease(on_lost),
            self._watch_presence(on_lost),
            self._watch_stop(on_stop, on_lost),
        ):
            yield

    async def agree(self, entry: Entry) -> Plan | None:
        """Return what all nodes do; None if one of them went before that was known."""
        await self._while_member(self._store.set(f"{self._keys}node/{self.rank}", json.dumps(asdict(entry))))
        if self.rank == 0:
            keys = [f"{self._keys}node/{rank}" for rank in range(len(self.members))]
            texts = await self._while_member(self._store.multi_get(keys, timeout=None), until=lambda: bool(self.gone))
            if texts is None:
                return None
            entries = [Entry(**json.loads(text)) for text in texts]
            number = await self._while_member(self._draw_number())
            assert number is not None  # as there is no `until`
            plan = Plan(
                max(number, *(each.after + 1 for each in entries)),  # the counter is gone when the store lost its data
                max(each.restarts for each in entries),
                tuple(each.nproc for each in entries),
            )
            await self._while_member(self._store.set(self._keys + "plan", plan.to_json()))
            return plan
        text = await self._while_member(
            self._store.get(self._keys + "plan", timeout=None), until=lambda: bool(self.gone)
        )
        if text is None:
            return None
        return Plan.from_json(text)

    async def stop(self, why: Stop) -> None:
        """Let all nodes stop their workers, if the store can be told."""
        with contextlib.suppress(DistError, TimeoutError):
            async with asyncio.timeout(_WORD_TIMEOUT_S):
                await self._store.compare_set(self._keys + "stop", b"", json.dumps(asdict(why)))

    async def decree(self, conclusion: Conclusion) -> None:
        """Conclude the round without asking anybody, if the store can be told."""
        with contextlib.suppress(DistError, TimeoutError):
            async with asyncio.timeout(_WORD_TIMEOUT_S):
                await self._store.compare_set(self._keys + "conclusion", b"", conclusion.to_json())

    async def end(self, end: End) -> None:
        """Say how this node's workers ended, if the store can be told."""
        with contextlib.suppress(DistError, TimeoutError):
            async with asyncio.timeout(_WORD_TIMEOUT_S):
                await self._store.set(f"{self._keys}end/{self.rank}", end.to_json())

    async def conclude(self, end: End, restarts: int, max_restarts: int) -> Conclusion:
        """Say how this node's workers ended, and wait, without limit, for every node to say it or to be lost."""
        await self._while_member(self._store.set(f"{self._keys}end/{self.rank}", end.to_json()))
        while (ends := await self._while_member(self._all_ends(), until=self._new_loss())) is None:
            pass
        gone = [rank for rank in range(len(self.members)) if rank not in ends]
        word = conclude(ends, gone, restarts, max_restarts).to_json()
        found = await self._while_member(self._store.compare_set(self._keys + "conclusion", b"", word))
        assert found is not None
        return Conclusion.from_json(found)

    def _new_loss(self) -> Callable[[], bool]:
        before = len(self.gone)
        return lambda: len(self.gone) > before

    async def _all_ends(self) -> dict[int, End]:
        """The ends of all nodes that are there, once they are known, and of those gone what they said before."""
        gone = list(self.gone)  # more may go meanwhile, whose ends are waited for all the same
        there = [rank for rank in range(len(self.members)) if rank not in gone]
        texts = await self._store.multi_get([f"{self._keys}end/{rank}" for rank in there], timeout=None)
        found = dict(zip(there, texts, strict=True))
        for rank in gone:
            with contextlib.suppress(StoreTimeoutError):
                found[rank] = await self._store.get(f"{self._keys}end/{rank}", timeout=0)
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

    async def _watch_members(self, on_lost: Callable[[DistError], None]) -> None:
        try:
            async for event in self._member:
                await self._follow(event)
        except DistError as error:
            on_lost(error)

    async def _follow(self, event: MemberEvent) -> None:
        if event.member in self.members:
            if event.kind == "joined":
                return
            rank = self.members.index(event.member)
            self.gone[rank] = kind = "lost" if event.member in self._killed else event.kind
            self._news.set()
            await self.stop(Stop(kind, f"{self.described(rank)} {'left' if kind == 'left' else 'was lost'}"))
        elif event.kind == "joined" and len(self.members) - len(self.gone) < self._most and not await self._ending():
            await self.stop(Stop("joined", f"another node joins ({shown(event.member)})"))

    async def _ending(self) -> bool:
        """Whether some node's workers have ended: the job is ending, or all are about to meet again in any case."""
        return bool(await self._store.list_keys(self._keys + "end/"))

    async def _watch_presence(self, on_lost: Callable[[DistError], None]) -> None:
        try:
            await self._presence.watch(self._killed.add)
        except DistError as error:
            on_lost(error)

    async def _watch_lease(self, on_lost: Callable[[DistError], None]) -> None:
        on_lost(LeaseLostError(await self._member.wait_lost()))

    async def _watch_stop(self, on_stop: Callable[[Stop], None], on_lost: Callable[[DistError], None]) -> None:
        try:
            text = await self._store.get(self._keys + "stop", timeout=None)
        except DistError as error:
            on_lost(error)
        else:
            on_stop(Stop(**json.loads(text)))


def shown(member: str) -> str:
    """A member's name without the number that only makes it unique: host and pid."""
    return member.rpartition(":")[0] or member
