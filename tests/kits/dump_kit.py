"""Dumps of three ranks of which one does not do what the others do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from group_kit import Group

import asyncdist as dist
from asyncdist.inspect import dumps
from asyncdist.inspect.recorder import RECORDER
from asyncdist.testing import run_world

__all__ = ["dumped"]


def dumped(folder: Path, *, differ: bool) -> None:
    """Three ranks do what all do, and then rank 2 does not come to an all_reduce, or runs something else there."""
    RECORDER.entries.clear()

    async def main(group: Group) -> None:
        x, all_of_it = np.ones(2), np.ones(6)
        await group.broadcast(x, 1)
        await group.all_gather_into_tensor(all_of_it, x)
        await group.reduce_scatter_tensor(x, all_of_it)
        await group.all_gather([np.empty(2) for _ in range(3)], x)
        await asyncio.gather(group.all_reduce(x, tag=3), group.barrier(tag=4), group.scan(x, tag=5))
        if group.rank < 2 or differ:
            work = group.barrier() if group.rank == 2 else group.all_reduce(x)
        await asyncio.sleep(0.1)
        dumps.write(folder / f"rank_{group.rank}.json", dumps.document(group.rank, "asked"))
        if group.rank < 2 or differ:
            group.abort("enough")
            with pytest.raises(dist.DistError):
                await work

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RECORDER, "sites", True)
        run_world(3, main)
