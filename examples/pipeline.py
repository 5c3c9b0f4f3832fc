"""Model parallelism: a network too large for one rank, a layer on each.

    asyncdist run --nproc-per-node 4 examples/pipeline.py

A batch passes through the ranks in small pieces: while rank 1 works on the first, rank 0 works on the second.
The same without asyncio: pipeline_blocking.py.
"""

from __future__ import annotations

import numpy as np

import asyncdist as dist

PIECES = 8
ROWS = 32  # of each piece
WIDTH = 64


def layer_of(rank: int) -> np.ndarray:
    """The weights of one layer; here any rank can make them, to check the result."""
    return np.random.default_rng(rank).normal(scale=WIDTH**-0.5, size=(WIDTH, WIDTH))


def apply(layer: np.ndarray, values: np.ndarray) -> np.ndarray:
    """What a layer makes of a piece."""
    return np.asarray(np.maximum(values @ layer, 0))


async def forward(batch: list[np.ndarray]) -> list[np.ndarray]:
    """Pass rank 0's batch through all ranks; returns the outputs on the last, nothing on the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer, outputs, sending = layer_of(rank), [], []
    for piece in range(PIECES):
        values = batch[piece] if rank == 0 else await dist.recv_array(src=rank - 1)
        values = apply(layer, values)
        if rank < size - 1:
            sending.append(dist.send(values, dst=rank + 1))  # leaves while the next piece is worked on
        else:
            outputs.append(values)
    for work in sending:
        await work
    return outputs


async def main() -> None:
    """Compare the pipeline with all layers applied in one place."""
    async with dist.init_process_group():
        batch = list(np.random.default_rng(99).normal(size=(PIECES, ROWS, WIDTH)))
        outputs = await forward(batch)
        if dist.get_rank() == dist.get_world_size() - 1:
            for values, output in zip(batch, outputs, strict=True):
                for rank in range(dist.get_world_size()):
                    values = apply(layer_of(rank), values)
                assert np.allclose(values, output)
            print(f"pipeline: {PIECES} pieces of {ROWS} rows through {dist.get_world_size()} layers")


if __name__ == "__main__":
    dist.run(main())
