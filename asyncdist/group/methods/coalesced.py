"""Collectives on lists of arrays; see `methods.issuer` for what all have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.collectives.arguments import coalesced, multi_device
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.group.methods.issuer import Issuer
from asyncdist.work import Work

__all__ = ["Coalesced", "MultiDevice"]


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
        return self._collective("all_reduce_coalesced", tag, timeout, coalesced.all_reduce_coalesced, tensors, op)

    def broadcast_coalesced(
        self, tensors: Sequence[Any], root: int, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Copy each of the root's `tensors` (any shapes, one dtype) into everybody's. The result is `tensors`.

        Raises ValueError for an empty list or several dtypes.
        """
        operation = "broadcast_coalesced"
        root = self._root(operation, root, tag)
        return self._collective(operation, tag, timeout, coalesced.broadcast_coalesced, tensors, root, self.rank)

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
            coalesced.all_gather_coalesced,
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
            coalesced.all_gather_into_tensor_coalesced,
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
            coalesced.reduce_scatter_tensor_coalesced,
            outputs,
            inputs,
            op,
            self.size,
        )


class MultiDevice(Issuer):
    """Collectives of several arrays a rank.

    Every rank has several arrays, all of one shape and dtype, as many on every rank; on GPUs, one array on each. What
    is reduced is reduced over all arrays of all ranks; `ReduceOp.AVG` divides by their number.
    """

    def all_reduce_multigpu(
        self, tensor_list: Sequence[Any], op: ReduceOpLike = ReduceOp.SUM, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Reduce all arrays of all ranks, in place in each of them. The result is `tensor_list`."""
        return self._collective("all_reduce_multigpu", tag, timeout, multi_device.all_reduce_multigpu, tensor_list, op)

    def broadcast_multigpu(
        self, tensor_list: Sequence[Any], root: int, src_tensor: int = 0, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Copy the root's `tensor_list[src_tensor]` into all other arrays of all ranks. The result is `tensor_list`."""
        operation = "broadcast_multigpu"
        root = self._root(operation, root, tag)
        return self._collective(
            operation, tag, timeout, multi_device.broadcast_multigpu, tensor_list, root, src_tensor, self.rank
        )

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
        return self._collective(
            operation, tag, timeout, multi_device.reduce_multigpu, tensor_list, root, dst_tensor, op, self.rank
        )

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
            "all_gather_multigpu",
            tag,
            timeout,
            multi_device.all_gather_multigpu,
            output_tensor_lists,
            input_tensor_list,
            self.size,
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
            multi_device.reduce_scatter_multigpu,
            output_tensor_list,
            input_tensor_lists,
            op,
            self.size,
        )
