"""Calls of the prefix reductions.

As in `calls.call`, each function checks the arguments for one rank, and raises TypeError and ValueError.
"""

from __future__ import annotations

from typing import Any

from asyncdist.arrays.device import any_array, device_of, flat_of
from asyncdist.arrays.reduce_op import PremulSum, ReduceOp, ReduceOpLike
from asyncdist.collectives.arguments.call import NO_BLOCKS, Call
from asyncdist.collectives.executor import reduction

__all__ = ["exscan", "scan"]


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
