"""Subscription: one process that serves the newest version of the weights of a name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from asyncdist.arrays.host import Array, describe, host_array
from asyncdist.concurrency import trace as events
from asyncdist.concurrency.tasks import ended, start_task, uninterrupted
from asyncdist.errors import ClosedError, DistError
from asyncdist.store import Store
from asyncdist.store.member import default_name
from asyncdist.weights.manifest import WeightsError
from asyncdist.weights.peer import Peer
from asyncdist.weights.staging import Ref, Stage
from asyncdist.weights.state import State, followed

AGAIN_S: Final = 0.1
MAX_AGAIN_S: Final = 2.0
"""Between two tries to be a subscriber again, after the store was away."""


class Version(NamedTuple):
    """A version that is served: its number, and its arrays by name, read-only, valid for as long as they are used."""

    number: int
    arrays: Mapping[str, Array]


def subscribe(
    name: str, *, into: MutableMapping[str, Any] | None = None, store: Store, label: str | None = None
) -> Subscription:
    """Serve the weights `name`: `async for version in weights.subscribe("policy", into=arrays, store=store)`.

    The first version comes when there is one, each later one when its publisher commits it; who is busy meanwhile gets
    the newest. With `into`, the arrays of a version take the place of those in it, all in one step and at once when it
    is committed, whether the loop waits for it or not: what reads `into` without an await between sees one version.
    Arrays that are in it at first say what is served: a version that differs in names, dtypes or shapes is refused.
    Without `into`, use `version.arrays` in the loop's body: this process counts as ready at a version once it asks for
    the next. The arrays are read-only, and shared with other processes of this host.

    `label` is this subscriber's name among those that are ready, which no other has, by default host, pid and a random
    number. Lost connections to the store are made anew; what is served stays meanwhile. Leave with `break` and it goes
    on in the background, until `close`; `async with` closes it. Cancelling, and errors, end it. The iterator raises
    WeightsError if this process serves nothing and cannot serve what is committed, DistError where the store refuses
    this process.
    """
    return Subscription(name, into, store, label or default_name())


class Subscription(AsyncIterator[Version]):
    """Made by `subscribe`."""

    def __init__(self, name: str, into: MutableMapping[str, Any] | None, store: Store, label: str) -> None:
        self.name = name
        self.label = label
        self._into = into
        given = {key: host_array(array, f"into[{key!r}]") for key, array in (into or {}).items()}
        self._fits = {key: describe(array.dtype, array.shape) for key, array in given.items()}
        self._store = store
        self._peer: Peer | None = None
        self._state = State()
        self._serving: tuple[Ref, Stage] | None = None
        self._arrays: dict[str, Array] = {}
        self._staged: tuple[Ref, Stage] | None = None
        self._refused: set[int] = set()
        self._getting: tuple[Ref, asyncio.Task[None]] | None = None
        self._failure: Exception | None = None
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._yielded = -1
        self._ready = 0

    def __repr__(self) -> str:
        return f"<Subscription {self.label} of '{self.name}', version {self.version}>"

    @property
    def version(self) -> int | None:
        """The number of the version that is served now."""
        return None if self._serving is None else self._serving[0].version

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Version:
        if self._task is None:
            self._task = start_task(asyncio.get_running_loop(), self._run(), name=f"asyncdist weights {self.name}")
        try:
            if self._into is None and self._serving is not None and self._peer is not None:
                with contextlib.suppress(DistError):
                    self._say_ready(self._peer)
            while self._serving is None or self._serving[0].id == self._yielded:
                if self._task.done():
                    raise self._failure or StopAsyncIteration
                await self._news.wait()
                self._news.clear()
        except BaseException:
            await self.close()
            raise
        ref = self._serving[0]
        self._yielded = ref.id
        return Version(ref.version, self._arrays)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Subscribe no more; arrays that were got stay valid. Bounded in time. Idempotent."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await uninterrupted(ended(self._task))

    async def _run(self) -> None:
        pause_s = AGAIN_S
        try:
            while True:
                try:
                    self._peer = await Peer.open(self._store, self.name, self.label, publishes=False)
                    pause_s = AGAIN_S
                    await self._live(self._peer)
                except (WeightsError, ClosedError) as error:
                    self._failure = error
                    return
                except DistError as error:
                    events.info("%r: %s; trying again", self, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_AGAIN_S)
        except Exception as error:
            self._failure = error
            raise
        finally:
            if self._serving is not None:
                self._serving[1].close()
            self._news.set()

    async def _live(self, peer: Peer) -> None:
        """Be a subscriber until its lease is lost, or the store fails."""
        loop = asyncio.get_running_loop()
        following = start_task(loop, self._follow(peer), name="asyncdist weights follows")
        losing = start_task(loop, peer.lease.wait_lost(), name="asyncdist weights is lost")
        try:
            if self._serving is not None:
                ref, stage = self._serving
                stage.source, stage.lent, stage.spoiled = None, set(), True
                peer.keep(stage)
                peer.tell(serves=ref.id)
                if self._into is not None or self._ready == ref.id:
                    self._say_ready(peer)
            await asyncio.wait([following, losing], return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                await following
            peer.lease.raise_if_lost()
        finally:
            for task in (following, losing):
                task.cancel()
            self._stop_getting()
            if self._staged is not None:
                peer.drop(self._staged[1])
            self._peer, self._staged = None, None
            await uninterrupted(_left(peer, following, losing))

    async def _follow(self, peer: Peer) -> None:
        async with contextlib.aclosing(followed(peer.view)) as states:
            async for state in states:
                self._state = state
                self._act(peer)

    def _act(self, peer: Peer) -> None:
        """Do what the state asks for: serve, stage, or take back."""
        committed, offered = self._state.committed, self._state.staged
        if committed is not None and self._staged is not None and self._staged[0].id == committed.id:
            self._serve(peer, *self._staged)
            self._staged = None
        if self._staged is not None and (offered is None or self._staged[0].id != offered.id):
            peer.drop(self._staged[1])
            self._staged = None
        here = {had[0].id for had in (self._serving, self._staged) if had is not None} | self._refused
        # What is offered comes first: it is waited for, and what is committed may be nowhere any more.
        wanted = next((ref for ref in (offered, committed) if ref is not None and ref.id not in here), None)
        if self._getting is not None and self._getting[0] != wanted:
            self._stop_getting()
        if wanted is not None and self._getting is None:
            self._getting = wanted, peer.begin(self._get(peer, wanted), f"gets version {wanted.version}")

    def _stop_getting(self) -> None:
        if self._getting is not None:
            self._getting[1].cancel()
            self._getting = None

    async def _get(self, peer: Peer, ref: Ref) -> None:
        """Stage a version, or say why it cannot be served here."""
        why = ""
        try:
            base = None if self._serving is None else self._serving[1]
            stage = await peer.fetch(ref, base, offered=ref == self._state.staged)
        except Exception as error:
            if isinstance(error, DistError) or not isinstance(error, OSError | MemoryError):
                events.info("%r: %r; subscribing anew", self, error)
                peer.lease.abandon()
                return
            why = f"there is no memory for it here: {error}"
        else:
            fits = not self._fits or (base is not None and stage.manifest.entries is base.manifest.entries)
            why = "" if fits else stage.manifest.why_unlike(self._fits)
            if why:
                peer.drop(stage)
        self._getting = None
        if not why:
            peer.keep(stage)
            if ref == self._state.committed:
                self._serve(peer, ref, stage)
            else:
                self._staged = ref, stage
        else:
            self._refused.add(ref.id)
            peer.tell(failed=ref.id, why=why, gets=0)
            if ref == self._state.committed and self._serving is None:
                self._failure = WeightsError(f"{self!r}: version {ref.version} cannot be served here: {why}")
                assert self._task is not None
                self._task.cancel()
        self._act(peer)

    def _serve(self, peer: Peer, ref: Ref, stage: Stage) -> None:
        """From now on this is what is served. One step: nothing here waits."""
        before, self._serving = self._serving, (ref, stage)
        self._arrays = stage.arrays()
        if self._into is not None:
            for name in self._into.keys() - self._arrays.keys():
                del self._into[name]
            self._into.update(self._arrays)
            self._say_ready(peer)
        if before is not None:
            peer.drop(before[1])
        self._news.set()

    def _say_ready(self, peer: Peer) -> None:
        assert self._serving is not None
        ref = self._serving[0]
        if not peer.lease.lost and peer.said_ready != ref.id:
            self._ready = ref.id
            peer.ready(ref)


async def _left(peer: Peer, *tasks: asyncio.Task[Any]) -> None:
    await ended(*tasks)
    await peer.close()
