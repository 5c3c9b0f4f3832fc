"""Many worlds, one after the other, through one connection to a store."""

from __future__ import annotations

import asyncio
import gc
import weakref

import asyncdist as dist
import asyncdist_server
from asyncdist.concurrency.deadline import Deadline
from asyncdist.init import _Restarts
from asyncdist.transport.addresses import PeerAddress
from asyncdist.world.rendezvous import Rendezvous


async def test_the_store_keeps_none_of_them_and_its_owners_callback_once() -> None:
    server = await asyncio.to_thread(asyncdist_server.serve_in_thread, "127.0.0.1", 0)
    calls: list[None] = []
    try:
        async with dist.TCPStore("127.0.0.1", server.port, on_incarnation_change=lambda: calls.append(None)) as store:
            before: weakref.WeakSet[Rendezvous] = weakref.WeakSet()
            for _ in range(20):
                async with dist.init_process_group(store=store, rank=0, world_size=1) as group:
                    before.add(group.world._rendezvous)
                del group
            gc.collect()
            assert len(before) <= 1, "the context remembers the last"
            hook = store.on_incarnation_change
            assert isinstance(hook, _Restarts)
            assert len(hook.watching) <= 1
            hook()
            assert len(calls) == 1
    finally:
        await asyncio.to_thread(server.close)


async def test_who_has_left_has_nothing_under_way() -> None:
    """The rank that hosts the store stops it then: whoever waited for an answer still, would wait for two seconds."""
    server = await asyncio.to_thread(asyncdist_server.serve_in_thread, "127.0.0.1", 0)
    try:
        async with dist.TCPStore("127.0.0.1", server.port) as one, dist.TCPStore("127.0.0.1", server.port) as two:
            ranks = [Rendezvous(store, rank, 2) for rank, store in enumerate((one, two))]
            deadline = Deadline.after(30, asyncio.get_running_loop().time())

            async def listen(_world_id: bytes) -> PeerAddress:
                return PeerAddress("host")

            await asyncio.gather(*(rank.join("host", True, {}, listen, deadline) for rank in ranks))
            for rank, store in zip(ranks, (one, two), strict=True):
                assert rank.presence.lease is not None
                await rank.leave()
                assert store._pipeline is not None
                assert store._pipeline.idle
    finally:
        await asyncio.to_thread(server.close)
