"""Load: what an algorithm asks of the network and of the ranks, before anybody says what that costs.

A formula, which stands beside its algorithm, turns the shape of a problem into a Load; `selection.prediction` turns a
Load into seconds. All lengths are bytes, as floats: shares need not be whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from asyncdist.plan.records import USUAL_LANE, LaneMemory

__all__ = [
    "AT_HOME",
    "CACHE_BYTES",
    "COLD",
    "NO_WORK",
    "Hop",
    "Load",
    "Round",
    "Shape",
    "Way",
    "Work",
    "alike",
    "cold",
    "in_rounds",
]

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
        return AT_HOME if self.one_host else Way(1 / self.ranks_per_host)

    def ahead(self, distance: int) -> Way:
        """From rank r to r + `distance`, all ranks at once: some of every host leave it, and all wait for those."""
        leaving = min(distance, self.ranks_per_host)
        return AT_HOME if self.one_host else Way(1.0, leaving, leaving)

    def partners(self, distance: int) -> Way:
        """Between r and r xor `distance`, a power of two: within hosts while it is small."""
        inside = self.one_host or self.ranks_per_host % (2 * distance) == 0
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
        return Work(
            self.messages + times * other.messages,
            self.sent + times * other.sent,
            self.received + times * other.received,
            self.worked + times * other.worked,
        )


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
    way = shape.neighbors() if shape.ranks_per_host % 2 else AT_HOME
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
