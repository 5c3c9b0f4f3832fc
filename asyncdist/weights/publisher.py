"""Publisher: commits versions of weights to all subscribers of a name, or to none."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from asyncdist.arrays.device import DeviceArray, any_array, device_of
from asyncdist.arrays.host import Array
from asyncdist.concurrency.deadline import Timeout, timeout_seconds
from asyncdist.concurrency.integers import as_int
from asyncdist.concurrency.tasks import uninterrupted
from asyncdist.errors import ClosedError, DistError
from asyncdist.gpu.host_copies import HostCopies
from asyncdist.gpu.streams import carried
from asyncdist.store import Store
from asyncdist.store.base import checked_integer
from asyncdist.store.member import default_name
from asyncdist.weights.manifest import Manifest, WeightsError, layout_of
from asyncdist.weights.members import Member, followed_values
from asyncdist.weights.peer import Peer
from asyncdist.weights.staging import Ref, Stage, fill, new_memory
from asyncdist.weights.state import State, change, read

COMMIT_TIMEOUT_S: Final = 60.0
"""How long a version may take to be staged by all, by default: servers that take longer hang, or have a slow network,
and their names are what the trainer is to know."""
ROLLBACK_S: Final = 5.0
ID_BITS: Final = 62
"""Commits have random numbers: a store that was restarted knows none of those before, which blocks still have."""
SPARES: Final = 2
"""Memory of earlier versions that is kept for the next ones: fresh memory takes eight times as long to fill."""


def publish(name: str, *, store: Store) -> Publisher:
    """Be the publisher of the weights `name`: `async with weights.publish("policy", store=store) as p`.

    From then on whoever published them before can commit nothing more, whether that process lives or not; subscribers
    go on serving what they serve. `store` stays the caller's; it has to know its clients, as TCPStore and HashStore do.
    """
    return Publisher(name, store)


class Publisher:
    """Made by `publish`; entered with `async with`."""

    def __init__(self, name: str, store: Store) -> None:
        self.name = name
        self._store = store
        self._peer: Peer | None = None
        self._state = State()
        self._ref = Ref(0, 0, b"", 0, "")
        self._in_doubt = False
        self._missing: list[str] = []
        self._current: Stage | None = None
        self._spares: list[Stage] = []
        self._turn = asyncio.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Publisher of '{self.name}', epoch {self._state.epoch}>"

    @property
    def version(self) -> int | None:
        """The number of the version that is committed; None before there is one."""
        return None if self._state.committed is None else self._state.committed.version

    @property
    def bytes_given(self) -> int:
        """Bytes of versions sent to subscribers since this publisher was opened; what they map is not sent."""
        return 0 if self._peer is None else self._peer.bytes_given

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Publish no more; subscribers go on, and those to come get the last version from them. Idempotent."""
        self._closed = True
        peer, self._peer = self._peer, None
        self._forget_stages()
        if peer is not None:
            await uninterrupted(peer.close())

    async def _open(self) -> None:
        """Take over: raises DistStoreError, DistNetworkError. Cancelling leaves nothing."""
        peer = await Peer.open(self._store, self.name, default_name(), publishes=True)
        try:
            while True:
                before = await read(peer.view)
                self._state = before.taken_over()
                if await change(peer.view, before, self._state):
                    break
            if self._closed:  # meanwhile
                raise ClosedError(f"{self!r} is closed")
        except BaseException:
            await uninterrupted(peer.close())
            raise
        self._peer = peer

    async def commit(self, version: int, arrays: Mapping[str, Any], *, timeout: Timeout = COMMIT_TIMEOUT_S) -> None:
        """Have all subscribers serve `arrays`, by name and of the host or a GPU, as `version`; all of them, or none.

        Each subscriber stages the version beside the one that it serves. When all have, it is committed by one change
        of the store, and they serve it within milliseconds. Blocks that are as in the version before are not sent
        again. The arrays must not change before this returns. `version` is an int of 64 bits, usually the step; it need
        not grow.

        Raises WeightsError, after which all serve the version before: where a subscriber cannot serve these arrays,
        where `timeout` seconds are over, with the names of those that were missing, and where another publisher has
        taken over. DistError where the store fails: the next commit finds out whether this one was made. At the call:
        TypeError and ValueError. Cancelling takes the version back, unless it is committed already. Concurrent commits
        take turns.
        """
        number = checked_integer("version", as_int(version, "version must be an int"))
        found = {name: carried(any_array(array, f"arrays[{name!r}]")) for name, array in arrays.items()}
        if not all(isinstance(name, str) for name in found) or not found:
            raise ValueError("arrays must be a mapping of names to arrays, with one at least")
        timeout_s = timeout_seconds(timeout, COMMIT_TIMEOUT_S)
        async with self._turn:
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    await self._commit(number, found)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                if self._state.committed == self._ref:
                    return
                raise WeightsError(
                    f"{self!r}: version {number} was not staged by all within {timeout_s:g} s, and all serve the one "
                    f"before: missing {', '.join(self._missing) or 'none'}"
                ) from error
            finally:
                if self._closed:  # meanwhile
                    self._forget_stages()

    async def _commit(self, version: int, arrays: Mapping[str, Array]) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} is closed")
        if self._peer is None or self._peer.lease.lost:  # the store was away for long, or came back without its data
            peer, self._peer = self._peer, None
            if peer is not None:
                self._forget_stages()
                await uninterrupted(peer.close())
            await self._open()
        peer = self._peer
        assert peer is not None
        if self._in_doubt:
            found = await read(peer.view)
            self._in_doubt = False
            if found.owner == self._state.owner:
                self._state = found
        stage = await self._stage(peer, version, arrays)
        try:
            await self._change(peer, staged=self._ref)
            await self._all_staged(peer, self._ref)
            await self._change(peer, committed=self._ref, staged=None)
        except BaseException as error:
            await uninterrupted(self._roll_back(peer))
            if self._state.committed != self._ref:
                peer.withhold(stage)
                self._spare(peer, stage)
                raise
            self._serve(peer, stage)
            if not isinstance(error, DistError):
                raise
            return
        self._serve(peer, stage)

    def _serve(self, peer: Peer, stage: Stage) -> None:
        before, self._current = self._current, stage
        if before is not None:
            peer.withhold(before)
            self._spare(peer, before)

    async def _stage(self, peer: Peer, version: int, arrays: Mapping[str, Array]) -> Stage:
        """Copy `arrays` to where subscribers of this host map them."""
        id = secrets.randbits(ID_BITS) + 1
        manifest = Manifest.for_layout(layout_of(arrays))
        stage, before = self._room(manifest, peer)
        try:
            if any(device_of(array) is not None for array in arrays.values()):
                arrays = dict(arrays)
                await peer.threads.do([partial(_bring_to_host, arrays)])
            await peer.threads.do(fill(stage, arrays, self._current, before, id))
            self._ref = stage.sealed(id)._replace(version=version, rank=peer.rank, host=peer.member.host)
            peer.keep(stage)
        except BaseException:
            stage.close()
            raise
        return stage

    def _room(self, manifest: Manifest, peer: Peer) -> tuple[Stage, Manifest | None]:
        """Memory for a version, and what is in it: that of an earlier version which no process reads, or new."""
        for stage in self._spares:
            if not (stage.lent or stage.sending or stage.spoiled) and stage.manifest.entries == manifest.entries:
                self._spares.remove(stage)
                return Stage(manifest, stage.memory, stage.segment), stage.manifest
        view, segment = new_memory(manifest.nbytes, peer.fds)
        return Stage(manifest, view, segment), None

    def _spare(self, peer: Peer, stage: Stage) -> None:
        """Keep its memory for one of the next versions."""
        self._spares.append(stage)
        usable = [stage for stage in self._spares if not stage.spoiled][-SPARES:]
        for old in self._spares:
            if old not in usable:
                old.close()
                peer.forget(old)
        self._spares = usable

    def _forget_stages(self) -> None:
        for stage in [*self._spares, self._current]:
            if stage is not None:
                stage.close()
        self._spares, self._current = [], None

    async def _change(self, peer: Peer, **changes: Any) -> None:
        """Change what subscribers go by. Raises WeightsError if somebody else has."""
        peer.lease.raise_if_lost()
        new = self._state.next(**changes)
        if not await change(peer.view, self._state, new):
            raise WeightsError(f"{self!r}: another publisher has taken over; what it commits is served from now on")
        self._state = new

    async def _all_staged(self, peer: Peer, ref: Ref) -> None:
        """Wait until every subscriber that lives has staged `ref`. Raises WeightsError if one cannot serve it."""
        async with contextlib.aclosing(followed_values(peer.view, "members/", Member.unpack)) as every:
            async for members in every:
                if not self._waited_for(members.values(), ref):
                    return

    def _waited_for(self, members: Iterable[Member | None], ref: Ref) -> list[Member]:
        """Subscribers that have not staged `ref`. One that serves nothing yet, while others do, cannot refuse it."""
        subscribers = [member for member in members if member is not None and member.subscribes]
        for member in subscribers:
            if member.failed == ref.id and (member.serves or self._state.committed is None):
                raise WeightsError(
                    f"{self!r}: {member.label} cannot serve version {ref.version}, and all serve the one before: "
                    f"{member.why}"
                )
        waited = [member for member in subscribers if ref.id not in member.has and member.failed != ref.id]
        self._missing = [member.label for member in waited]
        return waited

    async def _roll_back(self, peer: Peer) -> None:
        """Take what is staged back, unless it is committed. Which of both is known afterwards, if the store answers."""
        self._in_doubt = True
        with contextlib.suppress(DistError, TimeoutError):
            async with asyncio.timeout(ROLLBACK_S):
                found = await read(peer.view)
                if found.owner == self._state.owner:
                    self._state = found
                    if found.staged is not None:
                        await self._change(peer, staged=None)
                self._in_doubt = False


def _bring_to_host(arrays: dict[str, Any]) -> None:
    with HostCopies() as copies:
        for name, array in arrays.items():
            if type(array) is DeviceArray:
                arrays[name] = copies.to_host(array, f"arrays[{name!r}]")
