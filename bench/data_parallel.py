"""A step of training the digits by `DistributedDataParallel`, beside the same step with hand-written buckets.

    python -m bench.data_parallel --ranks 4 --steps 1000

Steps of both kinds alternate on the same ranks, each after a barrier; their time is the slowest rank's. Both train a
network of their own, and the weights are compared at the end, to the last bit.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

import asyncdist as dist

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMISED = 1.05
"""Most that a step may take, compared with the hand-written one."""


async def step_by_hand(digits: Any, network: Any, shard: Any, buckets: dist.GradientBuckets) -> None:
    """As `digits.train_step`; the last layer's gradient is the first of the list."""
    *inputs, scores = await asyncio.to_thread(digits.forward, network, shard.images)
    delta = digits.loss_gradient(scores, shard.labels)
    for index, (layer, values) in enumerate(zip(reversed(network), reversed(inputs), strict=True)):
        gradient, delta = await asyncio.to_thread(layer.backward, values, delta)
        buckets.ready(index, gradient)
    for layer, gradient in zip(reversed(network), await buckets.averaged(), strict=True):
        layer.step(gradient)


async def main(_local_rank: int, steps: int) -> list[list[float]]:
    """One rank: seconds of each step of both kinds."""
    sys.path.append(str(EXAMPLES))
    digits = importlib.import_module("train_digits")
    async with dist.init_process_group() as group:
        rng = np.random.default_rng(digits.SEED)
        networks = [[digits.Layer(*sizes, rng) for sizes in digits.pairwise(digits.LAYER_SIZES)] for _ in range(2)]
        for ours, others in zip(*networks, strict=True):
            others.weights[...] = ours.weights
        buckets = dist.GradientBuckets(
            [layer.weights for layer in reversed(networks[0])], op=dist.ReduceOp.SUM, bucket_bytes=1
        )
        weights = {f"layer {number}": layer.weights for number, layer in enumerate(networks[1])}
        ddp = await dist.DistributedDataParallel(weights, op=dist.ReduceOp.SUM, bucket_bytes=1)
        training, _ = digits.load_digits()
        shards = list(digits.batches(training, group.rank, group.size))
        took: list[list[float]] = [[], []]
        for number in range(steps):
            shard = shards[number % len(shards)]
            for kind in (number % 2, 1 - number % 2):
                await group.barrier()
                start = time.perf_counter()
                if kind:
                    await digits.train_step(networks[1], shard, ddp)
                else:
                    await step_by_hand(digits, networks[0], shard, buckets)
                slowest = np.array([time.perf_counter() - start])
                await group.all_reduce(slowest, dist.ReduceOp.MAX)
                took[kind].append(float(slowest[0]))
        for ours, others in zip(*networks, strict=True):
            assert ours.weights.tobytes() == others.weights.tobytes()
        return took


@click.command()
@click.option("--ranks", default=4, show_default=True)
@click.option("--steps", default=1000, show_default=True)
def command(ranks: int, steps: int) -> None:
    """Measure, and exit with 1 if the promise is not kept."""
    by_hand, wrapped = (np.array(took) * 1e6 for took in dist.spawn(main, (steps,), nprocs=ranks)[0])
    for name, took in (("buckets by hand", by_hand), ("DistributedDataParallel", wrapped)):
        p50, p99 = np.percentile(took, [50, 99])
        click.echo(f"{name:<24} min {took.min():8.0f} us   p50 {p50:8.0f} us   p99 {p99:8.0f} us")
    ratio = float(np.median(wrapped) / np.median(by_hand))
    click.echo(f"{ranks} ranks, {steps} steps of each, weights alike: {ratio:.3f}x (promised {PROMISED}x)")
    raise SystemExit(ratio > PROMISED)


if __name__ == "__main__":
    command()
