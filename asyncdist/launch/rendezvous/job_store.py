"""The job's store: hosted by this launcher, or answering already; and how long it has been away.

The rule is the address itself, never a comparison of host names: a launcher that may host tries to bind. Bound: it
hosts. Taken: what is there must be an asyncdist store, and is used. Not an address of this machine: the store is
elsewhere, and is waited for.

A job goes on without its store, until the store must be asked or a limit has passed (`Outage`).
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from asyncdist.errors import DistError, DistStoreError, LaunchError, StoreTimeoutError
from asyncdist.launch.config import Endpoint, LaunchConfig
from asyncdist_server.serving.sockets import is_loopback
from asyncdist_server.wire.auth import AuthenticationError, Refusal, derive_token, new_token, store_context

if TYPE_CHECKING:
    from asyncdist.store.base import Store
    from asyncdist.store.credentials import TLSConfig
    from asyncdist.store.tcp_store import TCPStore
    from asyncdist_server import ThreadedServer

__all__ = ["LAUNCHERS_NAMESPACE", "Outage", "StorePlace", "find_or_host", "open_store", "with_run_token"]

LAUNCHERS_NAMESPACE: Final = "asyncdist-launch"
"""Where launchers keep their keys: no job's, as workers have their job id for a namespace."""

_SALT: Final = "salt"
_SALT_TIMEOUT_S: Final = 30.0
"""The launcher that hosts writes the salt as soon as it has connected to its own store."""

_PROBE_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 0.2
"""Between two looks for a store whose launcher has not started yet."""

_SILENT_S: Final = 3.0
"""Launchers of one job start within a second or two. One that waits longer for the store says what for."""


LOOK_S: Final = 2.0
"""Between two looks at the store, and how long one may take: clients stop connecting anew unless they are asked."""

