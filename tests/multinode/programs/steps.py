"""Sums a vector at each of so many steps, with a pause behind each, and checks every sum."""

import asyncio
import sys

import numpy as np

import asyncdist as dist


async def main(steps: int, pause_s: float, elements: int = 1000) -> None:
    async with dist.init_process_group() as group:
        for step in range(1, steps + 1):
            x = np.full(elements, group.rank + step, np.float64)
            await dist.all_reduce(x)
            right = group.size * step + sum(range(group.size))
            assert (x == right).all(), f"step {step}: {x} instead of {right}"
            if group.rank == 0:
                print("step", step, flush=True)
            await asyncio.sleep(pause_s)
        if group.rank == 0:
            print(f"all sums of {group.size} ranks are right", flush=True)


dist.run(main(int(sys.argv[1]), float(sys.argv[2]), *map(int, sys.argv[3:])))
