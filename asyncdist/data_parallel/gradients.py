"""Averaging gradients and handing out parameters: many arrays in few operations, which overlap with what follows.

A list of arrays is divided into buckets, the same way on all ranks. Each bucket is one operation, and a `JoinedWork` is
done once all of them are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from asyncdist.api.ranks import root_of
from asyncdist.arrays import reduction
from asyncdist.arrays.host import Array, host_array
from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.collectives.arguments import coalesced
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.concurrency.integers import as_int
from asyncdist.errors import CollectiveMismatchError, DistError
from asyncdist.group.default_group import Group, resolve
from asyncdist.group.point_to_point import check_tag
from asyncdist.group.process_group import ProcessGroup
from asyncdist.group.unretrieved import watch
from asyncdist.work import Work

__all__ = [
    "BUCKET_BYTES",
    "JoinedWork",
    "arrays_of",
    "average_gradients",
    "broadcast_parameters",
    "check_bucket_bytes",
    "divide",
    "list_of",
]


BUCKET_BYTES: Final = 4 << 20
"""Unless told otherwise: enough for an operation to run at full bandwidth, little enough for the first to start early
and for copying one into place to take less than a millisecond of the event loop."""


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


class JoinedWork(Work[Any]):
    """Done once all `parts` are; the result is `value`.

    When this Work ends, well or not, the arrays of all parts are free. A part fails with its group, as do the others
    then, or because some rank refused it; that rank does not issue the parts that come after, and is out of step with
    all others from then on, so the group is aborted.
    """

    __slots__ = ("_asked", "_group", "_left", "_parts", "_value")

    def __init__(self, group: ProcessGroup, operation: str, parts: Sequence[Work[Any]], value: Any) -> None:
        self._parts = tuple(parts)
        self._asked = False
        super().__init__(asyncio.get_running_loop(), operation, sum(part.nbytes for part in parts))
        self._group = group
        self._value = value
        self._left = len(self._parts)
        for part in self._parts:
            part.add_done_callback(self._part_ended)

    @property
    def where(self) -> str:
        """See Work; of its parts the number is known, of all together there is none."""
        return self._group.where(self.operation)

    # The group must know, when it closes, whether the program has asked about a failure; the group knows the parts.

    @property
    def _retrieved(self) -> bool:
        return self._asked

    @_retrieved.setter
    def _retrieved(self, asked: bool) -> None:
        self._asked = asked
        if asked:
            for part in self._parts:
                part._retrieved = True

    def _part_ended(self, part: Work[Any]) -> None:
        self._left -= 1
        if self._done:
            return
        if part._error is not None:
            if self._waiters:
                self._retrieved = True  # they will be told
            if len(self._parts) > 1 and isinstance(part._error, CollectiveMismatchError):
                self._group.abort(f"{self.operation} failed in part: {part._error}")
            self._fail(part._error)
        elif not self._left:
            self._finish(self._value)


def divide(arrays: Sequence[Array], bucket_bytes: int) -> list[list[int]]:
    """Divide `arrays` into buckets of one dtype and at most `bucket_bytes`; a larger array has one to itself.

    Returns the numbers of each bucket's arrays. Arrays come in the order in which they are listed, and buckets in the
    order in which they would be full if arrays became ready in that order.
    """
    full: list[list[int]] = []
    filling: dict[np.dtype[Any], tuple[list[int], int]] = {}
    for index, array in enumerate(arrays):
        bucket, nbytes = filling.get(array.dtype, ([], 0))
        if bucket and nbytes + array.nbytes > bucket_bytes:
            full.append(bucket)
            bucket, nbytes = [], 0
        bucket.append(index)
        filling[array.dtype] = bucket, nbytes + array.nbytes
    full.extend(bucket for bucket, _ in filling.values())
    return sorted(full, key=lambda bucket: bucket[-1])


def check_bucket_bytes(value: int) -> int:
    """Return `value`. Raises TypeError for anything but an int, ValueError below 1."""
    value = as_int(value, "bucket_bytes must be an int")
    if value < 1:
        raise ValueError(f"bucket_bytes must be at least 1, but is {value}")
    return value
