"""The coalesced collectives: many arrays of one dtype in one operation, on `group` or the default group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.api.ranks import root_of
from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.group.default_group import Group, resolve
from asyncdist.work import Work

__all__ = [
    "all_gather_coalesced",
    "all_gather_into_tensor_coalesced",
    "all_gather_multigpu",
    "all_reduce_coalesced",
    "all_reduce_multigpu",
    "broadcast_coalesced",
    "broadcast_multigpu",
    "reduce_multigpu",
    "reduce_scatter_multigpu",
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


def all_reduce_multigpu(
    tensor_list: Sequence[Any],
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Reduce all arrays of all ranks, in place in each; see `ProcessGroup.all_reduce_multigpu`."""
    return resolve(group).all_reduce_multigpu(tensor_list, op, tag=tag, timeout=timeout)


def broadcast_multigpu(
    tensor_list: Sequence[Any],
    src: int | None = None,
    group: Group = None,
    *,
    src_tensor: int = 0,
    group_src: int | None = None,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Copy rank `src`'s `tensor_list[src_tensor]` into all others; see `ProcessGroup.broadcast_multigpu`."""
    found = resolve(group)
    root = root_of(found, "broadcast_multigpu", tag, src, group_src, "src")
    return found.broadcast_multigpu(tensor_list, root, src_tensor, tag=tag, timeout=timeout)


def reduce_multigpu(
    tensor_list: Sequence[Any],
    dst: int | None = None,
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    dst_tensor: int = 0,
    group_dst: int | None = None,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Reduce all arrays of all ranks into one of rank `dst`; see `ProcessGroup.reduce_multigpu`."""
    found = resolve(group)
    root = root_of(found, "reduce_multigpu", tag, dst, group_dst, "dst")
    return found.reduce_multigpu(tensor_list, root, op, dst_tensor, tag=tag, timeout=timeout)


def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Fill each of `output_tensor_lists` with all arrays of all ranks; see `ProcessGroup.all_gather_multigpu`."""
    return resolve(group).all_gather_multigpu(output_tensor_lists, input_tensor_list, tag=tag, timeout=timeout)


def reduce_scatter_multigpu(
    output_tensor_list: Sequence[Any],
    input_tensor_lists: Sequence[Sequence[Any]],
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Reduce `input_tensor_lists` and give every array its part; see `ProcessGroup.reduce_scatter_multigpu`."""
    return resolve(group).reduce_scatter_multigpu(output_tensor_list, input_tensor_lists, op, tag=tag, timeout=timeout)
