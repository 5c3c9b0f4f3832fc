"""How the launchers of one job reach each other without the job's store, and notice which are gone.

The launcher of node 0 hosts a small store of their own while they work together. Each of the others keeps a connection
to it, proven by a key that node 0 draws and tells them in the job's store. Keys, under a `root`:

    there/<node>/connected    bound to the connection of the node's launcher: it goes when that is killed
    there/<node>/heard        bound to a lease that the launcher renews: it goes when that is silent for too long
    bye/<node>                this node needs the others no longer
    stopped/<node>            JSON: the ranks of the node whose processes are stopped

Whoever hears nothing from that store asks some of the other launchers directly, each of which hosts a store as well: if
none of them answers either, not node 0 is gone, but this host is cut off.

While the launchers of an elastic job meet, the job's store itself tells which was killed (`Presence`). A launcher that
is stopped, or whose host is down, breaks no connection: its silence tells, much later. Keys, among those of the store's
job: `here/<member>`, bound to the launcher's connection, set before it joins and gone only after it has left, so that a
member without one was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from asyncdist.errors import DistError, LaunchError, StoreTimeoutError
from asyncdist.launch.failure import Record
from asyncdist.launch.rendezvous.job_store import LAUNCHERS_NAMESPACE, StorePlace
from asyncdist.store.prefix_store import PrefixStore
from asyncdist_server.wire.auth import new_token

if TYPE_CHECKING:
    from asyncdist.launch.config import LaunchConfig
    from asyncdist.store.base import Store
    from asyncdist.store.lease import Lease
    from asyncdist_server import ThreadedServer

BYE_TIMEOUT_S: Final = 5.0
"""How long node 0 waits for the goodbyes of the others, and another node for its own to arrive."""

OPEN_TIMEOUT_S: Final = 20.0
"""The launchers have just met, so one that is not connected within this cannot reach that of node 0."""

_WORD_TIMEOUT_S: Final = 5.0
"""A word about a loss or a failure is tried for this long; the others notice a silent launcher by themselves."""

_LOOK_S: Final = 1.0
"""How often a launcher looks which of its workers are stopped. That takes 0.1 ms for a worker, and people stop them."""

_ANSWER_TIMEOUT_S: Final = 1.0
"""A launcher that is there answers within this: it does nothing but wait."""

_ASKED: Final = 3
"""This many others are asked whether they are there, far apart: nodes with numbers close by may hang on one switch."""

CUT_OFF: Final = "reaches no other node"
"""What is said of a host whose launcher no other one answers."""

PRESENCE_GRACE_S: Final = 1.0
"""A launcher only waits, and makes a broken connection anew within milliseconds; one that does not was killed (a daemon
that comes back waits longer for its clients). One that was merely slow finds itself expelled, and joins anew."""

OnGone: TypeAlias = Callable[[int | None, str], Awaitable[None]]
"""Hears which launcher is gone, and why."""

OnLost: TypeAlias = Callable[[int, str], None]
"""Is told which node is lost, and why; of this one that it is, for the others, with what is said of "this host"."""

_HERE: Final = "here/"
_MEMBERS: Final = "members/"


@dataclass(frozen=True, slots=True)
class LinkPlace:
    """Where the launchers' own store is, and its key."""

    host: str
    """Several addresses with commas, where several interfaces are used."""
    port: int
    key: str


