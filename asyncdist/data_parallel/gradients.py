"""Averaging gradients and handing out parameters: many arrays in few operations, which overlap with what follows.

A list of arrays is divided into buckets, the same way on all ranks. Each bucket is one operation, and a `JoinedWork` is
done once all of them are. `GradientBuckets` sends buckets while later gradients are still being computed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from asyncdist.api.joined_work import JoinedWork
from asyncdist.arrays import reduction
from asyncdist.arrays.device import DeviceArray, any_array, device_of
from asyncdist.arrays.host import Array, describe
from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.concurrency.integers import as_int
from asyncdist.errors import ClosedError, DistError
from asyncdist.group.default_group import Group, resolve, root_of
from asyncdist.group.methods import coalesced
from asyncdist.group.misuse import watch
from asyncdist.group.point_to_point import check_tag
from asyncdist.group.process_group import ProcessGroup
from asyncdist.work import Work

__all__ = [
    "BUCKET_BYTES",
    "CommHook",
    "GradientBucket",
    "GradientBuckets",
    "average_gradients",
    "broadcast_parameters",
    "copy_gradient",
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
    operation = "broadcast_parameters"
    found, root = root_of(group, operation, tag, src, group_src, "src", default=0)

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
    """The arrays of `values`. Raises ValueError if there are none or one must be written and cannot be."""
    if not values:
        raise ValueError(f"{name} must not be empty")
    arrays = [any_array(value, f"{name}[{index}]") for index, value in enumerate(values)]
    for index, array in enumerate(arrays):
        if writable and not (array.flags.writeable if type(array) is np.ndarray else array.writable):
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


def divide(arrays: Sequence[Array], bucket_bytes: int) -> list[list[int]]:
    """Divide `arrays` into buckets of one dtype and device, of at most `bucket_bytes`; a larger array has its own.

    Returns the numbers of each bucket's arrays. Arrays come in the order in which they are listed, and buckets in the
    order in which they would be full if arrays became ready in that order.
    """
    full: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    for index, array in enumerate(arrays):
        kind = array.dtype, device_of(array)
        bucket, nbytes = filling.get(kind, ([], 0))
        if bucket and nbytes + array.nbytes > bucket_bytes:
            full.append(bucket)
            bucket, nbytes = [], 0
        bucket.append(index)
        filling[kind] = bucket, nbytes + array.nbytes
    full.extend(bucket for bucket, _ in filling.values())
    return sorted(full, key=lambda bucket: bucket[-1])


def check_bucket_bytes(value: int) -> int:
    """Return `value`. Raises TypeError for anything but an int, ValueError below 1."""
    value = as_int(value, "bucket_bytes must be an int")
    if value < 1:
        raise ValueError(f"bucket_bytes must be at least 1, but is {value}")
    return value


OPERATION: Final = "GradientBuckets"
"""What errors call the operations: the user has called no other."""


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """A bucket that is full, as its `CommHook` sees it."""

    index: int
    buffer: Array
    """All its gradients, one after the other, in one dimension: this rank's own, to be replaced by the averages."""
    gradients: list[Array]
    """The same memory in the shapes of the parameters."""
    group: ProcessGroup
    tag: int
    timeout: Timeout
    """For the collectives of the hook."""


