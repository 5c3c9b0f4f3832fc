"""How many requests a rank makes at the daemon to join a world: a thousand ranks make them at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from asyncdist.concurrency.deadline import Deadline
from asyncdist.store import TCPStore
from asyncdist.transport.addresses import PeerAddress
from asyncdist.world.rendezvous import Rendezvous
from asyncdist_server.serving.threaded import ThreadedServer
from asyncdist_server.wire.messages import OPERATION_NAMES

REQUESTS = {"lease": 2, "hold": 1, "set with lease": 2, "set": 1, "add": 2, "compare_set": 2, "check": 1, "get": 1}
"""The leases, what is bound to them, the place in the attempt, where the rank listens, and the end of the attempt."""
RANKS = 4


class CountingStore(TCPStore):
    """Counts what it asks the daemon, by the names of the operations."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: Counter[str] = Counter()

    def _request(self, operation: int, *arguments: Any, **options: Any) -> asyncio.Future[Any]:
        self.asked[OPERATION_NAMES[operation]] += 1
        return super()._request(operation, *arguments, **options)


async def test_a_rank_joins_with_twelve_requests(server: ThreadedServer, namespace: str) -> None:
    async def listen(_world_id: bytes) -> PeerAddress:
        return PeerAddress("here")

    deadline = Deadline.after(30.0, asyncio.get_running_loop().time())
    stores = [CountingStore("127.0.0.1", server.port, namespace=namespace) for _ in range(RANKS)]
    ranks = [Rendezvous(store, rank, RANKS) for rank, store in enumerate(stores)]
    joining = [asyncio.create_task(rank.join("a", True, {}, listen, deadline)) for rank in ranks]
    met = await asyncio.gather(*joining)
    for rank, store in enumerate(stores):
        if rank != met[rank].decider:  # that one reads what all have set, and decides
            assert store.asked == REQUESTS
        await store.close()
