"""A trainer that commits weights to the servers of weights_aiohttp.py and weights_fastapi.py.

    asyncdist-server --port 29500 &
    python examples/weights_aiohttp.py --store 127.0.0.1:29500 --port 8080 &
    python examples/weights_trainer.py --store 127.0.0.1:29500 --steps 5

Kill it, and the servers go on with the last version that it has committed; start it again, and it takes over.
"""

from __future__ import annotations

import argparse
import asyncio

import numpy as np

import asyncdist as dist
from asyncdist import weights


async def main(host: str, port: int, steps: int, every_s: float) -> None:
    """Commit a version for each step."""
    model = {"scale": np.ones(1 << 20, np.float32), "offset": np.zeros(1, np.float32)}
    async with dist.TCPStore(host, port) as store, weights.publish("example", store=store) as publisher:
        first = (publisher.version or 0) + 1
        for step in range(first, first + steps):
            model["scale"] *= 1.01  # a step
            model["offset"] += 1
            try:
                await publisher.commit(step, model)
            except weights.WeightsError as error:
                print(f"version {step} is not served: {error}", flush=True)
            else:
                print(f"version {step}: {await weights.ready('example', store=store)}", flush=True)
            await asyncio.sleep(every_s)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A trainer that commits weights.")
    parser.add_argument("--store", default="127.0.0.1:29500", help="where asyncdist-server listens")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two versions (default 1)")
    options = parser.parse_args()
    host, _, port = options.store.rpartition(":")
    dist.run(main(host, int(port), options.steps, options.every))