class LinkHost:
    """Hosts a store for the launchers on this node, if `place` is asked for: of node 0 the one they all use."""

    def __init__(self, job: StorePlace, config: LaunchConfig, environ: Mapping[str, str] = os.environ) -> None:
        self._job = job
        self._config = config
        self._environ = environ
        self._server: ThreadedServer | None = None
        self._place: LinkPlace | None = None

    async def place(self) -> LinkPlace:
        """Start the store, unless it runs; return where it is. Raises LaunchError if it cannot be hosted."""
        from asyncdist.transport.addresses import local_address
        from asyncdist.transport.config import ports_from_environ

        if self._place is None:
            environ = {**self._environ, "MASTER_ADDR": (self._config.endpoint or self._job.endpoint).host}
            if self._config.interface is not None:
                environ["ASYNCDIST_SOCKET_IFNAME"] = self._config.interface
            key = new_token()
            try:
                address = await local_address(self._job.endpoint.host, self._job.endpoint.port, environ)
                ips = address.ips[: address.interfaces]
                host = ips[0] if len(ips) == 1 else "" if any(":" in ip for ip in ips) else "0.0.0.0"
                self._server = await _serve(host, ports_from_environ(environ) or range(1), key)
            except (DistError, OSError, ValueError) as error:
                raise LaunchError(f"this node cannot listen for the launchers of the others: {error}") from error
            advertised = [ip for ip, _ in address.advertised[: address.interfaces]] or ips
            self._place = LinkPlace(",".join(advertised), self._server.port, key)
        return self._place

    def open(self, place: LinkPlace) -> Awaitable[Store]:
        """See `open_link`."""
        return open_link(place)

    async def close(self) -> None:
        """Stop the store, if it runs."""
        if self._server is not None:
            await asyncio.to_thread(self._server.close)


async def _serve(host: str, ports: Sequence[int], key: str) -> ThreadedServer:
    """Start the store on one of these ports, from the last one down: ranks may have taken others. Raises OSError."""
    from asyncdist.store.tcp_store import serve_off_loop

    for port in reversed(ports):
        try:
            return await serve_off_loop(host, port, key, (None, None))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"every port of ASYNCDIST_PORT_RANGE={ports[0]}-{ports[-1]} is in use")


async def open_link(place: LinkPlace) -> Store:
    """Return a client of the launchers' own store. Raises LaunchError if it cannot be reached."""
    from asyncdist.store.tcp_store import TCPStore

    store = TCPStore(place.host, place.port, token=place.key, namespace=LAUNCHERS_NAMESPACE, timeout=OPEN_TIMEOUT_S)
    try:
        await store.__aenter__()
    except DistError as error:
        raise LaunchError(
            f"this node cannot reach the launcher of node 0: {error}. Launchers need a TCP connection to it, as ranks "
            "do to each other; --local-addr or ASYNCDIST_SOCKET_IFNAME chooses the network"
        ) from error
    store.dialer.ends_with = "the launcher of node 0"
    return store


