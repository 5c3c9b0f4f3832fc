"""The coalesced collectives: lists of arrays of one dtype, packed into one operation.

The methods are followed by the functions that check their arguments for one rank and bind them into a `Call`. These
raise TypeError and ValueError as those of `arguments.call` do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from asyncdist.arrays import reduction
from asyncdist.arrays.device import device_of, flat_of
from asyncdist.arrays.host import Array, Flat, describe
from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.collectives.arguments import call
from asyncdist.collectives.arguments.call import (
    NO_BLOCKS,
    Call,
    arrays_of,
    check_same_dtype,
    coalesced,
    flats_of,
    lists_of,
)
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.group.methods.issuer import Issuer
from asyncdist.work import Work

__all__ = [
    "Coalesced",
    "Packed",
    "adjacent",
    "all_reduce_coalesced",
    "arrays_like",
    "broadcast_coalesced",
    "packed",
    "room_for",
    "same_dtype_arrays",
]


class Coalesced(Issuer):
    """Collectives of lists of arrays.

    Lists of arrays of one dtype travel as one message each way, and results are written in place. The arrays are copied
    into one and back, which pays for many small ones; large ones are better issued one by one. `all_reduce_coalesced`
    and `broadcast_coalesced` copy nothing where the arrays are adjacent pieces of one array. Lists have the same length
    and sizes on all ranks; every call is one operation in the order of its tag.
    """

    def all_reduce_coalesced(
        self, tensors: Sequence[Any], op: ReduceOpLike = ReduceOp.SUM, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Reduce each of `tensors` (any shapes, one dtype) over all ranks, in place. The result is `tensors`.

        Raises ValueError for an empty list or several dtypes.
        """
        return self._collective("all_reduce_coalesced", tag, timeout, all_reduce_coalesced, tensors, op)

    def broadcast_coalesced(
        self, tensors: Sequence[Any], root: int, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Copy each of the root's `tensors` (any shapes, one dtype) into everybody's. The result is `tensors`.

        Raises ValueError for an empty list or several dtypes.
        """
        operation = "broadcast_coalesced"
        root = self._root(operation, root, tag)
        return self._collective(operation, tag, timeout, broadcast_coalesced, tensors, root, self.rank)

    def all_gather_coalesced(
        self,
        output_tensor_lists: Sequence[Sequence[Any]],
        input_tensor_list: Sequence[Any],
        *,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[Any]:
        """Fill `output_tensor_lists[r]` with rank r's `input_tensor_list` (any shapes, one dtype). The result is it.

        Raises ValueError for lists that do not fit each other, an empty one, or several dtypes.
        """
        return self._collective(
            "all_gather_coalesced",
            tag,
            timeout,
            all_gather_coalesced,
            output_tensor_lists,
            input_tensor_list,
            self.size,
        )

    def all_gather_into_tensor_coalesced(
        self, output_tensors: Sequence[Any], input_tensors: Sequence[Any], *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Fill each output (`size` times the elements of the input beside it) with everybody's, in rank order.

        Raises ValueError for lists that do not fit each other, an empty one, or several dtypes.
        """
        return self._collective(
            "all_gather_into_tensor_coalesced",
            tag,
            timeout,
            all_gather_into_tensor_coalesced,
            output_tensors,
            input_tensors,
            self.size,
        )

    def reduce_scatter_tensor_coalesced(
        self,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        op: ReduceOpLike = ReduceOp.SUM,
        *,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[Any]:
        """Reduce each input (`size` times the elements of the output beside it); rank r gets the r-th part of each.

        Raises ValueError for lists that do not fit each other, an empty one, or several dtypes.
        """
        return self._collective(
            "reduce_scatter_tensor_coalesced",
            tag,
            timeout,
            reduce_scatter_tensor_coalesced,
            outputs,
            inputs,
            op,
            self.size,
        )


class Packed(Flat):
    """One run of elements that is copied to its places once results are in it."""

    __slots__ = ("_owners", "_places")

    def __init__(self, elements: Array, places: Sequence[Sequence[Array]] = (), owners: Iterable[Flat] = ()) -> None:
        """`elements` is one-dimensional. Each of `places` is a list of arrays that divide it, in order.

        `owners` are what the places are part of; they are written back at the end.
        """
        self._octets = None
        self.is_copy = True
        self._places = places
        self._owners = tuple(owners)
        self.elements = elements

    def write_back(self) -> None:
        """Copy the run to all its places."""
        for places in self._places:
            start = 0
            for place in places:
                stop = start + place.size
                if place is not self.elements:
                    place[...] = self.elements[start:stop]
                start = stop
        for owner in self._owners:
            owner.write_back()


def packed(parts: Sequence[Array]) -> Array:
    """The one-dimensional arrays `parts` in a row; a single one is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def room_for(parts: Sequence[Array]) -> Array:
    """Where results for the one-dimensional arrays `parts` go; a single one is its own room."""
    return parts[0] if len(parts) == 1 else np.empty(sum(part.size for part in parts), parts[0].dtype)


def adjacent(parts: Sequence[Array]) -> Array | None:
    """The memory of the one-dimensional arrays `parts`, if they lie in a row in one array; None otherwise."""
    first, whole = parts[0], parts[0].base
    if len(parts) == 1:
        return first
    if not isinstance(whole, np.ndarray) or whole.dtype != first.dtype or not whole.flags.c_contiguous:
        return None
    if whole.flags.writeable != first.flags.writeable:
        return None
    start = end = first.__array_interface__["data"][0]
    for part in parts:
        if part.base is not whole or part.__array_interface__["data"][0] != end:
            return None
        end += part.nbytes
    skipped, remainder = divmod(start - whole.__array_interface__["data"][0], whole.itemsize)
    if remainder:  # views of bytes, which lie between the elements of the whole
        return None
    return np.asarray(whole).reshape(-1)[skipped : skipped + sum(part.size for part in parts)]


def all_reduce_coalesced(tensors: object, op: ReduceOpLike) -> Call:
    """Any shapes; in place."""
    arrays = same_dtype_arrays(tensors, "tensors")
    reduction.validate(op, arrays[0].dtype)
    if device_of(arrays[0]) is not None:
        return coalesced([call.all_reduce(array, op) for array in arrays], _split_detail(arrays), tensors)
    whole = _in_place(arrays, writable=True)
    return _blocks("all_reduce", arrays, NO_BLOCKS, (whole,), tensors, op=op, finishes=True)


def broadcast_coalesced(tensors: object, root: int, rank: int) -> Call:
    """Any shapes; in place on every rank but the root, which only reads."""
    arrays = same_dtype_arrays(tensors, "tensors")
    if device_of(arrays[0]) is not None:
        return coalesced([call.broadcast(array, root, rank) for array in arrays], _split_detail(arrays), tensors)
    whole = _in_place(arrays, writable=rank != root)
    return _blocks("broadcast", arrays, NO_BLOCKS, (whole,), tensors, root=root)


def all_gather_coalesced(output_tensor_lists: object, input_tensor_list: object, size: int) -> Call:
    """`size` lists, in rank order, of arrays of the shapes and dtype of `input_tensor_list`."""
    arrays = same_dtype_arrays(input_tensor_list, "input_tensor_list")
    lists = lists_of(output_tensor_lists, "output_tensor_lists", size, "rank")
    rows = [arrays_like(one, f"output_tensor_lists[{rank}]", arrays) for rank, one in enumerate(lists)]
    if device_of(arrays[0]) is not None:
        members = [call.all_gather([row[index] for row in rows], array, 0, size) for index, array in enumerate(arrays)]
        return coalesced(members, _split_detail(arrays), output_tensor_lists)
    outputs: list[Flat] = []
    for rank, row in enumerate(rows):
        outputs += flats_of(row, f"output_tensor_lists[{rank}]", writable=True)
    places = [flat.elements for flat in outputs]
    whole = Packed(room_for(places), [places], outputs)
    return _blocks("all_gather", arrays, (_read(arrays),), (whole,), output_tensor_lists)


def all_gather_into_tensor_coalesced(output_tensors: object, input_tensors: object, size: int) -> Call:
    """Each output holds `size` times the elements of the input beside it."""
    arrays = same_dtype_arrays(input_tensors, "input_tensors")
    targets = _times(output_tensors, "output_tensors", arrays, "input_tensors", size)
    if device_of(arrays[0]) is not None:
        pairs = zip(targets, arrays, strict=True)
        members = [call.all_gather_into_tensor(target, array, size) for target, array in pairs]
        return coalesced(members, _split_detail(arrays), output_tensors)
    outputs = flats_of(targets, "output_tensors", writable=True)
    places = by_rank(outputs, arrays, size)
    whole = Packed(room_for(places), [places], outputs)
    return _blocks("all_gather", arrays, (_read(arrays),), (whole,), output_tensors)


def reduce_scatter_tensor_coalesced(outputs: object, inputs: object, op: ReduceOpLike, size: int) -> Call:
    """Each input holds `size` times the elements of the output beside it."""
    arrays = same_dtype_arrays(outputs, "outputs")
    reduction.validate(op, arrays[0].dtype)
    wholes = _times(inputs, "inputs", arrays, "outputs", size)
    if device_of(arrays[0]) is not None:
        pairs = zip(arrays, wholes, strict=True)
        members = [call.reduce_scatter_tensor(array, whole, op, size) for array, whole in pairs]
        return coalesced(members, _split_detail(arrays), outputs)
    sources = flats_of(wholes, "inputs", writable=False)
    source = Packed(packed(by_rank(sources, arrays, size)))
    targets = flats_of(arrays, "outputs", writable=True)
    places = [flat.elements for flat in targets]
    result = Packed(room_for(places), [places], targets)
    return _blocks("reduce_scatter", arrays, (source,), (result,), outputs, op=op, finishes=True)


def same_dtype_arrays(values: object, name: str) -> list[Array]:
    """The arrays of a list that is not empty and of one dtype."""
    if isinstance(values, list | tuple) and not values:
        raise ValueError(f"{name} must not be empty")
    arrays = arrays_of(values, name, None)
    for index, array in enumerate(arrays):
        check_same_dtype(array, arrays[0], f"{name}[{index}]", f"{name}[0]")
    return arrays


def arrays_like(values: object, name: str, like: Sequence[Array]) -> list[Array]:
    """The arrays of a list, each of the shape and dtype of that in `like` at its place."""
    arrays = arrays_of(values, name, None)
    if len(arrays) != len(like):
        raise ValueError(f"{name} must hold {len(like)} arrays, as many as there are inputs, but holds {len(arrays)}")
    for index, (array, model) in enumerate(zip(arrays, like, strict=True)):
        if array.shape != model.shape or array.dtype != model.dtype:
            raise ValueError(
                f"{name}[{index}] is {describe(array.dtype, array.shape)}, but the input at its place is "
                f"{describe(model.dtype, model.shape)}"
            )
        check_same_dtype(array, model, f"{name}[{index}]", "the input at its place")
    return arrays


def by_rank(flats: Sequence[Flat], like: Sequence[Array], size: int) -> list[Array]:
    """Rank 0's parts of all `flats`, then rank 1's, and so on; a part has the elements of that in `like`."""
    return [
        flat.elements[rank * model.size : (rank + 1) * model.size]
        for rank in range(size)
        for flat, model in zip(flats, like, strict=True)
    ]


def _split_detail(arrays: Sequence[Array]) -> str:
    """How the arrays divide the whole, for the fingerprint."""
    return "+".join(str(array.size) for array in arrays)


def _times(values: object, name: str, like: Sequence[Array], like_name: str, size: int) -> list[Array]:
    """Arrays of `size` times the elements of those of `like`."""
    arrays = same_dtype_arrays(values, name)
    if len(arrays) != len(like):
        raise ValueError(f"{name} holds {len(arrays)} arrays, but {like_name} {len(like)}")
    check_same_dtype(arrays[0], like[0], name, like_name)
    for index, (array, model) in enumerate(zip(arrays, like, strict=True)):
        if array.size != size * model.size:
            raise ValueError(
                f"{name}[{index}] must hold {size} times the {model.size} elements of {like_name}[{index}], but holds "
                f"{array.size}"
            )
    return arrays


def _read(arrays: Sequence[Array]) -> Flat:
    return Packed(packed([flat_of(array, writable=False).elements for array in arrays]))


def _in_place(arrays: Sequence[Array], *, writable: bool) -> Flat:
    flats = flats_of(arrays, "tensors", writable=writable)
    parts = [flat.elements for flat in flats]
    whole = adjacent(parts)
    if whole is not None:
        return Packed(whole, owners=flats)
    return Packed(packed(parts), [parts] if writable else [], flats)


def _blocks(
    collective: str, arrays: Sequence[Array], inputs: Sequence[Flat], outputs: Sequence[Flat], result: Any, **rest: Any
) -> Call:
    """Blocks of the elements of `arrays` together; without `inputs`, in place."""
    count, detail = sum(array.size for array in arrays), _split_detail(arrays)
    return Call(collective, arrays[0].dtype, count, inputs, outputs, result, detail=detail, **rest)
