"""Init methods: from what the caller and the environment say to a store, a rank and a world size.

| given | store |
| --- | --- |
| `env://` (default) with ASYNCDIST_STORE | the daemon there; nobody hosts |
| `env://` | rank 0 hosts at MASTER_ADDR:MASTER_PORT, or joins the asyncdist store that answers there |
| `tcp://host:port` | likewise at host:port |
| `file:///path` | a FileStore |
| `store=` | that one; it stays the caller's |
| `scheme://...` of `register_rendezvous_handler` | the one that the handler returns |
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Protocol
from urllib.parse import parse_qsl, urlsplit

from asyncdist.concurrency import trace as events
from asyncdist.concurrency.deadline import Deadline
from asyncdist.concurrency.integers import as_int
from asyncdist.concurrency.tasks import telling, uninterrupted
from asyncdist.errors import ConnectTimeoutError, DistError, DistNetworkError, DistStoreError
from asyncdist.launch.scheduler import torchrun_variables
from asyncdist.store import FileStore, Store, TCPStore, TLSConfig
from asyncdist.store.credentials import load_tls
from asyncdist.store.tcp_store import host_store
from asyncdist_server.wire.auth import load_token

if TYPE_CHECKING:
    from asyncdist_server import ThreadedServer

FAILURE_LINGER_S: Final = 3.0
"""How long the rank that hosts the store keeps it for those who still ask why there will be no world: one more round
trip for a rank that has connected, which a busy machine stretches."""
_LINGER_POLL_S: Final = 0.01

TAKEN_PORT_TIMEOUT_S: Final = 15.0
"""How long rank 0 tries a port that somebody else listens on: a store answers within milliseconds, a busy one within
seconds. Others, who may wait for rank 0 to come, try for as long as the world takes."""


class RendezvousHandler(Protocol):
    """What `register_rendezvous_handler` takes."""

    def __call__(
        self, url: str, rank: int, world_size: int, timeout: float | None
    ) -> Awaitable[tuple[Store, int, int]]:
        """Return the store where the ranks of `url` meet, open, with this rank and the world's size.

        `rank` and `world_size` are those of `init_process_group`, -1 if not given; `timeout` is in seconds. The world
        closes the store.
        """


_BUILT_IN: Final = ("env", "tcp", "file")

_handlers: Final[dict[str, RendezvousHandler]] = {}


def register_rendezvous_handler(scheme: str, handler: RendezvousHandler) -> None:
    """Let `init_process_group("scheme://...")` ask `handler` where to meet:

        async def meet(url, rank, world_size, timeout):
            return await dist.TCPStore.connect(*address_in(url), timeout=timeout), rank, world_size

    Raises ValueError for a scheme that is no name, RuntimeError for one that has a handler, TypeError for a handler
    that cannot be called.
    """
    if not isinstance(scheme, str) or urlsplit(f"{scheme}://").scheme != scheme or not scheme:
        raise ValueError(f"scheme must be the beginning of URLs, in lower case, not {scheme!r}")
    if not callable(handler):
        raise TypeError(f"handler must be an async function, not {type(handler).__name__}")
    if scheme in _BUILT_IN or scheme in _handlers:
        raise RuntimeError(f"{scheme}:// has a rendezvous handler already")
    _handlers[scheme] = handler


@dataclass(frozen=True, slots=True)
class InitMethod:
    """A resolved init method. One of `path`, `host`, `by_mpi`, `url` is set, or none with an explicit store."""

    rank: int
    world_size: int
    host: str = ""
    port: int = 0
    path: str = ""
    may_host: bool = False
    """Whether rank 0 hosts the store when none answers."""
    namespace: str = ""
    by_mpi: bool = False
    """Whether MPI knows all ranks, and no store is needed; `rank` and `world_size` are -1 unless they were given."""
    url: str = ""
    """For the handler of its scheme; `rank` and `world_size` are -1 unless they were given."""


class Hosting:
    """The daemon that this process hosts at an address, if it does: the last of its worlds there to close stops it."""

    _known: ClassVar[dict[tuple[int, str, int], Hosting]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, key: tuple[int, str, int]) -> None:
        self._key = key
        self.users = 0
        self.server: ThreadedServer | None = None

    @classmethod
    def at(cls, host: str, port: int) -> Hosting:
        """Of one more world at that address; each calls `release` once."""
        key = os.getpid(), host, port
        with cls._lock:
            hosting = cls._known.setdefault(key, cls(key)) if port else cls(key)
            hosting.users += 1
        return hosting

    async def release(self) -> None:
        """Stop the daemon, if nobody of this process needs it any more."""
        with self._lock:
            self.users -= 1
            last = not self.users
            if last and self._known.get(self._key) is self:
                del self._known[self._key]
        if last and self.server is not None:
            await asyncio.to_thread(self.server.close)


@dataclass(slots=True)
class StoreSource:
    """A store, and what has to be closed with the world."""

    store: Store
    owned: bool
    hosting: Hosting | None = None

    @property
    def server(self) -> ThreadedServer | None:
        """The daemon of this process that serves the store, if one does."""
        return None if self.hosting is None else self.hosting.server

    async def close(self) -> None:
        """Close what was opened here, also when cancelled; an explicit `store=` stays open.

        A store that is not connected is not waited for: what was to be said there had its time.
        """
        try:
            if self.owned:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if self.store.is_connected else 0):
                        await self.store.close()
        finally:
            await self._stop_hosting()

    async def close_after_failure(self) -> None:
        """Close, but let those who are still connected to our server hear first why there will be no world."""
        try:
            if self.owned:
                await self.store.close()
            if self.server is not None and self.hosting is not None and self.hosting.users == 1:
                await _linger(self.server)
        finally:
            await self._stop_hosting()

    async def _stop_hosting(self) -> None:
        if self.hosting is not None:
            await uninterrupted(self.hosting.release())


async def _linger(server: ThreadedServer) -> None:
    """Wait until nobody is connected, at most FAILURE_LINGER_S."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FAILURE_LINGER_S):
            while server.connection_count:  # noqa: ASYNC110 - it changes in the server's thread
                await asyncio.sleep(_LINGER_POLL_S)


