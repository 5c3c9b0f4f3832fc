"""The launchers of a job with a fixed number of nodes: how they meet, and what they tell each other then.

The job's store may know the job from before: it outlives launchers that end, fail, are interrupted or killed at any
moment, also while they wait for others. So launchers meet in numbered meetings, and one word decides about each:
`together` once all who came have answered a roll call, or why it came to nothing. Then everybody who still wants to
goes to the next one.

Keys in the job's store, under `launch/<job id>/`:

    meeting                number of the current meeting
    runs                   counter; names the runs of this job id apart
    <n>/nnodes             how many nodes there are, in the words of the first that came
    <n>/seats              counter; deals out node ranks
    <n>/claim/<node>       counter; two launchers that claim one node rank both see it
    <n>/node/<node>        JSON: how many workers, which host; where its launcher answers; of node 0 the run's name
    <n>/present/<node>     the node has seen all others
    <n>/verdict            `together`, or why not; written once

Once they have met, launchers tell each other who failed and who is done by their `Links`. Where a launcher hosts the
job's store, that is also the launchers' own. Keys, under those of their meeting, beside those of `Links`:

    <attempt>/failed       JSON of the first failure anywhere
    <attempt>/end/<node>   how the node's attempt ended; all wait for all, so that the hosting node leaves last
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from asyncdist.concurrency.deadline import Deadline
from asyncdist.errors import DistError, LaunchError, StoreTimeoutError
from asyncdist.launch.config import DEFAULT_LOST_AFTER_S
from asyncdist.launch.failure import Failure
from asyncdist.launch.rendezvous.links import CUT_OFF, LinkHost, LinkPlace, Links, OnLost, beside, first_done, open_link
from asyncdist.launch.worker import Roster

if TYPE_CHECKING:
    from asyncdist.store.base import Store

ROLL_CALL_S: Final = 5.0
"""Launchers that wait answer at once; one that is silent for this long was killed while it waited."""

_GIVE_UP_TIMEOUT_S: Final = 2.0
"""An interrupted launcher tries for this long to tell the others; they would notice at the next roll call."""

_TOGETHER: Final = b"together"
_DID_NOT_JOIN: Final = "did not join within"

ENDED_WELL: Final = b"ok"
"""How an attempt ended on a node whose workers have all ended with 0."""

PRESENCE_GRACE_S: Final = 2.0
"""A launcher whose connection broke makes it anew within a second. One that was merely slow has cost the job, which
cannot go on with fewer nodes, so this is more than what an elastic one allows."""

_FORGET_TIMEOUT_S: Final = 5.0

_CUT_OFF_CLOSE_S: Final = 0.5
"""A store is given this long to take leave when the host of one does not answer any more."""


class _ContradictionError(Exception):
    """Another launcher of this meeting says something else."""


class Meeting:
    """One launcher's way to the others. `keys` is the prefix of the meeting that came about."""

    def __init__(self, store: Store, job_id: str | None, nnodes: int, host: LinkHost | None = None) -> None:
        self._store = store
        self._job_id = job_id
        self._nnodes = nnodes
        self._link_host = host
        self._root = f"launch/{job_id or 'default'}/"
        self._number = 0
        self._verdict = b""
        self._late = "", 0  # what one that gave up said, and how many had come then
        self.keys = self._root
        self.hosts: list[str] = []
        """The names of all nodes, once they have met."""
        self.places: list[LinkPlace | None] = []
        """Where the launchers answer then; not where that of node 0 hosts the job's store."""

    async def join(self, node_rank: int | None, nproc: int, host: str, timeout_s: float) -> Roster:
        """Take a node rank and wait for the other nodes.

        Raises LaunchError naming the nodes that did not come in time, or a node rank claimed twice, or other nodes'
        number of nodes. Cancelling withdraws.
        """
        deadline = Deadline.after(timeout_s, _now())
        contradicted = False
        while True:
            self._number = await self._store.add(self._root + "meeting", 0)
            self.keys = f"{self._root}{self._number}/"
            try:
                mine = await self._take_seat(node_rank)
                if mine is None:
                    await self._until_decided(deadline)
                else:
                    entry = {"nproc": nproc, "host": host, "link": None}
                    if self._link_host is not None:
                        entry["link"] = asdict(await self._link_host.place())
                    if mine == 0:
                        entry["run_id"] = await self._run_id()
                    entries = await self._meet(mine, entry, deadline, timeout_s)
                    if entries is not None:
                        self.hosts = [each["host"] for each in entries]
                        self.places = [LinkPlace(**each["link"]) if each["link"] else None for each in entries]
                        return Roster(mine, tuple(each["nproc"] for each in entries), entries[0]["run_id"])
            except _ContradictionError as error:
                # The other launcher may have been killed, or be of an earlier run. If not, both will meet again.
                verdict = await self._decide(str(error).encode())
                if contradicted:  # also where the others have begun without this launcher
                    raise LaunchError(str(error)) from None
                contradicted = verdict != _TOGETHER
            except asyncio.CancelledError:
                with contextlib.suppress(DistError, TimeoutError):
                    async with asyncio.timeout(_GIVE_UP_TIMEOUT_S):
                        await self._decide(b"a launcher was interrupted while it waited")
                        await self._next_meeting()
                raise
            await self._next_meeting()

    async def delete_keys(self) -> None:
        """Take away what was written for this run; the number of the next meeting stays."""
        await self._next_meeting()
        for key in await self._store.list_keys(self.keys):
            if key != self.keys + "verdict":  # for launchers on their way here: this meeting is over
                await self._store.delete_key(key)

    async def _next_meeting(self) -> None:
        await self._store.compare_set(self._root + "meeting", str(self._number), str(self._number + 1))

    async def _take_seat(self, node_rank: int | None) -> int | None:
        """Return this node's rank; None if all seats are taken, as after an earlier run."""
        known = int(await self._store.compare_set(self.keys + "nnodes", b"", str(self._nnodes)))
        if known != self._nnodes:
            raise _ContradictionError(
                f"this launcher of job {self._job_id!r} expects {self._nnodes} nodes, another one {known}"
            )
        seat = await self._store.add(self.keys + "seats", 1) - 1
        if seat >= self._nnodes:
            return None
        mine = seat if node_rank is None else node_rank
        if await self._store.add(f"{self.keys}claim/{mine}", 1) > 1:
            job = "this job" if self._job_id is None else f"job {self._job_id!r}"
            raise _ContradictionError(
                f"two launchers of {job} claim node rank {mine}: give each a --node-rank of its own, or none"
            )
        return mine

    async def _until_decided(self, deadline: Deadline) -> None:
        """All seats are taken, at once or long ago. Wait for the verdict, and give it if a launcher has gone silent."""
        remaining_s = deadline.remaining_s(_now())
        assert remaining_s is not None
        try:
            await self._store.get(self.keys + "verdict", timeout=min(ROLL_CALL_S, remaining_s))
        except StoreTimeoutError:
            if remaining_s > ROLL_CALL_S:
                await self._decide(b"a launcher took a seat and went silent")

    async def _meet(
        self, mine: int, entry: dict[str, Any], deadline: Deadline, timeout_s: float
    ) -> list[dict[str, Any]] | None:
        """Wait for the others and return every node's entry; None if this meeting came to nothing."""
        await self._store.set(f"{self.keys}node/{mine}", json.dumps(entry))
        try:
            entries = await self._of_all("node", deadline.remaining_s(_now()))
        except StoreTimeoutError as error:
            missing = _nodes_in(error)
            problem = f"nodes {missing} of {self._nnodes} {_DID_NOT_JOIN} {timeout_s:g} s"
            await self._decide(problem.encode())
            await self._next_meeting()
            before, came = self._late
            if self._nnodes - len(missing) < came:
                problem = (
                    f"{before}, as a launcher said that gave up then; nobody has taken its place within {timeout_s:g} s"
                )
            raise LaunchError(problem) from None
        if entries is None:
            if _DID_NOT_JOIN in (verdict := self._verdict.decode()):
                came = len(await self._store.list_keys(self.keys + "node/"))
                if came >= self._late[1]:  # else those who had given up before are among the missing
                    self._late = verdict, came
            return None
        if await self._roll_call(mine, deadline) != _TOGETHER:
            return None
        return [json.loads(each) for each in entries]

    async def _roll_call(self, mine: int, deadline: Deadline) -> bytes:
        """See which of the launchers that came are still there, and return the verdict."""
        await self._store.set(f"{self.keys}present/{mine}", b"1")
        try:
            await self._of_all("present", ROLL_CALL_S)
        except StoreTimeoutError as error:
            problem = f"nodes {_nodes_in(error)} of {self._nnodes} came and went silent"
            verdict = await self._decide(problem.encode())
            if verdict != _TOGETHER and deadline.expired(_now()):
                await self._next_meeting()
                raise LaunchError(problem) from None
            return verdict
        return await self._decide(_TOGETHER)

    async def _of_all(self, name: str, timeout_s: float | None) -> list[bytes] | None:
        """Every node's key of that name, or None if the verdict is there first. Raises StoreTimeoutError."""
        keys = [f"{self.keys}{name}/{node}" for node in range(self._nnodes)]
        values, verdict = await first_done(
            self._store.multi_get(keys, timeout=timeout_s), self._store.get(self.keys + "verdict", timeout=None)
        )
        if verdict.cancelled():
            found: list[bytes] = values.result()
            return found
        self._verdict = verdict.result()
        return None

    async def _decide(self, word: bytes) -> bytes:
        """Write the verdict, unless there is one; return it."""
        return await self._store.compare_set(self.keys + "verdict", b"", word)

    async def _run_id(self) -> str:
        """What node 0 calls the run: the job id, and a number when the store has seen it before."""
        if not self._job_id:
            return secrets.token_hex(4)
        before = await self._store.add(self._root + "runs", 1) - 1
        return self._job_id + (f"-{before}" if before else "")


