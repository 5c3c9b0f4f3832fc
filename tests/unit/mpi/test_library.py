"""Which threads may call MPI, and what is said where it cannot be used."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import asyncdist as dist
from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.collectives.arguments import call
from asyncdist.collectives.backend import parse_backend
from asyncdist.concurrency.deadline import Deadline
from asyncdist.mpi import library, world
from asyncdist.mpi.transfer import MAX_BYTES, has_equal
from asyncdist.transport.config import TransportConfig
from asyncdist.world.init_method import InitMethod


class Level(SimpleNamespace):
    """A module `mpi4py.MPI` that was initialized for so many threads."""

    THREAD_SERIALIZED = 2
    THREAD_MULTIPLE = 3

    def Is_initialized(self) -> bool:
        return True

    def Is_finalized(self) -> bool:
        return bool(self.finalized)

    def Is_thread_main(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    def Query_thread(self) -> int:
        return int(self.level)


@pytest.fixture
def mpi(monkeypatch: pytest.MonkeyPatch) -> Level:
    mpi = Level(level=3, finalized=False)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    monkeypatch.setattr(library, "_caller", None)
    monkeypatch.setattr(library, "_pid", 1)  # nothing is registered for the end
    return mpi


def elsewhere(what: Any) -> Exception | None:
    """What `what()` raises in another thread."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            what()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_threads(mpi: Level) -> None:
    assert library.load() is mpi
    assert elsewhere(library.load) is None  # MPI_THREAD_MULTIPLE
    assert library.threads_allowed(mpi)
    mpi.level = 2
    assert not library.threads_allowed(mpi)
    library._caller = None
    library.load()
    assert "MPI is used in another thread already" in str(elsewhere(library.load))
    mpi.level = 1
    library._caller = None
    assert "from the main thread only" in str(elsewhere(library.load))
    library.load()
    mpi.finalized = True
    with pytest.raises(dist.DistBackendError, match="MPI is finalized"):
        library.load()


def test_no_mpi_behind_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        @property
        def MPI(self) -> object:
            raise RuntimeError("cannot load MPI library")

    monkeypatch.setitem(sys.modules, "mpi4py", Broken())
    with pytest.raises(dist.DistBackendError, match="mpi4py does not find its MPI: cannot load MPI library"):
        library.load()


def test_without_mpi4py_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncdist.collectives.backend.find_spec", lambda name: None)
    assert not dist.is_mpi_available()
    for backend in "mpi", "cpu:mpi", "MPI":
        with pytest.raises(ValueError, match=r'mpi4py is not installed: pip install "asyncdist\[mpi\]"'):
            dist.init_process_group(backend)


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncdist.collectives.backend.find_spec", lambda name: object())
    assert dist.is_mpi_available()
    assert parse_backend("MPI") == ("mpi", "mpi")
    assert parse_backend("cpu:mpi,cuda:aio") == ("mpi", "aio")
    with pytest.raises(ValueError, match="GPU arrays are carried by nccl or aio"):
        parse_backend("cuda:mpi")
    with pytest.raises(ValueError, match="registered already"):
        dist.Backend.register_backend("mpi", lambda *place: None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("dtype", "op", "equal"),
    [
        ("float32", "SUM", True),
        ("float64", "AVG", True),
        ("complex128", "PRODUCT", True),
        ("float64", "MAX", False),  # NaN
        ("int8", "MAX", True),
        ("bool", "SUM", True),
        ("uint16", "BXOR", True),
        ("float16", "SUM", False),
        ("longdouble", "SUM", False),
    ],
)
def test_what_has_an_equal(dtype: str, op: str, equal: bool) -> None:
    assert has_equal(call.all_reduce(np.ones(2, dtype), ReduceOp[op]), 2) is equal


def test_what_is_too_large_or_the_users_own_has_none() -> None:
    at = np.broadcast_to(np.uint8(0), MAX_BYTES)  # takes no memory
    beyond = np.broadcast_to(np.uint8(0), MAX_BYTES + 1)
    for array, equal in (at, True), (beyond, False):
        bound = call.Call("broadcast", array.dtype, array.size, (), (), None)
        assert has_equal(bound, 2) is equal
    assert not has_equal(call.all_reduce(np.ones(2), ReduceOp.custom(np.hypot)), 2)
    assert has_equal(call.all_reduce(np.ones(2), ReduceOp.PREMUL_SUM(3.0)), 2)


def test_ranks_that_not_one_mpirun_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_size=lambda: 1))
    monkeypatch.setattr(world, "load", lambda: alone)
    with pytest.raises(dist.DistError, match=r"the world has 2 ranks, but MPI_COMM_WORLD 1: .* one mpirun"):
        world.mesh_of_world(0, 2, b"", b"", None, None, TransportConfig())  # type: ignore[arg-type]


async def test_who_joins_as_another_rank_than_mpis(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_size=lambda: 4, Get_rank=lambda: 1))
    monkeypatch.setattr(world, "load", lambda: alone)
    for method, what in (InitMethod(2, 4, by_mpi=True), "rank=2"), (InitMethod(1, 3, by_mpi=True), "world_size=3"):
        with pytest.raises(ValueError, match=f"{what}, but MPI says"):
            await world.join_by_mpi(method, "", Deadline.after(1, 0), allow_pickle=False, check="on")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "MPICH has started this process as number 1 of 4, but .* Open MPI"),
        ({"PMI_RANK": "1"}, "PMI_SIZE not set"),
        ({"JOB_COMPLETION_INDEX": "3"}, "Kubernetes has started this process as number 3, but"),
    ],
)
async def test_an_mpi_that_is_not_the_launchers_makes_no_world_of_one(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], said: str
) -> None:
    world_of_one = SimpleNamespace(Get_size=lambda: 1, Get_rank=lambda: 0)
    alone = SimpleNamespace(COMM_WORLD=world_of_one, get_vendor=lambda: ("Open MPI", (4, 1, 4)))
    monkeypatch.setattr(world, "load", lambda: alone)
    method = InitMethod(-1, -1, by_mpi=True)
    with pytest.raises((dist.DistBackendError, ValueError), match=said):
        await world.join_by_mpi(method, "", Deadline.after(1, 0), allow_pickle=False, check="on", environ=environ)


async def test_a_group_of_another_world_cannot_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncdist.collectives.backend.find_spec", lambda name: object())
    store = dist.HashStore()
    async with dist.init_process_group(store=store, rank=0, world_size=1):
        with pytest.raises(ValueError, match="needs a world that init_process_group"):
            dist.new_group(backend="mpi")
