"""Torch 1.x's multi-device collectives: every rank has several arrays, one per device.

All arrays have one shape and dtype; every rank has as many. What a rank's host arrays contribute is reduced or packed
first; one operation of the group does the rest; results are copied to all the places they belong. GPU arrays, each on a
GPU of its own, are a rank's shares in one collective of all GPUs of all ranks: in it, rank r's array j of n is number
r * n + j.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.arrays import reduction
from asyncdist.arrays.device import device_of
from asyncdist.arrays.host import Array, Flat
from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.collectives.arguments import call
from asyncdist.collectives.arguments.call import NO_BLOCKS, Call, arrays_of, flats_of, lists_of, multi_device, place_of
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.concurrency.integers import as_int
from asyncdist.group.methods.coalesced import Packed, arrays_like, packed, room_for, same_dtype_arrays
from asyncdist.group.methods.issuer import Issuer
from asyncdist.work import Work

__all__ = ["MultiDevice"]


class MultiDevice(Issuer):
    """Collectives of several arrays a rank.

    Every rank has several arrays, all of one shape and dtype, as many on every rank; on GPUs, one array on each. What
    is reduced is reduced over all arrays of all ranks; `ReduceOp.AVG` divides by their number.
    """

    def all_reduce_multigpu(
        self, tensor_list: Sequence[Any], op: ReduceOpLike = ReduceOp.SUM, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Reduce all arrays of all ranks, in place in each of them. The result is `tensor_list`."""
        return self._collective("all_reduce_multigpu", tag, timeout, all_reduce_multigpu, tensor_list, op)

    def broadcast_multigpu(
        self, tensor_list: Sequence[Any], root: int, src_tensor: int = 0, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Copy the root's `tensor_list[src_tensor]` into all other arrays of all ranks. The result is `tensor_list`."""
        operation = "broadcast_multigpu"
        root = self._root(operation, root, tag)
        return self._collective(operation, tag, timeout, broadcast_multigpu, tensor_list, root, src_tensor, self.rank)

    def reduce_multigpu(
        self,
        tensor_list: Sequence[Any],
        root: int,
        op: ReduceOpLike = ReduceOp.SUM,
        dst_tensor: int = 0,
        *,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[Any]:
        """Reduce all arrays of all ranks into the root's `tensor_list[dst_tensor]`; all others stay as they are."""
        operation = "reduce_multigpu"
        root = self._root(operation, root, tag)
        return self._collective(operation, tag, timeout, reduce_multigpu, tensor_list, root, dst_tensor, op, self.rank)

    def all_gather_multigpu(
        self,
        output_tensor_lists: Sequence[Sequence[Any]],
        input_tensor_list: Sequence[Any],
        *,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[Any]:
        """Fill each list of `output_tensor_lists`, one per array of this rank, with all arrays of all ranks.

        With n arrays on every rank, `output_tensor_lists[i][r * n + j]` becomes rank r's `input_tensor_list[j]`.
        """
        return self._collective(
            "all_gather_multigpu", tag, timeout, all_gather_multigpu, output_tensor_lists, input_tensor_list, self.size
        )

    def reduce_scatter_multigpu(
        self,
        output_tensor_list: Sequence[Any],
        input_tensor_lists: Sequence[Sequence[Any]],
        op: ReduceOpLike = ReduceOp.SUM,
        *,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[Any]:
        """Reduce the lists of `input_tensor_lists`, one per array of this rank, over all of them and all ranks.

        With n arrays on every rank, rank r's `output_tensor_list[j]` becomes the reduction of all ranks'
        `input_tensor_lists[i][r * n + j]` over every i.
        """
        return self._collective(
            "reduce_scatter_multigpu",
            tag,
            timeout,
            reduce_scatter_multigpu,
            output_tensor_list,
            input_tensor_lists,
            op,
            self.size,
        )


def all_reduce_multigpu(tensor_list: object, op: ReduceOpLike) -> Call:
    """In place in all arrays of all ranks."""
    arrays = _same_arrays(tensor_list, "tensor_list")
    reduction.validate(op, arrays[0].dtype)
    if device_of(arrays[0]) is not None:
        return multi_device([call.all_reduce(array, op) for array in arrays], _detail(arrays), 0, tensor_list)
    flats = flats_of(arrays, "tensor_list", writable=True)
    runs = [flat.elements for flat in flats]
    _reduce_into(runs[0], runs[1:], op)
    whole = Packed(runs[0], [[run] for run in runs], flats)
    return _call("all_reduce", arrays, NO_BLOCKS, (whole,), tensor_list, op=op, finishes=True, shares=len(arrays))


def broadcast_multigpu(tensor_list: object, root: int, src_tensor: int, rank: int) -> Call:
    """From the root's array number `src_tensor` into all others."""
    arrays = _same_arrays(tensor_list, "tensor_list")
    _check_place(src_tensor, len(arrays), "src_tensor")
    if device_of(arrays[0]) is not None:
        count = len(arrays)
        members = [
            call.broadcast(array, root * count + src_tensor, rank * count + index) for index, array in enumerate(arrays)
        ]
        return multi_device(members, f"{count} arrays per rank, from number {src_tensor}", root, tensor_list)
    source = src_tensor if rank == root else 0
    flats = [
        Flat(array, writable=rank != root or index != source, name=f"tensor_list[{index}]")
        for index, array in enumerate(arrays)
    ]
    places = [[flat.elements] for index, flat in enumerate(flats) if index != source]
    whole = Packed(flats[source].elements, places, flats)
    return _call("broadcast", arrays, NO_BLOCKS, (whole,), tensor_list, root=root)


def reduce_multigpu(tensor_list: object, root: int, dst_tensor: int, op: ReduceOpLike, rank: int) -> Call:
    """Into the root's array number `dst_tensor`; all others stay as they are."""
    arrays = _same_arrays(tensor_list, "tensor_list")
    reduction.validate(op, arrays[0].dtype)
    _check_place(dst_tensor, len(arrays), "dst_tensor")
    if device_of(arrays[0]) is not None:
        count = len(arrays)
        members = [
            call.reduce(array, root * count + dst_tensor, op, rank * count + index)
            for index, array in enumerate(arrays)
        ]
        return multi_device(members, f"{count} arrays per rank, into number {dst_tensor}", root, tensor_list)
    runs = [flat.elements for flat in flats_of(arrays, "tensor_list", writable=False)]
    total = runs[0].copy()
    _reduce_into(total, runs[1:], op)
    outputs: Sequence[Flat] = NO_BLOCKS
    if rank == root:
        outputs = (Flat(arrays[dst_tensor], writable=True, name=f"tensor_list[{dst_tensor}]"),)
    return _call(
        "reduce",
        arrays,
        (Packed(total),),
        outputs,
        tensor_list,
        root=root,
        op=op,
        finishes=rank == root,
        shares=len(arrays),
    )


def all_gather_multigpu(output_tensor_lists: object, input_tensor_list: object, size: int) -> Call:
    """One list per own array, each of `size` times as many arrays as every rank has."""
    arrays = _same_arrays(input_tensor_list, "input_tensor_list")
    rows = _rows(output_tensor_lists, "output_tensor_lists", arrays, len(arrays), size)
    if device_of(arrays[0]) is not None:
        pairs = zip(rows, arrays, strict=True)
        members = [call.all_gather(row, array, 0, size * len(arrays)) for row, array in pairs]
        return multi_device(members, _detail(arrays), 0, output_tensor_lists)
    flats = [flats_of(row, f"output_tensor_lists[{index}]", writable=True) for index, row in enumerate(rows)]
    places = [[flat.elements for flat in row] for row in flats]
    whole = Packed(room_for(places[0]), places, [flat for row in flats for flat in row])
    own = Packed(packed([flat.elements for flat in flats_of(arrays, "input_tensor_list", writable=False)]))
    return _call("all_gather", arrays, (own,), (whole,), output_tensor_lists, count=len(arrays))


def reduce_scatter_multigpu(
    output_tensor_list: object, input_tensor_lists: object, op: ReduceOpLike, size: int
) -> Call:
    """One list per own array, each of `size` times as many arrays as every rank has."""
    arrays = _same_arrays(output_tensor_list, "output_tensor_list")
    reduction.validate(op, arrays[0].dtype)
    rows = _rows(input_tensor_lists, "input_tensor_lists", arrays, len(arrays), size)
    if device_of(arrays[0]) is not None:
        pairs = zip(arrays, rows, strict=True)
        members = [call.reduce_scatter(array, row, op, 0, size * len(arrays)) for array, row in pairs]
        return multi_device(members, _detail(arrays), 0, output_tensor_list)
    wholes = [packed([Flat(array, writable=False).elements for array in row]) for row in rows]
    total = wholes[0].copy() if len(wholes) > 1 else wholes[0]  # it may be the caller's memory
    _reduce_into(total, wholes[1:], op)
    targets = flats_of(arrays, "output_tensor_list", writable=True)
    places = [flat.elements for flat in targets]
    result = Packed(room_for(places), [places], targets)
    return _call(
        "reduce_scatter",
        arrays,
        (Packed(total),),
        (result,),
        output_tensor_list,
        op=op,
        finishes=True,
        shares=len(arrays),
        count=len(arrays),
    )


def _same_arrays(values: object, name: str) -> list[Array]:
    """The arrays of a list that is not empty, all of one shape and dtype."""
    found = arrays_of(values, name, None)
    arrays = _on_own_devices(found, name) if any(device_of(array) is not None for array in found) else None
    if arrays is None:
        arrays = same_dtype_arrays(values, name)
    for index, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise ValueError(f"{name}[{index}] has shape {array.shape}, but {name}[0] has {arrays[0].shape}")
    return arrays


def _rows(values: object, name: str, like: Sequence[Array], count: int, size: int) -> list[list[Array]]:
    """`count` lists of `size` times `count` arrays, those of each like that of `like` at its place."""
    rows = []
    for index, row in enumerate(lists_of(values, name, count, "array of this rank")):
        row_name = f"{name}[{index}]"
        if len(arrays_of(row, row_name, None)) != size * count:
            raise ValueError(f"{row_name} must hold {size} ranks' {count} arrays, but holds {len(row)}")
        rows.append(arrays_like(row, row_name, [like[index]] * (size * count)))
    return rows


def _on_own_devices(arrays: list[Array], name: str) -> list[Array]:
    """GPU arrays of one dtype, no two on one GPU."""
    seen: dict[int | None, int] = {}
    for index, array in enumerate(arrays):
        if array.dtype != arrays[0].dtype:
            raise ValueError(f"{name}[{index}] has dtype {array.dtype.name}, but {name}[0] has {arrays[0].dtype.name}")
        device = device_of(array)
        if device is None or device_of(arrays[0]) is None:
            raise ValueError(f"{name}[{index}] is on {place_of(array)}, but {name}[0] on {place_of(arrays[0])}")
        if device in seen:
            raise ValueError(f"{name}[{index}] and {name}[{seen[device]}] are both on cuda:{device}: give one per GPU")
        seen[device] = index
    return arrays


def _check_place(place: int, count: int, name: str) -> None:
    place = as_int(place, f"{name} must be the number of an array (an int)")
    if not 0 <= place < count:
        raise ValueError(f"{name}={place} is not in tensor_list, which holds {count} arrays")


def _reduce_into(total: Array, others: Sequence[Array], op: ReduceOpLike) -> None:
    """Reduce this rank's own arrays; PREMUL_SUM's factor and AVG's quotient come with the operation itself."""
    kernel = reduction.kernel(op, total.dtype)
    for other in others:
        kernel(total, other, total)


def _call(
    collective: str,
    arrays: Sequence[Array],
    inputs: Sequence[Flat],
    outputs: Sequence[Flat],
    result: Any,
    *,
    count: int = 1,
    **rest: Any,
) -> Call:
    detail = _detail(arrays)
    return Call(collective, arrays[0].dtype, arrays[0].size * count, inputs, outputs, result, detail=detail, **rest)


def _detail(arrays: Sequence[Array]) -> str:
    return f"{len(arrays)} arrays per rank"
