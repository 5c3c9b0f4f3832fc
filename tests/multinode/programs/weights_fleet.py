"""A trainer, or the servers of a host: `weights_fleet.py train SERVERS`, `weights_fleet.py serve SERVERS`.

Each server is a process. The trainer commits two versions of 16 MiB, the second with a 16th changed, and waits each
time until all SERVERS are ready.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import numpy as np

import asyncdist as dist
from asyncdist import weights

ELEMENTS = 4 << 20


def connected() -> dist.TCPStore:
    """A client of the store that the environment names."""
    host, _, port = os.environ["ASYNCDIST_STORE"].rpartition(":")
    return dist.TCPStore(host, int(port))


async def train(servers: int) -> None:
    """Commit, and say how many bytes of versions were sent by then."""
    arrays = {"w": np.arange(ELEMENTS, dtype=np.float32)}
    async with connected() as store, weights.publish("policy", store=store) as publisher:
        async with store.watch("weights/policy/members/") as watch:
            while len(await store.list_keys("weights/policy/members/")) <= servers:
                await anext(watch)
        for version in (1, 2):
            await publisher.commit(version, arrays)
            await weights.wait_ready("policy", version, count=servers, store=store)
            print(f"version {version}: {publisher.bytes_given} bytes", flush=True)
            arrays["w"][: ELEMENTS // 16] = version
            await asyncio.sleep(1)  # what servers of a host lend each other is over then


async def serve() -> None:
    """Serve until version 2 is here, and a little longer."""
    arrays: dict[str, Any] = {}
    async with connected() as store, weights.subscribe("policy", into=arrays, store=store) as subscription:
        async for version in subscription:
            changed = float(version.number - 1)
            assert (arrays["w"][1 : ELEMENTS // 16] == changed).all() or version.number == 1
            assert arrays["w"][-1] == ELEMENTS - 1
            print(f"serves {version.number}", flush=True)
            if version.number == 2:
                await asyncio.sleep(2)
                return


if __name__ == "__main__":
    role, count = sys.argv[1:]
    if role == "train":
        dist.run(train(int(count)))
    elif role == "one":
        dist.run(serve())
    else:
        processes = [subprocess.Popen([sys.executable, __file__, "one", "1"]) for _ in range(int(count))]
        sys.exit(max(process.wait() for process in processes))
