"""Exchanges: every rank has something for every rank; see `methods.issuer` for what all have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.collectives.arguments import exchange as call
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.group.methods.issuer import Issuer
from asyncdist.work import Work

__all__ = ["Exchanges"]


class Exchanges(Issuer):
    """all_to_all in its forms.

    Inputs may share memory with outputs; they are copied first then. In the uneven forms a rank knows what it sends and
    what it receives, nothing else; where two ranks disagree, the one that receives raises CollectiveMismatchError that
    names the other, and the group is aborted.
    """

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
            "all_to_all",
            tag,
            timeout,
            call.all_to_all,
            output_tensor_list,
            input_tensor_list,
            self.rank,
            self.size,
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
