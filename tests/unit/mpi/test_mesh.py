"""The mesh of MPI, on a fake of MPI, passes the checks that every mesh passes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from fake_mpi import FakeMpi
from mesh_world import Done
from transport_conformance import MESH_CHECKS, MeshCheck, Rank

from asyncdist.mpi.library import open_meshes
from asyncdist.mpi.mesh import MpiMesh
from asyncdist.transport.base_mesh import MeshOwner
from asyncdist.transport.protocol.frame import POINT_TO_POINT, pack_key
from asyncdist.transport.protocol.operations import Receive


@pytest.mark.parametrize("check", MESH_CHECKS, ids=lambda check: check.__name__)
async def test_mesh(check: MeshCheck) -> None:
    async def open_meshes(owners: Sequence[MeshOwner]) -> Sequence[MpiMesh]:
        mpi = FakeMpi(len(owners))
        meshes = [
            MpiMesh(mpi, rank, len(owners), owner, 20.0, (mpi.comms[rank], None)) for rank, owner in enumerate(owners)
        ]
        for mesh in meshes:
            await mesh.listen()
        return meshes

    await check(open_meshes)


async def test_the_communicators_of_all_are_for_one_group() -> None:
    mpi = FakeMpi(2)
    mesh = MpiMesh(mpi, 0, 2, Rank(), 0.0, (mpi.comms[0], mpi.comms[1]))
    assert mesh.take_communicators((1, 0)) is None
    assert mesh.take_communicators((0, 1)) == (mpi.comms[0], mpi.comms[1])
    assert mesh.take_communicators((0, 1)) is None
    assert mesh.spinner is None  # ASYNCDIST_SPIN_US=0


async def test_a_mesh_that_waits_for_nothing_says_so() -> None:
    """Else MPI would be asked five times as often while nothing is under way."""
    mpi = FakeMpi(2)
    mesh = MpiMesh(mpi, 0, 2, Rank(), 0.0, (mpi.comms[0], None))
    await mesh.listen()
    receive = Receive(pack_key(1, 0, 0, 0, POINT_TO_POINT), memoryview(bytearray(1)), Done(), None)
    assert not mesh.progress._awaited()
    mesh.post_receive_any([0, 1], receive)
    assert mesh.progress._awaited()
    assert mesh.withdraw(receive)
    assert not mesh.progress._awaited()
    mesh.abort()
    await asyncio.sleep(0)


async def test_a_process_that_ends_tells_all_and_takes_its_receives_back() -> None:
    mpi = FakeMpi(3)
    mesh = MpiMesh(mpi, 0, 3, Rank(), 0.0, (mpi.comms[0], None))
    await mesh.listen()
    assert mesh in open_meshes
    mesh.hang_up()
    mesh.hang_up()
    assert mesh not in open_meshes
    assert not mpi.comms[0].posted
    assert [[message.data for message in comm.arrived] for comm in mpi.comms[1:]] == [[b""], [b""]]
    mesh.abort()
    await asyncio.sleep(0)
