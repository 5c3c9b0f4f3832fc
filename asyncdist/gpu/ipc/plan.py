"""What each rank does in a collective whose ranks read each other's device memory: copies, reductions and waits.

Every rank has a slot of device memory that all others can read. A collective is cut into chunks that fit a slot. A
chunk has a few stages. A stage waits until some ranks have told that their stage before is complete, moves data between
the caller's arrays and slots, and tells some ranks when it is complete:

| collective | chunk |
| --- | --- |
| all_gather, gather, broadcast | own block into the slot; others' blocks out of theirs |
| scatter, all_to_all | a part of the slot for every reader; own parts out of the others' slots |
| reduce_scatter | as all_to_all, but what is read is reduced |
| all_reduce, reduce, small: one shot | own vector into the slot; all vectors reduced by ranks that want the result |
| all_reduce, reduce, large: two shots | own vector into the slot; every rank reduces its slice of all, into where its |
| | own would be in its slot, which no other rank reads; ranks that want the result collect the slices |

One shot moves p times the vector per rank, two shots move it three times but wait once more. In both one kernel reduces
an element over the ranks in order, so results are bit-identical everywhere. (DeepSpeed's and PyTorch's intra-node
all_reduce are cut the same way.) Everything here is pure: addresses are numbers, nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from asyncdist.arrays.reduce_op import CustomOp, PremulSum, ReduceOp, ReduceOpLike
from asyncdist.collectives.arguments.call import Call
from asyncdist.gpu.extents import ALIGN_BYTES, NOTHING, Extent, aligned, input_blocks, output_blocks

__all__ = ["CALLERS", "PLANNED", "Chunk", "Combine", "Move", "Place", "Stage", "chunks", "is_small"]

CALLERS: Final = -1
"""In a Place, instead of a rank: the caller's memory, at an address."""

PLANNED: Final = frozenset(
    {"all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"}
    | {"all_to_all_uneven", "gather_uneven", "scatter_uneven"}
)
"""Collectives that `chunks` knows."""


class Place(NamedTuple):
    """Byte `offset` of the slot of `rank`; for CALLERS, an address."""

    rank: int
    offset: int


class Move(NamedTuple):
    """Copy `nbytes` bytes."""

    target: Place
    source: Place
    nbytes: int


class Combine(NamedTuple):
    """target = op over all sources in their order, `nbytes` bytes of each; PREMUL_SUM has one source, and scales it."""

    target: Place
    sources: tuple[Place, ...]
    nbytes: int
    op: ReduceOp | PremulSum


@dataclass(frozen=True, slots=True)
class Stage:
    """Wait until the ranks of `wait` have told that their stage before is complete, work, then tell `tell`."""

    wait: tuple[int, ...] = ()
    work: tuple[Move | Combine, ...] = ()
    tell: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()
    """By rank, how many bytes of its piece are still to come, where only sender and receiver know; else empty."""
    announced: tuple[int, ...] = ()
    """By rank, how many bytes of our piece for it are still to go; else empty."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Stages, in order. `writes`: whether our slot is written. `readers` read our slot; we read those of `sources`."""

    stages: tuple[Stage, ...]
    writes: bool
    readers: frozenset[int]
    sources: frozenset[int]


Plan: TypeAlias = Iterator[Chunk]


def is_small(call: Call, size: int, slot_bytes: int) -> bool:
    """Whether the call fits a slot of `slot_bytes` in one chunk; never where lengths differ: all ranks must agree."""
    if call.pieces is not None or call.members or not isinstance(call.counts, int):
        return False
    nbytes = call.counts * call.dtype.itemsize
    if call.collective in _PRIVATE:
        return nbytes <= _quota(slot_bytes, size)
    return nbytes <= slot_bytes


def chunks(call: Call, rank: int, size: int, slot_bytes: int, one_shot_bytes: int) -> Plan:
    """The chunks of `call` on `rank`, in order. Ranks that move less than others may have fewer.

    Vectors up to `one_shot_bytes` are reduced in one shot.
    """
    inputs, outputs = input_blocks(call, size), output_blocks(call, size)
    everyone = tuple(range(size))
    collective, root, op = call.collective, call.root, call.op
    if collective == "broadcast":
        incoming = [outputs[0] if other == root and rank != root else NOTHING for other in everyone]
        return _shared(rank, outputs[0] if rank == root else NOTHING, everyone, incoming, slot_bytes)
    if collective == "all_gather":
        return _shared(rank, inputs[0], everyone, outputs, slot_bytes)
    if collective == "gather":
        return _shared(rank, inputs[0], (root,), outputs or (NOTHING,) * size, slot_bytes)
    if collective in ("scatter", "scatter_uneven"):
        incoming = [outputs[0] if other == root else NOTHING for other in everyone]
        pairs = Pairs(everyone if rank == root else (), (root,))
        return _private(rank, inputs or (NOTHING,) * size, incoming, slot_bytes, pairs)
    if collective == "gather_uneven":  # only the root knows all lengths, so it is a part for one reader
        outgoing = [inputs[0] if other == root else NOTHING for other in everyone]
        pairs = Pairs((root,), everyone if rank == root else ())
        return _private(rank, outgoing, outputs or (NOTHING,) * size, slot_bytes, pairs)
    if collective in ("all_to_all", "all_to_all_uneven"):
        return _private(rank, inputs, outputs, slot_bytes, Pairs(everyone, everyone))
    assert op is not None, f"{collective} reduces with no operation"
    if collective == "reduce_scatter":
        return _reduce_blocks(rank, inputs, outputs[0], op, slot_bytes)
    if collective not in ("all_reduce", "reduce"):
        raise AssertionError(f"no plan for {collective}")
    source = inputs[0] if inputs else outputs[0]
    readers = everyone if collective == "all_reduce" else (root,)
    target = outputs[0] if outputs else NOTHING
    if source.nbytes <= one_shot_bytes:
        return _one_shot(rank, size, source, target, readers, op, slot_bytes)
    return _two_shots(rank, size, source, target, readers, op, slot_bytes)