_TOLD_AFTER_S: Final = 5.0
"""A daemon is started again within this. The launcher tells of what takes longer."""


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where the store is, what opens it, and the server if it is ours to close.

    `token` is the launchers', `run_token` that of the workers. These differ where a launcher hosts the store and nodes
    share a token: its launcher draws a `salt` for each run, which others have yet to read ("").
    """

    endpoint: Endpoint
    token: str | None
    run_token: str | None
    hosted: ThreadedServer | None
    tls: TLSConfig | None = None
    salt: str | None = None


def launchers_token(config: LaunchConfig) -> str | None:
    """What the launchers of the job prove to each other.

    With a daemon the daemon's own token, for it accepts no other. Else derived from the shared token, or fresh random
    for a single node. Several nodes without a shared token have their user's, which only works on loopback.
    """
    if config.store is not None:
        return config.token
    if config.token is not None:
        return derive_token(config.token, "launch", (config.job_id or "").encode())
    return new_token() if config.nnodes == 1 else None


def run_token(token: str, salt: str) -> str:
    """The key of one run, for its workers: it opens no other run, whatever the job id of that."""
    return derive_token(token, "run", salt.encode())


async def find_or_host(config: LaunchConfig, say: Callable[[str], None] = lambda text: None) -> StorePlace:
    """Return the job's store, hosting it here if this node should. `say` tells people when that takes long.

    Raises LaunchError: nothing answers within the join time-out, something else holds the port, or an address other
    machines can reach would be served without a token.
    """
    token = launchers_token(config)
    if config.store is not None:
        found = await _until_it_answers(config.store, [token], config.tls, config.join_timeout_s, say)
        return StorePlace(config.store, found, found, None, config.tls)
    endpoint = config.endpoint or Endpoint("127.0.0.1", 0)
    tls = config.tls
    if tls is not None and _only_here(await _bind_address(endpoint, config.nnodes)):
        tls = None  # the launchers' own store, and what is said never leaves the machine
    if config.node_rank in (None, 0) or config.nnodes == 1:
        salt = None if config.token is None else new_token()
        workers = None if config.token is None or salt is None else run_token(config.token, salt)
        hosted = await _host_if_ours(endpoint, token, tls, config.nnodes, workers)
        if hosted is not None:
            workers = hosted.token if salt is None else workers
            return StorePlace(Endpoint(endpoint.host, hosted.port), hosted.token, workers, hosted, tls, salt)
    # Another launcher of this job serves with the launchers' key, a daemon that was there before with its own.
    tokens = [token, config.token]
    found = await _until_it_answers(endpoint, tokens, tls, config.join_timeout_s, say, own_user_only=True)
    return StorePlace(endpoint, found, found, None, tls, None if found == config.token else "")


async def _host_if_ours(
    endpoint: Endpoint, token: str | None, tls: TLSConfig | None, nnodes: int, workers_token: str | None = None
) -> ThreadedServer | None:
    """Host at this address, for clients with either token.

    None if it is another machine's, or a store answers there already.
    """
    from asyncdist.store.tcp_store import serve_off_loop

    address = await _bind_address(endpoint, nnodes)
    if token is None and not _only_here(address):
        if not _is_local(address):
            return None
        raise LaunchError(
            f"the store would listen on {endpoint}, which other machines can reach, so a token is needed: "
            "set ASYNCDIST_TOKEN or ASYNCDIST_TOKEN_FILE on every node (`asyncdist token` makes one)"
        )
    try:
        files = (None, None) if tls is None else tls.server_files()
        return await serve_off_loop(address, endpoint.port, token, files, workers_token)
    except ValueError as error:
        raise LaunchError(f"cannot host the store on {endpoint}: {error}") from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        if error.errno != errno.EADDRINUSE:
            raise LaunchError(f"cannot host the store on {endpoint}: {error.strerror or error}") from error
    if await _is_store(endpoint):
        return None
    raise LaunchError(
        f"cannot host the store on {endpoint}: the port is in use by something that is not an asyncdist store; "
        "choose another port"
    )


async def probe_store(
    endpoint: Endpoint, token: str | None, tls: TLSConfig | None = None, *, own_user_only: bool = False
) -> str | None:
    """Prove `token` to the store that answers there, and have it prove its own; return the one that it has.

    Without a token, one on loopback is to have this user's if it asks for one; with `own_user_only` it has to ask.

    Raises AuthenticationError: it refuses the token, or is no asyncdist store (`Refusal.NOT_A_STORE`);
    StoreRefusedError: it is not the one that `tls` means; OSError (TimeoutError included): nothing answers.
    """
    from asyncdist.store.store_connection import open_stream, prove

    async with asyncio.timeout(_PROBE_TIMEOUT_S):
        stream = await open_stream(endpoint.host, endpoint.port, tls)
        try:
            handshake = await prove(stream, token, store_context(LAUNCHERS_NAMESPACE), own_user_only=own_user_only)
            return handshake.token
        except ConnectionAbortedError as error:
            raise AuthenticationError(Refusal.NOT_A_STORE, detail="it closes the connection") from error
        finally:
            stream.close()


async def _is_store(endpoint: Endpoint) -> bool:
    """Whether what answers there is an asyncdist store, whatever its token."""
    try:
        await probe_store(endpoint, None)
    except AuthenticationError as error:
        return error.refusal is not Refusal.NOT_A_STORE
    except OSError:  # it holds the port and says nothing, or breaks off
        return False
    return True


async def _until_it_answers(
    endpoint: Endpoint,
    tokens: Sequence[str | None],
    tls: TLSConfig | None,
    timeout_s: float,
    say: Callable[[str], None],
    *,
    own_user_only: bool = False,
) -> str | None:
    """Wait for a store there and return the first of `tokens` it takes."""
    last: OSError | None = None

    def problem() -> str:
        return "nothing listens there" if isinstance(last, ConnectionRefusedError) else str(last or "no answer")

    def say_why() -> None:
        say(f"no store answers at {endpoint} yet ({problem()}); trying for up to {timeout_s:g} s")

    reminder = asyncio.get_running_loop().call_later(_SILENT_S, say_why)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await _fitting_token(endpoint, tokens, tls, own_user_only)
                except OSError as error:
                    last = error
                    await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise LaunchError(
            f"no store answers at {endpoint} after {timeout_s:g} s ({problem()}); is the launcher of node 0, or the "
            "daemon, running there?"
        ) from last
    finally:
        reminder.cancel()


async def _fitting_token(
    endpoint: Endpoint, tokens: Sequence[str | None], tls: TLSConfig | None, own_user_only: bool
) -> str | None:
    refused: AuthenticationError | None = None
    for token in dict.fromkeys(tokens):
        try:
            return await probe_store(endpoint, token, tls, own_user_only=own_user_only)
        except DistStoreError as error:
            raise LaunchError(f"the store at {endpoint} cannot be used: {error}") from error
        except AuthenticationError as error:
            refused = error
            if error.refusal is Refusal.NOT_A_STORE:
                raise LaunchError(f"what answers at {endpoint} is not an asyncdist store") from error
    raise LaunchError(f"the store at {endpoint} refuses this launcher: {refused}") from refused


async def _bind_address(endpoint: Endpoint, nnodes: int) -> str:
    """The address to bind for a host that may be a name, or several with commas; empty for all of this machine."""
    hosts = endpoint.host.split(",")
    if len(hosts) > 1:
        addresses = [await _bind_address(Endpoint(host, endpoint.port), nnodes) for host in hosts]
        return "" if any(map(_is_local, addresses)) else addresses[0]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(endpoint.host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(f"cannot resolve {endpoint.host!r}: {error}") from error
    # asyncio clients try every address of a name; the server takes the first, IPv4 where there is the choice.
    addresses = sorted((str(entry[4][0]) for entry in found), key=lambda address: ":" in address)
    address = addresses[0]
    is_name = endpoint.host not in (*addresses, "localhost")
    if nnodes > 1 and is_name and is_loopback(address):
        # Debian gives a machine's own name 127.0.1.1 in /etc/hosts, others ::1; the other nodes resolve it to a real
        # address, of either family.
        return ""
    return address


def _only_here(address: str) -> bool:
    """Whether other machines cannot reach what listens on the address."""
    return address != "" and is_loopback(address)


def _is_local(address: str) -> bool:
    """Whether this machine has the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


