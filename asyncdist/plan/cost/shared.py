"""What the algorithms through shared memory ask: rounds of waiting, and work of processors. One formula each.

Each says what its function in `shared_reduce` or `shared_move` does; costs are derived there. There are no links: what
takes time is waking up, steps, and bytes copied or reduced, by ranks that may be more than the host has cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from asyncdist.plan.cost.constants import Constants
from asyncdist.plan.cost.load import Shape
from asyncdist.plan.problem import Problem
from asyncdist.plan.records import NO_LANE, SINGLE_COPY_BYTES, LaneMemory, by_records, pieces_bytes

__all__ = ["RETURNED_S", "SHARED_FORMULAS", "SharedFormula", "SharedLoad", "Toil", "shared_seconds", "slowness_of"]

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


SharedFormula: TypeAlias = Callable[[Shape], SharedLoad]


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


def _direct_all_reduce(shape: Shape) -> SharedLoad:
    """Everyone publishes all and folds all; ranks with several below them fold those apart."""
    world, total, pieces = shape.world, shape.total, shape.pieces(shape.total)
    if by_records("all_reduce", "shared_direct", world, total, shape.memory):
        return _in_records(shape, total, worked=total * (world - 1))
    first = Toil(pieces * world, total, total * (world - 1))
    later = first.plus(Toil(0, total))
    everyone = Toil(0).plus(first, min(2, world)).plus(later, max(0, world - 2))
    scratch = 2 * total / pieces if world > 2 else 0.0
    return SharedLoad(1, later if world > 2 else first, everyone, total, scratch)


def _direct_reduce(shape: Shape) -> SharedLoad:
    """Everyone publishes all, the root folds it."""
    if by_records("reduce", "shared_direct", shape.world, shape.total, shape.memory):
        return _to_root(shape, shape.total, worked=shape.total * (shape.world - 1))
    world, total, pieces = shape.world, shape.total, shape.pieces(shape.total)
    root = Toil(pieces * (world - 1), total, total * (world - 1), local=total)
    other = Toil(pieces, total, lent=total)
    path, everyone = root.plus(other, 1 / pieces), root.plus(other, world - 1)
    return SharedLoad(1, path, everyone, total, lent_item=total / pieces)


def _direct_scan(shape: Shape) -> SharedLoad:
    """Everyone publishes all, rank r folds r + 1 vectors; the last one has most to do."""
    world, total, pieces = shape.world, shape.total, shape.pieces(shape.total)
    publish = Toil(pieces, total)
    last = Toil(pieces * (world - 1), total * (world > 2), total * (world - 1))
    folds = Toil(pieces * world * (world - 1) / 2, total * (world - 2), total * world * (world - 1) / 2)
    scratch = 2 * total / pieces if world > 2 else 0.0
    return SharedLoad(1, last.plus(publish, 1 / pieces), folds.plus(publish, world - 1), total, scratch)


def _direct_exscan(shape: Shape) -> SharedLoad:
    """The same with an operand fewer, so that it needs no memory."""
    world, total, pieces = shape.world, shape.total, shape.pieces(shape.total)
    publish = Toil(pieces, total)
    last = Toil(pieces * (world - 1), total, total * (world - 2))
    folds = Toil(pieces * world * (world - 1) / 2, total * (world - 1), total * (world - 1) * (world - 2) / 2)
    return SharedLoad(1, last.plus(publish, 1 / pieces), folds.plus(publish, world - 1), total)


def _sliced_all_reduce(shape: Shape) -> SharedLoad:
    """Everyone publishes the others' slices, folds its own, publishes the result and copies the others'."""
    if by_records("all_reduce", "shared", shape.world, shape.total, shape.memory):
        share = shape.block * (shape.world - 1)
        work = Toil(2, shape.total + shape.block + share, share, 2 * shape.world)
        return SharedLoad(2, work, Toil(0).plus(work, shape.world), shape.total, by_records=True)
    others, block, pieces = shape.world - 1, shape.block, shape.pieces(shape.block)
    work = Toil(pieces * (3 * others + 1), block * (2 * others + 1), block * others, lent=block * (others + 1))
    everyone = Toil(0).plus(work, shape.world)
    return SharedLoad(2, work, everyone, block * shape.world, lent_item=block / pieces)


def _sliced_reduce(shape: Shape) -> SharedLoad:
    """The same, but that only the root copies results."""
    others, block, pieces = shape.world - 1, shape.block, shape.pieces(shape.block)
    root = Toil(pieces * 3 * others, block * (2 * others + 1), block * others, lent=block * others, local=block)
    other = Toil(pieces * (2 * others + 1), block * (others + 2), block * others, lent=block * others, local=block)
    item = block / pieces
    return SharedLoad(2, root, root.plus(other, others), block * shape.world, 3 * item, lent_item=item)


def _reduce_scatter(shape: Shape) -> SharedLoad:
    """Everyone publishes the others' blocks and folds its own."""
    if by_records("reduce_scatter", "shared", shape.world, shape.total, shape.memory):
        return _in_records(shape, shape.total, worked=shape.block * (shape.world - 1))
    others, block, pieces = shape.world - 1, shape.block, shape.pieces(shape.block)
    given = shape.full(others)
    work = Toil(pieces * (given + others), block * (given + 1), block * others, lent=block * given, local=block)
    return SharedLoad(1, work, Toil(0).plus(work, shape.full(shape.world)), block * given, lent_item=block / pieces)


