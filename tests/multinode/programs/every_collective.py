"""Every collective on several random cases, each beside numpy."""

import random
import sys

from differential import RUNS, random_case

import asyncdist as dist


async def main(cases: int) -> None:
    generator = random.Random(5)  # the same on all ranks
    async with dist.init_process_group() as group:
        for name in sorted(RUNS):
            for _ in range(cases):
                await RUNS[name](group, random_case(generator, group.size))
        if group.rank == 0:
            print(f"{len(RUNS)} collectives are right on {group.size} ranks", flush=True)


dist.run(main(int(sys.argv[1])))
