"""Shapes that no array has, from a peer: the receive fails and the pair stays usable."""

from __future__ import annotations

import asyncio
import struct

import numpy as np
import pytest
from group_kit import Group

import asyncdist as dist
from asyncdist.testing import run_world
from asyncdist.transport.protocol.operations import SendOp

SHAPES = [(0, 1 << 63), (0, 1 << 62), (1 << 32, 0, 1 << 32), (0, (1 << 64) - 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("late", [False, True])
def test_empty_arrays_with_absurd_extents(shape: tuple[int, ...], late: bool) -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            if late:
                await group.recv(np.zeros(1), 1, 1)
            meta = struct.pack(f"<B7s{len(shape)}Q", 7, b"float32", *shape)
            made = group.isend(np.zeros(0, np.float32), 1)
            message = SendOp(made.message.key, memoryview(b""), meta, made, None)  # type: ignore[attr-defined]
            group.world.mesh.post_send(1, message)
            await group.isend(np.ones(2), 1)
        else:
            if not late:
                await asyncio.sleep(1)
            works = [group.recv_array(0) for _ in range(3)]
            if late:
                await group.isend(np.zeros(1), 0, 1)
            assert (await works[0]).shape == (0,)
            with pytest.raises(dist.CollectiveMismatchError, match="describes"):
                await works[1]
            assert (await works[2] == 1).all()

    run_world(2, main)
