"""Vectors of so many chunks that most steps of their plans are worked out on the way."""

from __future__ import annotations

import sys

import pytest
from jobs import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")

LONG = """
from asyncdist.plan.steps import RepeatedSteps

async def main():
    async with dist.init_process_group() as group:
        world, rank = group.size, group.rank
        part = (600_000 if world > 3 else 300_000) * 4 // world + 1  # of 8 bytes: some hundred chunks, the last short
        count = part * world

        def data(length, who):
            return np.arange(length) * 7 + who * 1_000_003

        def new(length, dtype=np.int64):
            return dist.empty(length, dtype) if os.environ["EMPTY"] == "1" else np.empty(length, dtype)

        def filled(length):
            array = new(length)
            array[:] = data(length, rank)
            return array

        for call in range(2):  # planned, and from what was planned
            for root in (0, world - 1):
                array = filled(count)
                await dist.broadcast(array, root)
                assert (array == data(count, root)).all()
                array = filled(count)
                await dist.reduce(array, root)
                assert rank != root or (array == sum(data(count, who) for who in range(world))).all()
                lists = [filled(part) for _ in range(world)]
                into = new(part)
                await dist.scatter(into, lists if rank == root else None, root)
                assert (into == data(part, root)).all()
                lists = [new(part) for _ in range(world)]
                await dist.gather(filled(part), lists if rank == root else None, root)
                assert rank != root or all((lists[who] == data(part, who)).all() for who in range(world))
            array = filled(count)
            await dist.all_reduce(array)
            assert (array == sum(data(count, who) for who in range(world))).all()
            array = filled(count)
            await dist.scan(array)
            assert (array == sum(data(count, who) for who in range(rank + 1))).all()
            into = new(count)
            await dist.all_gather_into_tensor(into, filled(part))
            assert (into == np.concatenate([data(part, who) for who in range(world)])).all()
            into = new(part)
            await dist.reduce_scatter_tensor(into, filled(count))
            assert (into == sum(data(count, who) for who in range(world))[rank * part:(rank + 1) * part]).all()
            into = new(count)
            await dist.all_to_all_single(into, filled(count))
            own = slice(rank * part, (rank + 1) * part)
            assert (into == np.concatenate([data(count, who)[own] for who in range(world)])).all()
        recipes = group._core._backend._recipes.values()
        print(sum(isinstance(recipe.program.plan.steps, RepeatedSteps) for recipe in recipes))
dist.run(main())
"""


@pytest.mark.slow("moves vectors of many mebibytes on three ranks")
@pytest.mark.parametrize(("world", "empty"), [(2, "0"), (3, "1"), pytest.param(4, "0", marks=pytest.mark.thorough)])
def test_every_collective_of_long_vectors_is_right(world: int, empty: str) -> None:
    for rank in run_ranks(LONG, world, {"EMPTY": empty}, 120.0):
        assert int(rank.stdout) >= 5
