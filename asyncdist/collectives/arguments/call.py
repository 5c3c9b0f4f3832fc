"""Call: one collective's arguments, checked and bound, before a byte moves.

Each function checks the arguments of one collective for one rank and returns the `Call` that a backend runs. All raise
TypeError for values that are no arrays or reduce operations, and ValueError for shapes, counts, dtypes or roots that
do not fit. The methods of `group.methods` that users call are beside it in name and order.

In the uneven forms a rank knows only its own lengths. `Call.pieces` then holds the arrays that travel, each whole, even
if it is empty. The plan counts each as one element, so that one plan serves all lengths. The receiver of an array
compares its length with the length that it expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncdist.arrays import reduction
from asyncdist.arrays.device import PLAIN, DeviceArray, any_array, device_flat, device_of, flat_of
from asyncdist.arrays.host import Array, Flat, describe
from asyncdist.arrays.reduce_op import PremulSum, ReduceOp, ReduceOpLike
from asyncdist.concurrency.integers import as_int
from asyncdist.plan.chunks import offsets

__all__ = [
    "NO_BLOCKS",
    "Call",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "arrays_of",
    "barrier",
    "blocks_like",
    "broadcast",
    "check_same_dtype",
    "coalesced",
    "exscan",
    "flats_of",
    "gather",
    "gather_uneven",
    "given_at_root",
    "lists_of",
    "monitored_barrier",
    "multi_device",
    "place_of",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scan",
    "scatter",
    "scatter_uneven",
]

_BYTE = np.dtype(np.uint8)
_UNEVEN_HINT = " (for different sizes, say uneven=True on every rank)"
NO_BLOCKS: tuple[Flat, ...] = ()


@dataclass(slots=True)
class Call:
    """A collective as the engine sees it.

    `counts` is what the plan is made for: elements in all for operations on one array; elements of each rank's block,
    or one number per rank, for those on blocks. `inputs` and `outputs` are the arrays, in rank order where there are
    several; empty where this rank has none.
    """

    collective: str
    dtype: np.dtype[Any]
    counts: int | tuple[int, ...]
    inputs: Sequence[Flat]
    outputs: Sequence[Flat]
    result: Any
    root: int = 0
    op: ReduceOpLike | None = None
    finishes: bool = False
    """Whether `op` is finished (AVG divides) on this rank's outputs."""
    detail: str = ""
    """What else ranks must agree on, told apart by the fingerprint: how several arrays make up the counts."""
    pieces: tuple[Sequence[Array], Sequence[Array]] | None = None
    """Where a rank knows only its own lengths: what it sends and receives, in rank order. Each is one element of the
    plan."""
    shares: int = 1
    """Arrays per rank that have been reduced into its contribution, which AVG counts."""
    algorithm: str | None = None
    """The algorithm the operation needs, whatever is fastest for one of this size; blocks then move in one piece."""
    device: int | None = None
    """The GPU that the arrays are on, which are `DeviceArray`s then; None for host arrays."""
    members: Sequence[Call] = ()
    """On a GPU, the calls that this one consists of, where it is several: they are carried out together. Where they are
    on different GPUs, they are a rank's shares in one collective of all GPUs of all ranks."""
    ready: Sequence[Any] = ()
    """On a GPU, events on the caller's streams that the arrays' use waits for."""
    recipe_key: tuple[Any, ...] = field(init=False, repr=False)
    """What the plan and the fingerprint are made of."""
    nbytes: int = field(init=False)
    """Bytes of the vector, or of a block where all have the same size; of pieces, what is sent or received here."""

    def __post_init__(self) -> None:
        detail, counts = self.detail, self.counts
        if self.device is not None:
            detail = f"{detail} on GPUs" if detail else "arrays on GPUs"
        self.recipe_key = self.collective, counts, self.dtype, self.root, self.op, detail
        if self.pieces is None:
            self.nbytes = (counts if isinstance(counts, int) else sum(counts)) * self.dtype.itemsize
        else:
            self.nbytes = max(sum(piece.nbytes for piece in side) for side in self.pieces)


