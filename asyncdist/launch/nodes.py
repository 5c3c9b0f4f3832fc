"""What the launchers of one job tell each other through the store once they have met: who failed, who is done.

Keys, under those of their meeting:

    here/<node>            bound to the connection of the node's launcher; it goes when that is killed
    beat/<node>            counter, changed every `BEAT_S`; each node watches the next one's
    <attempt>/failed       JSON of the first failure anywhere
    <attempt>/end/<node>   how the node's attempt ended; all wait for all, so that the hosting node leaves last
    bye/<node>             this node needs the store no longer
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from asyncdist.errors import DistError
from asyncdist.launch.beside import beside
from asyncdist.launch.meeting import Meeting, Roster

if TYPE_CHECKING:
    from asyncdist.store.base import Store

__all__ = ["BEAT_S", "LOST_AFTER_BEATS", "Failure", "Nodes"]

BEAT_S: Final = 2.0
LOST_AFTER_BEATS: Final = 10
"""A launcher only waits, so 20 s of silence means that it, its machine or the network is gone."""

_PRESENCE_GRACE_S: Final = 5.0
"""A launcher whose connection broke makes it anew within a second or two. Who was merely slow has cost the job, which
cannot go on with fewer nodes, so this is more than what an elastic one allows."""

_BYE_TIMEOUT_S: Final = 5.0
_REPORT_TIMEOUT_S: Final = 5.0
"""Last words are tried for this long; the others notice a silent launcher by themselves."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of an attempt, as every node reports it. `rank` is -1 for a lost node.

    `files` are what there is to read about it on `host`.
    """

    node: int
    rank: int
    host: str
    pid: int
    exitcode: int
    description: str
    files: str = ""


class Nodes:
    """This launcher among the launchers of its job. Owns the store client."""

    def __init__(self, store: Store, job_id: str | None, nnodes: int) -> None:
        self._store = store
        self._nnodes = nnodes
        self._meeting = Meeting(store, job_id, nnodes)
        self._node_rank = 0
        self._host = "?"
        self._joined = False
        self._lost = False
        self._killed: set[int] = set()
        self._news = asyncio.Event()  # somebody was killed

    async def join(self, node_rank: int | None, nproc: int, host: str, timeout_s: float) -> Roster:
        """Take a node rank and wait for the other nodes; see `Meeting.join`."""
        self._host = host
        roster = await self._meeting.join(node_rank, nproc, host, timeout_s)
        self._node_rank = roster.node_rank
        self._joined = True
        presence = await self._store.lease(_PRESENCE_GRACE_S, bound=True)
        await self._store.set(f"{self._root}here/{roster.node_rank}", b"", lease=presence)
        return roster

    @property
    def _root(self) -> str:
        return self._meeting.keys

    async def report_failure(self, attempt: int, failure: Failure) -> None:
        """Tell the others, if the store can be reached; the first report of an attempt wins."""
        with contextlib.suppress(DistError, TimeoutError):
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                await self._store.compare_set(f"{self._root}{attempt}/failed", b"", json.dumps(asdict(failure)))

    @asynccontextmanager
    async def watching(self, attempt: int, on_failure: Callable[[Failure], None]) -> AsyncIterator[None]:
        """While inside, call `on_failure` once if any node fails, goes silent, or the store is lost."""
        async with beside(
            self._await_failure(attempt, on_failure),
            self._beat(attempt, on_failure),
            self._watch_presence(attempt),
        ):
            yield

    async def _watch_presence(self, attempt: int) -> None:
        """Report launchers that are killed, and stop waiting for them."""
        here = f"{self._root}here/"
        with contextlib.suppress(DistError):  # `_await_failure` has said that the store is lost
            async with self._store.watch(here) as watch:
                if attempt:  # all were there in the first
                    there = {int(key.removeprefix(here)) for key in await self._store.list_keys(here)}
                    for node in set(range(self._nnodes)) - there:
                        await self._was_killed(node, attempt)
                async for event in watch:
                    if event.kind == "expire":  # who leaves in good order deletes it
                        await self._was_killed(int(event.key.removeprefix(here)), attempt)

    async def _was_killed(self, node: int, attempt: int) -> None:
        self._killed.add(node)
        self._news.set()
        description = "its launcher was killed, or cannot reach the job's store"
        await self.report_failure(attempt, Failure(node, -1, await self._host_of(node), 0, 1, description))

    async def _host_of(self, node: int) -> str:
        try:
            return str(json.loads(await self._store.get(f"{self._root}node/{node}", timeout=0))["host"])
        except DistError:
            return "?"

    async def _await_failure(self, attempt: int, on_failure: Callable[[Failure], None]) -> None:
        try:
            record = await self._store.get(f"{self._root}{attempt}/failed", timeout=None)
        except DistError as error:
            on_failure(self.store_lost(error))
        else:
            on_failure(Failure(**json.loads(record)))

    async def _beat(self, attempt: int, on_failure: Callable[[Failure], None]) -> None:
        """Show that this node lives, and look whether the next one does."""
        watched = (self._node_rank + 1) % self._nnodes
        last_seen, silent_beats = -1, 0
        with contextlib.suppress(DistError):  # `_await_failure` has said that the store is lost
            while True:
                try:
                    async with asyncio.timeout(BEAT_S * LOST_AFTER_BEATS):
                        await self._store.add(f"{self._root}beat/{self._node_rank}", 1)
                        seen = await self._store.add(f"{self._root}beat/{watched}", 0)
                except TimeoutError:
                    on_failure(self.store_lost("it does not answer"))
                    return
                silent_beats = silent_beats + 1 if seen == last_seen else 0
                last_seen = seen
                if silent_beats >= LOST_AFTER_BEATS:
                    silence = f"no sign of life for {BEAT_S * silent_beats:g} s"
                    host = await self._host_of(watched)
                    await self.report_failure(attempt, Failure(watched, -1, host, 0, 1, silence))
                    return
                await asyncio.sleep(BEAT_S)

    def store_lost(self, why: object) -> Failure:
        """Remember that the store has gone, and return that as a failure of this node."""
        self._lost = True
        return Failure(self._node_rank, -1, self._host, 0, 1, f"the connection to the job's store was lost: {why}")

    async def end(self, attempt: int, outcome: str) -> None:
        """Say how this node's attempt ended and wait, without limit, for all nodes to say it (if there is a store).

        Nobody waits for a node that was killed, which is known inside `watching`.
        """
        if self._lost:
            return
        await self._store.set(f"{self._root}{attempt}/end/{self._node_rank}", outcome)
        while True:
            self._news.clear()
            ends = asyncio.ensure_future(self._store.wait(self._of_living(f"{attempt}/end/"), None))
            news = asyncio.create_task(self._news.wait())
            try:
                await asyncio.wait((ends, news), return_when=asyncio.FIRST_COMPLETED)
                if ends.done():
                    return ends.result()
            finally:
                ends.cancel()
                news.cancel()
                await asyncio.gather(ends, news, return_exceptions=True)

    def _of_living(self, start: str) -> list[str]:
        return [f"{self._root}{start}{node}" for node in range(self._nnodes) if node not in self._killed]

    async def leave(self, *, hosting: bool, outlived: bool = False) -> None:
        """Close the store client.

        The hosting node of a job that began first waits, bounded, for the others to go. A store that outlives the job
        (`outlived`) is left as it was: the last to go deletes what the launchers wrote.
        """
        if self._joined and not self._lost:
            with contextlib.suppress(DistError, TimeoutError):
                async with asyncio.timeout(_BYE_TIMEOUT_S):
                    await self._store.set(f"{self._root}bye/{self._node_rank}", b"1")
                    byes = self._of_living("bye/")
                    if hosting:
                        await self._store.wait(byes, None)
                    elif outlived and await self._store.check(byes):
                        await self._meeting.delete_keys()
        await self._store.close()
