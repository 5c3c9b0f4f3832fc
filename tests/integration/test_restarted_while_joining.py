"""A store that ends while a rank joins, and comes back without its data, as that of a world that is just closing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import asyncdist as dist
from asyncdist.world.attempts import HERE_GRACE_S, Presence
from asyncdist_server.serving.threaded import serve_in_thread


@pytest.mark.parametrize("step", ["appear", "arrive"])
async def test_both_ranks_meet_in_the_store_that_comes_next(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has lost its leases, and not heard of the next store, when it takes that step."""
    do, first, nobody = getattr(Presence, step), serve_in_thread(), asyncio.Event()

    def late(self: Presence, *arguments: Any) -> Any:
        if self._rank and not nobody.is_set():
            nobody.set()
            first.close()
            assert self.lease is not None
            self.lease._keeper._end(self.lease, f"the store could not be reached for {HERE_GRACE_S} s")
        return do(self, *arguments)

    async def joins(rank: int) -> None:
        async with (
            dist.TCPStore("127.0.0.1", first.port) as store,
            dist.init_process_group(store=store, rank=rank, world_size=2, timeout=10) as group,
        ):
            await group.barrier()

    monkeypatch.setattr(Presence, step, late)
    one = asyncio.create_task(joins(1))
    async with asyncio.timeout(20):
        await nobody.wait()
        with serve_in_thread(port=first.port):
            await asyncio.gather(one, joins(0))
