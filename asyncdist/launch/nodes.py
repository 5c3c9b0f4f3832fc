"""What the launchers of one job tell each other once they have met: who failed, who is done.

They do so by their `Links`; where a launcher hosts the job's store, that is also the launchers' own. Keys, under those
of their meeting, beside those of `Links`:

    <attempt>/failed       JSON of the first failure anywhere
    <attempt>/end/<node>   how the node's attempt ended; all wait for all, so that the hosting node leaves last
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from asyncdist.errors import DistError
from asyncdist.launch.beside import beside
from asyncdist.launch.config import DEFAULT_LOST_AFTER_S
from asyncdist.launch.links import LinkHost, Links, open_link
from asyncdist.launch.meeting import Meeting, Roster

if TYPE_CHECKING:
    from asyncdist.store.base import Store

__all__ = ["Failure", "Nodes"]

PRESENCE_GRACE_S: Final = 5.0
"""A launcher whose connection broke makes it anew within a second or two. One that was merely slow has cost the job,
which cannot go on with fewer nodes, so this is more than what an elastic one allows."""

_FORGET_TIMEOUT_S: Final = 5.0
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
    """This launcher among the launchers of its job. Owns the clients of both stores.

    With a `host` node 0 hosts a store of the launchers' own, by which they go on when the job's is away.
    """

    def __init__(
        self,
        store: Store,
        job_id: str | None,
        nnodes: int,
        host: LinkHost | None = None,
        *,
        lost_after_s: float = DEFAULT_LOST_AFTER_S,
    ) -> None:
        self.store = store
        self._nnodes = nnodes
        self._meeting = Meeting(store, job_id, nnodes, host)
        self._lost_after_s = lost_after_s
        self._links: Links | None = None
        self._roster: Roster | None = None
        self._lost = False
        self._killed: set[int] = set()
        self._news = asyncio.Event()  # somebody was killed

    async def join(self, node_rank: int | None, nproc: int, host: str, timeout_s: float) -> Roster:
        """Take a node rank and wait for the other nodes; see `Meeting.join`."""
        self._roster = roster = await self._meeting.join(node_rank, nproc, host, timeout_s)
        self._links = Links(
            self.store if roster.link is None else await open_link(roster.link),
            roster.node_rank,
            self._nnodes,
            grace_s=PRESENCE_GRACE_S,
            lost_after_s=self._lost_after_s,
            root=self._meeting.keys,
        )
        if self._nnodes > 1:
            await self._links.meet()
        return roster

    @property
    def _root(self) -> str:
        return self._meeting.keys

    @property
    def words(self) -> Store:
        """Where the launchers tell each other: a store of their own, or the job's."""
        assert self._links is not None
        return self._links.store

    async def report_failure(self, attempt: int, failure: Failure) -> None:
        """Tell the others, if they can be reached; the first report of an attempt wins."""
        with contextlib.suppress(DistError, TimeoutError):
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                await self.words.compare_set(f"{self._root}{attempt}/failed", b"", json.dumps(asdict(failure)))

    @asynccontextmanager
    async def watching(self, attempt: int, on_failure: Callable[[Failure], None]) -> AsyncIterator[None]:
        """While inside, call `on_failure` if any node fails, goes silent, or cannot be reached."""
        assert self._links is not None
        watches = [self._await_failure(attempt, on_failure)]
        if self._links.met:  # there are others
            watches.append(self._links.watch(partial(self._was_lost, attempt, on_failure)))
        async with beside(*watches):
            yield

    async def _was_lost(self, attempt: int, on_failure: Callable[[Failure], None], node: int | None, why: str) -> None:
        """Report a launcher that is gone, and stop waiting for it."""
        if node is None:
            on_failure(self.unreachable(why))
            return
        self._killed.add(node)
        self._news.set()
        await self.report_failure(attempt, self._of_node(node, why))

    async def _await_failure(self, attempt: int, on_failure: Callable[[Failure], None]) -> None:
        try:
            record = await self.words.get(f"{self._root}{attempt}/failed", timeout=None)
        except DistError as error:
            on_failure(self.unreachable(error))
        else:
            on_failure(Failure(**json.loads(record)))

    def own_failure(self, why: str) -> Failure:
        """A failure of this node's launcher."""
        assert self._roster is not None
        return self._of_node(self._roster.node_rank, why)

    def _of_node(self, node: int, why: str) -> Failure:
        assert self._roster is not None
        return Failure(node, -1, self._roster.hosts[node], 0, 1, why)

    def unreachable(self, why: object) -> Failure:
        """Remember that the others cannot be reached, and return that as a failure."""
        self._lost = True
        assert self._roster is not None
        self._news.set()
        if self._roster.link is None:
            return self.own_failure(f"the connection to the job's store was lost: {why}")
        return self._of_node(0, f"its launcher was killed, or cannot be reached: {why}")

    async def end(self, attempt: int, outcome: str) -> None:
        """Say how this node's attempt ended and wait, without limit, for all nodes to say it (if they can be reached).

        Nobody waits for a node that was killed, which is known inside `watching`.
        """
        assert self._roster is not None
        if not self._lost:
            await self.words.set(f"{self._root}{attempt}/end/{self._roster.node_rank}", outcome)
        while not self._lost:
            self._news.clear()
            ends = asyncio.ensure_future(self.words.wait(self._of_living(f"{attempt}/end/"), None))
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
        """Take leave of the others, and close the clients.

        The node that hosts what the others still need waits for them, bounded. A store that outlives the job
        (`outlived`) is left as it was: node 0 deletes what the launchers wrote.
        """
        if self._links is None or self._roster is None:
            await self.store.close()
            return
        first = self._roster.node_rank == 0
        await self._links.leave(self._killed, last=hosting or (first and (outlived or self.words is not self.store)))
        if outlived and first:
            with contextlib.suppress(DistError, TimeoutError):
                async with asyncio.timeout(_FORGET_TIMEOUT_S):
                    await self._meeting.delete_keys()
        if self.words is not self.store:
            await self.words.close()
        await self.store.close()
