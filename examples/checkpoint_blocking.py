"""A checkpoint: rank 0 writes it, all others wait at a barrier and read it.

    asyncdist run --nproc-per-node 4 examples/checkpoint_blocking.py

The same on an event loop: checkpoint.py.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import asyncdist.blocking as dist


def save(path: Path, weights: np.ndarray) -> None:
    """Write a file that is there completely or not at all."""
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        np.save(file, weights)
    unfinished.replace(path)


def checkpoint(path: Path, weights: np.ndarray) -> None:
    """Save rank 0's weights. When it returns on any rank, the file is there."""
    if dist.get_rank() == 0:
        save(path, weights)
    dist.barrier()


def main() -> None:
    """Save, load, compare."""
    with dist.init_process_group():
        rank, size = dist.get_rank(), dist.get_world_size()
        with tempfile.TemporaryDirectory() as folder:
            shared: list[Any] = [folder]
            dist.broadcast_object_list(shared, src=0)  # rank 0's folder; all ranks of this host see it
            path = Path(shared[0]) / "weights.npy"

            weights = np.full(4, float(rank))
            dist.all_reduce(weights)
            checkpoint(path, weights)
            loaded = np.load(path)
            assert loaded.tolist() == [size * (size - 1) / 2] * 4
            dist.barrier()  # before the folder is removed, everybody has read the file
        if rank == 0:
            print("loaded:", loaded)


if __name__ == "__main__":
    main()
