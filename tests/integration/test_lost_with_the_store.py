"""Rank 0 hosts the store: who was killed with it is known to all, met or not; what it stopped in order is no loss."""

from __future__ import annotations

import asyncio
from contextvars import Context

import numpy as np
import pytest
from group_kit import outcome
from jobs import finish, free_port, start_ranks
from mesh_world import PATIENCE_S, eventually
from punctual import assert_within, punctual

import asyncdist as dist
from asyncdist import rendezvous

NAMED_S = 1.0
"""Within which a rank that is gone is named."""

RANK = """
async def main():
    group = await dist.init_process_group(timeout=60)
    await asyncio.sleep(0.3)                # the others are here, too
    if group.rank == 0:
        print(time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    works = {
        1: lambda: [group.irecv(np.zeros(1), None), group.barrier()],
        2: lambda: [group.all_reduce(np.zeros(9))],
    }[group.rank]()
    for work in works:
        try:
            await work
        except dist.PeerLostError as error:
            print(time.time(), error.rank, error.left)
    while group.usable:                     # rank 0 was lost before anything was issued, perhaps
        await asyncio.sleep(0.01)
    try:
        await group.recv(np.zeros(1), 3 - group.rank, timeout=30)
    except dist.PeerLostError as error:     # its address was in the store
        print(time.time(), error.rank, error.left)
    begun_s = time.monotonic()
    await group.close()
    print(time.monotonic() - begun_s)

dist.run(main())
"""


@punctual
def test_all_know_who_was_killed_before_anybody_had_met() -> None:
    host, *others = finish(start_ranks(RANK, 3))
    struck_s = float(host.stdout)
    for other in others:
        assert other.returncode == 0, other.stderr
        *told, closed_s = other.stdout.splitlines()
        *of_host, of_survivor = [line.split() for line in told]
        assert len(of_host) == 3 - other.rank, told
        assert all(rank == "0" and left == "False" for _, rank, left in of_host), told
        assert of_survivor[1] == str(3 - other.rank), told
        for at_s, *_ in [*of_host, of_survivor]:
            assert_within(NAMED_S, float(at_s) - struck_s)
        assert_within(NAMED_S, float(closed_s))


async def test_a_store_that_is_stopped_in_order_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "GOODBYE_LIMIT_S", 0.1)
    where = f"tcp://127.0.0.1:{free_port()}"

    async def join(rank: int) -> dist.ProcessGroup:
        return await dist.init_process_group(init_method=where, rank=rank, world_size=3, timeout=PATIENCE_S)

    joining = [asyncio.create_task(join(rank), context=Context()) for rank in range(3)]
    host, *others = await asyncio.gather(*joining)
    await asyncio.gather(others[0].isend(np.ones(1), 2), others[1].recv(np.zeros(1), 1))
    await host.close()
    try:
        store = others[0].world.store
        assert isinstance(await outcome(store.get("key")), dist.DistStoreError)
        await eventually(lambda: store._connector is None)
        await asyncio.gather(others[0].isend(np.ones(1), 2), others[1].recv(np.zeros(1), 1))
        assert all(group.usable and not group.world.lost for group in others)
        error = await outcome(others[0].recv(np.zeros(1), 0))
        assert isinstance(error, dist.PeerLostError)
        assert error.rank == 0
    finally:
        await asyncio.gather(*(group.close() for group in others))
