"""Data-parallel training on handwritten digits, in numpy.

    asyncdist run --nproc-per-node 4 examples/train_digits.py

Every rank holds the whole network and works on its shard of each batch. `DistributedDataParallel` sums the gradient of
one layer over the ranks while the gradient of the next layer is still being computed, in a thread, so communication
hides behind computation. The batches are the same for any number of ranks, and so is the accuracy, up to rounding.

Exits with status 1 if the accuracy on unseen digits is below 0.96, if `--compare` finds a run on one rank more than
0.3 points away, or if the ranks do not hold bit-identical weights at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track

import asyncdist as dist

DATA = Path(__file__).parent / "data" / "digits.csv.gz"
TEST_IMAGES = 597  # of 1,797: one image is 0.17 points of accuracy
LAYER_SIZES = (64, 256, 128, 10)
EPOCHS = 30
BATCH_IMAGES = 48  # over all ranks together
LEARNING_RATE = 0.05
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
SEED = 1998
REQUIRED_ACCURACY = 0.96
ALLOWED_DIFFERENCE = 0.003

Array = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Digits:
    """8x8 gray images as rows of 64 numbers between 0 and 1, and the digit each one shows."""

    images: Array
    labels: Labels

    def __getitem__(self, rows: npt.NDArray[np.int64]) -> Digits:
        return Digits(self.images[rows], self.labels[rows])


def load_digits() -> tuple[Digits, Digits]:
    """Read the data and split it, the same way on every rank, into a training and a test set."""
    with gzip.open(DATA, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    digits = Digits(table[:, :-1] / np.float32(16), table[:, -1].astype(np.int64))
    order = np.random.default_rng(SEED).permutation(len(table))
    return digits[order[TEST_IMAGES:]], digits[order[:TEST_IMAGES]]


def batches(digits: Digits, rank: int, world_size: int) -> Iterator[Digits]:
    """Yield this rank's shard of every batch; the shards of all ranks make up the same batches for any world size."""
    shuffle = np.random.default_rng(SEED + 1)
    for _ in range(EPOCHS):
        order = shuffle.permutation(len(digits.labels))
        for start in range(0, len(order), BATCH_IMAGES):
            yield digits[order[start : start + BATCH_IMAGES][rank::world_size]]


class Layer:
    """A fully connected layer: a weight matrix whose last row is the bias, and its momentum."""

    def __init__(self, inputs: int, outputs: int, rng: np.random.Generator) -> None:
        self.weights: Array = rng.standard_normal((inputs + 1, outputs), np.float32) * np.float32(np.sqrt(2 / inputs))
        self.weights[-1] = 0
        self.velocity = np.zeros_like(self.weights)

    def forward(self, inputs: Array) -> Array:
        outputs: Array = inputs @ self.weights[:-1] + self.weights[-1]
        return outputs

    def backward(self, inputs: Array, delta: Array) -> tuple[Array, Array]:
        """From the gradient at the outputs: the gradient of the weights, and the one at the (rectified) inputs."""
        gradient = np.concatenate([inputs.T @ delta, delta.sum(axis=0, keepdims=True)])
        return gradient, (delta @ self.weights[:-1].T) * (inputs > 0)

    def step(self, gradient: Array) -> None:
        self.velocity *= MOMENTUM
        self.velocity -= LEARNING_RATE * (gradient + WEIGHT_DECAY * self.weights)
        self.weights += self.velocity


Network = list[Layer]


def forward(network: Network, images: Array) -> list[Array]:
    """Return the inputs of every layer and, last, the scores of the ten digits."""
    values = [images]
    for layer in network[:-1]:
        values.append(np.maximum(layer.forward(values[-1]), 0))
    return [*values, network[-1].forward(values[-1])]


def loss_gradient(scores: Array, labels: Labels) -> Array:
    """Gradient of the cross entropy, as this shard's part of the mean over a whole batch."""
    probabilities: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    probabilities[np.arange(len(labels)), labels] -= 1
    probabilities /= BATCH_IMAGES
    return probabilities


