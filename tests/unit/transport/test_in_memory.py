"""The in-memory network does what every mesh must do, in order or at the whim of a seed, in real and virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from transport_conformance import MESH_CHECKS, MeshCheck, OpenMeshes

from asyncdist.testing.loop import VirtualTimeLoop
from asyncdist.transport.base_mesh import MeshOwner
from asyncdist.transport.in_memory import MemoryMesh, MemoryNetwork


def in_memory(seed: int | None = None, latency_s: float = 0.0) -> OpenMeshes:
    async def open_meshes(owners: Sequence[MeshOwner]) -> list[MemoryMesh]:
        network = MemoryNetwork(asyncio.get_running_loop(), seed, latency_s)
        meshes = [MemoryMesh(network, rank, len(owners), owner) for rank, owner in enumerate(owners)]
        for mesh in meshes:
            await mesh.listen()
        return meshes

    return open_meshes


@pytest.mark.parametrize("check", MESH_CHECKS, ids=lambda check: check.__name__)
async def test_mesh(check: MeshCheck) -> None:
    await check(in_memory())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("check", MESH_CHECKS, ids=lambda check: check.__name__)
def test_mesh_in_virtual_time(check: MeshCheck, seed: int) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(check(in_memory(seed, latency_s=0.01)))
