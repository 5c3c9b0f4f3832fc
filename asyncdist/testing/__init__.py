"""The public test kit: whole worlds in one loop and virtual time, and the suites that stores and meshes must pass."""

from asyncdist.testing.fake_cuda import FakeRuntime
from asyncdist.testing.fake_memory import FakeArray
from asyncdist.testing.fake_nccl import FakeCommunicator, FakeNccl
from asyncdist.testing.fake_provider import FakeCuda, fake_cuda
from asyncdist.testing.hosts import SimulatedHost
from asyncdist.testing.loop import DeadlockError, VirtualTimeLoop
from asyncdist.testing.network import SimulatedNetwork, run_simulated
from asyncdist.testing.store_conformance import STORE_CHECKS
from asyncdist.testing.transport_conformance import MESH_CHECKS
from asyncdist.testing.world import SimulatedWorld, run_world

__all__ = [
    "MESH_CHECKS",
    "STORE_CHECKS",
    "DeadlockError",
    "FakeArray",
    "FakeCommunicator",
    "FakeCuda",
    "FakeNccl",
    "FakeRuntime",
    "SimulatedHost",
    "SimulatedNetwork",
    "SimulatedWorld",
    "VirtualTimeLoop",
    "fake_cuda",
    "run_simulated",
    "run_world",
]
