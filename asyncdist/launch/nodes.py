"""What the launchers of one job tell each other through the store: who they are, who failed, who is done.

Keys, under `launch/<job id>/`; `g` counts the runs of this job id that the store has seen:

    joined                 counter; node n of run g is the one that got g * nnodes + n + 1
    g/claim/<node>         counter; two launchers that claim one node rank both see it
    g/node/<node>          JSON: how many workers, which host, what node 0 calls the run
    g/beat/<node>          counter, changed every `BEAT_S`; each node watches the next one's
    g/<attempt>/failed     JSON of the first failure anywhere
    g/<attempt>/end/<node> how the node's attempt ended; all wait for all, so that the hosting node leaves last
    g/bye/<node>           this node needs the store no longer
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from asyncdist.errors import DistError, LaunchError, StoreTimeoutError

if TYPE_CHECKING:
    from asyncdist.store.base import Store

__all__ = ["BEAT_S", "LOST_AFTER_BEATS", "Failure", "Nodes", "Roster"]

BEAT_S: Final = 2.0
LOST_AFTER_BEATS: Final = 10
"""A launcher only waits, so 20 s of silence means that it, its machine or the network is gone."""

_BYE_TIMEOUT_S: Final = 5.0
_REPORT_TIMEOUT_S: Final = 5.0
"""Last words are tried for this long; the others notice a silent launcher by themselves."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of an attempt, as every node reports it. `rank` is -1 for a lost node."""

    node: int
    rank: int
    host: str
    pid: int
    exitcode: int
    description: str


@dataclass(frozen=True, slots=True)
class Roster:
    """Who takes part: this node's rank, every node's number of workers, and the name of the run."""

    node_rank: int
    nprocs: tuple[int, ...]
    run_id: str

    @property
    def first_rank(self) -> int:
        """Global rank of this node's first worker."""
        return sum(self.nprocs[: self.node_rank])

    @property
    def world_size(self) -> int:
        """Workers of all nodes."""
        return sum(self.nprocs)


class Nodes:
    """This launcher among the launchers of its job. Owns the store client."""

    def __init__(self, store: Store, job_id: str | None, nnodes: int) -> None:
        self._store = store
        self._job_id = job_id
        self._nnodes = nnodes
        self._root = f"launch/{job_id or 'default'}/"
        self._node_rank = 0
        self._host = "?"
        self._joined = False
        self._lost = False

    async def join(self, node_rank: int | None, nproc: int, host: str, timeout_s: float) -> Roster:
        """Take a node rank and wait for the other nodes.

        Raises LaunchError naming the nodes that did not come in time, or a node rank claimed twice.
        """
        self._host = host
        number = await self._store.add(self._root + "joined", 1) - 1
        generation = number // self._nnodes
        self._node_rank = number % self._nnodes if node_rank is None else node_rank
        self._root += f"{generation}/"
        if await self._store.add(f"{self._root}claim/{self._node_rank}", 1) > 1:
            raise LaunchError(f"two launchers of job {self._job_id!r} claim node rank {self._node_rank}")
        run_id = (self._job_id or secrets.token_hex(4)) + (f"-{generation}" if generation else "")
        mine = {"nproc": nproc, "host": host, "run_id": run_id}
        await self._store.set(f"{self._root}node/{self._node_rank}", json.dumps(mine))
        keys = [f"{self._root}node/{node}" for node in range(self._nnodes)]
        try:
            entries = [json.loads(entry) for entry in await self._store.multi_get(keys, timeout=timeout_s)]
        except StoreTimeoutError as error:
            missing = sorted(int(key.rpartition("/")[2]) for key in error.keys)
            raise LaunchError(f"nodes {missing} of {self._nnodes} did not join within {timeout_s:g} s") from error
        self._joined = True
        return Roster(self._node_rank, tuple(entry["nproc"] for entry in entries), entries[0]["run_id"])

    async def report_failure(self, attempt: int, failure: Failure) -> None:
        """Tell the others, if the store can be reached; the first report of an attempt wins."""
        with contextlib.suppress(DistError, TimeoutError):
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                await self._store.compare_set(f"{self._root}{attempt}/failed", b"", json.dumps(asdict(failure)))

    @asynccontextmanager
    async def watching(self, attempt: int, on_failure: Callable[[Failure], None]) -> AsyncIterator[None]:
        """While inside, call `on_failure` once if any node fails, goes silent, or the store is lost."""
        tasks = [
            asyncio.create_task(self._await_failure(attempt, on_failure)),
            asyncio.create_task(self._beat(attempt, on_failure)),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception):  # a bug or a foreign record, not the cancellation
                    raise outcome

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
                    await self.report_failure(
                        attempt, Failure(watched, -1, "?", 0, 1, f"no sign of life for {BEAT_S * silent_beats:g} s")
                    )
                    return
                await asyncio.sleep(BEAT_S)

    def store_lost(self, why: object) -> Failure:
        """Remember that the store has gone, and return that as a failure of this node."""
        self._lost = True
        return Failure(self._node_rank, -1, self._host, 0, 1, f"the connection to the job's store was lost: {why}")

    async def end(self, attempt: int, outcome: str) -> None:
        """Say how this node's attempt ended and wait, without limit, for all nodes to say it (if there is a store)."""
        if self._lost:
            return
        await self._store.set(f"{self._root}{attempt}/end/{self._node_rank}", outcome)
        keys = [f"{self._root}{attempt}/end/{node}" for node in range(self._nnodes)]
        await self._store.wait(keys, None)

    async def leave(self, *, hosting: bool) -> None:
        """Close the store client; the hosting node of a job that began first waits, bounded, for the others to go."""
        if self._joined and not self._lost:
            with contextlib.suppress(DistError, TimeoutError):
                async with asyncio.timeout(_BYE_TIMEOUT_S):
                    await self._store.set(f"{self._root}bye/{self._node_rank}", b"1")
                    if hosting:
                        await self._store.wait([f"{self._root}bye/{node}" for node in range(self._nnodes)], None)
        await self._store.close()
