"""What a call becomes in NCCL: a collective of NCCL where there is one, else sends and receives in a group.

| call | NCCL |
| --- | --- |
| all_reduce, reduce, broadcast | the same, in place |
| all_gather, reduce_scatter of one array | the same |
| all_gather into a list | all_gather if the arrays lie in a row, else sends and receives |
| reduce_scatter of a list | one reduce for each rank |
| gather, scatter, all_to_all, all uneven forms | sends and receives; a rank's own part is copied |

Several operations are launched together (`Nccl.group`). PREMUL_SUM is the library's where the library has it, else the
SUM of a multiplied copy. Operations that NCCL does not have at all were refused at the call. If an input shares memory
with an output, other than as NCCL allows, a copy of the input is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Final

import numpy as np

from asyncdist.arrays.device import DeviceArray
from asyncdist.arrays.reduce_op import PremulSum, ReduceOp
from asyncdist.collectives.arguments.call import Call
from asyncdist.cuda import Communicator, Nccl, Runtime, Stream
from asyncdist.gpu.extents import NOTHING, Extent, input_blocks, output_blocks, overlap

_BYTES: Final = np.dtype(np.uint8)


@dataclass(slots=True, eq=False)
class Place:
    """Where calls are issued: one rank's communicator, its stream, and temporary memory in the stream's order."""

    nccl: Nccl
    runtime: Runtime
    communicator: Communicator
    stream: Stream
    scratch: Callable[[int], int]
    """`scratch(nbytes)`: a pointer to memory that belongs to this launch until the launch has ended on the stream."""


def talks_to(call: Call, communicator: Communicator) -> frozenset[int]:
    """Ranks that `call` sends to or receives from directly, rather than in a collective of NCCL's."""
    rank, everybody = communicator.rank, frozenset(range(communicator.size))
    if call.collective in ("gather", "gather_uneven", "scatter", "scatter_uneven"):
        return everybody - {rank} if rank == call.root else frozenset({call.root})
    if call.collective in ("all_to_all", "all_to_all_uneven") or (
        call.collective == "all_gather" and len(call.outputs) > 1
    ):
        return everybody - {rank}
    return frozenset()


def _all_reduce(call: Call, place: Place) -> None:
    elements: Any = call.outputs[0]
    op: Any = call.op
    pointer, count = elements.pointer, elements.size
    if count:
        place.communicator.all_reduce(pointer, pointer, count, call.dtype, op, place.stream)


def _broadcast(call: Call, place: Place) -> None:
    elements: Any = call.outputs[0]
    pointer, nbytes = elements.pointer, elements.nbytes
    if nbytes:
        place.communicator.broadcast(pointer, pointer, nbytes, _BYTES, call.root, place.stream)


def _reduce(call: Call, place: Place) -> None:
    source: Any = call.inputs[0]
    op: Any = call.op
    output: Any = call.outputs[0] if call.outputs else None
    target = 0 if output is None else output.pointer
    if source.size:
        place.communicator.reduce(source.pointer, target, source.size, call.dtype, op, call.root, place.stream)


def _all_gather_tensor(call: Call, place: Place) -> None:
    source: Any = call.inputs[0]
    target: Any = call.outputs[0]
    pointer, nbytes = source.pointer, source.nbytes
    if _apart_or_own(pointer, nbytes, target, place.communicator.rank * nbytes):
        place.communicator.all_gather(pointer, target.pointer, nbytes, _BYTES, place.stream)
    elif (part := _all_gather(call, place)) is not None:
        part()


def _reduce_scatter_tensor(call: Call, place: Place) -> None:
    source: Any = call.inputs[0]
    target: Any = call.outputs[0]
    op: Any = call.op
    pointer, count = target.pointer, target.size
    if _apart_or_own(pointer, target.nbytes, source, place.communicator.rank * target.nbytes):
        place.communicator.reduce_scatter(source.pointer, pointer, count, call.dtype, op, place.stream)
    elif (part := _reduce_scatter(call, place)) is not None:
        part()


