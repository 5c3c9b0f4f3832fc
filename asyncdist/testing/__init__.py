"""The public test kit: worlds and networks in one loop and virtual time, fake GPUs, and the checks of stores."""

from asyncdist.testing.fake_cuda import FakeCuda, FakeRuntime, fake_cuda
from asyncdist.testing.fake_memory import FakeArray
from asyncdist.testing.fake_nccl import FakeCommunicator, FakeNccl
from asyncdist.testing.hosts import SimulatedHost
from asyncdist.testing.loop import DeadlockError, VirtualTimeLoop
from asyncdist.testing.network import SimulatedNetwork, run_simulated
from asyncdist.testing.store_conformance import STORE_CHECKS
from asyncdist.testing.world import SimulatedWorld, run_world

__all__ = [
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
