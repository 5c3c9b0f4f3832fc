"""Sweep: simulated times of algorithms over worlds and sizes, as tables and plots need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from asyncdist.plan.algorithms.registry import algorithms
from asyncdist.plan.cost.constants import Constants
from asyncdist.plan.problem import BLOCK_COLLECTIVES, EXCHANGES, PRIVATE_COLLECTIVES, VECTOR_COLLECTIVES, Problem
from asyncdist.plan.selection.selector import candidates
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.plan.simulation.simulate import Method, simulate

__all__ = ["Sweep", "simulated_collectives"]

CHUNKS_MAX: Final = 256
"""Chunks of a vector that are simulated. With more the time of small chunks is the same within a percent, and that of
the simulation is not."""


def simulated_collectives() -> tuple[str, ...]:
    """Names of the collectives that can be simulated."""
    return tuple(
        name for name in (*BLOCK_COLLECTIVES, *EXCHANGES, *VECTOR_COLLECTIVES) if name not in PRIVATE_COLLECTIVES
    )


@dataclass(frozen=True, slots=True)
class Sweep:
    """What all cells of a table have in common. `ranks_per_host` consecutive ranks share a host."""

    collective: str
    constants: Constants
    ranks_per_host: int = 1
    itemsize: int = 4
    method: Method = Method.AUTO

    def seconds(self, algorithm: str, world: int, nbytes: int) -> float:
        """Simulate one cell: a vector of `nbytes` in all (of all_to_all: what one rank sends), rounded up to elements.

        Chunks are those the selector would take for this algorithm, or larger where there would be very many. In
        worlds of no whole number of hosts, every rank is its own host. Raises ValueError as `simulate` does.
        """
        problem = self.problem(world, nbytes)
        tuning = Tuning(self.constants, problem.ranks_per_host)
        found = candidates(problem, self.itemsize, tuning, algorithm=algorithm)
        chunk_bytes = max(found[0].chunk_bytes if found else 0, nbytes // CHUNKS_MAX, self.itemsize)
        chunk_length = chunk_bytes // self.itemsize
        return simulate(problem, algorithm, self.itemsize, self.constants, chunk_length, method=self.method)

    def problem(self, world: int, nbytes: int) -> Problem:
        """Return the problem of one cell."""
        per_host = self.ranks_per_host if world % self.ranks_per_host == 0 else 1
        return Problem.of_bytes(self.collective, world, nbytes, self.itemsize, ranks_per_host=per_host)

    def algorithms(self) -> tuple[str, ...]:
        """Names of the algorithms of the collective."""
        return algorithms(self.collective)
