"""Joining a world whose ranks MPI knows: with no store at all, or beside a store that the ranks meet in."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgpack
import numpy as np

from asyncdist.concurrency.deadline import Deadline
from asyncdist.errors import ConnectTimeoutError, DistBackendError, DistError
from asyncdist.launch.scheduler import find_place
from asyncdist.mpi.library import leave_behind, load
from asyncdist.mpi.mesh import MpiMesh
from asyncdist.plan.selection.selector import parse_overrides
from asyncdist.store import HashStore
from asyncdist.transport.addresses import LocalAddress, host_id
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.context import Absence
from asyncdist.transport.mesh import Resolve
from asyncdist.world.address_book import AddressBook
from asyncdist.world.init_method import InitMethod, StoreSource
from asyncdist.world.inspection import Inspection
from asyncdist.world.rendezvous import WORLD_ID_BYTES, Met
from asyncdist.world.tuning_file import agreed_tuning, own_tuning
from asyncdist.world.world import World

__all__ = ["join_by_mpi", "mesh_of_world"]

PAUSE_S: Final = 1e-3
"""Between two looks whether the other ranks have come."""
TRANSPORT: Final = "tcp"
"""What the constants of a world are those of whose messages go through MPI: no memory is shared by plans."""


class MpiMeeting:
    """What a world does with a store, where it has none: ranks say all they have to say by messages."""

    def __init__(self, world_size: int) -> None:
        self.book = AddressBook(world_size)

    def learn(self, first: int, addresses: Sequence[bytes]) -> bool:
        """There are no addresses."""
        return False

    async def infos(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """Nobody says where it can be asked."""
        return []

    async def words_of(self, rank: int) -> tuple[bytes, Absence]:
        """See Rendezvous."""
        return b"", Absence.NONE

    async def leave_words(self, words: bytes) -> bool:
        """All ranks are connected, and have been told."""
        return True

    async def leave(self) -> None:
        """See Rendezvous."""

    async def resign(self) -> None:
        """See Rendezvous."""

    async def wait_for_goodbyes(self, lost: Collection[int]) -> None:
        """See Rendezvous."""

    def hurry(self) -> None:
        """See Rendezvous."""


def mesh_of_world(
    rank: int, world_size: int, world_id: bytes, secret: bytes, resolve: Resolve, owner: World, config: TransportConfig
) -> MpiMesh:
    """Return the mesh of a world that meets in a store. Raises DistError unless `mpirun` has started all its ranks."""
    mpi = load()
    started = mpi.COMM_WORLD.Get_size()
    if started != world_size:
        raise DistError(
            f"rank {rank}: the world has {world_size} ranks, but MPI_COMM_WORLD {started}: start them all by one mpirun"
        )
    return MpiMesh(mpi, rank, world_size, owner, config.spin_us)


async def join_by_mpi(
    method: InitMethod,
    name: str,
    deadline: Deadline,
    *,
    allow_pickle: bool,
    check: str,
    environ: Mapping[str, str] = os.environ,
) -> World:
    """Meet the ranks of MPI_COMM_WORLD, whose numbers ranks have here too.

    Raises ValueError where `method` has other ones, DistBackendError where MPI cannot be used or is not the launcher's,
    DistError where ranks contradict each other, and ConnectTimeoutError when not all have called this in time.
    """
    mpi = load()
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    if size == 1 and method.world_size != 1:
        _check_alone(mpi, environ)
    for what, given, known in (("rank", method.rank, rank), ("world_size", method.world_size, size)):
        if given not in (-1, known):
            raise ValueError(f"{what}={given}, but MPI says {known}: leave it out, or give a store to meet in")
    config = TransportConfig.from_environ(environ)
    overrides = parse_overrides(environ.get("ASYNCDIST_ALGO", ""))
    tuning = own_tuning(environ, size, one_host=False, transport=TRANSPORT, overrides=overrides)
    mine = msgpack.packb([name, os.urandom(WORLD_ID_BYTES), allow_pickle, check, tuning.to_terms()])
    comm, data, said = await _Meeting(mpi, rank, deadline).meet(mine)
    first = said[0]
    if any(one[0] != name for one in said):
        names = ", ".join(sorted({repr(one[0]) for one in said}))
        raise DistError(f"rank {rank}: the ranks join worlds of other names: {names}")
    loop = asyncio.get_running_loop()
    meeting = MpiMeeting(size)
    world = World(loop, rank, size, StoreSource(HashStore(), owned=True), meeting, first[1])
    world.host = host_id(config.socket_dir)
    world.inspection = Inspection.open(name, rank, size, None, LocalAddress(("127.0.0.1",)), config, environ)
    world.mesh = MpiMesh(mpi, rank, size, world, config.spin_us, (comm, data))
    options = {"check": first[3], "tuning": first[4]}
    world.formed(Met(first[1], 0, options, all(one[2] for one in said)))
    world.tuning = agreed_tuning(rank, first[4], overrides)
    world.mesh.crowded = world.tuning.crowded
    await world.mesh.listen()
    return world


def _check_alone(mpi: Any, environ: Mapping[str, str]) -> None:
    """An MPI that another one's launcher has started finds nobody, and makes each process a world of one."""
    place = find_place(environ)
    if place is None or place.size == 1:
        return
    of = "" if place.size is None else f" of {place.size}"
    raise DistBackendError(
        f"{place.by} has started this process as number {place.rank}{of}, but mpi4py has loaded {mpi.get_vendor()[0]}, "
        "which knows of no other process. Start it by that MPI's own mpirun, or name the launcher's MPI in "
        "MPI4PY_LIBMPI; srun needs --mpi=pmix or --mpi=pmi2. Alone it joins with world_size=1"
    )


class _Meeting:
    """The steps of meeting, none of which blocks the event loop."""

    def __init__(self, mpi: Any, rank: int, deadline: Deadline) -> None:
        self._mpi = mpi
        self._rank = rank
        self._deadline = deadline

    async def meet(self, mine: bytes) -> tuple[Any, Any, list[Any]]:
        """Return two communicators of all ranks, and what each of them said."""
        comm, request = self._mpi.COMM_WORLD.Idup()
        await self._ended(request)
        data, request = comm.Idup()
        await self._ended(request)
        sizes = np.empty(comm.Get_size(), np.int64)
        await self._ended(comm.Iallgather(np.array([len(mine)], np.int64), sizes))
        everyone = bytearray(int(sizes.sum()))
        byte = self._mpi.BYTE
        await self._ended(comm.Iallgatherv([mine, byte], [everyone, sizes.tolist(), byte]))
        ends = np.cumsum(sizes).tolist()
        said = [msgpack.unpackb(everyone[end - size : end]) for end, size in zip(ends, sizes.tolist(), strict=True)]
        return comm, data, said

    async def _ended(self, request: Any) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not request.Test():
                remaining_s = self._deadline.remaining_s(loop.time())
                if remaining_s is not None and remaining_s <= 0:
                    raise ConnectTimeoutError(
                        f"rank {self._rank}: not all ranks of MPI_COMM_WORLD have joined within "
                        f"{self._deadline.given_s:g} s; MPI does not say which are missing"
                    )
                await asyncio.sleep(PAUSE_S)
        except BaseException:
            leave_behind("joining a world", [request])
            raise
