"""Sockets of clients: keepalive, addresses, ports served by this process, and how many descriptors it may have."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
import weakref
from typing import TYPE_CHECKING, Any, Final

if sys.platform != "win32":
    import resource
if sys.platform == "linux":
    import fcntl
    import termios
if TYPE_CHECKING:
    from asyncdist_server.serving.threaded import ThreadedServer

KEEPALIVE_IDLE_S: Final = 10
KEEPALIVE_INTERVAL_S: Final = 15
KEEPALIVE_PROBES: Final = 3
"""A host that vanished is noticed after 55 s of silence, 45 s after it vanished at the earliest.

Sooner than a client gives up that tries to connect for a minute: places that a vanished job has taken are free again
for its restart. Later than a client notices that it is cut off, which takes it 40 s at most: the time of a lock that is
bound to the connection begins with its holder before it does here.
"""
UNACKNOWLEDGED_MS: Final = 1000 * (KEEPALIVE_IDLE_S + KEEPALIVE_INTERVAL_S * KEEPALIVE_PROBES)
"""The same for a connection with unacknowledged data, which keepalive does not probe. Linux would send again for 15
minutes; so long a lock that is bound to the connection would seem to be held."""


def format_address(address: tuple[Any, ...] | None) -> str:
    """Return a socket's address as host:port, with brackets around an IPv6 address."""
    if not address:
        return ""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def notice_lost_hosts(sock: socket.socket | None) -> None:
    """Have the kernel end the connection of a client whose host has vanished."""
    if sock is not None:
        keep_alive(sock, KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES, UNACKNOWLEDGED_MS)


def keep_alive(sock: socket.socket, idle_s: int, interval_s: int, probes: int, unacknowledged_ms: int) -> None:
    """Turn on keepalive and bound how long data may stay unacknowledged; and send at once what is written."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", idle_s),
        ("TCP_KEEPINTVL", interval_s),
        ("TCP_KEEPCNT", probes),
        ("TCP_USER_TIMEOUT", unacknowledged_ms),
        ("TCP_NODELAY", 1),
    ):
        if hasattr(socket, name):  # macOS lacks TCP_KEEPIDLE and TCP_USER_TIMEOUT
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_loopback(ip: str) -> bool:
    """Whether `ip` (text, with or without a scope) can only be reached from its own host; ValueError if it is none."""
    address = ipaddress.ip_address(ip.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group."""


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return process and user of the other end of a Unix socket, 0 for a process that this one cannot see.

    Where the system does not say, this user's: a directory of mode 0700 keeps others out there.
    """
    if sys.platform != "linux":
        return 0, os.geteuid()
    pid, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


SPARE_DESCRIPTORS: Final = 128
"""Descriptors besides those of connections: listeners, the journal, the loop's own, 64 connections of HTTP, and some of
connections that end. In a process that does more than host the store: those that the rest of it needs."""

ENDING_DESCRIPTORS: Final = 32
"""How many of them connections may hold that were refused and have not read why."""


def descriptor_limit() -> int | None:
    """Return how many this process may have, None where nothing limits them."""
    if sys.platform == "win32":
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def connections_within(allowed: int | None, wanted: int) -> int:
    """Return how many connections to let in, `wanted` at most, with `allowed` descriptors.

    A client beyond that is told so. Without a descriptor left no client could be told anything: libuv closes what comes
    without a word, also the connections of those who ask over HTTP how the daemon is.
    """
    if allowed is None:
        return wanted
    return min(wanted, max(allowed - SPARE_DESCRIPTORS, allowed // 2))


def sockets_within(allowed: int | None) -> int:
    """Return how many sockets of clients to have, with those that just end, with `allowed` descriptors.

    A client that is refused beyond that is not told why: else strangers that read nothing would hold all that are left.
    """
    if allowed is None:
        return sys.maxsize
    return connections_within(allowed, sys.maxsize) + min(ENDING_DESCRIPTORS, allowed // 8)


def raise_descriptor_limit() -> None:
    """Raise the limit as far as this user may: the usual 1,024 descriptors would admit about 900 ranks."""
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_standard_descriptors() -> None:
    """Give standard input, output and error something harmless where they were closed.

    Else the event loop or a client's socket gets such a number, where whatever is written to standard error goes then;
    and libuv aborts the process that closes one.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # workers, too
    os.close(descriptor)


def unacknowledged_bytes(descriptor: int) -> int:
    """Return how many bytes the other host's kernel has not acknowledged; 0 where that cannot be known."""
    if sys.platform != "linux":
        return 0
    try:
        answer = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))  # SIOCOUTQ, of a TCP socket
    except OSError:
        return 0
    return int.from_bytes(answer, sys.byteorder)


running: Final[weakref.WeakSet[ThreadedServer]] = weakref.WeakSet()
"""The stores that threads of this process serve."""


def served_here(port: int) -> bool:
    """Whether a thread of this process serves that port: looking for its answers would keep it from giving them."""
    return any(server.port == port for server in list(running))
