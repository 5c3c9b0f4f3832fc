"""The public test kit: worlds in one loop and virtual time, histories and their judge, suites for stores and meshes."""

from asyncdist.testing.chaos_proxy import Chaos, chaos_proxy
from asyncdist.testing.fake_cuda import FakeCuda, FakeRuntime, fake_cuda
from asyncdist.testing.fake_memory import FakeArray
from asyncdist.testing.fake_nccl import FakeCommunicator, FakeNccl
from asyncdist.testing.hosts import SimulatedHost
from asyncdist.testing.linearizability import (
    IMPOSSIBLE,
    REFUSED,
    UNKNOWN,
    History,
    Model,
    Operation,
    Report,
    check_history,
)
from asyncdist.testing.loop import DeadlockError, VirtualTimeLoop
from asyncdist.testing.network import SimulatedNetwork, run_simulated
from asyncdist.testing.store_conformance import STORE_CHECKS
from asyncdist.testing.store_models import LockModel, LogModel, QueueModel, RegisterModel
from asyncdist.testing.transport_conformance import MESH_CHECKS
from asyncdist.testing.world import SimulatedWorld, run_world

__all__ = [
    "IMPOSSIBLE",
    "MESH_CHECKS",
    "REFUSED",
    "STORE_CHECKS",
    "UNKNOWN",
    "Chaos",
    "DeadlockError",
    "FakeArray",
    "FakeCommunicator",
    "FakeCuda",
    "FakeNccl",
    "FakeRuntime",
    "History",
    "LockModel",
    "LogModel",
    "Model",
    "Operation",
    "QueueModel",
    "RegisterModel",
    "Report",
    "SimulatedHost",
    "SimulatedNetwork",
    "SimulatedWorld",
    "VirtualTimeLoop",
    "chaos_proxy",
    "check_history",
    "fake_cuda",
    "run_simulated",
    "run_world",
]