def all_reduce(tensor: object, op: ReduceOpLike) -> Call:
    """Any shape; in place."""
    # Without a detour: small ones count nanoseconds.
    array: Any = tensor if type(tensor) is np.ndarray and tensor.dtype in PLAIN else any_array(tensor)
    dtype = array.dtype
    reduction.validate(op, dtype)
    if type(array) is np.ndarray:
        call = Call("all_reduce", dtype, array.size, NO_BLOCKS, NO_BLOCKS, tensor, 0, op, True)
        call.outputs = (Flat(array, writable=True),)
        return call
    flats: Any = (device_flat(array, writable=True),)
    return Call("all_reduce", dtype, array.size, NO_BLOCKS, flats, tensor, 0, op, True, device=array.device)


def broadcast(tensor: object, root: int, rank: int) -> Call:
    """Any shape; in place on every rank but the root, which only reads."""
    array = any_array(tensor)
    flat = flat_of(array, writable=rank != root)
    return Call("broadcast", array.dtype, array.size, NO_BLOCKS, (flat,), tensor, root, device=device_of(array))


def reduce(tensor: object, root: int, op: ReduceOpLike, rank: int) -> Call:
    """Any shape; in place on the root, untouched elsewhere."""
    array = any_array(tensor)
    reduction.validate(op, array.dtype)
    own, device = rank == root, device_of(array)
    flat = flat_of(array, writable=own)
    outputs = (flat,) if own else NO_BLOCKS
    return Call("reduce", array.dtype, array.size, (flat,), outputs, tensor, root, op, own, device=device)


def all_gather(tensor_list: object, tensor: object, rank: int, size: int) -> Call:
    """`size` arrays of the dtype of `tensor`, the same sizes on all ranks; this rank's is shaped like `tensor`."""
    array = any_array(tensor)
    arrays = blocks_of(tensor_list, "tensor_list", size, array, rank)
    outputs = flats_of(arrays, "tensor_list", writable=True)
    even = all(block.size == array.size for block in arrays)
    counts = array.size if even else tuple(block.size for block in arrays)
    inputs = (flat_of(array, writable=False),)
    return Call("all_gather", array.dtype, counts, inputs, outputs, tensor_list, device=device_of(array))


def all_gather_into_tensor(output: object, tensor: object, size: int) -> Call:
    """`output` holds `size` times the elements of `tensor`, concatenated or stacked along the first dimension."""
    array, target = any_array(tensor, "input_tensor"), any_array(output, "output_tensor")
    check_same_dtype(array, target, "input_tensor", "output_tensor")
    if target.size != size * array.size:
        raise ValueError(
            f"output_tensor must hold {size} times the {array.size} elements of input_tensor, but holds {target.size}"
        )
    outputs = (flat_of(target, writable=True, name="output_tensor"),)
    inputs = (flat_of(array, writable=False),)
    return Call("all_gather", array.dtype, array.size, inputs, outputs, output, device=device_of(array))


def gather(tensor: object, gather_list: object, root: int, rank: int, size: int) -> Call:
    """`gather_list` only on the root: `size` arrays of the shape and dtype of `tensor`."""
    array = any_array(tensor)
    outputs: Sequence[Flat] = NO_BLOCKS
    if given_at_root(gather_list, "gather_list", "destination", here=rank == root):
        outputs = blocks_like(gather_list, "gather_list", size, array, writable=True, hint=_UNEVEN_HINT)
    inputs = (flat_of(array, writable=False),)
    return Call("gather", array.dtype, array.size, inputs, outputs, gather_list or None, root, device=device_of(array))


def scatter(tensor: object, scatter_list: object, root: int, rank: int, size: int) -> Call:
    """`scatter_list` only on the root: `size` arrays of the shape and dtype of `tensor`."""
    array = any_array(tensor)
    inputs: Sequence[Flat] = NO_BLOCKS
    if given_at_root(scatter_list, "scatter_list", "source", here=rank == root):
        inputs = blocks_like(scatter_list, "scatter_list", size, array, writable=False, hint=_UNEVEN_HINT)
    own = (flat_of(array, writable=True),)
    return Call("scatter", array.dtype, array.size, inputs, own, tensor, root, device=device_of(array))


