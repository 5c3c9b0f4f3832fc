"""GradientBuckets: gradients that leave for the other ranks while later ones are still being computed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from asyncdist.arrays import reduction
from asyncdist.arrays.host import Array, describe, host_array
from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.collectives.arguments import coalesced
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.data_parallel.gradients import BUCKET_BYTES, JoinedWork, arrays_of, check_bucket_bytes, divide, list_of
from asyncdist.group.default_group import Group, resolve
from asyncdist.group.point_to_point import check_tag
from asyncdist.work import Work

__all__ = ["GradientBuckets"]

OPERATION: Final = "GradientBuckets"
"""What errors call the operations: the user has called no other."""


class GradientBuckets:
    """Room for the gradients of `parameters`, and their averaging over all ranks of a group, step after step.

        buckets = GradientBuckets(parameters)
        for batch in batches:
            for index in range(len(parameters)):
                ...                                 # compute buckets.gradients[index], in place
                buckets.ready(index)
            for parameter, gradient in zip(parameters, await buckets.averaged()):
                parameter -= rate * gradient

    `gradients` are arrays of the parameters' shapes and dtypes, in buckets: runs of memory of one dtype and at most
    `bucket_bytes` (a larger gradient has one to itself). A bucket leaves, without being copied, as soon as all its
    gradients and all earlier buckets are ready. So the order of the operations is that of the list, on every rank,
    whatever order gradients become ready in; it is best to list them in about that order, the last layer's first.

    Parameters are listed alike on all ranks: the same shapes, dtypes and number. `op` may be another reduction:
    `ReduceOp.PREMUL_SUM(share)` weights ranks whose batches differ in size. `tag` and `timeout` are those of every
    operation; other collectives issued between `ready` and `averaged` need another tag, as ranks may come to them with
    more or fewer buckets gone. Raises TypeError and ValueError for no or unsuitable arrays.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        group: Group = None,
        *,
        op: ReduceOpLike = ReduceOp.AVG,
        bucket_bytes: int = BUCKET_BYTES,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> None:
        self._group = resolve(group)
        self._op = op
        self._tag = check_tag(tag)
        self._timeout: Timeout = timeout
        like = arrays_of(list_of(parameters, "parameters"), "parameters", writable=False)
        for dtype in {array.dtype for array in like}:
            reduction.validate(op, dtype)
        self._buckets = divide(like, check_bucket_bytes(bucket_bytes))
        self.gradients = _room_for(like, self._buckets)
        """One array for each parameter. They belong to the group from `ready` until what `averaged` returned is done,
        and hold the averages from then on."""
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket}
        self._work: Work[Any] | None = None
        self._start_over()

    def __len__(self) -> int:
        """How many buckets there are, and so operations in each step."""
        return len(self._buckets)

    def __repr__(self) -> str:
        nbytes = sum(gradient.nbytes for gradient in self.gradients)
        return f"<GradientBuckets of {len(self.gradients)} gradients, {nbytes} bytes, in {len(self)} buckets>"

    def ready(self, index: int, gradient: Any = None) -> None:
        """Gradient number `index` of this step is in `gradients[index]`, or is `gradient` and copied there now.

        A `gradient` of another dtype is cast where numpy would in place: float64 to float32, but not complex to real.
        Raises IndexError for a number that is none, ValueError where it was ready already or does not fit, and
        RuntimeError while the last step's average is under way.
        """
        if not 0 <= index < len(self.gradients):
            raise IndexError(f"there are gradients 0 to {len(self.gradients) - 1}, but no {index}")
        if self._work is not None and not self._work.done():
            raise RuntimeError("the last step's gradients are still being averaged: await averaged() first")
        if index not in self._waiting:
            raise ValueError(f"gradient {index} was ready already in this step")
        if gradient is not None:
            _copy(gradient, self.gradients[index], index)
        self._waiting.discard(index)
        self._missing[self._bucket_of[index]] -= 1
        while len(self._works) < len(self._buckets) and not self._missing[len(self._works)]:
            self._issue(self._buckets[len(self._works)])

    def averaged(self) -> Work[list[Array]]:
        """End the step: return a Work whose result is `gradients`, done once all of them are averaged.

        The next step may begin when it is done. Raises ValueError if gradients are missing; where a rank has none for a
        parameter it hands in zeros. If one of several buckets fails the group is aborted. Cancelling a waiter ends only
        its waiting.
        """
        if self._waiting:
            missing = ", ".join(map(str, sorted(self._waiting)))
            raise ValueError(f"not ready yet: gradients {missing} (where this rank has none, hand in zeros)")
        self._work = JoinedWork(self._group, OPERATION, self._works, self.gradients)
        self._start_over()
        return self._work

    def _start_over(self) -> None:
        self._waiting = set(range(len(self.gradients)))
        self._missing = [len(bucket) for bucket in self._buckets]
        self._works: list[Work[Any]] = []

    def _issue(self, bucket: list[int]) -> None:
        gradients = [self.gradients[index] for index in bucket]
        prepare = coalesced.all_reduce_coalesced
        self._works.append(self._group._collective(OPERATION, self._tag, self._timeout, prepare, gradients, self._op))


def _room_for(like: list[Array], buckets: list[list[int]]) -> list[Array]:
    """Arrays of zeros in the shapes and dtypes of `like`, those of a bucket one after the other."""
    rooms: dict[int, Array] = {}
    for bucket in buckets:
        run = np.zeros(sum(like[index].size for index in bucket), like[bucket[0]].dtype)
        start = 0
        for index in bucket:
            shape = like[index].shape
            stop = start + math.prod(shape)
            rooms[index] = run[start:stop].reshape(shape)
            start = stop
    return [rooms[index] for index in range(len(like))]


def _copy(gradient: Any, room: Array, index: int) -> None:
    array = host_array(gradient, f"gradient {index}")
    if array.shape != room.shape or not np.can_cast(array.dtype, room.dtype, "same_kind"):
        raise ValueError(
            f"gradient {index} is {describe(array.dtype, array.shape)}, but its parameter is "
            f"{describe(room.dtype, room.shape)}"
        )
    np.copyto(room, array, "same_kind")
