"""A rank that overwrites its own shared memory, of every kind, while all are busy: others find it out, or do not care.

Nobody crashes, hangs, reads outside of what is shared, or lays it on anybody's loop.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from socket_world import socket_world

import asyncdist as dist

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")

WORDS = (64, 8 * 120, 12_000, 1 << 40)
"""How far into a segment a word is changed: control words, words of all members, records and descriptors, anything."""


def memory_of(group: dist.ProcessGroup) -> list[memoryview]:
    """Everything that a rank shares, as words."""
    memory = group.world.mesh.memory
    assert memory is not None
    views = [segment.view for segment in memory.segments.values()]
    views.append(memory.doorbell.page.view)
    views += [each._pairing.half.view for each in memory.connections.values() if each._pairing.half is not None]
    return [view.cast("Q") for view in views]


def scribble(rng: random.Random, words: memoryview) -> None:
    """Change one word."""
    at = rng.randrange(min(rng.choice(WORDS), len(words)))
    near = (words[at] + rng.randrange(-3, 100)) % (1 << 64)
    words[at] = rng.choice((0, 1, near, near, 1 << 62, 1 << 63, (1 << 64) - 1, rng.getrandbits(64)))


def programs(
    group: dist.ProcessGroup, shared: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> list[Callable[[], Awaitable[object]]]:
    """What a rank is busy with: records, items, rings, and arrays that are lent."""
    small, large, huge = np.ones(5), np.ones(60_000), np.ones(700_000)
    others = [rank for rank in range(group.size) if rank != group.rank]

    async def messages() -> None:
        sent = [group.isend(data, peer, 5) for data in (large, shared) for peer in others]
        for _ in range(2):
            for peer in others:
                await group.recv(np.zeros(shared.size), peer, 5)
        for work in sent:
            await work

    return [
        lambda: group.all_reduce(small),
        lambda: group.all_reduce(large, tag=1),
        lambda: group.broadcast(huge, 1, tag=2),
        lambda: group.broadcast(shared, 1, tag=4),
        messages,
    ]


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_a_rank_writes(seed: int) -> None:
    rng = random.Random(seed)
    async with socket_world(3) as groups:
        for tag in range(2):
            await asyncio.gather(*(group.all_reduce(np.ones(5), tag=tag) for group in groups))
        arrays = [group.empty(300_000, np.float64) for group in groups]
        busy = True

        async def repeat(program: Callable[[], Awaitable[object]]) -> None:
            while busy:
                await program()

        tasks = []
        for group, array in zip(groups, arrays, strict=True):
            array[...] = 1
            tasks += [asyncio.create_task(repeat(program)) for program in programs(group, array)]
        for _ in range(rng.randrange(3, 40)):
            await asyncio.sleep(0)
        for _ in range(rng.randrange(1, 30)):
            scribble(rng, rng.choice(memory_of(groups[1])))
            await asyncio.sleep(0)
        await asyncio.wait(tasks, timeout=0.3)
        busy = False
        for group in groups:
            group.abort("enough")
        ended, pending = await asyncio.wait(tasks, timeout=10)
        assert not pending
        for task in ended:
            assert isinstance(task.exception(), dist.DistError | None)
