"""Prefix reductions; see `methods.issuer` for what all have in common."""

from __future__ import annotations

from typing import Any

from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.collectives.arguments import scan as call
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.group.methods.issuer import Issuer
from asyncdist.work import Work

__all__ = ["Scans"]


class Scans(Issuer):
    """MPI's scan and exscan, in place.

    Operands are reduced in rank order. ReduceOp.AVG is not defined for them (TypeError).
    """

    def scan(
        self, tensor: Any, op: ReduceOpLike = ReduceOp.SUM, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Reduce the `tensor` (any shape, equal on all ranks) of ranks 0 to r into rank r's. The result is `tensor`."""
        return self._collective("scan", tag, timeout, call.scan, tensor, op)

    def exscan(
        self, tensor: Any, op: ReduceOpLike = ReduceOp.SUM, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Reduce the `tensor` of ranks 0 to r - 1 into rank r's; rank 0's stays as it is. The result is `tensor`."""
        return self._collective("exscan", tag, timeout, call.exscan, tensor, op, self.rank)
