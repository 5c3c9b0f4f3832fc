"""Averaging gradients and handing out parameters: many arrays in few operations, which overlap with what follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from asyncdist.api.resolve import Group, resolve, root_of
from asyncdist.arrays.host import Array, host_array
from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.collectives.arguments import coalesced
from asyncdist.collectives.executor import reduction
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.data_parallel.buckets import BUCKET_BYTES, check_bucket_bytes, divide
from asyncdist.data_parallel.joined_work import JoinedWork
from asyncdist.errors import DistError
from asyncdist.group.forgotten import watch
from asyncdist.group.point_to_point import check_tag
from asyncdist.group.process_group import ProcessGroup
from asyncdist.work import Work

__all__ = ["arrays_of", "average_gradients", "broadcast_parameters", "list_of"]


def average_gradients(
    gradients: Iterable[Any],
    group: Group = None,
    *,
    op: ReduceOpLike = ReduceOp.AVG,
    bucket_bytes: int = BUCKET_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Average each of `gradients` (arrays of any shapes and dtypes) over all ranks, in place. The result is their list.

    Arrays of one dtype travel together in buckets of about `bucket_bytes`. All buckets are issued at once, in the order
    of the list, which must be the same on all ranks: the same shapes, dtypes and number. `op` may be another reduction:
    `ReduceOp.PREMUL_SUM(share)` weights ranks whose batches differ in size. To send gradients while later ones are
    still being computed use `GradientBuckets`.

    The Work is done when all arrays are. Raises TypeError and ValueError, before anything is sent, for no or unsuitable
    arrays; the other ranks raise CollectiveMismatchError then. Where one of several buckets fails the group is aborted.
    Cancelling a waiter ends only its waiting.
    """
    found = resolve(group)
    operation = "average_gradients"

    def issue(bucket: list[Array]) -> Work[Any]:
        return found._collective(operation, tag, timeout, coalesced.all_reduce_coalesced, bucket, op)

    try:
        listed = list_of(gradients, "gradients")
        arrays = arrays_of(listed, "gradients", writable=True)
        for dtype in {array.dtype for array in arrays}:
            reduction.validate(op, dtype)
        buckets = divide(arrays, check_bucket_bytes(bucket_bytes))
    except Exception as error:  # wrong, as a rule; or what they come out of fails
        found.refuse(operation, check_tag(tag), error)
        raise
    return _issue_all(found, operation, issue, arrays, buckets, listed)


def broadcast_parameters(
    parameters: Iterable[Any],
    src: int | None = None,
    group: Group = None,
    *,
    group_src: int | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Copy each of rank `src`'s `parameters` (arrays of any shapes and dtypes) into everybody's.

    The result is their list; `src` is the group's first rank by default, and only reads its own. What is said at
    `average_gradients` about lists and buckets holds here too.

    Raises TypeError and ValueError, before anything is sent, for no or unsuitable arrays; the other ranks raise
    CollectiveMismatchError then. Cancelling a waiter ends only its waiting.
    """
    found = resolve(group)
    operation = "broadcast_parameters"
    root = root_of(found, operation, tag, src, group_src, "src", default=0)

    def issue(bucket: list[Array]) -> Work[Any]:
        return found._collective(operation, tag, timeout, coalesced.broadcast_coalesced, bucket, root, found.rank)

    try:
        listed = list_of(parameters, "parameters")
        arrays = arrays_of(listed, "parameters", writable=found.rank != root)
        buckets = divide(arrays, check_bucket_bytes(bucket_bytes))
    except Exception as error:  # wrong, as a rule; or what they come out of fails
        found.refuse(operation, check_tag(tag), error)
        raise
    return _issue_all(found, operation, issue, arrays, buckets, listed)


def list_of(values: Iterable[Any], name: str) -> list[Any]:
    """The items of `values`. Raises TypeError for what can be iterated over and is hardly meant so."""
    if isinstance(values, Mapping):
        raise TypeError(f"{name} must be arrays, not a {type(values).__name__} of them: pass its values()")
    if hasattr(values, "dtype") or isinstance(values, str | bytes | bytearray | memoryview):
        raise TypeError(f"{name} must be a list of arrays, not one {type(values).__name__}: put it into a list")
    if not hasattr(values, "__iter__"):
        hint = "of a torch module its parameters(), or their .grad"
        raise TypeError(f"{name} must be a list of arrays, not {type(values).__name__}; {hint}")
    return list(values)


def arrays_of(values: Sequence[Any], name: str, *, writable: bool) -> list[Array]:
    """The host arrays of `values`. Raises ValueError if there are none or one must be written and cannot be."""
    if not values:
        raise ValueError(f"{name} must not be empty")
    arrays = [host_array(value, f"{name}[{index}]") for index, value in enumerate(values)]
    for index, array in enumerate(arrays):
        if writable and not array.flags.writeable:
            raise ValueError(f"{name}[{index}] is read-only and this operation writes into it")
    return arrays


def _issue_all(
    group: ProcessGroup,
    operation: str,
    issue: Callable[[list[Array]], Work[Any]],
    arrays: Sequence[Array],
    buckets: Sequence[Sequence[int]],
    value: Any,
) -> Work[Any]:
    works: list[Work[Any]] = []
    for bucket in buckets:
        try:
            works.append(issue([arrays[index] for index in bucket]))
        except Exception as error:
            if works and not isinstance(error, DistError):  # the others wait for what we do not issue any more
                for work in works:
                    work._retrieved = True
                group.abort(f"{operation} failed after {len(works)} of {len(buckets)} operations: {error}")
            raise
    joined = JoinedWork(group, operation, works, value)
    return watch(joined) if group.watches else joined
