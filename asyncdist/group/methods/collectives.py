"""The collectives of torch.distributed on arrays of known size; see `methods.issuer` for what all have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.collectives.arguments import call
from asyncdist.collectives.arguments import exchange as call_exchange
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.group.methods.issuer import Issuer
from asyncdist.work import Work

__all__ = ["Collectives"]


class Collectives(Issuer):
    """broadcast, reduce, gather, scatter and their kin."""

    def all_reduce(
        self, tensor: Any, op: ReduceOpLike = ReduceOp.SUM, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Reduce `tensor` (any shape, equal on all ranks) over all ranks, in place on every rank.

        All ranks hold bit-identical results. The result is `tensor`.
        """
        return self._collective("all_reduce", tag, timeout, call.all_reduce, tensor, op)

    def broadcast(self, tensor: Any, root: int, *, tag: int = 0, timeout: Timeout = INHERIT) -> Work[Any]:
        """Copy the root's `tensor` (any shape, equal on all ranks) into everybody's. The result is `tensor`."""
        root = self._root("broadcast", root, tag)
        return self._collective("broadcast", tag, timeout, call.broadcast, tensor, root, self.rank)

    def reduce(
        self, tensor: Any, root: int, op: ReduceOpLike = ReduceOp.SUM, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Reduce `tensor` over all ranks into the root's; the others' stay as they are. The result is `tensor`."""
        root = self._root("reduce", root, tag)
        return self._collective("reduce", tag, timeout, call.reduce, tensor, root, op, self.rank)

    def all_gather(
        self, tensor_list: Sequence[Any], tensor: Any, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Fill `tensor_list` (one array per rank) with everybody's `tensor`; the result is it.

        The arrays may differ in size, as the tensors do; every rank gives the same sizes, its own shaped like `tensor`.
        """
        return self._collective("all_gather", tag, timeout, call.all_gather, tensor_list, tensor, self.rank, self.size)

    def all_gather_into_tensor(
        self, output_tensor: Any, input_tensor: Any, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Fill `output_tensor` (`size` times the elements of `input_tensor`) with everybody's, in rank order."""
        return self._collective(
            "all_gather_into_tensor",
            tag,
            timeout,
            call.all_gather_into_tensor,
            output_tensor,
            input_tensor,
            self.size,
        )

    all_gather_single = all_gather_into_tensor

    def gather(
        self,
        tensor: Any,
        gather_list: Sequence[Any] | None = None,
        root: int = 0,
        *,
        uneven: bool = False,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[Any]:
        """Fill the root's `gather_list` (one array per rank, shaped like `tensor`); None on the other ranks.

        With `uneven=True`, on every rank, the tensors may differ in size, and with them the arrays of the list. Only
        the root needs to know all sizes; one that is not as it says raises CollectiveMismatchError.
        """
        root = self._root("gather", root, tag)
        prepare = call_exchange.gather_uneven if uneven else call.gather
        return self._collective("gather", tag, timeout, prepare, tensor, gather_list, root, self.rank, self.size)

    def scatter(
        self,
        tensor: Any,
        scatter_list: Sequence[Any] | None = None,
        root: int = 0,
        *,
        uneven: bool = False,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[Any]:
        """Fill `tensor` with this rank's entry of the root's `scatter_list`; None on the other ranks.

        With `uneven=True`, on every rank, the entries may differ in size, and with them the tensors. Only the root
        needs to know all sizes; a tensor of another size than its entry raises CollectiveMismatchError.
        """
        root = self._root("scatter", root, tag)
        prepare = call_exchange.scatter_uneven if uneven else call.scatter
        return self._collective("scatter", tag, timeout, prepare, tensor, scatter_list, root, self.rank, self.size)

    def reduce_scatter(
        self,
        output: Any,
        input_list: Sequence[Any],
        op: ReduceOpLike = ReduceOp.SUM,
        *,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[Any]:
        """Reduce `input_list[r]` of all ranks into rank r's `output`; sizes may differ between entries."""
        return self._collective(
            "reduce_scatter", tag, timeout, call.reduce_scatter, output, input_list, op, self.rank, self.size
        )

    def reduce_scatter_tensor(
        self,
        output: Any,
        input: Any,
        op: ReduceOpLike = ReduceOp.SUM,
        *,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[Any]:
        """Reduce `input` (`size` times the elements of `output`) over all ranks; rank r gets the r-th part."""
        return self._collective(
            "reduce_scatter_tensor",
            tag,
            timeout,
            call.reduce_scatter_tensor,
            output,
            input,
            op,
            self.size,
        )

    reduce_scatter_single = reduce_scatter_tensor

    def barrier(self, *, tag: int = 0, timeout: Timeout = INHERIT) -> Work[Any]:
        """Done once every rank has called it."""
        return self._collective("barrier", tag, timeout, call.barrier)
