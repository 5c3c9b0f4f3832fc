"""File descriptors: how many the process may have, as each connection needs one, and the three that it starts with."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Final

if sys.platform != "win32":
    import resource

__all__ = [
    "SPARE_DESCRIPTORS",
    "connections_within",
    "descriptor_limit",
    "open_standard_descriptors",
    "raise_descriptor_limit",
    "sockets_within",
]

SPARE_DESCRIPTORS: Final = 128
"""Those besides connections: listeners, the journal, the loop's own, 64 connections of HTTP, and some that just end.
In a process that does more than to host the store: what it needs besides."""


ENDING_DESCRIPTORS: Final = 32
"""How many of them those may hold that just end, as they were refused and have not read why."""


def descriptor_limit() -> int | None:
    """Return how many this process may have, None where nothing limits them."""
    if sys.platform == "win32":
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def connections_within(allowed: int | None, wanted: int) -> int:
    """Return how many connections to let in, `wanted` at most, where so many descriptors are `allowed`.

    Whoever is beyond that is told so. Without a descriptor left nobody could be told anything: libuv closes what comes
    without a word, also the connections of those who ask over HTTP how the daemon is.
    """
    if allowed is None:
        return wanted
    return min(wanted, max(allowed - SPARE_DESCRIPTORS, allowed // 2))


def sockets_within(allowed: int | None) -> int:
    """Return how many sockets of clients to have, with those that just end, where so many descriptors are `allowed`.

    Who is refused beyond that is not told why: else strangers who read nothing would hold all that are left.
    """
    if allowed is None:
        return sys.maxsize
    return connections_within(allowed, sys.maxsize) + min(ENDING_DESCRIPTORS, allowed // 8)


def raise_descriptor_limit() -> None:
    """Ask for as many as this user may have: the usual 1,024 would stop at 1,000 ranks."""
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
