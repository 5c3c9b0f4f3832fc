"""Where a rank can be reached: what it advertises through the store, and how it chooses that.

A rank never advertises what its host name resolves to: on many machines that is 127.0.0.1 or an interface that no other
host can reach. It advertises the interfaces it was told to use, else the local address of the route to the store.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from asyncdist.errors import DistNetworkError, RemoteProtocolError
from asyncdist.transport.socket_dir import directory_id
from asyncdist_server.serving.sockets import is_loopback

MAX_ADDRESS_BYTES: Final = 4096
"""Longest encoded address: sixteen IPv6 endpoints and two names need under 1.5 KiB; more is not an address."""
MAX_ENDPOINTS: Final = 16
"""Most TCP endpoints one rank advertises; a peer tries them one after the other, so more would never be reached."""
_MAX_NAME_BYTES: Final = 256
_FORMAT: Final = 1

Endpoint = tuple[str, int]
"""IP address (text) and port."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """How to reach one rank's listener.

    `host_id` tells ranks that share a kernel and a way to each other's sockets; `endpoints` are TCP addresses in the
    order to be tried; `unix` is the Unix socket's name, which starts with a zero byte if abstract, or empty for none.
    """

    host_id: str
    endpoints: tuple[Endpoint, ...] = ()
    unix: bytes = b""

    @property
    def loopback(self) -> bool:
        """Whether only ranks on the same host can reach this rank."""
        return all(is_loopback(ip) for ip, _port in self.endpoints)

    def to_bytes(self) -> bytes:
        """Encode for the store."""
        packed: bytes = msgpack.packb([_FORMAT, self.host_id, self.endpoints, self.unix])
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> PeerAddress:
        """Decode what a peer published; raises RemoteProtocolError for anything that is not an address."""
        if len(data) > MAX_ADDRESS_BYTES:
            raise RemoteProtocolError(f"peer address of {len(data)} bytes exceeds {MAX_ADDRESS_BYTES}")
        try:
            form, host, endpoints, unix = msgpack.unpackb(data, use_list=False)
            if form != _FORMAT:
                raise ValueError(f"format {form!r}, this version reads {_FORMAT}")
            if not isinstance(host, str) or len(host) > _MAX_NAME_BYTES:
                raise ValueError("host id")
            if not isinstance(unix, bytes) or len(unix) > _MAX_NAME_BYTES:
                raise ValueError("Unix socket name")
            if not isinstance(endpoints, tuple) or len(endpoints) > MAX_ENDPOINTS:
                raise ValueError("endpoints")
            return cls(host, tuple(_checked_endpoint(endpoint) for endpoint in endpoints), unix)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RemoteProtocolError(f"malformed peer address: {error}") from error

    def __str__(self) -> str:
        parts = [f"tcp {endpoint_text(endpoint)}" for endpoint in self.endpoints]
        if self.unix:
            parts.append(f"unix {unix_text(self.unix)}")
        return ", ".join(parts) or "nowhere"


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """IP addresses to listen on, and what to advertise instead of them: port 0 stands for the one listened on."""

    ips: tuple[str, ...]
    advertised: tuple[Endpoint, ...] = ()
    interfaces: int = 1
    """So many of them, the first ones, belong to interfaces that are to be used all."""

    @property
    def loopback(self) -> bool:
        """Whether no other host can reach what is advertised."""
        return all(map(is_loopback, [ip for ip, _port in self.advertised] or self.ips))


def _checked_endpoint(value: Any) -> Endpoint:
    ip, port = value
    if not isinstance(ip, str) or type(port) is not int or not 0 < port < 65536:
        raise ValueError("endpoint")
    is_loopback(ip)  # raises ValueError unless it is an IP address: names are never resolved on a peer's word
    return ip, port


def endpoint_text(endpoint: Endpoint) -> str:
    """Printable form of a TCP endpoint, with an IPv6 address in brackets."""
    ip, port = endpoint
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def unix_text(name: bytes) -> str:
    """Printable form of a Unix socket's name, with `@` for the zero byte of an abstract one."""
    return name.replace(b"\0", b"@", 1).decode(errors="replace")


