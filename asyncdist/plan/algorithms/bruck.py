"""Rounds of doubling distance for any p: Bruck's all_to_all, and the dissemination barrier.

`bruck` is for blocks whose latency outweighs their bytes. Slot i of a rank holds the block that still has to go i ranks
up, at first the block for rank r + i. For each power of two D below p, largest first, every slot with bit D in its
number goes D ranks up, all in one message, and takes the place of what the receiver sent. After the last round slot i
holds the block of rank r - i.

With m bytes of INPUT: ceil(log2 p) a + (mb/2) ceil(log2 p). Each rank sends about half its blocks every round, so this
pays log2(p)/2 times the bytes to save p - 1 - log2(p) messages. The largest D goes first, as the slots of a message
then lie in few runs, 1, 2, 4, ...: packing takes about p copies in all; another p bring the blocks to their places.

`dissemination` takes ceil(log2 p) rounds of messages without elements. In round k, rank r tells rank r + 2^k that rank
r has arrived, and every rank that it has heard of. After the last round every rank has heard of every other.

Sources: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport
message-passing systems", IEEE Transactions on Parallel and Distributed Systems 8(11), 1997; Hensgen, Finkel and Manber,
"Two algorithms for barrier synchronization", International Journal of Parallel Programming 17(1), 1988.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from asyncdist.plan.algorithms.algorithm import DOUBLING, Algorithm
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.cost.load import Hop, Load, Round, Shape, in_rounds
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice, Symmetry

__all__ = []


class _Slots(NamedTuple):
    """Slots `first` .. `last` - 1, one after another in memory from `place` on."""

    first: int
    last: int
    place: Slice


def all_to_all(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Send half of the slots each round; even blocks only."""
    rank, world, count = builder.rank, problem.world, problem.counts[0]
    if not count:
        return builder.build()
    held = [_Slots(0, world - rank, Slice(Buffer.INPUT, rank * count, (world - rank) * count))]
    if rank:
        held.append(_Slots(world - rank, world, Slice(Buffer.INPUT, 0, rank * count)))
    distance = 1 << (world - 1).bit_length() >> 1
    while distance:
        leaving = [part for slots in held for part in _halves(slots, distance, count, leaving=True)]
        held = [part for slots in held for part in _halves(slots, distance, count, leaving=False)]
        builder.send((rank + distance) % world, _packed(builder, leaving))
        incoming = builder.scratch(sum(slots.place.length for slots in leaving))
        builder.recv((rank - distance) % world, incoming)
        held += _unpacked(_merged_numbers(leaving), incoming, count)
        held.sort()
        distance >>= 1
    for slots in held:
        for slot in range(slots.first, slots.last):
            source = Slice(slots.place.buffer, slots.place.offset + (slot - slots.first) * count, count)
            builder.copy(source, Slice(Buffer.OUTPUT, (rank - slot) % world * count, count))
    return builder.build()


def _halves(slots: _Slots, distance: int, count: int, *, leaving: bool) -> list[_Slots]:
    """The parts of `slots` whose numbers have bit `distance`, or those whose numbers have not."""
    parts = []
    first = slots.first
    while first < slots.last:
        last = min(slots.last, (first // distance + 1) * distance)
        if bool(first & distance) == leaving:
            offset = slots.place.offset + (first - slots.first) * count
            parts.append(_Slots(first, last, Slice(slots.place.buffer, offset, (last - first) * count)))
        first = last
    return parts


def _packed(builder: PlanBuilder, parts: list[_Slots]) -> Slice:
    """Where the slots of `parts` lie one after another: where they are, or a copy."""
    if len(parts) == 1:
        return parts[0].place
    packed = builder.scratch(sum(part.place.length for part in parts))
    offset = packed.offset
    for part in parts:
        builder.copy(part.place, Slice(packed.buffer, offset, part.place.length))
        offset += part.place.length
    return packed


def _merged_numbers(parts: list[_Slots]) -> list[tuple[int, int]]:
    """First and last of the slots of `parts`, neighbors joined: the same on all ranks, unlike where they lie."""
    numbers: list[tuple[int, int]] = []
    for part in parts:
        if numbers and numbers[-1][1] == part.first:
            numbers[-1] = (numbers[-1][0], part.last)
        else:
            numbers.append((part.first, part.last))
    return numbers


def _unpacked(numbers: list[tuple[int, int]], incoming: Slice, count: int) -> list[_Slots]:
    """The slots of a message that came."""
    result = []
    offset = incoming.offset
    for first, last in numbers:
        length = (last - first) * count
        result.append(_Slots(first, last, Slice(incoming.buffer, offset, length)))
        offset += length
    return result


def _all_to_all_cost(shape: Shape) -> Load:
    """L rounds of the blocks whose number has a bit, packed and, at the end, put into place."""
    rounds = []
    for bit in reversed(range(shape.levels)):
        distance = 1 << bit
        slots = shape.world // (2 * distance) * distance + max(0, shape.world % (2 * distance) - distance)
        # A block goes as many ways as its number has bits, fewer than there are rounds unless p is a power of two.
        rounds.append(Round(slots * shape.block, shape.ahead(distance), latencies=min(1, shape.depth - bit)))
    load = in_rounds(shape, rounds)
    copied = (load.busiest.sent + shape.total) / 2  # a copy costs half of a reduction
    busiest = load.busiest._replace(worked=copied)
    everyone = load.everyone._replace(worked=shape.world * copied)
    path = (*load.path, Hop(0, 0, copied))
    return load._replace(path=path, busiest=busiest, everyone=everyone, scratch=2 * load.busiest.sent)


def barrier(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Return the rank's signals."""
    rank, world = builder.rank, problem.world
    heard: list[int] = []
    distance = 1
    while distance < world:
        builder.signal((rank + distance) % world, after=heard)
        heard.append(builder.await_signal((rank - distance) % world))
        distance *= 2
    return builder.build(symmetry=Symmetry.ROTATION)


def _barrier_cost(shape: Shape) -> Load:
    """L rounds of messages without elements."""
    return in_rounds(shape, [Round(0, shape.ahead(1 << bit)) for bit in range(shape.levels)])


ALGORITHMS: Final = (
    Algorithm("all_to_all", "bruck", all_to_all, _all_to_all_cost, DOUBLING, chunked=False),
    Algorithm("barrier", "dissemination", barrier, _barrier_cost, DOUBLING, chunked=False),
)
