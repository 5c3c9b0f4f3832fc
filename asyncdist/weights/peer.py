"""Peer: one publisher or subscriber among those of a name: how it is found, what it has, and how it gets what it lacks.

Keys, below `weights/NAME/` in the store:

| key | value |
| --- | --- |
| `world` | 16 random bytes, made by the first to come |
| `ranks` | a counter: each peer takes the next number as its rank in the mesh |
| `state` | which version is committed and which one staged; changed by compare_set only (`state.py`) |
| `members/RANK` | a `Member`, for as long as it lives |
| `ready/LABEL` | the number of the version that a subscriber serves, as text, for as long as it lives |

Peers dial each other when one needs something of the other. A request is a control message: msgpack [request, verb, id,
blocks]. LOOK and TAKE are answered by messages: msgpack [status, number], then the manifest, or the runs of blocks that
were asked for, in their order. STOP ends an answer, DONE gives a lent segment back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgpack
import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.concurrency import trace as events
from asyncdist.concurrency.tasks import ended, uninterrupted
from asyncdist.errors import DistError, PeerLostError, RemoteProtocolError
from asyncdist.messages.work import PairWork, RecvArrayWork, RecvWork, SendWork
from asyncdist.store import Lease, PrefixStore, Store, TCPStore
from asyncdist.transport.addresses import PeerAddress, host_id, local_address
from asyncdist.transport.base_mesh import BaseMesh
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.fork import SocketSet
from asyncdist.transport.mesh import Mesh
from asyncdist.transport.protocol.frame import pack_key
from asyncdist.weights.manifest import MAX_MANIFEST_BYTES, Manifest, WeightsError, digest
from asyncdist.weights.members import BROKEN, Member, members_of, view_of
from asyncdist.weights.staging import Ref, Stage, Threads, new_memory, unmap
from asyncdist.work import Work
from asyncdist_server.wire.auth import derive_key, load_token

RANKS: Final = 1 << 16
"""Peers of a name at one time. Numbers are taken again after so many, when those who had them are long forgotten."""
GRACE_S: Final = 1.0
"""For how long a peer counts as alive whose connection to the store broke. A commit waits so long for a dead one."""
GIVEN_AT_ONCE: Final = 2
"""Peers of other hosts that one peer sends blocks to at a time. Those that have them give them on: so the number of
hosts that have a version grows by this factor with each wave, and the trainer's network is not what bounds it."""
SPARED_S: Final = 1.0
"""For how long a publisher that has sent a version to some leaves it to those to give it on."""
ANSWER_S: Final = 5.0
"""A peer whose answer takes longer is busy with other things: another one is asked."""
STALL_S: Final = 20.0
"""A run that takes longer comes from a peer that hangs, or through a network of less than 7 Mbit/s."""
RETRY_S: Final = 0.01
MAX_RETRY_S: Final = 0.25
"""Between two looks for somebody who has what we want, and is not busy."""
TURN_S: Final = 10.0
"""How long we wait for another subscriber of this host to fetch a version, and ask those only who should give it. They
may hang."""
LEAVE_S: Final = 2.0

_GROUP: Final = int.from_bytes(b"weights\0", "little")
_VERBS: Final = range(4)
_LOOK, _TAKE, _STOP, _DONE = _VERBS
_OK, _BUSY, _GONE = range(3)


class _Refusal(Exception):
    """A peer has answered that it cannot give what we want now."""


