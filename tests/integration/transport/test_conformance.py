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


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp", "striped"])
@pytest.mark.parametrize("check", MESH_CHECKS, ids=lambda check: check.__name__)
async def test_mesh(check: MeshCheck, transport: str) -> None:
    async def open_meshes(owners: Sequence[MeshOwner]) -> Sequence[Mesh]:
        addresses: dict[int, PeerAddress] = {}

        async def resolve(ranks: Sequence[int]) -> dict[int, PeerAddress]:
            await asyncio.sleep(0)
            return {rank: addresses[rank] for rank in ranks}

        striped = transport == "striped"
        config = TransportConfig("tcp", interfaces=2, streams=3) if striped else TransportConfig(transport)
        ips = ["127.0.0.1", "127.0.0.2"] if striped else ["127.0.0.1"]
        meshes = [
            Mesh(rank, len(owners), bytes(16), b"secret", resolve, owner, config) for rank, owner in enumerate(owners)
        ]
        for mesh in meshes:
            addresses[mesh.rank] = await mesh.listen(ips)
        return meshes

    await check(open_meshes)
