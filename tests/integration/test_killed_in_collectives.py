"""A rank killed in the midst of every collective, small and large: all survivors hear of it, and go on without it."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import pytest
from jobs import finish, start_ranks
from punctual import assert_within, punctual

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory and abstract sockets")

NAMED_S = 1.0
"""How soon a failure is to name the rank."""

RANKS = 4
HOST = 0
"""The rank that hosts the store."""

PROGRAM = """
SMALL, LARGE = 4, 1 << 16

def collectives(group, count):
    size, rank = group.size, group.rank
    one, other = np.ones(count), np.ones(count)
    whole, wide = np.ones(count * size), np.ones(count * size)
    parts, others = list(whole.reshape(size, -1)), list(wide.reshape(size, -1))
    at_root = rank == 1
    return {
        "all_reduce": lambda: group.all_reduce(one),
        "broadcast": lambda: group.broadcast(one, 1),
        "reduce": lambda: group.reduce(one, 1),
        "all_gather": lambda: group.all_gather(parts, one),
        "gather": lambda: group.gather(one, parts if at_root else None, 1),
        "scatter": lambda: group.scatter(one, parts if at_root else None, 1),
        "reduce_scatter": lambda: group.reduce_scatter(one, parts),
        "all_to_all": lambda: group.all_to_all(others, parts),
        "scan": lambda: group.scan(one),
        "exscan": lambda: group.exscan(one),
        "barrier": lambda: group.barrier(),
        "all_gather_object": lambda: group.all_gather_object([None] * size, bytes(8 * count)),
        "all_gather_array": lambda: group.all_gather_array(one),
        "all_reduce_coalesced": lambda: group.all_reduce_coalesced([one, other]),
    }

async def until_lost(name, call, told, started):
    try:
        await call()
        started.discard(name)
        while True:
            await call()
    except dist.DistError as error:
        told[name] = [type(error).__name__, getattr(error, "rank", None), time.time(), str(error)]

async def main():
    world = await dist.init_process_group(timeout=60)
    victim, told, programs = int(os.environ["VICTIM"]), {}, {}
    for count in (SMALL, LARGE):
        for name in collectives(world, 1):
            group = dist.new_group()
            programs[f"{name} {count}"] = collectives(group, count)[name]
    started = set(programs)
    tasks = [asyncio.create_task(until_lost(name, call, told, started)) for name, call in programs.items()]
    if world.rank == victim:
        while started:
            await asyncio.sleep(0.001)
        print(json.dumps(time.time()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.wait(tasks, timeout=30)
    survivors = [rank for rank in range(world.size) if rank != victim]
    async with dist.new_group(survivors, use_local_synchronization=True) as group:
        data = np.ones(100_000)
        await group.all_reduce(data)
        assert (data == group.size).all()
    try:
        await world.close()
    except dist.DistError:
        pass
    method = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    place = survivors.index(world.rank)
    async with dist.init_process_group(
        init_method=method, rank=place, world_size=len(survivors), group_name="survivors", timeout=30
    ) as group:
        data = np.ones(3)
        await group.all_reduce(data)
        assert (data == group.size).all()
    print(json.dumps(told), flush=True)

import json
dist.run(main())
"""


@pytest.mark.parametrize(("transport", "victim"), [("shm", 2), ("unix", HOST), ("tcp", 3)])
@punctual
def test_all_hear_who_was_killed_and_go_on_without_it(transport: str, victim: int) -> None:
    ended = finish(start_ranks(PROGRAM, RANKS, {"ASYNCDIST_TRANSPORT": transport, "VICTIM": str(victim)}))
    killed_s = json.loads(ended[victim].stdout)
    assert ended[victim].returncode == -signal.SIGKILL
    latest_s = killed_s
    for rank in ended:
        if rank.rank == victim:
            continue
        assert rank.returncode == 0, rank.stderr
        told: dict[str, Any] = json.loads(rank.stdout)
        assert len(told) == 28
        for name, (kind, lost, at_s, text) in told.items():
            assert kind in ("PeerLostError", "GroupAbortedError"), (name, text)
            assert lost == victim, (name, text)
            assert f"lost rank {victim}" in text
            latest_s = max(latest_s, at_s)
    assert_within(NAMED_S, latest_s - killed_s)