class Links:
    """This node's connection to the launcher of node `hub`, which hosts the store of the launchers.

    A launcher is gone `grace_s` after its connection broke, or after `lost_after_s` of silence. `places` are where the
    launchers of all nodes answer, as far as they do; `open` connects to one.
    """

    def __init__(
        self,
        store: Store,
        node: int,
        nnodes: int,
        *,
        grace_s: float,
        lost_after_s: float,
        root: str = "",
        hub: int = 0,
        places: Sequence[LinkPlace | None] = (),
        open: Callable[[LinkPlace], Awaitable[Store]] = open_link,
    ) -> None:
        self.store = store
        self._node = node
        self._nnodes = nnodes
        self._grace_s = grace_s
        self._lost_after_s = lost_after_s
        self._root = root
        self._there = f"{root}there/"
        self._bye = f"{root}bye/"
        self._stopped = f"{root}stopped/"
        self._said_stopped: Sequence[int] = []
        self._heard: Lease | None = None
        self._hub = hub
        self._places = places
        self._open = open
        self._gone: set[int] = set()
        self._met = False
        self._unreachable = False
        self.cut_off = False
        """Whether this host reaches no other node."""

    @property
    def met(self) -> bool:
        """Whether this node has been seen by the others."""
        return self._met

    async def meet(self, timeout_s: float = OPEN_TIMEOUT_S) -> None:
        """Be seen by the others, and wait until all are seen. Raises LaunchError naming those that are not."""
        connection = await self.store.lease(self._grace_s, bound=True)
        self._heard = heard = await self.store.lease(self._lost_after_s)
        mine = f"{self._there}{self._node}/"
        await self.store.set(f"{mine}heard", b"", lease=heard)
        await self.store.set(f"{mine}connected", b"", lease=connection)
        self._met = True
        try:
            await self.store.wait([f"{self._there}{node}/connected" for node in range(self._nnodes)], timeout_s)
        except StoreTimeoutError as error:
            missing = sorted(int(key.removeprefix(self._there).partition("/")[0]) for key in error.keys)
            raise LaunchError(
                f"the launchers of nodes {missing} did not connect to that of node 0 within {timeout_s:g} s"
            ) from None

    async def watch(self, on_gone: OnGone) -> None:
        """After `meet`: call `on_gone(node, why)` of each launcher that is gone, until cancelled.

        The node is None when the one that hosts cannot be reached, or none (`cut_off`).
        """
        try:
            async with self.store.watch(self._there) as watch, beside(self._watch_own(on_gone)):
                there = set(await self.store.list_keys(self._there))
                for node in range(self._nnodes):
                    for what in ("connected", "heard"):
                        if f"{self._there}{node}/{what}" not in there:
                            await self._has_gone(node, what, on_gone)
                async for event in watch:
                    number, what = event.key.removeprefix(self._there).split("/")
                    if event.kind == "expire":  # a launcher that leaves in good order deletes its keys
                        await self._has_gone(int(number), what, on_gone)
        except DistError as error:
            why = f"its launcher was killed, or cannot be reached: {error}"
            await self._out_of_touch(on_gone, why, cut_off=await self._reaches_nobody())

    async def _has_gone(self, node: int, what: str, on_gone: OnGone) -> None:
        """A key of `node` has gone."""
        if self._unreachable:
            return
        self._gone.add(node)
        if self._node == self._hub != node and await self._reaches_nobody():
            return await self._out_of_touch(on_gone, "", cut_off=True)
        why = "its launcher was killed, or cannot reach the others" if what == "connected" else self._silent
        await on_gone(node, self._given_up if node == self._node else why)

    @property
    def _silent(self) -> str:
        doubt = " (or this host is cut off)" if self._nnodes == 2 else ""  # there is no third one to ask
        return f"no sign of life for {self._lost_after_s:g} s{doubt}"

    @property
    def _given_up(self) -> str:
        return f"was silent for {self._lost_after_s:g} s, and the others gave it up"

    async def _out_of_touch(self, on_gone: OnGone, why: str, *, cut_off: bool) -> None:
        """The launchers' store cannot be reached, or only by this node, which hosts it."""
        if not self._unreachable:
            self._unreachable = True
            self.cut_off = cut_off
            await on_gone(None, CUT_OFF if cut_off else why)

    async def _reaches_nobody(self) -> bool:
        """Whether no launcher answers of those that are not gone yet, the hub's aside; False if none can be asked."""
        skipped = {self._node, self._hub, *self._gone}
        others = [place for node, place in enumerate(self._places) if place is not None and node not in skipped]
        step = max(1, len(others) // _ASKED)
        tasks = [asyncio.create_task(self._answers(place)) for place in others[self._node % step :: step][:_ASKED]]
        try:
            for answer in asyncio.as_completed(tasks):
                if await answer:
                    return False
            return bool(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answers(self, place: LinkPlace) -> bool:
        with contextlib.suppress(DistError, TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await (await self._open(place)).close()
                return True
        return False

    async def _watch_own(self, on_gone: OnGone) -> None:
        assert self._heard is not None
        await self._heard.wait_lost()
        hub_answers, nobody_does = await asyncio.gather(self._hub_answers(), self._reaches_nobody())
        if hub_answers:
            await on_gone(self._node, self._given_up)
        else:
            await self._out_of_touch(on_gone, self._silent, cut_off=nobody_does)

    async def _hub_answers(self) -> bool:
        with contextlib.suppress(DistError, TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await self.store.check([self._there])
                return True
        return False

    async def share_stopped(self, look: Callable[[], Sequence[int]], tell: Callable[[Sequence[int]], None]) -> None:
        """Let all launchers know which ranks of this node `look` finds stopped; `tell` hears of all. Until cancelled.

        They have met. A launcher that is gone is the business of `watch`.
        """
        of_nodes: dict[str, list[int]] = {}

        def hear(key: str, value: bytes) -> None:
            of_nodes[key] = json.loads(value) if value else []
            tell(sorted(chain.from_iterable(of_nodes.values())))

        with contextlib.suppress(DistError):
            async with self.store.watch(self._stopped) as watch, beside(self._say_stopped(look)):
                for key in await self.store.list_keys(self._stopped):
                    hear(key, await self.store.get(key))
                async for event in watch:
                    hear(event.key, event.value)

    async def _say_stopped(self, look: Callable[[], Sequence[int]]) -> None:
        with contextlib.suppress(DistError):
            while True:
                if (found := look()) != self._said_stopped:
                    await self.store.set(f"{self._stopped}{self._node}", json.dumps(found))
                    self._said_stopped = found
                await asyncio.sleep(_LOOK_S)

    async def say(self, key: str, word: Record) -> bool:
        """Write a word for all launchers, unless there is one; return whether there is one. Bounded; never raises."""
        with contextlib.suppress(DistError, TimeoutError):
            async with asyncio.timeout(_WORD_TIMEOUT_S):
                await self.store.compare_set(self._root + key, b"", word.to_json())
            return True
        return False

    async def leave(self, gone: Collection[int], *, last: bool) -> None:
        """Take leave of the others, if the one that hosts is there: it is the `last`, and waits, bounded, for those
        not `gone`."""
        if self._heard is None or not self._met or self._unreachable or self._hub in gone:
            return
        self._heard.abandon()
        with contextlib.suppress(DistError, TimeoutError):
            async with asyncio.timeout(BYE_TIMEOUT_S):
                await self.store.set(f"{self._bye}{self._node}", b"")
                if last:
                    living = (node for node in range(self._nnodes) if node not in gone)
                    await self.store.wait([f"{self._bye}{node}" for node in living], None)


class Presence:
    """One launcher's presence, for as long as it is the member `name` of the store's `job`, and that of the others."""

    def __init__(self, store: Store, job: str, name: str, grace_s: float = PRESENCE_GRACE_S) -> None:
        self._store = store
        self._view = PrefixStore(f"job/{job}", store)
        self._grace_s = grace_s
        self._lease: Lease | None = None
        self.job = job
        self.name = name

    async def show(self) -> None:
        """Let the others see this launcher from now on."""
        self._lease = await self._store.lease(self._grace_s, bound=True)
        self._lease.outlive_outages()
        await self._view.set(_HERE + self.name, b"", lease=self._lease)

    def end(self) -> None:
        """Be seen no more."""
        if self._lease is not None:
            self._lease.abandon()

    async def watch(self, on_killed: Callable[[str], None]) -> None:
        """Expel members that were killed, until cancelled; `on_killed` is called with the name of each before that.

        Raises DistError when the store cannot tell any more.
        """
        async with self._view.watch(_HERE) as watch:
            members, here = await asyncio.gather(self._names(_MEMBERS), self._names(_HERE))
            for name in members - here:
                await self._has_gone(name, on_killed)
            async for event in watch:
                if event.kind != "set":
                    await self._has_gone(event.key.removeprefix(_HERE), on_killed)

    async def _names(self, start: str) -> set[str]:
        return {key.removeprefix(start) for key in await self._view.list_keys(start)}

    async def _has_gone(self, name: str, on_killed: Callable[[str], None]) -> None:
        if name == self.name:  # connected again, too late, and no other was there to expel it
            await self.show()
            return
        on_killed(name)
        with contextlib.suppress(DistError):  # then its silence tells
            await self._store.expel(self.job, name)


async def first_done(*awaitables: Awaitable[Any]) -> list[asyncio.Future[Any]]:
    """Return the futures of all `awaitables` once one of them is done; those that are not are cancelled."""
    futures: list[asyncio.Future[Any]] = [asyncio.ensure_future(each) for each in awaitables]
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
    return futures


@asynccontextmanager
async def beside(*watches: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `watches` while inside and cancel them at its end; what one of them has raised is raised there."""
    tasks = [asyncio.create_task(watch) for watch in watches]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):  # a bug or a foreign record, not the cancellation
                raise outcome