_PRIVATE: Final = frozenset({"scatter", "all_to_all", "reduce_scatter"})
"""Collectives in which a slot has a part for every reader."""


def _quota(slot_bytes: int, size: int) -> int:
    return slot_bytes // size // ALIGN_BYTES * ALIGN_BYTES


def _own(pointer: int) -> Place:
    return Place(CALLERS, pointer)


def _copy_own(source: Extent, target: Extent) -> tuple[Move, ...]:
    apart = source.nbytes and source.pointer != target.pointer
    return (Move(_own(target.pointer), _own(source.pointer), source.nbytes),) if apart else ()


def _cuts(runs: Sequence[Extent], chunk_bytes: int, *, least: int = 0) -> Iterator[tuple[int, int]]:
    """Begin and end of each chunk of the longest of `runs`, and of `least` chunks at least."""
    longest = max(max(run.nbytes for run in runs), least * chunk_bytes)
    return ((start, start + chunk_bytes) for start in range(0, longest, chunk_bytes))


def _moved(parts: Mapping[int, Extent], offset: int) -> tuple[Move, ...]:
    """Copies to the caller's memory, from byte `offset` of the slots of these ranks."""
    return tuple(Move(_own(part.pointer), Place(other, offset), part.nbytes) for other, part in parts.items())


def _parts(runs: Sequence[Extent], start: int, stop: int) -> dict[int, Extent]:
    """By rank, the bytes of `runs` between `start` and `stop`, where there are any."""
    return {other: run.part(start, stop) for other, run in enumerate(runs) if run.nbytes > start}


def _without(rank: int, runs: Sequence[Extent]) -> list[Extent]:
    return [NOTHING if other == rank else run for other, run in enumerate(runs)]


def _shared(rank: int, source: Extent, readers: Sequence[int], incoming: Sequence[Extent], slot_bytes: int) -> Plan:
    """One block for all `readers`; `incoming` is where each rank's block goes, if that rank has one for us."""
    others = tuple(reader for reader in readers if reader != rank)
    foreign = _without(rank, incoming)
    own = _copy_own(source, incoming[rank]) if incoming[rank].nbytes else ()
    sent = source if others else NOTHING
    for start, stop in _cuts([sent, *foreign], slot_bytes, least=1 if own else 0):
        part = sent.part(start, stop)
        work: tuple[Move | Combine, ...] = () if start else own
        if part.nbytes:
            work += (Move(Place(rank, 0), _own(part.pointer), part.nbytes),)
        tell = others if part.nbytes else ()
        parts = _parts(foreign, start, stop)
        yield _chunk(Stage((), work, tell), Stage(tuple(parts), _moved(parts, 0)), writes=bool(part.nbytes))


class Pairs(NamedTuple):
    """The ranks that get a block from us, even an empty one, and those that give us one: both compare lengths."""

    readers: Sequence[int]
    writers: Sequence[int]


def _private(rank: int, outgoing: Sequence[Extent], incoming: Sequence[Extent], slot_bytes: int, pairs: Pairs) -> Plan:
    """A block for every rank, and one from every rank; any may be empty."""
    quota = _quota(slot_bytes, len(outgoing))
    own = _copy_own(outgoing[rank], incoming[rank])
    sent, foreign = _without(rank, outgoing), _without(rank, incoming)
    for start, stop in _cuts([*sent, *foreign], quota, least=1):
        parts, places = _parts(sent, start, stop), _parts(foreign, start, stop)
        work: tuple[Move | Combine, ...] = () if start else own
        work += tuple(
            Move(Place(rank, other * quota), _own(part.pointer), part.nbytes) for other, part in parts.items()
        )
        tell, wait = tuple(parts), tuple(places)
        if not start:  # a rank that expects another length is to hear of the difference
            tell = tuple(other for other in pairs.readers if other != rank)
            wait = tuple(other for other in pairs.writers if other != rank)
        rest = tuple(max(0, run.nbytes - start) for run in sent)
        expected = tuple(max(0, run.nbytes - start) for run in foreign)
        stages = (Stage((), work, tell, announced=rest), Stage(wait, _moved(places, rank * quota), expected=expected))
        yield _chunk(*stages, writes=bool(parts))