def _broadcast(shape: Shape) -> SharedLoad:
    """The root publishes chunks, which the others copy while it publishes more; the last one remains."""
    if by_records("broadcast", "shared", shape.world, shape.total, shape.memory):
        return _from_root(shape, shape.total, shape.total)
    pieces = shape.pieces(shape.total)
    root, other = Toil(pieces, shape.total, lent=shape.total), Toil(pieces, shape.total)
    path, everyone = other.plus(root, 1 / pieces), root.plus(other, shape.world - 1)
    return SharedLoad(1, path, everyone, shape.total, lent_item=shape.total / pieces)


def _all_gather(shape: Shape) -> SharedLoad:
    """Everyone publishes its block, and copies all of them, its own included."""
    if by_records("all_gather", "shared", shape.world, shape.block, shape.memory):
        return _in_records(shape, shape.block, copied=shape.block * shape.world)
    block, pieces, blocks = shape.block, shape.pieces(shape.block), shape.full(shape.world)
    work = Toil(pieces * blocks, block * (blocks + 1), lent=block, local=block)
    return SharedLoad(1, work, Toil(0).plus(work, shape.world), block, lent_item=block / pieces)


def _gather(shape: Shape) -> SharedLoad:
    """Everyone publishes its block, the root copies all."""
    if by_records("gather", "shared", shape.world, shape.block, shape.memory):
        return _to_root(shape, shape.block, copied=shape.block * shape.world)
    block, pieces = shape.block, shape.pieces(shape.block)
    one = Toil(pieces, block, lent=block)
    root = Toil(0, block, local=block).plus(Toil(pieces, block), shape.world - 1)
    path, everyone = root.plus(one, 1 / pieces), root.plus(one, shape.world - 1)
    return SharedLoad(1, path, everyone, block, lent_item=block / pieces)


def _scatter(shape: Shape) -> SharedLoad:
    """The same the other way round."""
    if by_records("scatter", "shared", shape.world, shape.total, shape.memory):
        return _from_root(shape, shape.total, shape.block)
    block, pieces, others = shape.block, shape.pieces(shape.block), shape.world - 1
    one = Toil(pieces, block)
    root = Toil(0, block, local=block).plus(Toil(pieces, block, lent=block), others)
    return SharedLoad(1, root.plus(one, 1 / pieces), root.plus(one, others), block * others, lent_item=block / pieces)


def _all_to_all(shape: Shape) -> SharedLoad:
    """Everyone publishes the others' blocks and copies those for it; its own it copies once."""
    if by_records("all_to_all", "shared", shape.world, shape.total, shape.memory):
        return _in_records(shape, shape.total, copied=shape.total)
    others, block, pieces = shape.world - 1, shape.block, shape.pieces(shape.block)
    work = Toil(pieces * 2 * others, block * (2 * others + 1), lent=block * others, local=block)
    return SharedLoad(1, work, Toil(0).plus(work, shape.world), block * others, lent_item=block / pieces)


def _uneven_gather(shape: Shape) -> SharedLoad:
    """As `_gather`, of pieces that are not cut."""
    return _gather(_whole(shape, shape.block))


def _uneven_scatter(shape: Shape) -> SharedLoad:
    """As `_scatter`, likewise."""
    return _scatter(_whole(shape, shape.total))


def _uneven_all_to_all(shape: Shape) -> SharedLoad:
    """As `_all_to_all`, likewise."""
    return _all_to_all(_whole(shape, shape.total))


def _whole(shape: Shape, given: float) -> Shape:
    """Of a collective whose pieces travel whole; in records, if those who give all give so few bytes."""
    memory = shape.memory if given <= pieces_bytes(shape.world, shape.memory) else NO_LANE
    return shape._replace(chunk=max(1.0, shape.block), memory=memory)


def _barrier(shape: Shape) -> SharedLoad:
    """Everyone says that it is here, and waits for all."""
    return _in_records(shape, 0.0)


def _in_records(shape: Shape, payload: float, copied: float = 0.0, worked: float = 0.0) -> SharedLoad:
    """Everyone puts its payload out and copies and reduces what it is to have."""
    work = Toil(1, payload + copied, worked, shape.world)
    return SharedLoad(1, work, Toil(0).plus(work, shape.world), payload, by_records=True)


def _from_root(shape: Shape, payload: float, copied: float) -> SharedLoad:
    """The root puts its payload out, then the others copy what they are to have."""
    root, other = Toil(1, payload), Toil(1, copied, operands=1)
    return SharedLoad(1, root.plus(other), root.plus(other, shape.world - 1), payload, by_records=True)


def _to_root(shape: Shape, payload: float, copied: float = 0.0, worked: float = 0.0) -> SharedLoad:
    """Everyone puts its payload out, then the root copies or reduces all."""
    other, root = Toil(1, payload), Toil(0, copied, worked, shape.world)
    return SharedLoad(1, other.plus(root), root.plus(other, shape.world), payload, by_records=True)


SHARED_FORMULAS: Final[Mapping[str, Mapping[str, SharedFormula]]] = MappingProxyType(
    {
        "all_reduce": {"shared_direct": _direct_all_reduce, "shared": _sliced_all_reduce},
        "reduce": {"shared_direct": _direct_reduce, "shared": _sliced_reduce},
        "reduce_scatter": {"shared": _reduce_scatter},
        "scan": {"shared_direct": _direct_scan},
        "exscan": {"shared_direct": _direct_exscan},
        "broadcast": {"shared": _broadcast},
        "all_gather": {"shared": _all_gather},
        "gather": {"shared": _gather},
        "scatter": {"shared": _scatter},
        "all_to_all": {"shared": _all_to_all},
        "barrier": {"shared": _barrier},
        "all_to_all_uneven": {"shared": _uneven_all_to_all},
        "gather_uneven": {"shared": _uneven_gather},
        "scatter_uneven": {"shared": _uneven_scatter},
    }
)
"""By collective and algorithm, as `registry.SHARED_ALGORITHMS`."""
