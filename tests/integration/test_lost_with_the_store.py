"""Rank 0 hosts the store: who was killed with it is known to all, met or not; what it stopped in order is no loss."""

from __future__ import annotations

import asyncio
from contextvars import Context

import numpy as np
import pytest
from group_kit import outcome
from jobs import finish, free_port, start_rank, start_ranks
from punctual import assert_within, punctual
from waiting import PATIENCE_S, eventually

import asyncdist as dist
from asyncdist.group.core import core_of
from asyncdist.world import rendezvous

NAMED_S = 1.0
"""Within which a rank that is gone is named."""

RANK = """
async def main():
    group = await dist.init_process_group(timeout=60)
    if group.rank == 0:
        await group.world.store.wait(["waits 1", "waits 2"])
        print(time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    waits = group.irecv(np.zeros(1), None)                    # which dials nobody
    await group.world.store.set(f"waits {group.rank}", "")
    for call in (lambda: waits, lambda: group.barrier()):
        try:
            await call()
        except dist.DistError as error:
            print(time.time(), type(error).__name__, error.rank)
    sent = group.isend(np.ones(1), 3 - group.rank)            # which it meets now
    assert await group.recv(np.zeros(1), 3 - group.rank) == 3 - group.rank
    await sent
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
        expected = [("PeerLostError", "0"), ("GroupAbortedError", "0")]
        assert [(what, rank) for _, what, rank in map(str.split, told)] == expected, told
        for line in told:
            assert_within(NAMED_S, float(line.split()[0]) - struck_s)
        assert_within(NAMED_S, float(closed_s))


async def test_a_store_that_is_stopped_in_order_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "GOODBYE_LIMIT_S", 0.1)
    where = f"tcp://127.0.0.1:{free_port()}"

    async def join(rank: int) -> dist.ProcessGroup:
        return await dist.init_process_group(init_method=where, rank=rank, world_size=3, timeout=PATIENCE_S)

    joining = [asyncio.create_task(join(rank), context=Context()) for rank in range(3)]
    host, *others = await asyncio.gather(*joining)
    await host.close()
    try:
        store = others[0].world.store
        assert isinstance(await outcome(store.get("key")), dist.DistStoreError)
        await eventually(lambda: store._connector is None)
        await asyncio.gather(others[0].isend(np.ones(1), 2), others[1].recv(np.zeros(1), 1))  # who had not met
        assert all(core_of(group).usable and not group.world.lost for group in others)
        error = await outcome(others[0].recv(np.zeros(1), 0))
        assert isinstance(error, dist.PeerLostError)
        assert error.rank == 0
    finally:
        await asyncio.gather(*(group.close() for group in others))


JOINING = """
from asyncdist.world.rendezvous import Rendezvous

RANK = int(os.environ["RANK"])

async def strike():
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    async with dist.TCPStore(*where) as store:
        await store.wait(["waits 1", "waits 2"])
    print(time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    hear = Rendezvous._hear_who_hosts

    async def heard(rendezvous, on_hosted):
        await hear(rendezvous, on_hosted)
        await rendezvous._store.underlying_store.set(f"waits {RANK}", "")

    Rendezvous._hear_who_hosts = heard
    if RANK == 0:
        striking = asyncio.create_task(strike())
    try:
        await dist.init_process_group(timeout=60, progress=os.environ["PROGRESS"])
    except dist.DistError as error:
        print(time.time(), type(error).__name__, error)

dist.run(main())
"""


@pytest.mark.parametrize("progress", ["loop", "thread"])
@punctual
def test_who_waits_for_others_hears_that_the_rank_that_hosts_the_store_was_killed(progress: str) -> None:
    """Rank 3 never comes."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PROGRESS": progress}
    host, *others = finish([start_rank(JOINING, rank, 4, where) for rank in range(3)])
    struck_s = float(host.stdout)
    for other in others:
        assert other.returncode == 0, other.stderr
        named_s, kind, text = other.stdout.strip().split(" ", 2)
        assert kind == "DistStoreError"
        assert "it has ended with rank 0, which hosted it" in text
        assert_within(NAMED_S, float(named_s) - struck_s)
