"""The real mesh passes the checks that every mesh passes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from transport_conformance import MESH_CHECKS, MeshCheck

from asyncdist.transport.addresses import PeerAddress
from asyncdist.transport.base_mesh import MeshOwner
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.mesh import Mesh


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
@pytest.mark.parametrize("check", MESH_CHECKS, ids=lambda check: check.__name__)
async def test_mesh(check: MeshCheck, transport: str) -> None:
    async def open_meshes(owners: Sequence[MeshOwner]) -> Sequence[Mesh]:
        addresses: dict[int, PeerAddress] = {}

        async def resolve(ranks: Sequence[int]) -> dict[int, PeerAddress]:
            await asyncio.sleep(0)
            return {rank: addresses[rank] for rank in ranks}

        config = TransportConfig(transport=transport)
        meshes = [
            Mesh(rank, len(owners), bytes(16), b"secret", resolve, owner, config) for rank, owner in enumerate(owners)
        ]
        for mesh in meshes:
            addresses[mesh.rank] = await mesh.listen()
        return meshes

    await check(open_meshes)