def _nodes_in(error: StoreTimeoutError) -> list[int]:
    return sorted(int(key.rpartition("/")[2]) for key in error.keys)


class Nodes:
    """What this launcher and the others tell each other once they have met. Owns the clients of both stores.

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
        self._hub = 0
        self._lost = False
        self._killed: set[int] = set()
        self._news = asyncio.Event()  # a launcher is gone

    async def join(self, node_rank: int | None, nproc: int, host: str, timeout_s: float) -> Roster:
        """Take a node rank and wait for the other nodes; see `Meeting.join`."""
        self._roster = roster = await self._meeting.join(node_rank, nproc, host, timeout_s)
        places = self._meeting.places
        self._hub = places.index(None) if None in places else 0  # a launcher that hosts the job's store needs no other
        hub = places[self._hub]
        self._links = Links(
            self.store if hub is None else await open_link(hub),
            roster.node_rank,
            self._nnodes,
            grace_s=PRESENCE_GRACE_S,
            lost_after_s=self._lost_after_s,
            root=self._meeting.keys,
            hub=self._hub,
            places=places,
        )
        if self._nnodes > 1:
            await self._links.meet()
        return roster

    @property
    def _root(self) -> str:
        return self._meeting.keys

    @property
    def hosts(self) -> list[str]:
        """The names of all nodes' hosts."""
        return self._meeting.hosts

    @property
    def words(self) -> Store:
        """Where the launchers tell each other: a store of their own, or the job's."""
        assert self._links is not None
        return self._links.store

    async def share_stopped(self, look: Callable[[], Sequence[int]], tell: Callable[[Sequence[int]], None]) -> None:
        """See `Links.share_stopped`."""
        assert self._links is not None
        if self._links.met:
            await self._links.share_stopped(look, tell)

    async def report_failure(self, attempt: int, failure: Failure) -> None:
        """Tell the others, if they can be reached; the first report of an attempt wins."""
        assert self._links is not None
        await self._links.say(f"{attempt}/failed", failure)

    @asynccontextmanager
    async def watching(
        self, attempt: int, on_failure: Callable[[Failure], None], on_lost: OnLost = lambda node, why: None
    ) -> AsyncIterator[None]:
        """While inside, call `on_failure` if any node fails, goes silent, or cannot be reached.

        `on_lost(node, why)` is called before that if a node is lost; of this one if the others are.
        """
        assert self._links is not None
        watches = [self._await_failure(attempt, on_failure)]
        if self._links.met:  # there are others
            watches.append(self._links.watch(partial(self._was_lost, attempt, on_failure, on_lost)))
        async with beside(*watches):
            yield

    async def _was_lost(
        self, attempt: int, on_failure: Callable[[Failure], None], on_lost: OnLost, node: int | None, why: str
    ) -> None:
        """Stop waiting for a launcher that is gone, and report it, unless all of its workers had ended well."""
        if node is None:
            failure = self.unreachable(why)
            on_lost(failure.node, why)
            on_failure(failure)
            return
        is_done = await self._ended_well(attempt, node)
        self._killed.add(node)
        self._news.set()
        if not is_done:
            assert self._roster is not None
            own = node == self._roster.node_rank
            await self.report_failure(attempt, self._of_node(node, f"this host {why}" if own else why))
            on_lost(node, why)

    async def _ended_well(self, attempt: int, node: int) -> bool:
        with contextlib.suppress(DistError):
            return await self.words.get(f"{self._root}{attempt}/end/{node}", timeout=0) == ENDED_WELL
        return False

    async def _await_failure(self, attempt: int, on_failure: Callable[[Failure], None]) -> None:
        try:
            record = await self.words.get(f"{self._root}{attempt}/failed", timeout=None)
        except DistError as error:
            assert self._links is not None
            if not self._links.met:  # else the watch of the others fails as well, and finds out more
                on_failure(self.unreachable(error))
        else:
            on_failure(Failure.from_json(record))

    def own_failure(self, why: str) -> Failure:
        """A failure of this node's launcher."""
        assert self._roster is not None
        return self._of_node(self._roster.node_rank, why)

    def _of_node(self, node: int, why: str) -> Failure:
        return Failure(node, -1, self._meeting.hosts[node], 0, 1, why)

    def unreachable(self, why: object) -> Failure:
        """Remember that the others cannot be reached, and return that as a failure."""
        self._lost = True
        self._news.set()
        if self._links is not None and self._links.cut_off:
            return self.own_failure(f"this host {CUT_OFF}")
        if not any(self._meeting.places):  # perhaps no launcher hosts it
            return self.own_failure(f"the connection to the job's store was lost: {why}")
        return self._of_node(self._hub, str(why))

    async def end(self, attempt: int, outcome: bytes) -> None:
        """Say how this node's attempt ended and wait, without limit, for all nodes to say it (if they can be reached).

        A node that was killed, as is known inside `watching`, is not waited for.
        """
        assert self._roster is not None
        if not self._lost:
            await self.words.set(f"{self._root}{attempt}/end/{self._roster.node_rank}", outcome)
        while not self._lost:
            self._news.clear()
            ends, _ = await first_done(self.words.wait(self._of_living(f"{attempt}/end/"), None), self._news.wait())
            if not ends.cancelled():
                return ends.result()  # type: ignore[no-any-return]

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
        for store in dict.fromkeys((self.words, self.store)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CUT_OFF_CLOSE_S if self._lost else None):
                    await store.close()


def _now() -> float:
    return asyncio.get_running_loop().time()