def parse_init_method(
    init_method: str | None,
    rank: int,
    world_size: int,
    *,
    has_store: bool = False,
    environ: MutableMapping[str, str] = os.environ,
) -> InitMethod:
    """Work out where to meet; arguments (rank, world_size >= 0) override the environment.

    Where neither arguments nor RANK tell, a scheduler may (`asyncdist.launch.scheduler`): torchrun's variables are then
    set in `environ` as the scheduler's say.

    Raises ValueError for anything missing, contradictory or malformed, naming the variable or parameter, and TypeError
    for ranks and sizes that are no ints, such as texts from the environment.
    """
    rank, world_size = as_int(rank, "rank must be an int"), as_int(world_size, "world_size must be an int")
    if not isinstance(init_method, str | None):
        raise TypeError(f"init_method must be a str, not {type(init_method).__name__}")
    if has_store:
        if init_method is not None:
            raise ValueError("give either store= or init_method=, not both")
        if rank < 0 or world_size <= 0:
            raise ValueError("store= needs rank= and world_size= as well")
        return _checked(InitMethod(rank, world_size))
    parts = urlsplit(init_method or "env://")
    if parts.scheme in _handlers:
        return InitMethod(rank, world_size, url=str(init_method))
    if parts.scheme not in _BUILT_IN:
        raise ValueError(
            f"no rendezvous for {init_method!r}: use env://, tcp://host:port or file:///path, or a scheme of your own "
            "(register_rendezvous_handler)"
        )
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    query.pop("use_libuv", None)  # torch's: which of its servers, here there is one
    rank, world_size = _from_query(query, rank, world_size, init_method)
    if parts.scheme == "env" and rank < 0 and world_size < 0:
        environ.update(torchrun_variables(environ))  # also for what else asks for LOCAL_RANK, say
    namespace = environ.get("ASYNCDIST_JOB_ID", "")
    if parts.scheme == "env":
        rank = _from_environ(environ, "RANK", rank)
        world_size = _from_environ(environ, "WORLD_SIZE", world_size)
        host, port, may_host = _store_from_environ(environ)
        return _checked(InitMethod(rank, world_size, host, port, may_host=may_host, namespace=namespace))
    if rank < 0 or world_size < 0:
        missing = "rank" if rank < 0 else "world_size"
        raise ValueError(f"{init_method}: {missing} is missing; give it as an argument or as ?{missing}= in the URL")
    if parts.scheme == "tcp":
        host, port = _host_port(f"{parts.netloc}", f"init_method {init_method}")
        return _checked(InitMethod(rank, world_size, host, port, may_host=True, namespace=namespace))
    if parts.netloc or not parts.path:
        raise ValueError(f"{init_method}: use file:///absolute/path")
    return _checked(InitMethod(rank, world_size, path=parts.path))


