"""How long a journal may become before its oldest batches are given up. No clock and no I/O.

What counts is the time to read it again, and what must be remembered of each batch meanwhile (`BATCH_BYTES`), so a
journal of many small batches is cleaned sooner than one of few large ones of the same size.
"""

from __future__ import annotations

from typing import Final

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.history import EVENT_BYTES, HISTORY_OVERHEAD_BYTES
from asyncdist_server.engine.leases import LEASE_BYTES, LEASED_KEY_BYTES
from asyncdist_server.engine.namespace import ITEM_OVERHEAD_BYTES, KEY_OVERHEAD_BYTES, QUEUE_OVERHEAD_BYTES

__all__ = ["BATCH_BYTES", "SLACK_BYTES", "JournalSize"]

SLACK_BYTES: Final = 4 * 1024 * 1024
"""How much longer than twice what it has to say a journal may be: small stores are hardly ever cleaned."""
BATCH_BYTES: Final = 700
"""What a batch costs besides its rows: the objects that say what it speaks of (measured, of one key and one reply)."""
ENTRY_BYTES: Final = 16
"""What a key, an event or a lease costs in the journal besides its names and its value."""
ESTIMATE_BYTES: Final = 64 * 1024
"""So much is written between two estimates: they take a moment for each namespace."""


class JournalSize:
    """Estimates how much of the journal is still valid, and says by how much it is too long."""

    __slots__ = ("_engine", "_valid_bytes", "_written")

    def __init__(self, engine: StoreEngine) -> None:
        self._engine = engine
        self._written = ESTIMATE_BYTES  # since the last estimate
        self._valid_bytes = 0

    def grew(self, batch_bytes: int) -> None:
        """Note that a batch was written."""
        self._written += batch_bytes

    def excess(self, journal_bytes: int, batches: int) -> int:
        """Return by how many bytes a journal of that size is too long; not positive if it is not."""
        if self._written >= ESTIMATE_BYTES:
            self._written = 0
            self._valid_bytes = said_once_bytes(self._engine)
        return journal_bytes + BATCH_BYTES * batches - 2 * self._valid_bytes - SLACK_BYTES


def said_once_bytes(engine: StoreEngine) -> int:
    """Return about how many bytes say everything that a store holds, once: what it is charged without its objects."""
    state = engine.state
    size = state.memory_bytes - state.waiter_bytes
    for namespace in engine.namespaces.values():
        size -= (KEY_OVERHEAD_BYTES - ENTRY_BYTES) * len(namespace.values)
        size -= (QUEUE_OVERHEAD_BYTES - ITEM_OVERHEAD_BYTES) * len(namespace.queues)
        size -= (LEASE_BYTES - ENTRY_BYTES) * len(namespace.leases) + LEASED_KEY_BYTES * len(namespace.leased)
        for history in namespace.histories.values():
            size -= HISTORY_OVERHEAD_BYTES + (EVENT_BYTES - ENTRY_BYTES) * len(history.events)
    return size
