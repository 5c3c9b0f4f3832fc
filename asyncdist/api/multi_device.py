"""torch 1.x's multi-device collectives, on lists of host arrays, on `group` or the default group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.api.resolve import Group, resolve, root_of
from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.work import Work

__all__ = [
    "all_gather_multigpu",
    "all_reduce_multigpu",
    "broadcast_multigpu",
    "reduce_multigpu",
    "reduce_scatter_multigpu",
]


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
