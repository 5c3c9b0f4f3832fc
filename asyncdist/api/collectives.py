"""Collectives on arrays of known size: each acts on `group`, or on the default group, and returns a `Work` at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.collectives.arguments import call
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.group.default_group import Group, resolve, root_of
from asyncdist.group.methods.streams import DEFAULT_CHUNK_BYTES, ChunkStream
from asyncdist.work import Work


def all_reduce(
    tensor: Any,
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
    on_lost: str = "raise",
) -> Work[Any]:
    """Reduce `tensor` (any shape, equal on all ranks) over all ranks, in place on every rank.

    All ranks hold bit-identical results. The result is `tensor`.

    With `on_lost="continue"`, on every rank, it goes on without the ranks that are lost, leave, or give the group up.
    The result is a `Reduced` then: `tensor`, and the global ranks whose values are in it, the same on all ranks that
    are left. Their later calls with `on_lost="continue"` go on among them; other operations raise, as ever. It costs a
    copy of `tensor`, which is in host memory, and a barrier. Raises GroupAbortedError on a rank without which the
    others go on, although it is alive.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation. Which dtypes an `op` takes
    is said at `ReduceOp`.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    found = resolve(group)
    if on_lost == "raise":  # without a detour: small ones count nanoseconds
        return found._collective("all_reduce", tag, timeout, call.all_reduce, tensor, op)
    return found.all_reduce(tensor, op, tag=tag, timeout=timeout, on_lost=on_lost)


def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    *,
    group_src: int | None = None,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Copy rank `src`'s `tensor` (any shape, equal on all ranks) into everybody's.

    The result is `tensor`.

    `src` is a global rank, also in a smaller group; `group_src` is one of the group.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    found, root = root_of(group, "broadcast", tag, src, group_src, "src")
    return found.broadcast(tensor, root, tag=tag, timeout=timeout)


