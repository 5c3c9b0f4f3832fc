"""Load: what an algorithm asks of the network and of the ranks, before anything is said of what that costs.

A formula, which stands beside its algorithm, turns the shape of a problem into a Load; `selection.prediction` turns the
Load into seconds. All lengths are bytes, as floats: shares need not be whole.

An algorithm through shared memory asks a SharedLoad: rounds of waiting, and work of processors. There are no links.
What takes time is waking up, steps, and copied or reduced bytes, on ranks that may be more than the host's cores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from asyncdist.plan.cost.constants import Constants
from asyncdist.plan.problem import Problem
from asyncdist.plan.records import SINGLE_COPY_BYTES, USUAL_LANE, LaneMemory

CACHE_BYTES: Final = 512 << 10
"""Up to here what has been received is still in the processor's cache when it is reduced."""

COLD: Final = 1.6
"""What reducing longer pieces costs, relative to that: a correction fitted to all_reduce on 2 and 4 ranks of one host,
where unchunked algorithms lose to the ring from blocks of 512 KiB on although they move as much in fewer rounds."""


class Way(NamedTuple):
    """Between which ranks messages go, as far as hosts are concerned."""

    crossing: float
    """Share of those on the longest path that go from one host to another."""
    sharing: float = 1.0
    """Ranks of a host that send such messages at the same time."""
    leaving: float = 1.0
    """What leaves a host, in multiples of what one of its ranks sends."""


AT_HOME: Final = Way(0.0, 1.0, 0.0)