async def ask_handler(method: InitMethod, deadline: Deadline) -> tuple[InitMethod, StoreSource]:
    """Ask the handler of `method.url`. Raises what it raises; TypeError and ValueError where its answer is none."""
    handler = _handlers[urlsplit(method.url).scheme]
    timeout_s = _remaining(deadline)
    try:
        async with asyncio.timeout(timeout_s) as limit:
            answer = await handler(method.url, method.rank, method.world_size, timeout_s)
    except TimeoutError:
        if limit.expired():
            raise ConnectTimeoutError(f"the handler of {method.url} returned no store within {timeout_s:g} s") from None
        raise
    match answer:
        case (Store() as store, int(rank), int(world_size)):
            source = StoreSource(store, owned=True)
            try:
                return _checked(InitMethod(rank, world_size)), source
            except ValueError:
                await uninterrupted(source.close())
                raise
    raise TypeError(f"the handler of {method.url} must return (store, rank, world_size), not {answer!r}")


async def open_store(method: InitMethod, deadline: Deadline, environ: Mapping[str, str] = os.environ) -> StoreSource:
    """Open the store of `method`, hosting it where that falls to this rank.

    Raises DistStoreError or DistNetworkError saying what is wrong at which address. Cancelling leaves nothing open.
    """
    if method.path:
        return StoreSource(FileStore(method.path, timeout=_remaining(deadline)), owned=True)
    token = load_token(environ)
    tls = load_tls(environ)
    hosting = None
    port = method.port
    connect_by = deadline
    if method.may_host and method.rank == 0:
        hosting = Hosting.at(method.host, method.port)
        try:
            server = await _host(method, token, tls)
        except BaseException:
            await uninterrupted(hosting.release())
            raise
        timeout_s = _remaining(deadline)
        if server is not None:
            hosting.server = server
            port = server.port
        elif timeout_s is None or timeout_s > TAKEN_PORT_TIMEOUT_S:
            connect_by = Deadline.after(TAKEN_PORT_TIMEOUT_S, asyncio.get_running_loop().time())
    try:
        store = TCPStore(method.host, port, token=token, tls=tls, namespace=method.namespace)
        store.dialer.own_user_only = method.may_host  # rank 0 hosts it with this user's token: no other may pass for it
        with telling(lambda: _tell_where(method, connect_by)):
            await store.open_by(connect_by)
        store.set_timeout(_remaining(deadline))
    except BaseException as error:
        hosts = hosting is not None and hosting.server is not None
        if hosting is not None:
            await uninterrupted(hosting.release())
        if isinstance(error, DistNetworkError | DistStoreError):
            said = _unreachable(method, error, environ, hosting=hosts)
            raise type(error)(said) from error.__cause__
        raise
    return StoreSource(store, owned=True, hosting=hosting)


async def _tell_where(method: InitMethod, deadline: Deadline) -> None:
    limit = "" if deadline.given_s is None else f", for up to {deadline.given_s:g} s"
    whose = ", which rank 0 hosts" if method.may_host and method.rank else ""
    events.warn("rank %d: waiting for the store at %s:%d%s%s", method.rank, method.host, method.port, whose, limit)