def reduce_scatter(output: object, input_list: object, op: ReduceOpLike, rank: int, size: int) -> Call:
    """`input_list` holds one array per rank, of any sizes; this rank gets the reduction of its own."""
    target = any_array(output, "output")
    reduction.validate(op, target.dtype)
    arrays = arrays_of(input_list, "input_list", size)
    for index, array in enumerate(arrays):
        check_same_dtype(array, target, f"input_list[{index}]", "output")
    if arrays[rank].shape != target.shape:
        raise ValueError(f"output has shape {target.shape}, but input_list[{rank}] has {arrays[rank].shape}")
    inputs = [flat_of(array, writable=False) for array in arrays]
    counts = tuple(array.size for array in arrays)
    outputs = (flat_of(target, writable=True, name="output"),)
    device = device_of(target)
    return Call("reduce_scatter", target.dtype, counts, inputs, outputs, output, op=op, finishes=True, device=device)


def reduce_scatter_tensor(output: object, tensor: object, op: ReduceOpLike, size: int) -> Call:
    """`tensor` holds `size` times the elements of `output`."""
    target, array = any_array(output, "output"), any_array(tensor, "input")
    reduction.validate(op, target.dtype)
    check_same_dtype(array, target, "input", "output")
    if array.size != size * target.size:
        raise ValueError(f"input must hold {size} times the {target.size} elements of output, but holds {array.size}")
    inputs = (flat_of(array, writable=False),)
    outputs = (flat_of(target, writable=True, name="output"),)
    device = device_of(target)
    return Call(
        "reduce_scatter", target.dtype, target.size, inputs, outputs, output, op=op, finishes=True, device=device
    )


def barrier() -> Call:
    """No data."""
    return Call("barrier", _BYTE, 0, NO_BLOCKS, NO_BLOCKS, None)


def monitored_barrier() -> Call:
    """No data; not to be met by a plain barrier."""
    return Call("barrier", _BYTE, 0, NO_BLOCKS, NO_BLOCKS, None, detail="monitored")


def given_at_root(values: object, name: str, role: str, *, here: bool) -> bool:
    """Return `here`: whether this is the rank that alone gives a list, as source or destination (`role`).

    Elsewhere an empty list is none.
    """
    if here and values is None:
        raise ValueError(f"{name} must be given on the {role} rank")
    if values and not here:
        raise ValueError(f"{name} must not be given on ranks other than the {role}")
    return here


def arrays_of(values: object, name: str, size: int | None) -> list[Array]:
    """The arrays of a list that holds one per rank; of any length if `size` is None."""
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name} must be a list of arrays, not {type(values).__name__}")
    if size is not None and len(values) != size:
        raise ValueError(f"{name} must hold one array per rank: {size}, but holds {len(values)}")
    return [any_array(value, f"{name}[{index}]") for index, value in enumerate(values)]


def blocks_like(values: object, name: str, size: int, like: Array, *, writable: bool, hint: str = "") -> list[Flat]:
    """The arrays of a list that holds one per rank, each of the shape and dtype of `like`; `hint` ends the error."""
    arrays = arrays_of(values, name, size)
    for index, array in enumerate(arrays):
        if array.shape != like.shape or array.dtype != like.dtype:
            raise ValueError(
                f"{name}[{index}] is {describe(array.dtype, array.shape)}, but tensor is "
                f"{describe(like.dtype, like.shape)}{hint if array.dtype == like.dtype else ''}"
            )
        check_same_dtype(array, like, f"{name}[{index}]", "tensor")
    return flats_of(arrays, name, writable=writable)


def flats_of(arrays: Sequence[Array], name: str, *, writable: bool) -> list[Flat]:
    """The arrays of a list as flat runs of elements."""
    return [flat_of(array, writable=writable, name=f"{name}[{index}]") for index, array in enumerate(arrays)]


def lists_of(values: object, name: str, count: int, owner: str) -> Sequence[Any]:
    """A list of `count` lists of arrays, one per `owner`."""
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name} must be a list of lists of arrays, not {type(values).__name__}")
    if len(values) != count:
        raise ValueError(f"{name} must hold one list per {owner}: {count}, but holds {len(values)}")
    return values


def blocks_of(values: object, name: str, size: int, own: Array, rank: int) -> list[Array]:
    """The arrays of a list that holds one per rank, of the dtype of `own`, and `rank`'s of its shape."""
    arrays = arrays_of(values, name, size)
    for index, array in enumerate(arrays):
        check_same_dtype(array, own, f"{name}[{index}]", "tensor")
    if arrays[rank].shape != own.shape:
        raise ValueError(
            f"{name}[{rank}] is {describe(own.dtype, arrays[rank].shape)}, but tensor is "
            f"{describe(own.dtype, own.shape)}"
        )
    return arrays


