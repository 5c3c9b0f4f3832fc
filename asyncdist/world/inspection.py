"""Where whoever asks finds the ranks: each process listens for that, and the worlds' keys in the store say where.

A process has one `Endpoint` for all its worlds that have the same token. It listens on a Unix socket, and by TCP if it
has a token and other hosts can reach it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from asyncdist.concurrency import trace as events
from asyncdist.errors import DistStoreError, RemoteProtocolError
from asyncdist.inspect.ask import EndpointAddress
from asyncdist.inspect.endpoint import Endpoint, name_of
from asyncdist.inspect.job import MAX_RANKS
from asyncdist.store import Store
from asyncdist.transport.addresses import LocalAddress, PeerAddress
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.listening import listen_tcp, listen_unix
from asyncdist.transport.socket_dir import path_of
from asyncdist.world.attempts import unpacked

VARIABLE: Final = "ASYNCDIST_INSPECT"
INFOS_TOGETHER: Final = 1024
"""Ranks in one request."""
MAX_ENDPOINTS: Final = 4
"""Addresses of a rank that are tried."""

_INFO: Final = re.compile(r"world/(.+)/([0-9]{1,9})/info/([0-9]{1,9})", re.DOTALL)


class Inspection:
    """The endpoint of this process, shared by its worlds: each closes its own use of it once."""

    _known: ClassVar[dict[tuple[Any, ...], Inspection]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, key: tuple[Any, ...]) -> None:
        self._key = key
        self._users = 0
        self._endpoint: Endpoint | None = None
        self.token: str | None = key[1]
        """Who asks other ranks proves it."""
        self.address: list[Any] = []
        """What the store is told: the fields of `EndpointAddress`."""

    @classmethod
    def open(
        cls,
        name: str,
        rank: int,
        world_size: int,
        token: str | None,
        reachable: LocalAddress,
        config: TransportConfig,
        environ: Mapping[str, str],
    ) -> Inspection | None:
        """Listen for one more world; None where ASYNCDIST_INSPECT is off, or it cannot be. Raises ValueError."""
        word = environ.get(VARIABLE, "").strip().lower() or "on"
        if word not in ("on", "off"):
            raise ValueError(f"{VARIABLE}={word!r}: use on or off")
        if word == "off":
            return None
        key = os.getpid(), token, reachable, config.socket_dir, config.ports
        with cls._lock:
            shared = cls._known.get(key) or cls(key)
            try:
                if shared._endpoint is None:
                    prefix = name_of(environ.get("ASYNCDIST_JOB_ID", ""), name, rank)
                    ranks_here = config.local_ranks if environ.get("LOCAL_WORLD_SIZE") else world_size
                    shared._listen(prefix, token, reachable, config, ranks_here)
            except OSError as error:
                events.info("nobody can ask this process what it does: %s", error)
                return None
            cls._known[key] = shared
            shared._users += 1
        return shared

    def close(self) -> None:
        """This world needs it no more. Blocks for a moment."""
        with self._lock:
            self._users -= 1
            if self._users or self._known.get(self._key) is not self:
                return
            del self._known[self._key]
        if self._endpoint is not None and self._key[0] == os.getpid():
            self._endpoint.close()

    def _listen(
        self, prefix: str, token: str | None, reachable: LocalAddress, config: TransportConfig, ranks_here: int
    ) -> None:
        with contextlib.ExitStack() as undo:
            unix, name, remove = listen_unix(config.socket_dir, prefix)
            undo.callback(remove)
            sockets = [undo.enter_context(unix)]
            endpoints = []
            spare = config.ports is None or len(config.ports) > 2 * ranks_here  # each rank needs one for its peers
            if token is not None and not reachable.loopback and spare:
                with contextlib.suppress(OSError):
                    sockets.append(undo.enter_context(listen_tcp(reachable.ips[0], config.ports)))
                    ip = reachable.advertised[0][0] if reachable.advertised else reachable.ips[0]
                    endpoints.append((ip, sockets[-1].getsockname()[1]))
            self._endpoint = Endpoint(sockets, token, remove)
            self.address = [socket.gethostname(), os.getpid(), name, endpoints]
            undo.pop_all()


os.register_at_fork(
    before=Inspection._lock.acquire, after_in_parent=Inspection._lock.release, after_in_child=Inspection._lock.release
)


@dataclass
class FoundWorld:
    """A world as a store knows it: where its ranks answer, and what became of those that are not here any more."""

    name: str
    size: int
    formed: bool
    """Whether its ranks have stopped waiting for each other to join."""
    endpoints: dict[int, EndpointAddress] = field(default_factory=dict)
    addresses: dict[int, PeerAddress] = field(default_factory=dict)
    """Where the others dial them."""
    ended: dict[int, str] = field(default_factory=dict)
    """Ranks that have `left`, or are `gone`: their connection to the store has ended."""


async def worlds_of(store: Store, environ: Mapping[str, str] = os.environ) -> list[FoundWorld]:
    """The worlds whose keys are in that store, each in its newest attempt. Raises DistError.

    Every member can write those keys: what is no world, or no rank of one, is left out.
    """
    keys = set(await store.list_keys("world/"))
    newest: dict[str, int] = {}
    found = [(match[1], int(match[2]), int(match[3]), key) for key in keys if (match := _INFO.fullmatch(key))]
    for name, attempt, _, _ in found:
        newest[name] = max(newest.get(name, 0), attempt)
    infos = sorted(one for one in found if newest[one[0]] == one[1])
    said: list[bytes] = []
    for first in range(0, len(infos), INFOS_TOGETHER):
        said += await store.multi_get([key for *_, key in infos[first : first + INFOS_TOGETHER]])
    leases = any("/here/" in key for key in keys)
    worlds: dict[str, FoundWorld] = {}
    for (name, _, rank, key), packed in zip(infos, said, strict=True):
        prefix = key.rpartition("info/")[0]
        if name not in worlds:
            terms = _record(await store.get(f"{prefix}terms")) if f"{prefix}terms" in keys else {}
            size = terms.get("world_size")
            size = size if type(size) is int and 0 < size <= MAX_RANKS else 0
            worlds[name] = FoundWorld(name, size, f"{prefix}ready" in keys)
        world = worlds[name]
        if rank >= world.size:
            continue
        info = _record(packed)
        world.endpoints[rank] = endpoint_of(info, environ)
        if isinstance(address := info.get("address"), bytes):
            with contextlib.suppress(RemoteProtocolError):
                world.addresses[rank] = PeerAddress.from_bytes(address)
        if f"{prefix}left/{rank}" in keys:
            world.ended[rank] = "left"
        elif leases and f"{prefix}here/{rank}" not in keys:
            world.ended[rank] = "gone"
    return [world for world in worlds.values() if world.size]


def _record(packed: bytes) -> dict[str, Any]:
    with contextlib.suppress(DistStoreError):
        return unpacked(packed)
    return {}


def endpoint_of(info: dict[str, Any], environ: Mapping[str, str] = os.environ) -> EndpointAddress:
    """Where a rank answers, by what it has told the store of itself: numbers, as names take seconds to look up."""
    match info.get("endpoint"):
        case [str(host), int(pid), bytes(name), list(told)] if b"\0" not in name[1:]:
            if name.startswith(b"/"):
                directory = environ.get("ASYNCDIST_SOCKET_DIR", "").strip() or os.path.dirname(os.fsdecode(name))
                name = path_of(directory, name) or b""
            endpoints = tuple((ip, port) for ip, port in filter(_is_endpoint, told[:MAX_ENDPOINTS]))
            return EndpointAddress(host, pid, name if name[:1] in (b"/", b"\0") else b"", endpoints)
    return EndpointAddress("", 0)


def _is_endpoint(told: object) -> bool:
    match told:
        case [str(ip), int(port)] if 0 < port < 1 << 16:
            with contextlib.suppress(ValueError):
                return ipaddress.ip_address(ip).compressed != ""
    return False
