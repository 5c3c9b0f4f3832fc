"""What a daemon says of itself beside what its engine holds: version, process, connections, journal."""

from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncdist_server.serving.daemon import StoreServer

__all__ = ["describe", "not_served", "resident_bytes", "stuck", "version"]


def describe(server: StoreServer) -> dict[str, Any]:
    """Return the server's version, address, process, age, connections, memory and journal."""
    return {
        "version": version(),
        "address": server.address,
        "pid": os.getpid(),
        "uptime_s": round(time.monotonic() - server.started_at, 3),
        "connections": server.connection_count,
        "connection_limit": server.config.limits.connections,
        "process_bytes": resident_bytes(),
        "durability": server.config.durability.name,
        **_of_journal(server),
    }


def stuck(server: StoreServer) -> dict[str, float]:
    """Return for how long the journal has been stuck, nothing if it is not."""
    stuck_s = 0.0 if server.gate is None else server.gate.stuck_s
    return {"journal_stuck_s": round(stuck_s, 3)} if stuck_s else {}


def not_served(server: StoreServer) -> str:
    """Return why clients are not served now, in a few words; empty while they are."""
    gate = server.gate
    if not server.not_ready and gate is not None and gate.stuck_s and gate.durability.delay_s is None:
        return "the journal is stuck"  # every answer waits for it, and every new client
    return server.not_ready


def _of_journal(server: StoreServer) -> dict[str, Any]:
    gate = server.gate
    if gate is None:
        return {}
    return {"journal_bytes": gate.journal_bytes, "commits": gate.statistics.commits, **stuck(server)}


def resident_bytes() -> int:
    """Return how much memory this process occupies, 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@functools.cache
def version() -> str:
    """Return the version of the installed package; `unknown` where the sources run without being installed."""
    import importlib.metadata  # which loads as much as all of the store client, for what few ask

    try:
        return importlib.metadata.version("asyncdist")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
