"""The public test kit: whole worlds in one loop and virtual time, and the suites that stores and meshes must pass."""

from asyncdist.testing.loop import DeadlockError, VirtualTimeLoop
from asyncdist.testing.store_conformance import STORE_CHECKS
from asyncdist.testing.transport_conformance import MESH_CHECKS
from asyncdist.testing.world import SimulatedWorld, run_world

__all__ = ["MESH_CHECKS", "STORE_CHECKS", "DeadlockError", "SimulatedWorld", "VirtualTimeLoop", "run_world"]
