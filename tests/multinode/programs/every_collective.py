"""Every collective on several random cases, each beside numpy; given MiB, an all_reduce whose bytes are counted too."""

import os
import random
import sys
from pathlib import Path

import numpy as np
from differential import RUNS, random_case

import asyncdist as dist


async def main(cases: int, mebibytes: int = 0) -> None:
    generator = random.Random(5)  # the same on all ranks
    async with dist.init_process_group() as group:
        for name in sorted(RUNS):
            for _ in range(cases):
                await RUNS[name](group, random_case(generator, group.size))
        if mebibytes:
            before, after = await received_of_one_sum(mebibytes)
            if os.environ["LOCAL_RANK"] == "0":
                print(f"bytes received {before}, {after}", flush=True)
        if group.rank == 0:
            print(f"{len(RUNS)} collectives are right on {group.size} ranks", flush=True)


async def received_of_one_sum(mebibytes: int) -> tuple[int, int]:
    """What the host's interface has received before and after a sum."""
    vector = np.ones(mebibytes << 18, np.float32)
    await dist.all_reduce(vector)  # connections are made
    assert (vector == dist.get_world_size()).all()
    await dist.barrier()
    before = received()
    await dist.all_reduce(vector)
    await dist.barrier()
    return before, received()


def received() -> int:
    return int(Path("/sys/class/net/eth0/statistics/rx_bytes").read_text())


dist.run(main(*map(int, sys.argv[1:])))
