"""A model over two ranks: rank 0 has the first layer, rank 1 keeps the second for it and is called for each batch.

    asyncdist run --nproc-per-node 2 examples/rpc_model_parallel.py

A batch goes in pieces. While rank 1 works on one, rank 0 works on the next.
"""

from __future__ import annotations

import numpy as np

import asyncdist as dist
from asyncdist import rpc

PIECES = 4
STEPS = 200
RATE = 0.5


@rpc.register
class Layer:
    """A linear layer that learns; `loss` is for the last one."""

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        self.weights = np.random.default_rng(seed).normal(scale=inputs**-0.5, size=(inputs, outputs))
        self.gradient = np.zeros_like(self.weights)

    def loss(self, values: np.ndarray, wanted: np.ndarray) -> tuple[float, np.ndarray]:
        """Half the mean squared error of a piece, and its gradient by `values`."""
        errors = values @ self.weights - wanted
        return float(np.mean(errors**2) / 2), self.backward(values, errors / errors.size)

    def backward(self, values: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        """Add up the weights' gradient; returns that by `values`."""
        self.gradient += values.T @ gradient
        return np.asarray(gradient @ self.weights.T)

    def step(self) -> None:
        """Follow the gradient of all pieces."""
        self.weights -= RATE * self.gradient / PIECES
        self.gradient[...] = 0


async def train() -> list[float]:
    """On rank 0: the loss of each step."""
    rng = np.random.default_rng(0)
    first, losses = Layer(8, 32, seed=1), []
    with await rpc.create(1, "Layer", 32, 1, seed=2) as second:
        for _ in range(STEPS):
            batch = rng.uniform(-1, 1, size=(PIECES, 32, 8))
            hidden = [np.tanh(piece @ first.weights) for piece in batch]
            wanted = [np.sin(piece.sum(axis=1, keepdims=True)) for piece in batch]
            works = [second.call("loss", *piece) for piece in zip(hidden, wanted, strict=True)]
            loss = 0.0
            for piece, values, work in zip(batch, hidden, works, strict=True):
                piece_loss, gradient = await work
                loss += piece_loss / PIECES
                first.backward(piece, gradient * (1 - values**2))
            first.step()
            await second.call("step")
            losses.append(loss)
    return losses


async def main() -> None:
    """Rank 1, and others if there are any, only serve."""
    async with dist.init_process_group() as group, rpc.serve():
        if group.rank == 0:
            losses = await train()
            better = np.mean(losses[:20]) / np.mean(losses[-20:])
            print(f"model over two ranks: {STEPS} steps, the loss fell {'well' if better > 3 else 'too little'}")


if __name__ == "__main__":
    dist.run(main())