def reduce(
    tensor: Any,
    dst: int | None = None,
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    group_dst: int | None = None,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Reduce `tensor` over all ranks into rank `dst`'s; the others' stay as they are.

    The result is `tensor`.

    `dst` is a global rank, also in a smaller group; `group_dst` is one of the group.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation. Which dtypes an `op` takes
    is said at `ReduceOp`.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    found, root = root_of(group, "reduce", tag, dst, group_dst, "dst")
    return found.reduce(tensor, root, op, tag=tag, timeout=timeout)


def all_gather(
    tensor_list: Sequence[Any], tensor: Any, group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT
) -> Work[Any]:
    """Fill `tensor_list` (one array per rank) with everybody's `tensor`.

    The result is `tensor_list`. The arrays may differ in size, as the tensors do; every rank gives the same sizes, its
    own shaped like `tensor`.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    return resolve(group).all_gather(tensor_list, tensor, tag=tag, timeout=timeout)


def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT
) -> Work[Any]:
    """Fill `output_tensor` (`size` times the elements of `input_tensor`) with everybody's, in rank order.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    return resolve(group).all_gather_into_tensor(output_tensor, input_tensor, tag=tag, timeout=timeout)


all_gather_single = all_gather_into_tensor


def gather(
    tensor: Any,
    gather_list: Sequence[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    *,
    group_dst: int | None = None,
    uneven: bool = False,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Fill rank `dst`'s `gather_list` (one array per rank, shaped like `tensor`) with everybody's `tensor`.

    `gather_list` is None on the other ranks. `dst` is the group's first rank unless given.

    With `uneven=True`, on every rank, the tensors may differ in size, and with them the arrays of the list. Only the
    root needs to know all sizes; one that is not as it says raises CollectiveMismatchError.

    `dst` is a global rank, also in a smaller group; `group_dst` is one of the group.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    found, root = root_of(group, "gather", tag, dst, group_dst, "dst", default=0)
    return found.gather(tensor, gather_list, root, uneven=uneven, tag=tag, timeout=timeout)


def scatter(
    tensor: Any,
    scatter_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    *,
    group_src: int | None = None,
    uneven: bool = False,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Fill `tensor` with this rank's entry of rank `src`'s `scatter_list`.

    `scatter_list` is None on the other ranks. `src` is the group's first rank unless given.

    With `uneven=True`, on every rank, the entries may differ in size, and with them the tensors. Only the root needs to
    know all sizes; a tensor of another size than its entry raises CollectiveMismatchError.

    `src` is a global rank, also in a smaller group; `group_src` is one of the group.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    found, root = root_of(group, "scatter", tag, src, group_src, "src", default=0)
    return found.scatter(tensor, scatter_list, root, uneven=uneven, tag=tag, timeout=timeout)


def reduce_scatter(
    output: Any,
    input_list: Sequence[Any],
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Reduce `input_list[r]` of all ranks into rank r's `output`; sizes may differ between entries.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation. Which dtypes an `op` takes
    is said at `ReduceOp`.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    return resolve(group).reduce_scatter(output, input_list, op, tag=tag, timeout=timeout)


def reduce_scatter_tensor(
    output: Any,
    input: Any,
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Reduce `input` (`size` times the elements of `output`) over all ranks; rank r gets the r-th part.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation. Which dtypes an `op` takes
    is said at `ReduceOp`.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    return resolve(group).reduce_scatter_tensor(output, input, op, tag=tag, timeout=timeout)


reduce_scatter_single = reduce_scatter_tensor


def barrier(group: Group = None, *, device_ids: Any = None, tag: int = 0, timeout: Timeout = INHERIT) -> Work[Any]:
    """Done once every rank of the group has called it.

    `device_ids` is accepted for torch's sake and not used: a group for GPU arrays alone knows its GPU.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    del device_ids
    return resolve(group).barrier(tag=tag, timeout=timeout)


def all_to_all(
    output_tensor_list: Sequence[Any],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Fill `output_tensor_list[r]` with what group rank r has for this rank in its `input_tensor_list`.

    The result is `output_tensor_list`. Both hold one array per rank, of any shapes (empty ones too) and one dtype.
    Raises ValueError for lists of another length, several dtypes, or if the two arrays of this rank itself differ in
    shape.

    Inputs may share memory with outputs; they are copied first then. In the uneven forms a rank knows what it sends and
    what it receives, nothing else; where two ranks disagree, the one that receives raises CollectiveMismatchError that
    names the other, and the group is aborted.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    return resolve(group).all_to_all(output_tensor_list, input_tensor_list, tag=tag, timeout=timeout)


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Send `input_split_sizes[r]` rows of `input` to each rank r, and receive as `output_split_sizes` says.

    What is received is in rank order. Rows are those of the first dimension; None (or an empty list) shares them
    evenly. All ranks give splits, one or both, or none does. The result is `output`.

    Raises ValueError for splits that are not one per rank, are negative, do not add up to the first dimension or leave
    this rank another number of elements for itself in the two arrays; for a first dimension that cannot be shared
    evenly; and for arrays without dimensions or of two dtypes. TypeError for splits that are no ints.

    Inputs may share memory with outputs; they are copied first then. In the uneven forms a rank knows what it sends and
    what it receives, nothing else; where two ranks disagree, the one that receives raises CollectiveMismatchError that
    names the other, and the group is aborted.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    return resolve(group).all_to_all_single(
        output, input, output_split_sizes, input_split_sizes, tag=tag, timeout=timeout
    )


def scan(
    tensor: Any, op: ReduceOpLike = ReduceOp.SUM, group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT
) -> Work[Any]:
    """Reduce the `tensor` (any shape, equal on all ranks) of the ranks up to this one into this one's.

    The result is `tensor`. Operands are reduced in rank order. ReduceOp.AVG is not defined for them (TypeError).

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation. Which dtypes an `op` takes
    is said at `ReduceOp`.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    return resolve(group).scan(tensor, op, tag=tag, timeout=timeout)


def exscan(
    tensor: Any, op: ReduceOpLike = ReduceOp.SUM, group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT
) -> Work[Any]:
    """Reduce the `tensor` of the ranks below this one into this one's; the first rank's stays as it is.

    The result is `tensor`. Operands are reduced in rank order. ReduceOp.AVG is not defined for them (TypeError).

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation. Which dtypes an `op` takes
    is said at `ReduceOp`.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    return resolve(group).exscan(tensor, op, tag=tag, timeout=timeout)


def monitored_barrier(
    group: Group = None, timeout: Timeout = INHERIT, wait_all_ranks: bool = False, *, tag: int = 0
) -> Work[Any]:
    """Done once every rank has called it; when `timeout` expires, the error names all ranks that have not.

    The group's first rank asks all others then, connected or not, and its verdict is every rank's
    CollectiveTimeoutError, whose `missing` are their global ranks; the group is aborted. Where the first rank itself
    does not come, the others say so one second later. Other collectives name who is missing as well, but in groups of
    more than 256 ranks only as far as ranks are connected.

    `wait_all_ranks` is torch's choice between the first missing rank and all; here it is always all.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    return resolve(group).monitored_barrier(timeout, wait_all_ranks, tag=tag)


def broadcast_stream(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    group_src: int | None = None,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> ChunkStream:
    """Copy rank `src`'s `tensor` into everybody's, handing over each chunk of `chunk_bytes` once it is complete.

    `tensor` is as for `broadcast`, and C-contiguous; `chunk_bytes` is the same on all ranks. See `ChunkStream`. On the
    root a chunk is complete when it may be written again. The time-out bounds the whole operation.

    `src` is a global rank, also in a smaller group; `group_src` is one of the group.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.
    """
    found, root = root_of(group, "broadcast_stream", tag, src, group_src, "src")
    return found.broadcast_stream(tensor, root, chunk_bytes=chunk_bytes, tag=tag, timeout=timeout, in_global_ranks=True)


def all_gather_stream(
    output: Any,
    input: Any,
    group: Group = None,
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> ChunkStream:
    """Gather everybody's `input` in `output`, handing over each chunk of each rank's once it is complete.

    `output` is one array of `size` times the elements of `input`, or a list of `size` arrays shaped like it; all are
    C-contiguous. `chunk_bytes`, of one rank's block, is the same on all ranks. See `ChunkStream`. The time-out bounds
    the whole operation.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.
    """
    return resolve(group).all_gather_stream(
        output, input, chunk_bytes=chunk_bytes, tag=tag, timeout=timeout, in_global_ranks=True
    )
