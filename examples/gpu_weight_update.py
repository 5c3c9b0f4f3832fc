"""New weights from a trainer's GPU into the GPUs of servers, which answer requests meanwhile.

    asyncdist run --nproc-per-node 2 examples/gpu_weight_update.py --updates 5 --megabytes 256

Rank 0 trains: it computes a version of the weights on its GPU and broadcasts it, layer by layer; layers leave while
later ones are still being computed, as each broadcast waits for its own array on the GPU and nothing waits on the CPU.
The other ranks serve: an update comes into a second set of arrays, which takes the place of the first once it is
complete. Awaiting it leaves the event loop to the requests; how late it ever got to one is printed.

Where there is no GPU, or with `--arrays numpy`, the same runs on host arrays; `--arrays fake` plays GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import asyncdist as dist

LAYERS = 8
REQUEST_INTERVAL_S = 0.002
BETWEEN_UPDATES_S = 0.05


class Weights:
    """Arrays of one kind: how to make, fill and read them. All elements of version v are v."""

    def __init__(self, kind: str, resources: contextlib.ExitStack) -> None:
        self.kind = kind
        if kind == "cupy":
            import cupy

            cupy.cuda.Device(int(os.environ.get("LOCAL_RANK", "0")) % cupy.cuda.runtime.getDeviceCount()).use()
            self._made = cupy.full
        elif kind == "fake":
            from asyncdist.testing import fake_cuda

            folder = Path(tempfile.gettempdir()) / f"asyncdist-fake-gpu-{os.environ['MASTER_PORT']}"
            folder.mkdir(exist_ok=True)
            if os.environ["RANK"] == "0":
                resources.callback(shutil.rmtree, folder, ignore_errors=True)
            cuda = resources.enter_context(fake_cuda(int(os.environ["WORLD_SIZE"]), folder=folder))
            device = int(os.environ["LOCAL_RANK"])
            self._made = lambda count, value, dtype: cuda.runtime.array(np.full(count, value, dtype), device)
        else:
            self._made = np.full

    def layers(self, megabytes: int) -> list[Any]:
        """Layers of version 0, all together so large."""
        count = max(1, (megabytes << 20) // (4 * LAYERS))
        return [self._made(count, 0, np.float32) for _ in range(LAYERS)]

    def write(self, layer: Any, version: int) -> None:
        """Compute a version; on a GPU this only queues the work."""
        if self.kind == "fake":
            layer.set(version)
        else:
            layer[...] = version

    def read(self, layer: Any) -> tuple[float, float]:
        """The first and the last element."""
        if self.kind == "numpy":
            return float(layer[0]), float(layer[-1])
        return float(layer[:1].get()[0]), float(layer[-1:].get()[0])


async def train(weights: Weights, updates: int, megabytes: int) -> None:
    """Broadcast one version after another."""
    layers = weights.layers(megabytes)
    for version in range(1, updates + 1):
        began_s = time.perf_counter()
        works = []
        for layer in layers:
            weights.write(layer, version)
            works.append(dist.broadcast(layer, 0))
        for work in works:
            await work
        print(f"version {version} sent in {(time.perf_counter() - began_s) * 1e3:.0f} ms", flush=True)
        await asyncio.sleep(BETWEEN_UPDATES_S)


class Server:
    """The weights in use, those to come, and the requests answered from the former."""

    def __init__(self, weights: Weights, megabytes: int) -> None:
        self._weights = weights
        self.version = 0
        self.layers, self.next_layers = weights.layers(megabytes), weights.layers(megabytes)
        self.last = asyncio.Event()
        self.requests = 0
        self.latest_s = 0.0

    async def update(self, updates: int) -> None:
        """Receive every version and use it once it is complete."""
        for version in range(1, updates + 1):
            works = [dist.broadcast(layer, 0) for layer in self.next_layers]
            for work in works:
                await work
            # One step of the loop: a request sees the old version or the new one.
            self.version, self.layers, self.next_layers = version, self.next_layers, self.layers

    async def serve(self, last: int) -> None:
        """Answer requests, one after the other, until cancelled; `self.last` is set after one from version `last`."""
        due_s = time.perf_counter()
        while True:
            self.latest_s = max(self.latest_s, time.perf_counter() - due_s)
            ends = {element for layer in self.layers for element in self._weights.read(layer)}
            assert ends == {self.version}, f"an answer from versions {sorted(ends)}, not {self.version}"
            self.requests += 1
            if self.version == last:
                self.last.set()
            due_s = time.perf_counter() + REQUEST_INTERVAL_S
            await asyncio.sleep(REQUEST_INTERVAL_S)


async def serve(weights: Weights, updates: int, megabytes: int) -> None:
    """Serve until the last version has come, and answer once more with that."""
    server = Server(weights, megabytes)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve(updates))
        await server.update(updates)
        await server.last.wait()
        serving.cancel()
    print(
        f"{server.requests} requests, the last from version {server.version}; "
        f"the loop was at most {server.latest_s * 1e3:.1f} ms late",
        flush=True,
    )


async def main(options: argparse.Namespace) -> None:
    """The trainer or a server, by rank."""
    with contextlib.ExitStack() as resources:
        weights = Weights(options.arrays, resources)
        async with dist.init_process_group() as group:
            role = train if group.rank == 0 else serve
            await role(weights, options.updates, options.megabytes)
            if group.rank == 0:
                print(repr(group), flush=True)


def best_arrays() -> str:
    """cupy where it works, else numpy."""
    return "cupy" if dist.is_nccl_available() else "numpy"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="New weights from a trainer's GPU into those of servers.")
    parser.add_argument("--updates", type=int, default=5, help="versions that the trainer makes (default 5)")
    parser.add_argument("--megabytes", type=int, default=64, help="size of the weights in MiB (default 64)")
    parser.add_argument(
        "--arrays", choices=["cupy", "numpy", "fake"], help="kind of arrays (default: cupy, else numpy)"
    )
    options = parser.parse_args()
    options.arrays = options.arrays or best_arrays()
    dist.run(main(options))
