"""Collectives on arrays of known size; see `methods.issuer` for what all have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.collectives.arguments import call
from asyncdist.concurrency.deadline import INHERIT, Timeout, timeout_seconds
from asyncdist.group.deadlines import MONITORED_BARRIER, PROBE_S
from asyncdist.group.methods.issuer import Issuer
from asyncdist.group.point_to_point import check_tag
from asyncdist.work import Work

VERDICT_S: Final = 2 * PROBE_S
"""How much longer the other ranks wait than the first, so that its verdict, which needs PROBE_S, comes first."""


class Collectives(Issuer):
    """Collectives of arrays whose sizes all ranks know, and all_to_all.

    Inputs of all_to_all may share memory with outputs; they are copied first then. In its uneven forms a rank knows
    only what it sends and what it receives. Where two ranks disagree, the one that receives raises
    CollectiveMismatchError that names the other, and the group is aborted.

    scan and exscan are MPI's, in place. Operands are reduced in rank order. ReduceOp.AVG is not defined for them
    (TypeError).
    """

    timeout_s: float | None

    def all_reduce(
        self,
        tensor: Any,
        op: ReduceOpLike = ReduceOp.SUM,
        *,
        tag: int = 0,
        timeout: Timeout = INHERIT,
        on_lost: str = "raise",
    ) -> Work[Any]:
        """Reduce `tensor` (any shape, equal on all ranks) over all ranks, in place on every rank.

        All ranks hold bit-identical results. The result is `tensor`; with `on_lost="continue"`, on every rank, it is a
        `Reduced`, see `asyncdist.all_reduce`.
        """
        if on_lost != "raise":
            if on_lost == "continue":
                return self._core.all_reduce_of_the_left(tensor, op, tag, timeout)
            error = ValueError(f"on_lost={on_lost!r} is neither 'raise' nor 'continue'")
            self.refuse("all_reduce", check_tag(tag), error)
            raise error
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
            "all_gather_into_tensor", tag, timeout, call.all_gather_into_tensor, output_tensor, input_tensor, self.size
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
        prepare = call.gather_uneven if uneven else call.gather
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
        prepare = call.scatter_uneven if uneven else call.scatter
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
        self, output: Any, input: Any, op: ReduceOpLike = ReduceOp.SUM, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Reduce `input` (`size` times the elements of `output`) over all ranks; rank r gets the r-th part."""
        return self._collective(
            "reduce_scatter_tensor", tag, timeout, call.reduce_scatter_tensor, output, input, op, self.size
        )

    reduce_scatter_single = reduce_scatter_tensor

    def barrier(self, *, tag: int = 0, timeout: Timeout = INHERIT) -> Work[Any]:
        """Done once every rank has called it."""
        return self._collective("barrier", tag, timeout, call.barrier)

    def all_to_all(
        self,
        output_tensor_list: Sequence[Any],
        input_tensor_list: Sequence[Any],
        *,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[Any]:
        """Fill `output_tensor_list[r]` with what rank r has for this one in its `input_tensor_list`. The result is it.

        Both hold one array per rank, of any shapes (empty ones too) and one dtype. Raises ValueError for lists of
        another length, several dtypes, or if the two arrays of this rank itself differ in shape.
        """
        return self._collective(
            "all_to_all", tag, timeout, call.all_to_all, output_tensor_list, input_tensor_list, self.rank, self.size
        )

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[Any]:
        """Send `input_split_sizes[r]` rows of `input` to each rank r; receive as `output_split_sizes` says, in order.

        Rows are those of the first dimension; None (or an empty list) shares them evenly. All ranks give splits, one or
        both, or none does. The result is `output`.

        Raises ValueError for splits that are not one per rank, are negative, do not add up to the first dimension or
        leave this rank another number of elements for itself in the two arrays; for a first dimension that cannot be
        shared evenly; and for arrays without dimensions or of two dtypes. TypeError for splits that are no ints.
        """
        return self._collective(
            "all_to_all_single",
            tag,
            timeout,
            call.all_to_all_single,
            output,
            input,
            output_split_sizes,
            input_split_sizes,
            self.rank,
            self.size,
        )

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

    def monitored_barrier(self, timeout: Timeout = INHERIT, wait_all_ranks: bool = False, *, tag: int = 0) -> Work[Any]:
        """Done once every rank has called it; when `timeout` expires, the error names all ranks that have not.

        The group's first rank asks all others then, connected or not, and its verdict is every rank's
        CollectiveTimeoutError, whose `missing` are their global ranks; the group is aborted. Where the first rank
        itself does not come, the others say so one second later. Other collectives name who is missing as well, but in
        groups of more than 256 ranks only as far as ranks are connected.

        `wait_all_ranks` is torch's choice between the first missing rank and all; here it is always all.
        """
        try:
            timeout_s = self.timeout_s if timeout is INHERIT else timeout_seconds(timeout, None)
        except (TypeError, ValueError) as error:
            self.refuse(MONITORED_BARRIER, check_tag(tag), error)
            raise
        if timeout_s is not None and self.rank != 0:
            timeout_s += VERDICT_S
        return self._collective(MONITORED_BARRIER, tag, timeout_s, call.monitored_barrier)