async def train_step(network: Network, shard: Digits, ddp: dist.DistributedDataParallel) -> None:
    """One step of gradient descent, each layer's gradient under way while the next one is computed."""
    *inputs, scores = await asyncio.to_thread(forward, network, shard.images)
    delta = loss_gradient(scores, shard.labels)
    for number, values in reversed(list(enumerate(inputs))):
        gradient, delta = await asyncio.to_thread(network[number].backward, values, delta)
        ddp.ready(f"layer {number}", gradient)  # leaves now
    sums = await ddp.averaged()
    for number, layer in enumerate(network):
        layer.step(sums[f"layer {number}"])


async def train(digits: Digits, label: str, group: dist.ProcessGroup | None = None) -> Network:
    """Train a network with the ranks of `group` (default: all) and return it."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    rng = np.random.default_rng((SEED, rank))  # every rank draws different weights; rank 0's are taken
    network = [Layer(*sizes, rng) for sizes in pairwise(LAYER_SIZES)]
    weights = {f"layer {number}": layer.weights for number, layer in enumerate(network)}
    ddp = await dist.DistributedDataParallel(weights, group, op=dist.ReduceOp.SUM, bucket_bytes=1)  # one for each layer
    shards = list(batches(digits, rank, world_size))
    for shard in progress(shards, label) if rank == 0 else shards:
        await train_step(network, shard, ddp)
    return network


def progress(steps: list[Digits], label: str) -> Iterable[Digits]:
    """A progress bar on a terminal, a few plain lines anywhere else."""
    if sys.stderr.isatty():
        yield from track(steps, label, console=Console(stderr=True))
        return
    for done, step in enumerate(steps, 1):
        yield step
        if done % (len(steps) // 5) == 0:
            print(f"{label}: {done} of {len(steps)} steps", file=sys.stderr, flush=True)


def accuracy(network: Network, digits: Digits) -> float:
    """Share of the images that the network recognizes."""
    scores = forward(network, digits.images)[-1]
    return float(np.mean(scores.argmax(axis=1) == digits.labels))


async def weights_are_identical(network: Network) -> bool:
    """Gather a digest of every rank's weights on every rank and compare them, to the last bit."""
    digest = np.frombuffer(hashlib.sha256(b"".join(layer.weights.tobytes() for layer in network)).digest(), np.uint8)
    digests = [np.empty_like(digest) for _ in range(dist.get_world_size())]
    await dist.all_gather(digests, digest)
    return all(np.array_equal(digest, other) for other in digests)


async def alone_accuracy(training: Digits, test: Digits) -> float:
    """Accuracy of the same training on rank 0 alone, told to all ranks."""
    alone = dist.new_group([0])
    result = np.zeros(1)
    if isinstance(alone, dist.ProcessGroup):  # on rank 0
        result[0] = accuracy(await train(training, "training alone", alone), test)
    await dist.broadcast(result, src=0)
    return float(result[0])


async def main(compare: bool) -> int:
    """Train, check and report; returns the exit status."""
    training, test = load_digits()
    async with dist.init_process_group():
        world_size = dist.get_world_size()
        ranks = f"{world_size} rank{'s' * (world_size > 1)}"
        start = time.perf_counter()
        network = await train(training, f"training on {ranks}")
        seconds = time.perf_counter() - start
        reached = accuracy(network, test)
        identical = await weights_are_identical(network)
        alone = await alone_accuracy(training, test) if compare else reached
        if dist.get_rank() == 0:
            compared = f" (alone {alone:.4f})" if compare else ""
            same = "bit-identical" if identical else "DIFFERENT"
            print(f"accuracy {reached:.4f}{compared} in {seconds:.1f} s on {ranks}, weights {same}", flush=True)
    good = identical and reached >= REQUIRED_ACCURACY and abs(reached - alone) <= ALLOWED_DIFFERENCE
    return 0 if good else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Data-parallel training on handwritten digits.")
    parser.add_argument("--compare", action="store_true", help="also train on rank 0 alone and compare the accuracy")
    sys.exit(dist.run(main(parser.parse_args().compare)))