class Peer:
    """Made by `open`, for one life: it ends with its lease. `stages` are the versions that others can get of it."""

    lease: Lease
    member: Member

    def __init__(self, view: PrefixStore, rank: int, world_id: bytes, secret: bytes, config: TransportConfig) -> None:
        self.view = view
        self.rank = rank
        self.mesh: BaseMesh = Mesh(rank, RANKS, world_id, secret, self._addresses, self, config)
        self.stages: dict[int, Stage] = {}
        self.threads = Threads()
        self.said_ready = 0
        """The id of the version that it has said to be ready at."""
        self.bytes_given = 0
        """Bytes of versions sent to others; what they map is not sent."""
        assert self.mesh.memory is not None
        self._memory = self.mesh.memory
        self._loop = asyncio.get_running_loop()
        self._requests = 0
        self._given = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._answering: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._lenders: set[Stage] = set()  # that are lent to somebody

    @classmethod
    async def open(cls, store: Store, name: str, label: str, *, publishes: bool) -> Peer:
        """Become a peer of that name. Raises DistStoreError, DistNetworkError. Cancelling leaves nothing."""
        events.configure_logging()
        view = view_of(store, name)
        await view.compare_set("world", b"", secrets.token_bytes(16))
        world_id = await view.get("world")
        below: Store = store
        while isinstance(below, PrefixStore):
            below = below.underlying_store
        server = (below.host, below.port) if isinstance(below, TCPStore) else (None, 0)
        token = load_token(os.environ) or (below.dialer.token if isinstance(below, TCPStore) else None)
        here = await local_address(server[0], server[1], os.environ)
        config = replace(TransportConfig.from_environ(os.environ, here.interfaces), spin_us=0)  # requests would wait
        rank = (await view.add("ranks", 1) - 1) % RANKS
        while await view.check([f"members/{rank}"]):
            rank = (await view.add("ranks", 1) - 1) % RANKS
        peer = cls(view, rank, world_id, derive_key(token, "peer", world_id), config)
        lease: Lease | None = None
        try:
            peer.lease = lease = await store.lease(GRACE_S, bound=True)
            address = await peer.mesh.listen(here.ips, here.advertised)
            peer.member = Member(label, host_id(config.socket_dir), address.to_bytes(), serves=-1 if publishes else 0)
            await peer.tell()
        except BaseException:
            peer.mesh.abort()
            peer.threads.close()
            if lease is not None:
                lease.abandon()
            raise
        return peer

    async def close(self) -> None:
        """Leave, bounded in time."""
        self.lease.abandon()
        for task in list(self._tasks):
            task.cancel()
        await uninterrupted(self.mesh.close(LEAVE_S))
        for stage in self.stages.values():
            stage.spoiled = True
        self.stages.clear()
        self.threads.close()
        await self.view.close()

    @property
    def fds(self) -> SocketSet:
        """Of memory for versions."""
        return self._memory.fds

    def begin(self, steps: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `steps` as a task that ends with the peer."""
        task = self._loop.create_task(steps, name=f"asyncdist weights {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended_task)
        return task

    def _ended_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            events.info("weights: %s: %r", task.get_name(), error)

    # -- what the others are told

    def tell(self, **changes: Any) -> Awaitable[None]:
        """Say in the store what is new; said at the call, whether it is awaited or not. Raises LeaseLostError."""
        self.member = self.member._replace(**changes)
        return self._said(self.view.set(f"members/{self.rank}", self.member.pack(), lease=self.lease))

    def ready(self, ref: Ref) -> Awaitable[None]:
        """Say that this subscriber serves a version and can be asked, as `tell` does."""
        self.said_ready = ref.id
        self.tell(serves=ref.id)
        return self._said(self.view.set(f"ready/{self.member.label}", str(ref.version), lease=self.lease))

    def _said(self, reply: Awaitable[None]) -> Awaitable[None]:
        future = asyncio.ensure_future(reply)
        future.add_done_callback(lambda future: future.cancelled() or future.exception())
        return future

    def keep(self, stage: Stage) -> None:
        """Let others get `stage`."""
        self.stages[stage.id] = stage
        self.tell(has=tuple(self.stages), gets=0)

    def withhold(self, stage: Stage) -> None:
        """Refuse `stage` to peers that ask for it."""
        if self.stages.pop(stage.id, None) is not None and not self.lease.lost:
            self.tell(has=tuple(self.stages))

    def drop(self, stage: Stage) -> None:
        """Refuse `stage` to peers, and give it back to the peer that lent it when it is used no more."""
        self.withhold(stage)
        stage.close()
        stage.when_unused(partial(self._unused, stage))

    def _unused(self, stage: Stage) -> None:
        """Called in any thread, and from within anything."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._give_back, stage)

    def _give_back(self, stage: Stage) -> None:
        stage.unused = True
        if stage.segment is not None:
            self.threads.later(partial(unmap, stage.segment))
        if stage.source is not None and not stage.lent and not stage.spoiled:
            self._say_done(*stage.source)
            stage.source = None

    def _say_done(self, rank: int, number: int) -> None:
        """A segment that `rank` has lent us is read no more."""
        if not self.mesh.closing and self.mesh.is_connected(rank):
            self._send_control(rank, [0, _DONE, number, b""])

    # -- what others want

    def control_received(self, rank: int, payload: bytes) -> None:
        """A request came. Raises RemoteProtocolError."""
        try:
            request, verb, id, blocks = msgpack.unpackb(payload)
            if not (type(request) is type(id) is int and isinstance(blocks, bytes) and verb in _VERBS):
                raise ValueError(f"verb {verb!r}")
        except BROKEN as error:
            raise RemoteProtocolError(f"rank {rank} sent what is no request for weights: {error}") from None
        if verb == _DONE:
            self._given_back(rank, id)
        elif verb == _STOP:
            answering = self._answering.get((rank, request))
            if answering is not None:
                answering.cancel()
        else:
            task = self.begin(self._answer(rank, request, verb, id, blocks), f"answers rank {rank}")
            self._answering[rank, request] = task
            task.add_done_callback(lambda _task: self._answering.pop((rank, request), None))

    def forget(self, stage: Stage) -> None:
        """The memory of `stage` is not used again: peers that map it keep it."""
        self._lenders.discard(stage)

    def _given_back(self, rank: int, number: int) -> None:
        if rank in self._memory.connections:
            self._memory.connections[rank].unshare(number)
        for stage in [stage for stage in self._lenders if (rank, number) in stage.lent]:
            stage.lent.discard((rank, number))
            if not stage.lent:
                self._lenders.discard(stage)
                if stage.unused:
                    self._give_back(stage)

    async def _answer(self, rank: int, request: int, verb: int, id: int, blocks: bytes) -> None:
        stage = self.stages.get(id)
        if stage is None:
            await self._send(rank, request, msgpack.packb([_GONE, 0]))
        elif verb == _LOOK:
            await self._send(rank, request, msgpack.packb([_OK, self._lend(stage, rank)]))
            await self._send(rank, request, stage.packed)
        elif self._given >= GIVEN_AT_ONCE or (not self.member.subscribes and self._loop.time() < stage.spared_until_s):
            await self._send(rank, request, msgpack.packb([_BUSY, 0]))
        else:
            self._given += 1
            stage.sending += 1
            flat = stage.flat  # which may be dropped meanwhile
            try:
                await self._send(rank, request, msgpack.packb([_OK, 0]))
                for run, octets in stage.manifest.runs(_unpacked(blocks, len(stage.manifest.born))):
                    await self.threads.do([partial(stage.sum_up, run)])
                    async with asyncio.timeout(STALL_S):
                        await self._send(rank, request, stage.sums[run.start : run.stop].astype("<u4").view(np.uint8))
                        await self._send(rank, request, flat[octets])
                    self.bytes_given += octets.stop - octets.start
            finally:
                self._given -= 1
                stage.sending -= 1
                stage.given += 1
                if stage.given >= GIVEN_AT_ONCE:
                    stage.spared_until_s = self._loop.time() + SPARED_S

    def _lend(self, stage: Stage, rank: int) -> int:
        """Have `rank` map a version; the number of the segment there, 0 if it cannot."""
        if stage.segment is None or rank not in self._memory.connections:
            return 0
        number = self._memory.lend(stage.segment, rank)
        if number:
            stage.lent.add((rank, number))
            self._lenders.add(stage)
        return number

    # -- what we want

    async def fetch(self, ref: Ref, base: Stage | None, *, offered: bool) -> Stage:
        """Get a version from a peer that has it, however long that takes; `base` is a version that we have already.

        A version that is `offered` is not committed yet: its publisher is asked first if it is on this host.
        Cancelling leaves nothing. Raises OSError and MemoryError where there is no memory for it.
        """
        pause_s, since_s, sources = RETRY_S, self._loop.time(), [ref.rank]
        try:
            if not offered or ref.host != self.member.host:
                sources = await self._sources(ref, wait=True)
            while True:
                for rank in sources:
                    try:
                        return await self._fetch_from(rank, ref, base)
                    except (DistError, TimeoutError, _Refusal) as error:
                        events.info("weights: version %d from rank %d: %r", ref.version, rank, error)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, MAX_RETRY_S)
                sources = await self._sources(ref, wait=self._loop.time() - since_s < TURN_S)
        except BaseException:
            if not self.lease.lost:
                self.tell(gets=0)
            raise

    async def _sources(self, ref: Ref, *, wait: bool) -> list[int]:
        """The peers to ask, in any order: those of this host, else of other hosts; subscribers before the publisher.

        None while a subscriber of this host fetches the version, as it will lend it. That is one that has begun, else
        the first of those that want it: it says that it begins, and looks again. Without `wait`, all that have it.
        """
        for begins in (False, True):
            await self.tell(gets=-ref.id if begins else ref.id)
            members = await members_of(self.view)
            having = [rank for rank, member in members.items() if ref.id in member.has and rank != self.rank]
            here = {rank: member for rank, member in members.items() if member.host == self.member.host}
            random.shuffle(having)
            if not wait:
                return having
            found = having
            if near := [rank for rank in having if rank in here]:
                found = near
                break
            if any(
                (rank < self.rank and abs(member.gets) == ref.id) or (member.gets == -ref.id and not begins)
                for rank, member in here.items()
                if rank != self.rank
            ):
                return []
        return [rank for rank in found if members[rank].subscribes] or found

    async def _fetch_from(self, rank: int, ref: Ref, base: Stage | None) -> Stage:
        looking = self._loop.create_task(self._look(rank, ref, base), name=f"asyncdist weights looks at rank {rank}")
        try:
            stage = await asyncio.shield(looking)
        except asyncio.CancelledError:
            looking.add_done_callback(self._unwanted)
            raise
        if stage.source is None:
            try:
                await self._take(rank, ref, stage, base)
            except BaseException:
                stage.close()
                raise
        return stage

    def _unwanted(self, looking: asyncio.Task[Stage]) -> None:
        """The version is here, but the fetch was cancelled."""
        if not looking.cancelled() and looking.exception() is None:
            self.drop(looking.result())

    async def _look(self, rank: int, ref: Ref, base: Stage | None) -> Stage:
        """Return a version that `rank` has lent us, or empty room for one that is to be taken from it."""
        request = self._ask(rank, _LOOK, ref.id, b"")
        with self._bounded(rank, request):
            async with asyncio.timeout(ANSWER_S):
                number = await self._heard(rank, request)
                packed = bytes(await self._receive_array(rank, request))
        if not number:
            manifest = self._checked(rank, ref, packed, base)
            stage = Stage(manifest, *new_memory(manifest.nbytes, self._memory.fds))
        elif rank not in self._memory.connections:
            raise PeerLostError(f"rank {rank} is gone", rank)
        else:
            segment = self._memory.connections[rank].take_segment(number)
            try:
                manifest = self._checked(rank, ref, packed, base)
                if segment.size < manifest.nbytes:
                    raise RemoteProtocolError(f"rank {rank} lent {segment.size} bytes for {manifest.nbytes}")
            except BaseException:
                segment.close()
                self._say_done(rank, number)
                raise
            stage = Stage(manifest, segment.view, segment)
            stage.source = (rank, number)
        stage.packed, stage.id = packed, ref.id
        return stage

    def _checked(self, rank: int, ref: Ref, packed: bytes, base: Stage | None) -> Manifest:
        if digest(packed) != ref.digest:
            raise WeightsError(f"rank {rank} has another version {ref.version} than was committed")
        again = None if base is None else base.manifest.again(packed, base.packed)
        return again or Manifest.unpack(packed)

    async def _take(self, rank: int, ref: Ref, stage: Stage, base: Stage | None) -> None:
        """Fill `stage` with what is in `base` already, and with blocks from `rank`."""
        manifest = stage.manifest
        old = None if base is None or base.dropped else base.flat  # which may be dropped meanwhile
        wanted = manifest.differs_from(None if old is None or base is None else base.manifest)
        request = self._ask(rank, _TAKE, ref.id, np.packbits(wanted).tobytes())
        with self._bounded(rank, request):
            async with asyncio.timeout(ANSWER_S):
                await self._heard(rank, request)
            checks = []
            if old is not None and base is not None:
                stage.sums[~wanted] = base.sums[~wanted]
                checks = [partial(_copy, stage, old, octets) for _, octets in manifest.runs(~wanted)]
            for run, octets in manifest.runs(wanted):
                sums = np.empty(len(run), "<u4")
                checking = self._loop.create_task(self.threads.do(checks))
                try:
                    async with asyncio.timeout(STALL_S):
                        await self._receive(rank, request, sums.view(np.uint8))
                        await self._receive(rank, request, stage.flat[octets])
                finally:
                    await uninterrupted(ended(checking))
                checking.result()
                checks = [partial(stage.check, run, sums, f"rank {rank}")]
            await self.threads.do(checks)

    @contextlib.contextmanager
    def _bounded(self, rank: int, request: int) -> Iterator[None]:
        """Where the answer to a request is given up, what is to come of it is not sent, or thrown away."""
        try:
            yield
        except BaseException:
            self.mesh.drop_group(_key(self.rank, request)[:16])
            if not self.mesh.closing and self.mesh.is_connected(rank):
                self._send_control(rank, [request, _STOP, 0, b""])
            raise

    async def _heard(self, rank: int, request: int) -> int:
        """The number in an answer. Raises _Refusal for a refusal."""
        answer = bytes(await self._receive_array(rank, request))
        try:
            status, number = map(int, msgpack.unpackb(answer))
        except BROKEN:
            raise RemoteProtocolError(f"rank {rank} answers {answer[:20]!r}") from None
        if status != _OK:
            raise _Refusal("it is busy" if status == _BUSY else "it has the version no more")
        return number

    def _ask(self, rank: int, verb: int, id: int, blocks: bytes) -> int:
        self._requests += 1
        self._send_control(rank, [self._requests, verb, id, blocks])
        return self._requests

    def _send_control(self, rank: int, words: list[Any]) -> None:
        self.mesh.send_control(rank, msgpack.packb(words))

    # -- messages; this is the owner of their Works

    async def _send(self, rank: int, request: int, payload: bytes | Array) -> None:
        array = np.frombuffer(payload, np.uint8) if isinstance(payload, bytes) else payload
        work = SendWork(self._loop, "send", array, _key(rank, request), self, rank, True)
        if self.mesh.post_send(rank, work.message):
            return
        await work

    async def _receive(self, rank: int, request: int, array: Array) -> None:
        await self._posted(RecvWork(self._loop, "recv", array, _key(self.rank, request), self, rank, None, True), rank)

    async def _receive_array(self, rank: int, request: int) -> Array:
        work = RecvArrayWork(self._loop, _key(self.rank, request), self, rank, None, MAX_MANIFEST_BYTES)
        return np.asarray(await self._posted(work, rank))

    async def _posted(self, work: RecvWork, rank: int) -> Any:
        if self.mesh.post_receive(rank, work.message):
            work.message_received(None, work.message)
        return await work

    def where(self, operation: str, peer: int) -> str:
        """The beginning of every message about an operation with `peer`."""
        return f"weights '{self.view.prefix.removeprefix('weights/')}', {self.member.label}: {operation} (rank {peer})"

    def ended(self, work: PairWork) -> None:
        """Whoever awaits it knows."""

    def untold(self, work: Work[object]) -> None:
        """Whoever would have been told is cancelled."""

    def refuse_gpu_array(self, source: int, meta: bytes) -> None:
        """No peer sends any."""

    # -- what the mesh tells

    async def _addresses(self, ranks: Sequence[int]) -> dict[int, PeerAddress]:
        members = await members_of(self.view, ranks)
        return {rank: PeerAddress.from_bytes(member.address) for rank, member in members.items()}

    def peer_connected(self, rank: int) -> None:
        """It is known once it asks."""

    def peer_lost(self, rank: int, error: PeerLostError) -> None:
        """Its connection broke."""
        self.peer_left(rank)

    def peer_left(self, rank: int) -> None:
        """What it maps it may read for ever, unknown to us."""
        for stage in list(self._lenders):
            gone = {(holder, number) for holder, number in stage.lent if holder == rank}
            if gone:
                stage.spoiled = True
                stage.lent -= gone
                if not stage.lent:
                    self._lenders.discard(stage)
        self._loop.call_soon(self.mesh.forget, rank)


def _key(rank: int, request: int) -> bytes:
    """The key of the messages that answer a request of `rank`."""
    return pack_key(_GROUP, rank, request & 0xFFFFFFFF, 0, 0)


def _unpacked(blocks: bytes, count: int) -> Array:
    """Which of `count` blocks are wanted."""
    if len(blocks) != -(-count // 8):
        raise RemoteProtocolError(f"a peer asks for {8 * len(blocks)} blocks of {count}")
    return np.unpackbits(np.frombuffer(blocks, np.uint8), count=count).view(np.bool_)


def _copy(stage: Stage, old: Array, octets: slice) -> None:
    stage.flat[octets] = old[octets]