def host_id(socket_dir: str = "") -> str:
    """Name of this kernel's boot and this process's network namespace, or of `socket_dir` in place of that.

    Ranks with equal ids can reach each other over loopback and abstract Unix sockets, which are per namespace, or
    through sockets in that directory. On systems without /proc it is the machine's hardware address and node name.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        if socket_dir:
            return f"{boot}:{directory_id(socket_dir)}"
        namespace = os.stat("/proc/self/ns/net")
        return f"{boot}:{namespace.st_dev}:{namespace.st_ino}"
    except OSError:
        return f"{sys.platform}:{os.uname().nodename}:{uuid.getnode():x}"


async def local_address(store_host: str | None, store_port: int, environ: Mapping[str, str]) -> LocalAddress:
    """Choose the IP addresses this rank advertises.

    ASYNCDIST_SOCKET_IFNAME, or GLOO_SOCKET_IFNAME when that is unset, names interfaces. Otherwise it is the source
    address of the route to the store. A rank that reaches the store over loopback (it runs beside it) advertises what
    MASTER_ADDR resolves to, if that is an address of this host. With `store_host=None` (a file or in-process store) the
    route to MASTER_ADDR decides, else loopback.

    ASYNCDIST_ADVERTISE is told to the other ranks instead, where they reach this rank by another address (NAT, a
    container's published port).

    The result's `loopback` is set if no other host can reach it: an error as soon as ranks of another host join.
    Raises ValueError if no interface matches, DistNetworkError if a name does not resolve or no route leads to the
    store. Cancellation leaves nothing behind.
    """
    ips, interfaces = await _ips_to_listen_on(store_host, store_port, environ)
    advertised = await _advertised(environ.get("ASYNCDIST_ADVERTISE", ""))
    return LocalAddress(ips, advertised, min(interfaces, len(advertised) or interfaces))


async def _advertised(text: str) -> tuple[Endpoint, ...]:
    """Resolve `host` or `host:port`, several separated by commas; an IPv6 address with a port stands in brackets."""
    endpoints = []
    for item in filter(None, map(str.strip, text.split(","))):
        found = re.fullmatch(r"(?:\[([^]]+)\]|([^:]+))(?::(\d+))?|([^]]+:[^]]*:[^]]*)", item)
        port = int(found[3] or -1) if found else 0
        if found is None or port > 65535 or not port:
            raise ValueError(f"ASYNCDIST_ADVERTISE={text!r}: {item!r} is no host:port with a port of 1 to 65535")
        port = max(port, 0)
        try:
            _family, address = await _resolve(found[1] or found[2] or found[4], port)
        except DistNetworkError as error:
            raise DistNetworkError(f"ASYNCDIST_ADVERTISE: {error}") from error
        endpoints.append((str(address[0]), port))
    return tuple(endpoints[:MAX_ENDPOINTS])


async def _ips_to_listen_on(
    store_host: str | None, store_port: int, environ: Mapping[str, str]
) -> tuple[tuple[str, ...], int]:
    """Addresses, and how many of them belong to interfaces that are to be used all."""
    for name in ("ASYNCDIST_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        spec = environ.get(name, "").strip()
        if spec:
            try:
                return _interfaces_first(spec, list_interfaces())
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    master = environ.get("MASTER_ADDR", "").strip().strip("[]")
    if store_host is None:
        if not master:
            return ("127.0.0.1",), 1
        return (_route_source(await _resolve(master, 9)),), 1
    source = _route_source(await _resolve(store_host, store_port))
    if is_loopback(source) and master:
        ip = (await _resolve(master, 9))[1][0]
        if not is_loopback(ip) and is_local_ip(ip):
            source = ip
    return (source,), 1


async def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """First address of `host`, or of the first of several: the store client tries them in the same order."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host.partition(",")[0], port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise DistNetworkError(f"cannot resolve {host!r}: {error}") from error
    family, _kind, _protocol, _name, address = found[0]
    return family, address


def _route_source(target: tuple[socket.AddressFamily, tuple[Any, ...]]) -> str:
    """Local address of the route to `target`; connecting a datagram socket asks the routing table, nothing is sent."""
    family, address = target
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise DistNetworkError(f"no route to {address[0]}: {error}") from error


@dataclass(frozen=True, slots=True)
class Interface:
    """One address of one network interface."""

    name: str
    ip: str


def list_interfaces() -> list[Interface]:
    """Addresses of the interfaces that are up, IPv4 before IPv6, otherwise in the kernel's order.

    IPv6 link-local addresses are left out: they mean nothing without an interface of the peer's. Raises OSError.
    """
    import psutil  # needed by few programs, and reads /proc as it is imported

    stats = psutil.net_if_stats()
    found = psutil.net_if_addrs().items()
    return [
        Interface(name, each.address)
        for family in (socket.AF_INET, socket.AF_INET6)
        for name, addresses in found
        if _is_up(stats.get(name.partition(":")[0]))  # eth0:1 is another name of eth0
        for each in addresses
        if each.family == family and not each.address.startswith("fe80")
    ]


def _is_up(stats: Any) -> bool:
    """Whether an interface is up; psutil's `isup` is another question: whether something is plugged in."""
    return stats is not None and "up" in stats.flags.split(",")


def select_ips(spec: str, interfaces: Sequence[Interface]) -> tuple[str, ...]:
    """Addresses of `interfaces` that `spec` chooses, e.g. `"eth0"`, `"eth,ib0"`, `"^docker,veth"`.

    Items are interface names; an item that is no interface's name is a prefix. `^` excludes, and at the front of `spec`
    excludes all that follows, as NCCL_SOCKET_IFNAME does. Loopback has to be asked for by name. Raises ValueError when
    nothing is left, listing what is there.
    """
    items = [item.strip() for item in spec.split(",") if item.strip()]
    all_excluded = bool(items) and items[0].startswith("^")
    included = [] if all_excluded else [item for item in items if not item.startswith("^")]
    excluded = items if all_excluded else [item for item in items if item.startswith("^")]
    names = {interface.name for interface in interfaces}

    def matches(name: str, item: str) -> bool:
        return name == item if item in names else name.startswith(item)

    banned = {name for name in names for item in excluded if matches(name, item.removeprefix("^"))}
    if included:
        chosen = [i for item in included for i in interfaces if matches(i.name, item)]
    else:
        chosen = [i for i in interfaces if not is_loopback(i.ip)]
    ips = tuple(dict.fromkeys(i.ip for i in chosen if i.name not in banned))
    if not ips:
        there = ", ".join(f"{i.name} ({i.ip})" for i in interfaces) or "none"
        raise ValueError(f"no network interface matches {spec!r}; interfaces that are up: {there}")
    return ips


def _interfaces_first(spec: str, interfaces: Sequence[Interface]) -> tuple[tuple[str, ...], int]:
    """The addresses that `spec` chooses, one of each interface first, and how many of those there are.

    What is only not excluded is not chosen to be used: hosts may differ in it.
    """
    ips = select_ips(spec, interfaces)
    if spec.startswith("^"):
        return ips[:MAX_ENDPOINTS], 1
    names = {interface.ip: interface.name.partition(":")[0] for interface in interfaces}
    firsts = {names[ip]: ip for ip in reversed(ips)}
    used = [ip for ip in ips if firsts[names[ip]] == ip]
    return tuple(dict.fromkeys((*used, *ips)))[:MAX_ENDPOINTS], min(len(used), MAX_ENDPOINTS)


def is_local_ip(ip: str) -> bool:
    """Whether this host owns `ip`: binding to it is the one question the kernel answers truthfully."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True
