"""The coalesced collectives: many arrays of one dtype in one operation, on `group` or the default group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.api.resolve import Group, resolve, root_of
from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.work import Work

__all__ = [
    "all_gather_coalesced",
    "all_gather_into_tensor_coalesced",
    "all_reduce_coalesced",
    "broadcast_coalesced",
    "reduce_scatter_tensor_coalesced",
]


def all_reduce_coalesced(
    tensors: Sequence[Any],
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Reduce each of `tensors` in place; see `ProcessGroup.all_reduce_coalesced`."""
    return resolve(group).all_reduce_coalesced(tensors, op, tag=tag, timeout=timeout)


def broadcast_coalesced(
    tensors: Sequence[Any],
    src: int | None = None,
    group: Group = None,
    *,
    group_src: int | None = None,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Copy each of rank `src`'s `tensors` into everybody's; see `ProcessGroup.broadcast_coalesced`."""
    found = resolve(group)
    root = root_of(found, "broadcast_coalesced", tag, src, group_src, "src")
    return found.broadcast_coalesced(tensors, root, tag=tag, timeout=timeout)


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Fill `output_tensor_lists[r]` with rank r's `input_tensor_list`; see `ProcessGroup.all_gather_coalesced`."""
    return resolve(group).all_gather_coalesced(output_tensor_lists, input_tensor_list, tag=tag, timeout=timeout)


def all_gather_into_tensor_coalesced(
    output_tensors: Sequence[Any],
    input_tensors: Sequence[Any],
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Fill each output with everybody's input; see `ProcessGroup.all_gather_into_tensor_coalesced`."""
    return resolve(group).all_gather_into_tensor_coalesced(output_tensors, input_tensors, tag=tag, timeout=timeout)


def reduce_scatter_tensor_coalesced(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Reduce each input; rank r gets the r-th part; see `ProcessGroup.reduce_scatter_tensor_coalesced`."""
    return resolve(group).reduce_scatter_tensor_coalesced(outputs, inputs, op, tag=tag, timeout=timeout)
