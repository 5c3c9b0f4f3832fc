"""StoreObserver: a client that asks the daemon how it is, and nothing else."""

from __future__ import annotations

from typing import Any

from asyncdist.store.tcp_store import TCPStore
from asyncdist_server.wire.messages import OBSERVER_ID

__all__ = ["StoreObserver"]


class StoreObserver(TCPStore):
    """A TCPStore of which only `status`, `waits` and `namespaces` may be used.

    The daemon ends the connection over anything else.

    It connects, and is answered, also while the daemon's disk hangs: a durable daemon has others wait until it is on
    the disk that they came. The arguments are those of TCPStore.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._client_id = OBSERVER_ID
