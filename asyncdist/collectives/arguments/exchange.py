"""Calls of the exchanges, and of gather and scatter where a rank knows only its own lengths.

As in `calls.call`, each function checks the arguments for one rank, and raises TypeError and ValueError.

In the uneven forms `Call.pieces` holds the arrays that travel, whole and even if they are empty. The plan counts each
as one element, so that one plan serves all lengths; who receives one compares its length with what is expected.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncdist.arrays.device import any_array, device_of, flat_of
from asyncdist.arrays.host import Array, Flat
from asyncdist.collectives.arguments.call import NO_BLOCKS, Call, arrays_of, blocks_of, check_same_dtype, given_at_root
from asyncdist.concurrency.integers import as_int
from asyncdist.plan.chunks import offsets

__all__ = ["all_to_all", "all_to_all_single", "gather_uneven", "scatter_uneven"]


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
    inputs = _flats(sources, "input_tensor_list", writable=False)
    outputs = _flats(targets, "output_tensor_list", writable=True)
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
        outputs = _flats(blocks_of(gather_list, "gather_list", size, array, rank), "gather_list", writable=True)
    pieces = ([own.elements], [flat.elements for flat in outputs])
    counts, device, filled = (1,) * size, device_of(array), gather_list or None
    return Call("gather_uneven", array.dtype, counts, (own,), outputs, filled, root, pieces=pieces, device=device)


def scatter_uneven(tensor: object, scatter_list: object, root: int, rank: int, size: int) -> Call:
    """`scatter_list` only on the root: `size` arrays of the dtype of `tensor`; its own is shaped like `tensor`."""
    array = any_array(tensor)
    own = flat_of(array, writable=True)
    inputs: Sequence[Flat] = NO_BLOCKS
    if given_at_root(scatter_list, "scatter_list", "source", here=rank == root):
        inputs = _flats(blocks_of(scatter_list, "scatter_list", size, array, rank), "scatter_list", writable=False)
    pieces = ([flat.elements for flat in inputs], [own.elements])
    counts, device = (1,) * size, device_of(array)
    return Call("scatter_uneven", array.dtype, counts, inputs, (own,), tensor, root, pieces=pieces, device=device)


def _exchange(
    inputs: Sequence[Flat], outputs: Sequence[Flat], pieces: tuple[Sequence[Array], Sequence[Array]], result: object
) -> Call:
    counts, own = (1,) * 2 * len(pieces[0]), inputs[0].elements
    device = device_of(own)
    return Call("all_to_all_uneven", own.dtype, counts, inputs, outputs, result, pieces=pieces, device=device)


def _flats(arrays: Sequence[Array], name: str, *, writable: bool) -> list[Flat]:
    return [flat_of(array, writable=writable, name=f"{name}[{index}]") for index, array in enumerate(arrays)]


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