CommHook: TypeAlias = Callable[[GradientBucket], Coroutine[Any, Any, None]]
"""An async function that replaces the gradients of a bucket on all ranks by what the step is to use.

It runs as a task of its own for each bucket, and issues its collectives with the bucket's own `tag`.
`asyncdist.data_parallel.hooks` has some.
"""


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
    `ReduceOp.PREMUL_SUM(share)` weights ranks whose batches differ in size. `comm_hook` is another way to send a bucket
    (see `CommHook`). `tag` and `timeout` are those of every operation; other collectives issued between `ready` and
    `averaged` need another tag, as ranks may come to them with more or fewer buckets gone. With a hook bucket number i
    has `tag` + 1 + i. Raises TypeError and ValueError for no or unsuitable arrays.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        group: Group = None,
        *,
        op: ReduceOpLike = ReduceOp.AVG,
        bucket_bytes: int = BUCKET_BYTES,
        comm_hook: CommHook | None = None,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> None:
        self._group = resolve(group)
        self._op = op
        self._comm_hook = comm_hook
        self._tag = check_tag(tag)
        self._timeout: Timeout = timeout
        like = arrays_of(list_of(parameters, "parameters"), "parameters", writable=False)
        for dtype in {array.dtype for array in like}:
            reduction.validate(op, dtype)
        self._buckets = divide(like, check_bucket_bytes(bucket_bytes))
        self._buffers = [_room(sum(like[i].size for i in bucket), like[bucket[0]]) for bucket in self._buckets]
        self.gradients = _parts_of(self._buffers, like, self._buckets)
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
            copy_gradient(gradient, self.gradients[index], str(index))
        self._waiting.discard(index)
        self._missing[self._bucket_of[index]] -= 1
        while len(self._works) < len(self._buckets) and not self._missing[len(self._works)]:
            self._works.append(self._issue(len(self._works)))

    def averaged(self, value: Any = None, more: Sequence[Work[Any]] = ()) -> Work[Any]:
        """End the step: return a Work whose result is `gradients`, done once all of them are averaged.

        Its result may be another `value`, and it waits for `more` Works of the same group.

        The next step may begin when it is done. Raises ValueError if gradients are missing; where a rank has none for a
        parameter it hands in zeros. If one of several buckets fails the group is aborted. Cancelling a waiter ends only
        its waiting.
        """
        if self._waiting:
            missing = ", ".join(map(str, sorted(self._waiting)))
            raise ValueError(f"not ready yet: gradients {missing} (where this rank has none, hand in zeros)")
        result = self.gradients if value is None else value
        self._work = JoinedWork(self._group, OPERATION, [*more, *self._works], result)
        self._start_over()
        return self._work

    def _start_over(self) -> None:
        self._waiting = set(range(len(self.gradients)))
        self._missing = [len(bucket) for bucket in self._buckets]
        self._works: list[Work[Any]] = []

    def _issue(self, number: int) -> Work[Any]:
        gradients = [self.gradients[index] for index in self._buckets[number]]
        if self._comm_hook is None:
            prepare = coalesced.all_reduce_coalesced
            if type(self._buffers[number]) is not np.ndarray:  # of a GPU each would be an operation of its own
                gradients = [self._buffers[number]]
            return self._group._collective(OPERATION, self._tag, self._timeout, prepare, gradients, self._op)
        tag = self._tag + 1 + number
        bucket = GradientBucket(number, self._buffers[number], gradients, self._group, tag, self._timeout)
        return _HookWork(bucket, self._comm_hook)


class _HookWork(Work[Any]):
    """A bucket that a hook sends."""

    __slots__ = ("_group", "_task")

    def __init__(self, bucket: GradientBucket, hook: CommHook) -> None:
        super().__init__(asyncio.get_running_loop(), OPERATION, bucket.buffer.nbytes)
        self._group = bucket.group
        self._task = self._loop.create_task(hook(bucket))
        self._task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        error = ClosedError(f"{self.where}: its comm_hook was cancelled") if task.cancelled() else task.exception()
        if error is None:
            self._finish(None)
            return
        if not isinstance(error, DistError) or task.cancelled():  # the other ranks wait for what it does not send
            self._group.abort(f"the comm_hook of {self.where} failed: {error}")
        self._fail(error)


def _numpy_like(array: Any) -> Any:
    """An array of `any_array` as one that numpy's functions take: itself, or cupy's over the same memory."""
    if type(array) is not DeviceArray:
        return array
    if hasattr(array.owner, "__array_function__"):
        return array.owner
    import cupy

    return cupy.asarray(array.owner.detach() if hasattr(array.owner, "detach") else array.owner)


def _room(size: int, like: Array) -> Array:
    """Zeros of the dtype of `like`, in the memory of its device."""
    made: Array = np.zeros(size, like.dtype, like=_numpy_like(like))
    return made


def _parts_of(buffers: list[Array], like: list[Array], buckets: list[list[int]]) -> list[Array]:
    """The buffers of `buckets` cut into the shapes of `like`."""
    parts: dict[int, Array] = {}
    for buffer, bucket in zip(buffers, buckets, strict=True):
        start = 0
        for index in bucket:
            shape = like[index].shape
            stop = start + math.prod(shape)
            parts[index] = buffer[start:stop].reshape(shape)
            start = stop
    return [parts[index] for index in range(len(like))]


def copy_gradient(gradient: Any, room: Array, name: str, *, add: bool = False) -> None:
    """Copy `gradient` into `room`, or add it to what is there. Raises ValueError where it does not fit."""
    array = _numpy_like(any_array(gradient, f"gradient {name}"))
    if array.shape != room.shape or not np.can_cast(array.dtype, room.dtype, "same_kind"):
        raise ValueError(
            f"gradient {name} is {describe(array.dtype, array.shape)}, but its parameter is "
            f"{describe(room.dtype, room.shape)}"
        )
    if add:
        np.add(room, array, room, casting="same_kind")
    else:
        np.copyto(room, array, "same_kind")