def check_same_dtype(left: Any, right: Any, left_name: str, right_name: str) -> None:
    """Raise ValueError unless both have one dtype and are in one memory, the host's or a GPU's."""
    if left.dtype != right.dtype:
        raise ValueError(f"{left_name} has dtype {left.dtype.name}, but {right_name} has {right.dtype.name}")
    if (type(left) is DeviceArray or type(right) is DeviceArray) and device_of(left) != device_of(right):
        raise ValueError(f"{left_name} is on {place_of(left)}, but {right_name} on {place_of(right)}")


def place_of(array: Any) -> str:
    """`cuda:0` or `the host`, for messages."""
    device = device_of(array)
    return "the host" if device is None else f"cuda:{device}"


def scan(tensor: object, op: ReduceOpLike) -> Call:
    """Any shape; in place."""
    array = _operand(tensor, op)
    flat = flat_of(array, writable=True)
    return Call("scan", array.dtype, array.size, NO_BLOCKS, (flat,), tensor, op=op, device=device_of(array))


def exscan(tensor: object, op: ReduceOpLike, rank: int) -> Call:
    """Any shape; in place, except on rank 0, whose array is only read."""
    array = _operand(tensor, op)
    device = device_of(array)
    if not rank and isinstance(op, PremulSum) and device is None:
        array = array.copy()  # what is multiplied in place is not the caller's
    flat = flat_of(array, writable=rank > 0)
    return Call("exscan", array.dtype, array.size, NO_BLOCKS, (flat,), tensor, op=op, device=device)


def _operand(tensor: object, op: ReduceOpLike) -> Any:
    array = any_array(tensor)
    reduction.validate(op, array.dtype)
    if op is ReduceOp.AVG:
        raise TypeError("ReduceOp.AVG is not defined for prefixes, whose ranks differ in number: use SUM and divide")
    return array


def coalesced(members: Sequence[Call], detail: str, result: Any) -> Call:
    """Several calls of one kind on one GPU, carried out together; `detail` says how they divide the whole."""
    return multi_device(members, detail, members[0].root, result)


def multi_device(members: Sequence[Call], detail: str, root: int, result: Any) -> Call:
    """A rank's shares, one per GPU, in one collective of all GPUs of all ranks. `root` is a group rank."""
    first = members[0]
    counts = sum(member.counts if isinstance(member.counts, int) else sum(member.counts) for member in members)
    return Call(
        first.collective,
        first.dtype,
        counts,
        NO_BLOCKS,
        NO_BLOCKS,
        result,
        root,
        first.op,
        detail=detail,
        device=first.device,
        members=members,
    )


def all_to_all(output_list: object, input_list: object, rank: int, size: int) -> Call:
    """`size` arrays each, of any shapes and one dtype; `input_list[rank]` is shaped like `output_list[rank]`."""
    sources = arrays_of(input_list, "input_tensor_list", size)
    targets = arrays_of(output_list, "output_tensor_list", size)
    own, place = sources[rank], targets[rank]
    for name, arrays in (("input_tensor_list", sources), ("output_tensor_list", targets)):
        for index, array in enumerate(arrays):
            check_same_dtype(array, sources[0], f"{name}[{index}]", "input_tensor_list[0]")
    if own.shape != place.shape:
        raise ValueError(
            f"output_tensor_list[{rank}] has shape {place.shape}, but input_tensor_list[{rank}] {own.shape}"
        )
    inputs = flats_of(sources, "input_tensor_list", writable=False)
    outputs = flats_of(targets, "output_tensor_list", writable=True)
    pieces = ([flat.elements for flat in inputs], [flat.elements for flat in outputs])
    return _exchange(inputs, outputs, pieces, output_list)