def _unreachable(method: InitMethod, error: DistError, environ: Mapping[str, str], *, hosting: bool) -> str:
    """What to say where the store cannot be joined: it is another thing to each rank."""
    if not method.may_host or hosting:
        return f"rank {method.rank}: {error}"
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environ.get("MASTER_PORT") == str(method.port):
        return (
            f"rank {method.rank}: {error}. torchrun has a store of torch's own at MASTER_PORT: start the script with "
            '`asyncdist run`, or meet at another port, by init_method="tcp://host:port" or ASYNCDIST_STORE'
        )
    if method.rank == 0:
        return (
            f"rank 0 cannot host the store: {method.host}:{method.port} is in use, and what answers there is not "
            f"an asyncdist store we may join ({error}). Choose another port: MASTER_PORT, or that of init_method."
        )
    if isinstance(error, ConnectTimeoutError):
        return f"rank {method.rank}: {error}. Rank 0 hosts the store: has it started, and with this address and port?"
    return f"rank {method.rank}: {error}"


async def _host(method: InitMethod, token: str | None, tls: TLSConfig | None) -> ThreadedServer | None:
    """Start the store in a thread of its own; None if the port is taken."""
    try:
        server = await host_store(method.host, method.port, token, tls, may_join=True)
    except DistStoreError as error:
        raise DistStoreError(f"rank 0 {error}") from error.__cause__
    if server is None:
        events.info("%s:%d is in use: rank 0 joins the store there", method.host, method.port)
    else:
        events.info("rank 0 hosts the store at %s:%d", method.host, server.port)
    return server


def _remaining(deadline: Deadline) -> float | None:
    return deadline.remaining_s(asyncio.get_running_loop().time())


def _checked(method: InitMethod) -> InitMethod:
    if method.world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {method.world_size}")
    if not 0 <= method.rank < method.world_size:
        raise ValueError(f"rank {method.rank} is not in a world of {method.world_size}: ranks go from 0 on")
    return method


def _from_query(query: dict[str, str], rank: int, world_size: int, init_method: str | None) -> tuple[int, int]:
    given = {"rank": rank, "world_size": world_size}
    for name, text in query.items():
        if name not in given:
            raise ValueError(f"{init_method}: unknown parameter {name!r}; rank and world_size are known")
        if given[name] >= 0:
            raise ValueError(f"{init_method}: {name} is given in the URL and as an argument")
        given[name] = _integer(text, f"{name} in {init_method}")
    return given["rank"], given["world_size"]


def _from_environ(environ: Mapping[str, str], name: str, argument: int) -> int:
    if argument >= 0:
        return argument
    if not environ.get(name):
        raise ValueError(
            f"env:// rendezvous: environment variable {name} expected, but not set "
            "(`asyncdist run` sets it; or pass rank= and world_size=)"
        )
    return _integer(environ[name], f"environment variable {name}")


def _store_from_environ(environ: Mapping[str, str]) -> tuple[str, int, bool]:
    if environ.get("ASYNCDIST_STORE"):
        return *_host_port(environ["ASYNCDIST_STORE"], "environment variable ASYNCDIST_STORE"), False
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise ValueError(
                f"env:// rendezvous: environment variable {name} expected, but not set "
                "(or set ASYNCDIST_STORE=host:port of a running asyncdist-server)"
            )
    port = _integer(environ["MASTER_PORT"], "environment variable MASTER_PORT")
    if not 0 <= port <= 65535:
        raise ValueError(f"environment variable MASTER_PORT={port} is not a port")
    return environ["MASTER_ADDR"].strip("[]"), port, True


def _host_port(text: str, name: str) -> tuple[str, int]:
    host, colon, port_text = text.rpartition(":")
    if not colon or not host:
        raise ValueError(f"{name}: {text!r} is not host:port")
    port = _integer(port_text, f"{name}: the port")
    if not 0 <= port <= 65535:
        raise ValueError(f"{name}: port {port} is not between 0 and 65535")
    return host.strip("[]"), port


def _integer(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is not an integer: {text!r}") from None