def _apart_or_own(pointer: int, nbytes: int, whole: Any, offset: int) -> bool:
    """Whether a block is not empty, and either apart from the array of all blocks or its own part of that array."""
    begin = whole.pointer
    own = begin + offset
    return bool(nbytes) and (pointer == own or pointer + nbytes <= begin or begin + whole.nbytes <= pointer)


def _one_of_several(call: Call, place: Place) -> Callable[[], None] | None:
    """What issues an operation on whole arrays, where it is one of several in a launch or has a factor."""
    op: Any = call.op
    elements: Any = (call.inputs or call.outputs)[0]
    if not elements.size:
        return None
    if isinstance(op, PremulSum) and not place.nccl.native_premul_sum:
        pointer = elements.pointer
        target = place.scratch(elements.nbytes) if call.inputs else pointer  # this rank's contribution stays as it is
        place.runtime.scale(call.dtype, target, pointer, op.factor, elements.size, place.stream)
        call = replace(call, op=ReduceOp.SUM)
        if call.inputs:
            inputs: Any = (DeviceArray(target, (elements.size,), call.dtype, elements.device),)
            call = replace(call, inputs=inputs)
    return partial(_ALONE[call.collective], call, place)


def _all_gather(call: Call, place: Place) -> Callable[[], None] | None:
    communicator = place.communicator
    blocks = output_blocks(call, communicator.size)
    (own,) = input_blocks(call, communicator.size)
    if not any(block.nbytes for block in blocks):
        return None
    mine = blocks[communicator.rank]
    if own.pointer != mine.pointer and overlap([own], blocks):
        (own,) = _copies([own], place)
    if _in_a_row(blocks):
        return partial(communicator.all_gather, own.pointer, blocks[0].pointer, own.nbytes, _BYTES, place.stream)
    if own.pointer != mine.pointer:
        place.runtime.copy(mine.pointer, own.pointer, own.nbytes, place.stream)
    return partial(_exchange, place, [own] * communicator.size, blocks)


def _reduce_scatter(call: Call, place: Place) -> Callable[[], None] | None:
    communicator, runtime = place.communicator, place.runtime
    target: Any = call.outputs[0]
    blocks = input_blocks(call, communicator.size)
    if not any(block.nbytes for block in blocks):
        return None
    op: Any = call.op
    premultiply = isinstance(op, PremulSum) and not place.nccl.native_premul_sum
    own = blocks[communicator.rank]
    shared = own.pointer != target.pointer and overlap(blocks, [Extent(target.pointer, target.nbytes)])
    if premultiply or shared:
        copies = _room_for(blocks, place)
        for block, copy in zip(blocks, copies, strict=True):
            if premultiply:
                count = block.nbytes // call.dtype.itemsize
                runtime.scale(call.dtype, copy.pointer, block.pointer, op.factor, count, place.stream)
            else:
                runtime.copy(copy.pointer, block.pointer, block.nbytes, place.stream)
        blocks = copies
        op = ReduceOp.SUM if premultiply else op
    size, stream = communicator.size, place.stream
    if _in_a_row(blocks):
        source = blocks[0].pointer
        return partial(communicator.reduce_scatter, source, target.pointer, target.size, call.dtype, op, stream)

    def reduce_each() -> None:
        for root in range(size):
            count = blocks[root].nbytes // call.dtype.itemsize
            where = target.pointer if root == communicator.rank else 0
            if count:
                communicator.reduce(blocks[root].pointer, where, count, call.dtype, op, root, stream)

    return reduce_each


