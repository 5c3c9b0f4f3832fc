"""init_process_group: from arguments and environment to an open world."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import weakref
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

from asyncdist.api.groups import warn_unused
from asyncdist.collectives.backend import Backend, parse_backend
from asyncdist.concurrency import trace as events
from asyncdist.concurrency.deadline import DEFAULT_TIMEOUT_S, INHERIT, Deadline, Timeout, timeout_seconds
from asyncdist.concurrency.integers import derive_group_id
from asyncdist.concurrency.tasks import uninterrupted
from asyncdist.concurrency.trace import warn_of_misspelt
from asyncdist.cuda.provider import chosen_device
from asyncdist.group import default_group as context
from asyncdist.group.core import GroupCore
from asyncdist.group.mismatch import parse_check
from asyncdist.group.process_group import ProcessGroup
from asyncdist.inspect.counts import count_if_wanted
from asyncdist.inspect.dumps import dump_on_sigterm
from asyncdist.plan.selection.selector import parse_overrides
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.store import PrefixStore, Store, TCPStore
from asyncdist.threads.core import open_there
from asyncdist.threads.stores import StoreOfLoop
from asyncdist.transport.addresses import PeerAddress, host_id, local_address
from asyncdist.transport.base_mesh import BaseMesh
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.mesh import Mesh, Resolve
from asyncdist.transport.shared_memory.segment import segments_available
from asyncdist.world.init_method import InitMethod, StoreSource, ask_handler, open_store, parse_init_method
from asyncdist.world.inspection import Inspection
from asyncdist.world.rendezvous import Rendezvous
from asyncdist.world.tuning_file import agreed_tuning, own_tuning
from asyncdist.world.world import World
from asyncdist_server.wire.auth import derive_key, load_token

MeshFactory: TypeAlias = Callable[[int, int, bytes, bytes, Resolve, World, TransportConfig], BaseMesh]
"""Rank, world size, world id, secret, address look-up, owner, configuration."""


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout = INHERIT,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
    *,
    allow_pickle: bool = False,
    progress: Literal["loop", "thread"] = "loop",
) -> GroupOpening:
    """Join a world: `async with init_process_group() as group` or `group = await init_process_group()`.

    `init_method` is `env://` (default; RANK, WORLD_SIZE and either ASYNCDIST_STORE or MASTER_ADDR and MASTER_PORT),
    `tcp://host:port` or `file:///path`, the latter two with `rank` and `world_size` as arguments or in the URL's query;
    or a URL of `register_rendezvous_handler`.
    `store=` takes an open store instead, and needs `rank` and `world_size`; it stays the caller's. Arguments override
    the environment. With `backend="mpi"`, none of these and no RANK in the environment there is no store: MPI knows the
    ranks that `mpirun` has started. `timeout` (seconds, timedelta, None for no limit; by default ASYNCDIST_TIMEOUT,
    else 1,800 s) bounds joining and is the default of every collective. `group_name` tells apart several worlds of one
    process.
    With `progress="thread"` transport and reductions run in the process's communication thread, so that peers do not
    wait while a coroutine here computes; everything else is the same. Not under virtual time (ValueError).
    `allow_pickle`: whether objects that cannot be sent otherwise may be pickled, which lets any rank run code on all
    others; it holds only if every rank gives it. With `device_id` (a number, `"cuda:1"`, a device of torch or cupy;
    `"cuda"` is LOCAL_RANK's) communicators for GPU arrays are opened at once, in the background, if all ranks give it;
    without, by the first operation on such arrays. `pg_options` has no effect (UserWarning).

    The group becomes the default group of the current context. Raises ValueError for missing or contradictory
    arguments, at the call; DistError, ConnectTimeoutError (naming the ranks that did not come) or DistStoreError when
    the world cannot be formed. Cancelling leaves nothing open.
    """
    warn_of_misspelt(os.environ)
    warn_unused(pg_options, "init_process_group")
    timeout_s = timeout_seconds(timeout, _timeout_from_environ(os.environ))
    names = parse_backend(backend)
    if progress not in ("loop", "thread"):
        raise ValueError(f'progress must be "loop" or "thread", not {progress!r}')
    if store is not None and not isinstance(store, Store):
        raise TypeError(f"store must be a Store that is open, not {type(store).__name__}")
    if names.cpu == Backend.MPI and store is None and init_method is None and not os.environ.get("RANK"):
        method = InitMethod(rank, world_size, by_mpi=True)
    else:
        method = parse_init_method(init_method, rank, world_size, has_store=store is not None)
    device = chosen_device(device_id)
    return GroupOpening(method, store, timeout_s, group_name or "default", backend, progress, allow_pickle, device)


def _timeout_from_environ(environ: Mapping[str, str]) -> float | None:
    text = environ.get("ASYNCDIST_TIMEOUT")
    if not text:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds) or seconds <= 0:
        raise ValueError(
            f"environment variable ASYNCDIST_TIMEOUT={text!r} is not a number of seconds above 0, or inf for no limit"
        )
    return None if math.isinf(seconds) else seconds


@dataclass(eq=False, repr=False)
class GroupOpening:
    """A world about to be joined: await it, or enter it with `async with`, once."""

    _method: InitMethod
    _store: Store | None
    _timeout_s: float | None
    _name: str
    _backend: str | None
    _progress: str
    _allow_pickle: bool
    _device: int | None
    _group: ProcessGroup | None = None

    def __await__(self) -> Generator[Any, None, ProcessGroup]:
        return self._open().__await__()

    async def __aenter__(self) -> ProcessGroup:
        self._group = await self._open()
        return self._group

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._group is not None
        await self._group.__aexit__(kind, error, traceback)

    if not TYPE_CHECKING:  # a type checker says so by itself

        def __enter__(self) -> NoReturn:
            raise TypeError("init_process_group() is entered with `async with`, not with `with`")

        def __exit__(self, *exc_info: object) -> NoReturn:
            raise AssertionError("it cannot have been entered")

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"init_process_group() was not awaited: only the group that comes of it has a {name!r}"
            )

    async def _open(self) -> ProcessGroup:
        name = self._name
        current = context.current_world()
        if current is not None and current.name == name and not current.world.forked:
            raise ValueError(f"group {name!r} is initialized already: destroy it first, or give another group_name=")
        events.configure_logging()
        dump_on_sigterm()
        count_if_wanted(os.environ)
        if self._progress == "thread":
            if self._store is not None:
                self._store = StoreOfLoop(self._store, asyncio.get_running_loop())
            return await open_there(self._open_here)
        return await self._open_here()

    async def _open_here(self) -> ProcessGroup:
        deadline = Deadline.after(self._timeout_s, asyncio.get_running_loop().time())
        if self._method.by_mpi:
            from asyncdist.mpi.world import join_by_mpi  # for programs that ask for it only: it starts MPI

            check = parse_check(os.environ.get("ASYNCDIST_CHECK", ""))
            world = await join_by_mpi(self._method, self._name, deadline, allow_pickle=self._allow_pickle, check=check)
            return await _open_group(world, self._name, self._timeout_s, self._backend, self._device)
        make_mesh = self._mesh_factory()
        method = self._method
        if method.url:
            method, source = await ask_handler(method, deadline)
        elif self._store is not None:
            source = StoreSource(self._store, owned=False)
        else:
            source = await open_store(method, deadline)
        try:
            return await open_world(
                source,
                method,
                self._name,
                self._timeout_s,
                deadline,
                backend=self._backend,
                allow_pickle=self._allow_pickle,
                device=self._device,
                make_mesh=make_mesh,
            )
        except Exception:
            await uninterrupted(source.close_after_failure())
            raise
        except BaseException:
            await uninterrupted(source.close())
            raise

    def _mesh_factory(self) -> MeshFactory:
        """What carries the messages between ranks: MPI where it is the backend of host arrays.

        MPI starts here, as its start waits for all ranks: nobody may wait for this one before.
        """
        if parse_backend(self._backend).cpu != Backend.MPI:
            return Mesh
        from asyncdist.mpi.library import load
        from asyncdist.mpi.world import mesh_of_world

        load()
        return mesh_of_world


async def open_world(
    source: StoreSource,
    method: InitMethod,
    name: str,
    timeout_s: float | None,
    deadline: Deadline,
    *,
    backend: str | None = None,
    allow_pickle: bool = False,
    device: int | None = None,
    environ: Mapping[str, str] = os.environ,
    make_mesh: MeshFactory = Mesh,
    tuning: Tuning | None = None,
) -> ProcessGroup:
    """Join through an open store and return the world's group, the context's default from now on.

    `make_mesh` is how simulations come by another transport; `tuning` is what rank 0 publishes, else what it finds on
    its host. Cancelling leaves nothing open.
    """
    world = await _join(source, method, name, deadline, environ, make_mesh, allow_pickle, tuning)
    return await _open_group(world, name, timeout_s, backend, device)


async def _open_group(
    world: World, name: str, timeout_s: float | None, backend: str | None, device: int | None
) -> ProcessGroup:
    """Return the group of all ranks, the context's default from now on."""
    ranks = tuple(range(world.world_size))
    named = parse_backend(backend)
    try:
        core = GroupCore(world, derive_group_id(world.world_id), ranks, timeout_s, name, named, is_world=True)
        core.bind_device(device)
    except BaseException:  # a backend of the user's, or none for this device
        await uninterrupted(world.resign())
        raise
    group = ProcessGroup(core)
    context.register_world(group)
    return group


async def _join(
    source: StoreSource,
    method: InitMethod,
    name: str,
    deadline: Deadline,
    environ: Mapping[str, str],
    make_mesh: MeshFactory,
    allow_pickle: bool,
    tuning: Tuning | None,
) -> World:
    loop = asyncio.get_running_loop()
    rendezvous = Rendezvous(source.store, method.rank, method.world_size, name)
    _watch_restarts(source.store, rendezvous)
    hosted = source.store if method.may_host and method.rank and isinstance(source.store, TCPStore) else None
    rendezvous.on_hosted = None if hosted is None else lambda: _ends_with_rank_0(hosted)
    overrides = parse_overrides(environ.get("ASYNCDIST_ALGO", ""))
    check = parse_check(environ.get("ASYNCDIST_CHECK", ""))
    reachable = await local_address(method.host or None, method.port, environ)
    config = TransportConfig.from_environ(environ, reachable.interfaces)
    rendezvous.connections = config.interfaces, config.streams
    options = {"check": check, "rank 0 hosts": source.server is not None}
    if method.rank == 0:
        own = tuning or own_tuning(
            environ, method.world_size, one_host=reachable.loopback, transport=config.transport, overrides=overrides
        )
        options["tuning"] = own.to_terms()
        options["lanes"] = config.shares_memory and getattr(make_mesh, "shares_memory", False) and segments_available()
    host = host_id(config.socket_dir)
    below = _underlying(source.store)
    token = load_token(environ) or (below.dialer.token if isinstance(below, TCPStore) else None)
    inspection = Inspection.open(name, method.rank, method.world_size, token, reachable, config, environ)
    rendezvous.endpoint = [] if inspection is None else inspection.address
    worlds: list[World] = []

    async def listen(world_id: bytes) -> PeerAddress:
        """In a world of that id, which takes the place of the one that an attempt before did not form."""
        for world in worlds:
            world.mesh.abort()
        world = World(loop, method.rank, method.world_size, source, rendezvous, world_id)
        secret = derive_key(token, "peer", world_id)
        mesh = make_mesh(method.rank, method.world_size, world_id, secret, rendezvous.addresses, world, config)
        world.host, world.mesh, worlds[:] = host, mesh, [world]
        mesh.hear_out = world.hear_out
        mesh.absences = rendezvous.presence.absences
        return await mesh.listen(reachable.ips, reachable.advertised, accept=False)

    try:
        met = await rendezvous.join(host, reachable.loopback, options, listen, deadline, allow_pickle=allow_pickle)
        (world,) = worlds
        try:
            world.formed(met)
            world.tuning = agreed_tuning(method.rank, met.options.get("tuning"), overrides)
            if met.placement is not None and tuning is None:
                per_host, hosts = met.placement
                world.tuning = replace(world.tuning, ranks_per_host=per_host, hosts=tuple(hosts))
            await world.hear_launcher(environ)
        except BaseException:
            await uninterrupted(rendezvous.resign())
            raise
    except BaseException:
        if inspection is not None:
            inspection.close()
        for world in worlds:
            world.mesh.abort()
        raise
    world.inspection = inspection
    world.mesh.crowded = world.tuning.crowded
    world.mesh.accept()
    world.pass_on_addresses()
    if world.rank_0_hosts and hosted is not None:
        _ends_with_rank_0(hosted)
        hosted.dialer.on_end = world.store_ended
    return world


def _ends_with_rank_0(store: TCPStore) -> None:
    store.dialer.ends_with = "rank 0"


def _watch_restarts(store: Store, rendezvous: Rendezvous) -> None:
    """Have the rendezvous told when the daemon comes back without its data."""
    store = _underlying(store)
    if isinstance(store, TCPStore):
        hook = store.on_incarnation_change
        if not isinstance(hook, _Restarts):
            hook = store.on_incarnation_change = _Restarts(hook)
        hook.watching[rendezvous] = asyncio.get_running_loop()


def _underlying(store: Store) -> Store:
    while isinstance(store, PrefixStore | StoreOfLoop):
        store = store.underlying_store
    return store


class _Restarts:
    """What a store calls then: one for all worlds that meet through it, which may be many, one after the other."""

    def __init__(self, theirs: Callable[[], object] | None) -> None:
        self.watching: weakref.WeakKeyDictionary[Rendezvous, asyncio.AbstractEventLoop] = weakref.WeakKeyDictionary()
        """With the loop that each is told on: the store's own, or the communication thread's."""
        self._theirs = theirs

    def __call__(self) -> None:
        for rendezvous, loop in list(self.watching.items()):
            if loop is asyncio.get_running_loop():
                rendezvous.store_restarted()
            else:
                with contextlib.suppress(RuntimeError):  # it is closed
                    loop.call_soon_threadsafe(rendezvous.store_restarted)
        if self._theirs is not None:
            self._theirs()
