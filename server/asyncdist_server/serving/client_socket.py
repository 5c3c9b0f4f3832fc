"""What the daemon does with a client's socket: have the kernel notice a host that is gone, and say where it is."""

from __future__ import annotations

import socket
from typing import Any, Final

__all__ = ["format_address", "notice_lost_hosts"]

KEEPALIVE_IDLE_S: Final = 10
KEEPALIVE_INTERVAL_S: Final = 15
KEEPALIVE_PROBES: Final = 3
"""A host that vanished is noticed after 55 s of silence, 45 s after it vanished at the earliest.

Sooner than a client gives up that tries to connect for a minute: places that a vanished job has taken are free again
for its restart. Later than a client notices that it is cut off, which takes it 40 s at most: the time of a lock that is
bound to the connection begins with its holder before it does here.
"""
UNACKNOWLEDGED_MS: Final = 1000 * (KEEPALIVE_IDLE_S + KEEPALIVE_INTERVAL_S * KEEPALIVE_PROBES)
"""And as soon when something was sent to it, of which keepalive knows nothing: Linux would try for 15 minutes, in which
what is bound to that connection would seem to be in use."""


def format_address(address: tuple[Any, ...] | None) -> str:
    """Return a socket's address as host:port, with brackets around an IPv6 address."""
    if not address:
        return ""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def notice_lost_hosts(sock: socket.socket | None) -> None:
    """Turn on keepalive and bound how long data may stay unacknowledged; and send at once what is written."""
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_MS),
        ("TCP_NODELAY", 1),
    ):
        if hasattr(socket, name):  # macOS lacks TCP_KEEPIDLE and TCP_USER_TIMEOUT
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