def _move(call: Call, place: Place) -> Callable[[], None] | None:
    """gather, scatter, all_to_all: a rank has a block for each rank that it sends to, and one for each it hears."""
    communicator, root = place.communicator, call.root
    rank, size = communicator.rank, communicator.size
    sent, received = input_blocks(call, size), output_blocks(call, size)
    if overlap(sent, received) and not _same_place(sent, received, rank, call):
        sent = _copies(sent, place)
    if call.collective.startswith("gather"):
        sent = tuple(sent[0] if peer == root else NOTHING for peer in range(size))
        received = received if rank == root else (NOTHING,) * size
    elif call.collective.startswith("scatter"):
        received = tuple(received[0] if peer == root else NOTHING for peer in range(size))
        sent = sent if rank == root else (NOTHING,) * size
    if sent[rank].nbytes and sent[rank].pointer != received[rank].pointer:
        place.runtime.copy(received[rank].pointer, sent[rank].pointer, sent[rank].nbytes, place.stream)
    if not any(run.nbytes for side in (sent, received) for peer, run in enumerate(side) if peer != rank):
        return None
    return partial(_exchange, place, sent, received)


def _same_place(sent: Sequence[Extent], received: Sequence[Extent], rank: int, call: Call) -> bool:
    """Whether input and output share at most the rank's own block, which then stays where it is."""
    if not call.collective.startswith(("gather", "scatter")) or not (sent and received):
        return False
    own, others = (sent, received) if len(sent) == 1 else (received, sent)
    if len(others) <= rank or own[0].pointer != others[rank].pointer:
        return False
    return not overlap(own, [block for index, block in enumerate(others) if index != rank])


def _exchange(place: Place, sent: Sequence[Extent], received: Sequence[Extent]) -> None:
    """Send every block that is not empty to its rank, and receive those from other ranks."""
    communicator, stream = place.communicator, place.stream
    for peer in range(communicator.size):
        if peer == communicator.rank:
            continue
        if sent[peer].nbytes:
            communicator.send(sent[peer].pointer, sent[peer].nbytes, _BYTES, peer, stream)
        if received[peer].nbytes:
            communicator.recv(received[peer].pointer, received[peer].nbytes, _BYTES, peer, stream)


def _in_a_row(blocks: Sequence[Extent]) -> bool:
    """Whether blocks of one size follow each other in memory."""
    pointer, nbytes = blocks[0]
    return all(block == (pointer + index * nbytes, nbytes) for index, block in enumerate(blocks))


def _room_for(blocks: Sequence[Extent], place: Place) -> tuple[Extent, ...]:
    """Temporary memory for blocks, in a row."""
    sizes = [block.nbytes for block in blocks]
    return tuple(map(Extent, accumulate(sizes[:-1], initial=place.scratch(sum(sizes))), sizes))


def _copies(blocks: Sequence[Extent], place: Place) -> tuple[Extent, ...]:
    room = _room_for(blocks, place)
    for block, copy in zip(blocks, room, strict=True):
        place.runtime.copy(copy.pointer, block.pointer, block.nbytes, place.stream)
    return room


_ALONE: Final[dict[str, Callable[[Call, Place], None]]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather_tensor,
    "reduce_scatter": _reduce_scatter_tensor,
}
_OF_BLOCKS: Final = frozenset({"all_gather", "reduce_scatter"})


def alone(call: Call) -> Callable[[Call, Place], None] | None:
    """What queues `call` where the call is one operation of NCCL, which needs no group; else None."""
    if call.members or type(call.op) is PremulSum:
        return None
    if call.collective in _OF_BLOCKS and (len(call.inputs) > 1 or len(call.outputs) > 1):
        return None
    return _ALONE.get(call.collective)


ISSUE: Final[dict[str, Callable[[Call, Place], Callable[[], None] | None]]] = {
    **dict.fromkeys(("all_reduce", "broadcast", "reduce"), _one_of_several),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    **dict.fromkeys(("gather", "scatter", "all_to_all"), _move),
    **dict.fromkeys(("gather_uneven", "scatter_uneven", "all_to_all_uneven"), _move),
}
"""By collective, what queues all that comes before a call's communication: copies and factors. It returns what queues
the communication, if there is any, so that the communication of several calls can be launched together."""