def _reduce_blocks(rank: int, blocks: Sequence[Extent], target: Extent, op: ReduceOpLike, slot_bytes: int) -> Plan:
    """Reduce every rank's block for us into `target`."""
    size = len(blocks)
    quota = _quota(slot_bytes, size)
    scaled = isinstance(op, PremulSum)
    for start, stop in _cuts(blocks, quota):
        parts = _parts(blocks, start, stop)
        written = {other: part for other, part in parts.items() if other != rank or scaled}
        work = tuple(_put(Place(rank, other * quota), part, op) for other, part in written.items())
        first = Stage((), work, tuple(other for other in parts if other != rank))
        if rank not in parts:
            yield _chunk(first, writes=bool(written))
            continue
        own = Place(rank, rank * quota) if scaled else _own(parts[rank].pointer)
        sources = tuple(own if other == rank else Place(other, rank * quota) for other in range(size))
        place = target.part(start, stop)
        combine = Combine(_own(place.pointer), sources, place.nbytes, _kernel_op(op))
        yield _chunk(first, Stage(_others(rank, size), (combine,)), writes=bool(written))


def _one_shot(
    rank: int, size: int, source: Extent, target: Extent, readers: Sequence[int], op: ReduceOpLike, slot_bytes: int
) -> Plan:
    """Every reader reduces all vectors."""
    tell = tuple(reader for reader in readers if reader != rank)
    sources = tuple(Place(other, 0) for other in range(size))
    for start, stop in _cuts([source], slot_bytes):
        part = source.part(start, stop)
        first = Stage((), (_put(Place(rank, 0), part, op),), tell)
        if rank not in readers:
            yield _chunk(first, writes=True)
            continue
        place = _own(target.part(start, stop).pointer)
        combine = Combine(place, sources, part.nbytes, _kernel_op(op))
        yield _chunk(first, Stage(_others(rank, size), (combine,)), writes=True)


def _two_shots(
    rank: int, size: int, source: Extent, target: Extent, readers: Sequence[int], op: ReduceOpLike, slot_bytes: int
) -> Plan:
    """Every rank reduces a slice in its slot, which holds a chunk of the vector; every reader collects the slices."""
    for start, stop in _cuts([source], slot_bytes):
        part = source.part(start, stop)
        slice_bytes = aligned(-(-part.nbytes // size))
        slices = [part.part(other * slice_bytes, (other + 1) * slice_bytes) for other in range(size)]
        holders = tuple(other for other in range(size) if slices[other].nbytes)
        others = tuple(other for other in holders if other != rank)
        copied = holders if isinstance(op, PremulSum) else others
        put = tuple(_put(Place(rank, other * slice_bytes), slices[other], op) for other in copied)
        stages = [Stage((), put, others)]
        if rank in holders:
            at = rank * slice_bytes
            own = Place(rank, at) if isinstance(op, PremulSum) else _own(slices[rank].pointer)
            sources = tuple(own if other == rank else Place(other, at) for other in range(size))
            combine = Combine(Place(rank, at), sources, slices[rank].nbytes, _kernel_op(op))
            tell = tuple(reader for reader in readers if reader != rank)
            stages.append(Stage(_others(rank, size), (combine,), tell))
        if rank in readers:
            if len(stages) == 1:
                stages.append(Stage())
            whole = target.part(start, stop)
            places = {other: other * slice_bytes for other in holders}
            taken = tuple(
                Move(_own(whole.pointer + at), Place(other, at), slices[other].nbytes) for other, at in places.items()
            )
            stages.append(Stage(others, taken))
        yield _chunk(*stages, writes=True)


def _others(rank: int, size: int) -> tuple[int, ...]:
    return tuple(other for other in range(size) if other != rank)


def _put(target: Place, part: Extent, op: ReduceOpLike) -> Move | Combine:
    """Put our contribution into the slot, with our own factor: factors may differ between ranks."""
    if isinstance(op, PremulSum):
        return Combine(target, (_own(part.pointer),), part.nbytes, op)
    return Move(target, _own(part.pointer), part.nbytes)


def _kernel_op(op: ReduceOpLike) -> ReduceOp:
    assert not isinstance(op, CustomOp), "functions of the user's do not run on the GPU"
    return ReduceOp.SUM if isinstance(op, PremulSum) else op


def _chunk(*stages: Stage, writes: bool) -> Chunk:
    last = stages[-1]
    if len(stages) > 1 and not (last.wait or last.work or last.tell):
        stages = stages[:-1]
    readers = frozenset().union(*(stage.tell for stage in stages))
    sources = frozenset().union(*(stage.wait for stage in stages))
    return Chunk(stages, writes, readers, sources)
