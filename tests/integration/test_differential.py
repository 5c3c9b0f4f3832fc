"""Every algorithm of every collective against numpy, between real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run_ranks

PROGRAM = f"""
sys.path.insert(0, {str(Path(__file__).parents[1] / "kits")!r})
import random
from differential import RUNS, Tagged, choose, random_case
from asyncdist.plan.algorithms.registry import ALGORITHMS

async def task(group, tag, names, generator):
    for name in names:
        await RUNS[name](Tagged(group, tag), random_case(generator, group.size))

async def main():
    generator = random.Random(3)
    async with dist.init_process_group() as group:
        for name, algorithms in ALGORITHMS.items():
            for algorithm in algorithms:
                choose(group, name, algorithm, 1)
                for _ in range(2):
                    await RUNS[name](group, random_case(generator, group.size))
        pairs = [dist.new_group([2, 0], sort_ranks=False), dist.new_group([1, 2])]
        async with asyncio.TaskGroup() as tasks:
            for number, one in enumerate([group, group, *pairs]):
                names = generator.sample(sorted(RUNS), 8)
                if not isinstance(one, dist.NonMember):
                    tasks.create_task(task(one, number, names, random.Random(number)))
    print("done")
dist.run(main())
"""


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_every_algorithm(transport: str) -> None:
    for rank in run_ranks(PROGRAM, 3, {"ASYNCDIST_TRANSPORT": transport}):
        assert rank.stdout == "done\n"
        assert rank.stderr == ""
