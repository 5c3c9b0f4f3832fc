"""MPI's prefix reductions, natively awaitable; see `api.collectives` for what all have in common."""

from __future__ import annotations

from typing import Any

from asyncdist.api.resolve import Group, resolve
from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.work import Work

__all__ = ["exscan", "scan"]


def scan(
    tensor: Any, op: ReduceOpLike = ReduceOp.SUM, group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT
) -> Work[Any]:
    """Reduce `tensor` over the group's ranks up to this one, in place; see `ProcessGroup.scan`."""
    return resolve(group).scan(tensor, op, tag=tag, timeout=timeout)


def exscan(
    tensor: Any, op: ReduceOpLike = ReduceOp.SUM, group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT
) -> Work[Any]:
    """Reduce `tensor` over the group's ranks below this one, in place; see `ProcessGroup.exscan`."""
    return resolve(group).exscan(tensor, op, tag=tag, timeout=timeout)