class Shape(NamedTuple):
    """A problem as formulas see it; `world` is at least 2."""

    world: int
    total: float
    """The whole vector: all blocks, for collectives of blocks; what one rank sends, for exchanges."""
    block: float
    """The longest block; for collectives on vectors a rank's share, rounded up to elements."""
    chunk: float
    """Longest chunk of the algorithms that cut."""
    ranks_per_host: int = 1
    root: int = 0
    memory: LaneMemory = USUAL_LANE
    """What each rank has for the items of shared memory."""
    hosts: tuple[int, ...] = ()
    """As of `Problem`, where hosts hold no equal runs; `ranks_per_host` is that of the largest one then."""

    @property
    def host_sizes(self) -> tuple[int, ...]:
        """Ranks of each of `hosts`."""
        return tuple(Counter(self.hosts).values())

    @property
    def levels(self) -> int:
        """Return ceil(log2 world)."""
        return (self.world - 1).bit_length()

    @property
    def depth(self) -> int:
        """Return floor(log2 world): most bits that are set in the number of a rank."""
        return self.world.bit_length() - 1

    @property
    def one_host(self) -> bool:
        """Whether no message leaves the host."""
        return self.world <= self.ranks_per_host

    def full(self, blocks: float) -> float:
        """To how many of the longest the longest `blocks` blocks come at most; fewer where the others are short."""
        return min(blocks, self.total / self.block) if self.block else blocks

    def pieces(self, nbytes: float) -> int:
        """Chunks that `nbytes` are cut into; one where there is nothing, since formulas count messages."""
        return max(1, int(-(-nbytes // self.chunk)))

    def neighbors(self) -> Way:
        """From each rank to the next: one of a host's leaves it."""
        if self.hosts:
            crossing = [host for rank, host in enumerate(self.hosts) if self.hosts[rank - 1] != host]
            most = max(Counter(crossing).values())
            return Way(len(crossing) / self.world, most, most)
        return AT_HOME if self.one_host else Way(1 / self.ranks_per_host)

    def ahead(self, distance: int) -> Way:
        """From rank r to r + `distance`, all ranks at once: some of every host leave it, and all wait for those."""
        leaving = min(distance, self.ranks_per_host)
        return AT_HOME if self.one_host else Way(1.0, leaving, leaving)

    def partners(self, distance: int) -> Way:
        """Between positions r and r xor `distance`, a power of two: within hosts while it is small.

        Where neighbors are folded, since the world is no power of two, a position stands for two ranks.
        """
        ranks = distance if self.world & (self.world - 1) == 0 else 2 * distance
        inside = self.one_host or not (self.hosts or self.ranks_per_host % (2 * ranks))
        return AT_HOME if inside else Way(1.0, self.ranks_per_host, self.ranks_per_host)

    def everybody(self) -> Way:
        """From every rank to every other."""
        if self.one_host:
            return AT_HOME
        crossing, senders = (self.world - self.ranks_per_host) / (self.world - 1), self.full(self.ranks_per_host)
        return Way(crossing, senders, crossing * senders)

    def tree(self) -> Way:
        """Along the edges of a tree in rank order: those near the leaves stay within hosts, few ranks speak for one."""
        if self.one_host:
            return AT_HOME
        hosts = -(-self.world // self.ranks_per_host)
        return Way(min(1.0, (hosts - 1).bit_length() / self.levels), 1.0, min(2, hosts - 1))

    def rooted(self) -> Way:
        """From one rank to every other, or back: its host's link has no other user."""
        if self.one_host:
            return AT_HOME
        crossing = (self.world - self.ranks_per_host) / (self.world - 1)
        return Way(crossing, 1.0, crossing)


class Hop(NamedTuple):
    """Part of a path: messages one after another, each sent when the one before has arrived and been reduced."""

    rounds: float
    """Messages."""
    nbytes: float
    """Bytes on the link meanwhile."""
    worked: float = 0.0
    """Bytes reduced meanwhile, with the link waiting."""
    way: Way = AT_HOME


class Work(NamedTuple):
    """What ranks handle."""

    messages: float
    """Sent or received."""
    sent: float
    received: float
    worked: float = 0.0
    """Bytes reduced."""

    def plus(self, other: Work, times: float = 1) -> Work:
        """Return the sum of this and `times` times `other`."""
        return Work(*(own + times * its for own, its in zip(self, other, strict=True)))


NO_WORK: Final = Work(0, 0, 0)


class Load(NamedTuple):
    """What one algorithm asks."""

    path: tuple[Hop, ...]
    """The longest, from the start to the end; behind its first chunk the others on the narrowest link."""
    idle: tuple[Hop, ...]
    """The part of it during which the busiest rank has nothing else to do: every latency in rounds that wait for each
    other, the filling of the pipeline where chunks follow chunks."""
    busiest: Work
    everyone: Work
    """Sums over all ranks."""
    card: float = 0.0
    """Bytes that leave the host which sends most."""
    hidden: float = 0.0
    """Messages that the busiest rank handles while it waits for the first."""
    scratch: float = 0.0
    """Temporary memory of the rank that needs most, beyond a window of chunks."""


def cold(nbytes: float, piece: float) -> float:
    """Return what `nbytes` of reductions of pieces of length `piece` count as."""
    return nbytes * COLD if piece > CACHE_BYTES else nbytes


def alike(shape: Shape, path: tuple[Hop, ...], idle: tuple[Hop, ...], work: Work, way: Way) -> Load:
    """Return the Load of an algorithm in which every rank does as much as any other, sending all its bytes `way`."""
    return Load(path, idle, work, NO_WORK.plus(work, shape.world), way.leaving * work.sent)


class Round(NamedTuple):
    """One exchange: every rank sends and receives `nbytes`."""

    nbytes: float
    way: Way
    reduces: bool = False
    pieces: int = 1
    messages: float = 1.0
    """Per piece and direction: more than one where a message is two runs of the array on some ranks."""
    latencies: float = 1.0
    """None of its own where it waits for nothing that the round before brings."""


def in_rounds(shape: Shape, rounds: Sequence[Round], fold: Sequence[Round] = ()) -> Load:
    """Return the Load of rounds that wait for each other.

    With `fold`, what comes before and after them in worlds that are no power of two: some ranks give their part to a
    neighbor, which acts for both, and get theirs back (the first and the last of `fold`).
    """
    world = shape.world
    active = 1 << (world.bit_length() - 1)
    folded = world - active if fold else 0
    way = shape.neighbors() if shape.hosts or shape.ranks_per_host % 2 else AT_HOME
    aside = [one._replace(way=way) for one in fold] if folded else []
    hops = tuple(_hop(one) for one in (*aside[:1], *rounds, *aside[1:]))
    # Latency waits with nothing to do unless chunks follow each other from round to round.
    idle = tuple(Hop(one.latencies, 0, 0, one.way) for one in (*aside, *rounds) if one.pieces == 1) or (Hop(1, 0),)
    work = NO_WORK
    for one in rounds:
        reduced = _reduced(one)
        work = work.plus(Work(2 * one.messages * one.pieces, one.nbytes, one.nbytes, reduced))
    busiest = work
    everyone = NO_WORK.plus(work, world - folded)
    for number, one in enumerate(aside):
        sent, received = (one.nbytes, 0) if number else (0, one.nbytes)
        reduced = _reduced(one)
        busiest = busiest.plus(Work(one.pieces, sent, received, reduced))
        everyone = everyone.plus(Work(2 * one.pieces, one.nbytes, one.nbytes, reduced), folded)
    card = math.fsum(one.nbytes * one.way.leaving for one in rounds)
    return Load(hops, idle, busiest, everyone, card)


def _hop(one: Round) -> Hop:
    """A round on the path: of several pieces, all but the last are reduced while others are under way."""
    return Hop(one.latencies, one.nbytes, _reduced(one) / one.pieces, one.way)


def _reduced(one: Round) -> float:
    return cold(one.nbytes, one.nbytes / one.pieces) if one.reduces else 0.0


CACHED_BYTES: Final = 32 << 20
"""Of all ranks' arrays: a usual last level of a host's caches."""

OF_MEMORY: Final = 1.4
"""How many times as long copies and reductions take beyond them."""

RETURNED_S: Final = 40e-6
"""From the moment the last of what a rank has lent was read until it goes on: it sleeps then, as nothing is left to do,
and all ranks end when the last one does."""


class SharedWork(NamedTuple):
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

    def plus(self, other: SharedWork, times: float = 1) -> SharedWork:
        """Return the sum of this and `times` times `other`."""
        return SharedWork(*(own + times * its for own, its in zip(self, other, strict=True)))

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
    path: SharedWork
    """Of the rank that is done last, with what it waits for at the start."""
    everyone: SharedWork
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

    `slowness` is that of `slowness_of`; with `single_copy`, items that may be are read where they lie.
    """
    waits_s = constants.begun_s(world) + load.rounds * constants.shared.wake_s * constants.crowding(world)
    waits_s += RETURNED_S if single_copy else 0.0
    if load.by_records:  # a rank that waits for others to fold may wait for those that share its core to look
        waits_s += (load.rounds - 1) * constants.begun_s(world) * min(1.0, constants.crowding(world) - 1)
    begin_s = 0.0 if load.by_records else constants.shared.begin_s
    path_s = waits_s + begin_s + load.path.seconds(constants, slowness, single_copy=single_copy)
    if not 0 < constants.cores < world:
        return path_s
    everyone_s = begin_s * world + load.everyone.seconds(constants, slowness, single_copy=single_copy)
    return max(path_s, waits_s + everyone_s / constants.cores)


def in_records(shape: Shape, payload: float, copied: float = 0.0, worked: float = 0.0) -> SharedLoad:
    """Everyone puts its payload out and copies and reduces what it is to have."""
    work = SharedWork(1, payload + copied, worked, shape.world)
    return SharedLoad(1, work, SharedWork(0).plus(work, shape.world), payload, by_records=True)


def from_root(shape: Shape, payload: float, copied: float) -> SharedLoad:
    """The root puts its payload out, then the others copy what they are to have."""
    root, other = SharedWork(1, payload), SharedWork(1, copied, operands=1)
    return SharedLoad(1, root.plus(other), root.plus(other, shape.world - 1), payload, by_records=True)


def to_root(shape: Shape, payload: float, copied: float = 0.0, worked: float = 0.0) -> SharedLoad:
    """Everyone puts its payload out, then the root copies or reduces all."""
    other, root = SharedWork(1, payload), SharedWork(0, copied, worked, shape.world)
    return SharedLoad(1, other.plus(root), root.plus(other, shape.world), payload, by_records=True)