def all_to_all_single(
    output: object, input: object, output_splits: object, input_splits: object, rank: int, size: int
) -> Call:
    """Rows of the first dimension, `size` equal parts each or as the splits say; one dtype."""
    source, target = any_array(input, "input"), any_array(output, "output")
    check_same_dtype(source, target, "input", "output")
    flat_input = flat_of(source, writable=False, name="input")
    flat_output = flat_of(target, writable=True, name="output")
    even = not (_given(input_splits) or _given(output_splits))
    sent = _lengths(source, input_splits, "input", size)
    received = _lengths(target, output_splits, "output", size)
    if sent[rank] != received[rank]:
        raise ValueError(
            f"input holds {sent[rank]} elements for this rank itself, but output has room for {received[rank]}"
        )
    if even:
        device = device_of(source)
        return Call("all_to_all", source.dtype, sent[0], (flat_input,), (flat_output,), output, device=device)
    pieces = (_cut(flat_input, sent), _cut(flat_output, received))
    return _exchange((flat_input,), (flat_output,), pieces, output)


def gather_uneven(tensor: object, gather_list: object, root: int, rank: int, size: int) -> Call:
    """`gather_list` only on the root: `size` arrays of the dtype of `tensor`; its own is shaped like `tensor`."""
    array = any_array(tensor)
    own = flat_of(array, writable=False)
    outputs: Sequence[Flat] = NO_BLOCKS
    if given_at_root(gather_list, "gather_list", "destination", here=rank == root):
        outputs = flats_of(blocks_of(gather_list, "gather_list", size, array, rank), "gather_list", writable=True)
    pieces = ([own.elements], [flat.elements for flat in outputs])
    counts, device, filled = (1,) * size, device_of(array), gather_list or None
    return Call("gather_uneven", array.dtype, counts, (own,), outputs, filled, root, pieces=pieces, device=device)


def scatter_uneven(tensor: object, scatter_list: object, root: int, rank: int, size: int) -> Call:
    """`scatter_list` only on the root: `size` arrays of the dtype of `tensor`; its own is shaped like `tensor`."""
    array = any_array(tensor)
    own = flat_of(array, writable=True)
    inputs: Sequence[Flat] = NO_BLOCKS
    if given_at_root(scatter_list, "scatter_list", "source", here=rank == root):
        inputs = flats_of(blocks_of(scatter_list, "scatter_list", size, array, rank), "scatter_list", writable=False)
    pieces = ([flat.elements for flat in inputs], [own.elements])
    counts, device = (1,) * size, device_of(array)
    return Call("scatter_uneven", array.dtype, counts, inputs, (own,), tensor, root, pieces=pieces, device=device)


def _exchange(
    inputs: Sequence[Flat], outputs: Sequence[Flat], pieces: tuple[Sequence[Array], Sequence[Array]], result: object
) -> Call:
    counts, own = (1,) * 2 * len(pieces[0]), inputs[0].elements
    device = device_of(own)
    return Call("all_to_all_uneven", own.dtype, counts, inputs, outputs, result, pieces=pieces, device=device)


def _given(splits: object) -> bool:
    """Whether splits are given: torch takes an empty list for none."""
    return splits is not None and not (isinstance(splits, list | tuple) and not splits)


def _lengths(array: Array, splits: object, name: str, size: int) -> tuple[int, ...]:
    """Elements of `array` for each rank."""
    if not array.ndim:
        raise ValueError(f"{name} must have a dimension to split, but is a single number")
    rows = array.shape[0]
    if not _given(splits):
        if rows % size:
            raise ValueError(f"the first dimension of {name} is {rows}, which {size} ranks cannot share evenly")
        return (array.size // size,) * size
    if not isinstance(splits, list | tuple):
        raise TypeError(f"{name}_split_sizes must be a list of ints, not {type(splits).__name__}")
    if len(splits) != size:
        raise ValueError(f"{name}_split_sizes must hold one size per rank: {size}, but holds {len(splits)}")
    sizes = [
        split if type(split) is int else as_int(split, f"{name}_split_sizes[{index}] must be an int")
        for index, split in enumerate(splits)
    ]
    if min(sizes) < 0:
        raise ValueError(f"{name}_split_sizes must not be negative: {sizes}")
    if sum(sizes) != rows:
        raise ValueError(f"{name}_split_sizes add up to {sum(sizes)}, but the first dimension of {name} is {rows}")
    row_length = array.size // rows if rows else 0
    return tuple(split * row_length for split in sizes)


def _cut(flat: Flat, lengths: Sequence[int]) -> list[Array]:
    starts = offsets(lengths)
    return [flat.elements[start : start + length] for start, length in zip(starts, lengths, strict=False)]