async def open_store(place: StorePlace, timeout_s: float) -> TCPStore:
    """Return a connected client of the job's store, for the launchers' own keys."""
    from asyncdist.store.tcp_store import TCPStore

    host, port = place.endpoint.host, place.endpoint.port
    return await TCPStore.connect(
        host, port, token=place.token, tls=place.tls, namespace=LAUNCHERS_NAMESPACE, timeout=timeout_s
    )


async def with_run_token(place: StorePlace, store: Store, config: LaunchConfig) -> StorePlace:
    """Tell the other launchers the salt of this run, or read it; return `place` with the workers' token.

    Raises LaunchError if the launcher that hosts the store does not tell it.
    """
    if place.salt is None or config.token is None:
        return place
    if place.hosted is not None:
        await store.set(_SALT, place.salt)
        return place
    try:
        salt = (await store.get(_SALT, timeout=_SALT_TIMEOUT_S)).decode()
    except StoreTimeoutError:
        raise LaunchError(f"the launcher that hosts the store at {place.endpoint} is of another version") from None
    return replace(place, run_token=run_token(config.token, salt), salt=salt)


class Outage:
    """Whether the store answers. `limit_s` is how long it may be away, `say` tells people."""

    def __init__(self, where: object, limit_s: float, say: Callable[[str], None], look_s: float | None = None) -> None:
        self._where = where
        self._limit_s = limit_s
        self._say = say
        self._look_s = LOOK_S if look_s is None else look_s
        self._since_s: float | None = None
        self._told = False
        self.restarts = 0
        """How often the store has come back without its data."""
        self._answers = asyncio.Event()
        self._answers.set()

    def on_data_lost(self) -> None:
        """The store has come back without its data."""
        self.restarts += 1

    async def answers(self, store: Store) -> bool:
        """Whether the store answers now."""
        return not await self._look(store)

    async def watch(self, store: Store, on_over: Callable[[str], None]) -> None:
        """Look at the store until cancelled; call `on_over(why)` once it has been away for longer than it may."""
        while True:
            away_s = await self._look(store)
            if away_s > self._limit_s:
                on_over(f"the store at {self._where} has been away for {away_s:.0f} s, which --store-outage forbids")
                return
            if away_s > _TOLD_AFTER_S and not self._told:
                self._told = True
                self._say(f"the store at {self._where} does not answer; the job goes on while all nodes are well")
            await asyncio.sleep(min(self._look_s, max(0.0, self._limit_s - away_s)))

    async def wait(self, store: Store, timeout_s: float, hint: str = "") -> None:
        """Wait until the store answers. Raises LaunchError after `timeout_s`, or once it was away for the limit."""
        begun_s = _now()
        while away_s := await self._look(store):
            if not self._told:
                self._told = True
                self._say(f"the store at {self._where} does not answer; without it the nodes cannot meet: waiting")
            if away_s > self._limit_s or _now() - begun_s > timeout_s:
                raise LaunchError(
                    f"the connection to the job's store was lost: the store at {self._where} has not answered for "
                    f"{away_s:.0f} s{hint}"
                )
            await asyncio.sleep(min(self._look_s, 0.1 * timeout_s))

    async def over(self) -> None:
        """Wait, while `watch` looks, until the store answers again."""
        await asyncio.sleep(self._look_s)  # it may not have been found away yet
        await self._answers.wait()

    async def _look(self, store: Store) -> float:
        """Return for how many seconds the store has been away; 0 if it answers."""
        asked_s = _now()
        try:
            async with asyncio.timeout(self._look_s):
                await store.check(["launch"])
        except (DistError, TimeoutError):
            if self._since_s is None:
                self._since_s = asked_s
                self._answers.clear()
            return max(_now() - self._since_s, 1e-9)
        if self._told and self._since_s is not None:
            self._say(f"the store at {self._where} answers again, after {_now() - self._since_s:.0f} s")
        self._since_s, self._told = None, False
        self._answers.set()
        return 0.0


def _now() -> float:
    return asyncio.get_running_loop().time()
