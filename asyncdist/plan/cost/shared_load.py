"""SharedLoad: what an algorithm through shared memory asks: rounds of waiting, and work of processors.

There are no links: what takes time is waking up, steps, and bytes copied or reduced, by ranks that may be more than the
host has cores. The formulas stand beside the algorithms.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from asyncdist.plan.cost.constants import Constants
from asyncdist.plan.cost.load import Shape
from asyncdist.plan.problem import Problem
from asyncdist.plan.records import SINGLE_COPY_BYTES, LaneMemory

__all__ = ["RETURNED_S", "SharedLoad", "Toil", "from_root", "in_records", "shared_seconds", "slowness_of", "to_root"]

CACHED_BYTES: Final = 32 << 20
"""Of all ranks' arrays: a usual last level of a host's caches."""

OF_MEMORY: Final = 1.4
"""How many times as long copies and reductions take beyond them."""

RETURNED_S: Final = 40e-6
"""From the moment the last of what a rank has lent was read until it goes on: it sleeps then, as nothing is left to do,
and all ranks end when the last one does."""


class Toil(NamedTuple):
    """What ranks do; bytes as floats, since shares need not be whole."""

    steps: float
    """Items published, fetched or reduced. What a rank copies within its own arrays only counts its bytes."""
    copied: float = 0.0
    worked: float = 0.0
    """Bytes reduced."""
    operands: float = 0.0
    """Looked at in records, of operations that need no items."""
    lent: float = 0.0
    """Of the bytes copied, those of items that the others can read where they lie, if the kernel lets them: then these
    are not copied, and all that is taken of other ranks' items is read."""
    local: float = 0.0
    """Of the bytes copied, those within the arrays of the rank."""

    def plus(self, other: Toil, times: float = 1) -> Toil:
        """Return the sum of this and `times` times `other`."""
        return Toil(
            self.steps + times * other.steps,
            self.copied + times * other.copied,
            self.worked + times * other.worked,
            self.operands + times * other.operands,
            self.lent + times * other.lent,
            self.local + times * other.local,
        )

    def seconds(self, constants: Constants, slowness: float = 1.0, *, single_copy: bool = False) -> float:
        """Return what one processor takes; `slowness` is as `slowness_of` says."""
        shared = constants.shared
        moved_s = slowness * (self.copied * shared.copy_s + self.worked * shared.reduce_s)
        if single_copy:
            taken = self.copied - self.lent - self.local + self.worked
            moved_s = slowness * self.local * shared.copy_s + taken * shared.read_s + self.worked * shared.reduce_s
        return self.steps * shared.step_s + self.operands * shared.operand_s + moved_s


class SharedLoad(NamedTuple):
    """What one algorithm asks."""

    rounds: int
    """Waits, one after another, for something that was published."""
    path: Toil
    """Of the rank that is done last, with what it waits for at the start."""
    everyone: Toil
    """Sums over all ranks."""
    published: float
    """Bytes, by the rank that publishes most."""
    scratch: float = 0.0
    """Temporary memory of the rank that needs most."""
    by_records: bool = False
    """Whether it moves no items, so that there is no plan to begin and to end."""
    lent_item: float = 0.0
    """Bytes of the longest items that the others may read where they lie; 0: of none."""

    def lends(self, memory: LaneMemory) -> bool:
        """Whether they do: they can, and what they read is long enough."""
        return memory.single_copy and self.lent_item >= SINGLE_COPY_BYTES


def slowness_of(problem: Problem, itemsize: int) -> float:
    """How many times as long copies and reductions take as within the caches, where the ranks' arrays exceed those.

    What is read of another process is in the cache when it is reduced.
    """
    ranks = 1 if problem.collective.removesuffix("_uneven") in ("gather", "scatter") else problem.world
    return OF_MEMORY if ranks * problem.total * itemsize >= CACHED_BYTES else 1.0


def shared_seconds(
    load: SharedLoad, world: int, constants: Constants, slowness: float = 1.0, *, single_copy: bool = False
) -> float:
    """Predict a load's time on one host, which has `constants.cores` for all `world` ranks.

    `slowness` is as `slowness_of` says, `single_copy` whether what is lent is read where it lies.
    """
    waits_s = constants.begun_s(world) + load.rounds * constants.shared.wake_s * constants.crowding(world)
    waits_s += RETURNED_S if single_copy else 0.0
    if load.by_records:  # who has to wait for others to fold may have to wait for those that share its core to look
        waits_s += (load.rounds - 1) * constants.begun_s(world) * min(1.0, constants.crowding(world) - 1)
    begin_s = 0.0 if load.by_records else constants.shared.begin_s
    path_s = waits_s + begin_s + load.path.seconds(constants, slowness, single_copy=single_copy)
    if not 0 < constants.cores < world:
        return path_s
    everyone_s = begin_s * world + load.everyone.seconds(constants, slowness, single_copy=single_copy)
    return max(path_s, waits_s + everyone_s / constants.cores)


def in_records(shape: Shape, payload: float, copied: float = 0.0, worked: float = 0.0) -> SharedLoad:
    """Everyone puts its payload out and copies and reduces what it is to have."""
    work = Toil(1, payload + copied, worked, shape.world)
    return SharedLoad(1, work, Toil(0).plus(work, shape.world), payload, by_records=True)


def from_root(shape: Shape, payload: float, copied: float) -> SharedLoad:
    """The root puts its payload out, then the others copy what they are to have."""
    root, other = Toil(1, payload), Toil(1, copied, operands=1)
    return SharedLoad(1, root.plus(other), root.plus(other, shape.world - 1), payload, by_records=True)


def to_root(shape: Shape, payload: float, copied: float = 0.0, worked: float = 0.0) -> SharedLoad:
    """Everyone puts its payload out, then the root copies or reduces all."""
    other, root = Toil(1, payload), Toil(0, copied, worked, shape.world)
    return SharedLoad(1, other.plus(root), root.plus(other, shape.world), payload, by_records=True)
