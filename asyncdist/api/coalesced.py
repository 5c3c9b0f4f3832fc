"""Collectives on lists of arrays: the coalesced forms, and those of torch 1.x with an array on each device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.group.default_group import Group, resolve, root_of
from asyncdist.work import Work


def all_reduce_coalesced(
    tensors: Sequence[Any],
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Reduce each of `tensors` (any shapes, one dtype) over all ranks, in place.

    The result is `tensors`. Raises ValueError for an empty list or several dtypes.

    Lists of arrays of one dtype travel as one message each way, and results are written in place. The arrays are copied
    into one and back, which pays for many small ones; large ones are better issued one by one. `all_reduce_coalesced`
    and `broadcast_coalesced` copy nothing where the arrays are adjacent pieces of one array. Lists have the same length
    and sizes on all ranks; every call is one operation in the order of its tag.

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
    return resolve(group).all_reduce_coalesced(tensors, op, tag=tag, timeout=timeout)


def broadcast_coalesced(
    tensors: Sequence[Any],
    src: int | None = None,
    group: Group = None,
    *,
    group_src: int | None = None,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Copy each of rank `src`'s `tensors` (any shapes, one dtype) into everybody's.

    The result is `tensors`. Raises ValueError for an empty list or several dtypes.

    Lists of arrays of one dtype travel as one message each way, and results are written in place. The arrays are copied
    into one and back, which pays for many small ones; large ones are better issued one by one. `all_reduce_coalesced`
    and `broadcast_coalesced` copy nothing where the arrays are adjacent pieces of one array. Lists have the same length
    and sizes on all ranks; every call is one operation in the order of its tag.

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
    found, root = root_of(group, "broadcast_coalesced", tag, src, group_src, "src")
    return found.broadcast_coalesced(tensors, root, tag=tag, timeout=timeout)


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Fill `output_tensor_lists[r]` with rank r's `input_tensor_list` (any shapes, one dtype).

    The result is `output_tensor_lists`. Raises ValueError for lists that do not fit each other, an empty one, or
    several dtypes.

    Lists of arrays of one dtype travel as one message each way, and results are written in place. The arrays are copied
    into one and back, which pays for many small ones; large ones are better issued one by one. `all_reduce_coalesced`
    and `broadcast_coalesced` copy nothing where the arrays are adjacent pieces of one array. Lists have the same length
    and sizes on all ranks; every call is one operation in the order of its tag.

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
    return resolve(group).all_gather_coalesced(output_tensor_lists, input_tensor_list, tag=tag, timeout=timeout)


def all_gather_into_tensor_coalesced(
    output_tensors: Sequence[Any],
    input_tensors: Sequence[Any],
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Fill each output (`size` times the elements of the input beside it) with everybody's input, in rank order.

    Raises ValueError for lists that do not fit each other, an empty one, or several dtypes.

    Lists of arrays of one dtype travel as one message each way, and results are written in place. The arrays are copied
    into one and back, which pays for many small ones; large ones are better issued one by one. `all_reduce_coalesced`
    and `broadcast_coalesced` copy nothing where the arrays are adjacent pieces of one array. Lists have the same length
    and sizes on all ranks; every call is one operation in the order of its tag.

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
    return resolve(group).all_gather_into_tensor_coalesced(output_tensors, input_tensors, tag=tag, timeout=timeout)


def reduce_scatter_tensor_coalesced(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Reduce each input (`size` times the elements of its output) over all ranks; rank r gets the r-th part of each.

    Raises ValueError for lists that do not fit each other, an empty one, or several dtypes.

    Lists of arrays of one dtype travel as one message each way, and results are written in place. The arrays are copied
    into one and back, which pays for many small ones; large ones are better issued one by one. `all_reduce_coalesced`
    and `broadcast_coalesced` copy nothing where the arrays are adjacent pieces of one array. Lists have the same length
    and sizes on all ranks; every call is one operation in the order of its tag.

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
    return resolve(group).reduce_scatter_tensor_coalesced(outputs, inputs, op, tag=tag, timeout=timeout)


def all_reduce_multigpu(
    tensor_list: Sequence[Any],
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Reduce all arrays of all ranks, in place in each of them.

    The result is `tensor_list`. Every rank has several arrays, all of one shape and dtype, as many on every rank; on
    GPUs, one array on each. What is reduced is reduced over all arrays of all ranks; `ReduceOp.AVG` divides by their
    number.

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
    return resolve(group).all_reduce_multigpu(tensor_list, op, tag=tag, timeout=timeout)


def broadcast_multigpu(
    tensor_list: Sequence[Any],
    src: int | None = None,
    group: Group = None,
    *,
    src_tensor: int = 0,
    group_src: int | None = None,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Copy rank `src`'s `tensor_list[src_tensor]` into all other arrays of all ranks.

    The result is `tensor_list`. Every rank has several arrays, all of one shape and dtype, as many on every rank; on
    GPUs, one array on each. What is reduced is reduced over all arrays of all ranks; `ReduceOp.AVG` divides by their
    number.

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
    found, root = root_of(group, "broadcast_multigpu", tag, src, group_src, "src")
    return found.broadcast_multigpu(tensor_list, root, src_tensor, tag=tag, timeout=timeout)


def reduce_multigpu(
    tensor_list: Sequence[Any],
    dst: int | None = None,
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    dst_tensor: int = 0,
    group_dst: int | None = None,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Reduce all arrays of all ranks into rank `dst`'s `tensor_list[dst_tensor]`; all others stay as they are.

    Every rank has several arrays, all of one shape and dtype, as many on every rank; on GPUs, one array on each. What
    is reduced is reduced over all arrays of all ranks; `ReduceOp.AVG` divides by their number.

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
    found, root = root_of(group, "reduce_multigpu", tag, dst, group_dst, "dst")
    return found.reduce_multigpu(tensor_list, root, op, dst_tensor, tag=tag, timeout=timeout)


def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Fill each list of `output_tensor_lists`, one per array of this rank, with all arrays of all ranks.

    With n arrays on every rank, `output_tensor_lists[i][r * n + j]` becomes rank r's `input_tensor_list[j]`.

    Every rank has several arrays, all of one shape and dtype, as many on every rank; on GPUs, one array on each. What
    is reduced is reduced over all arrays of all ranks; `ReduceOp.AVG` divides by their number.

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
    return resolve(group).all_gather_multigpu(output_tensor_lists, input_tensor_list, tag=tag, timeout=timeout)


def reduce_scatter_multigpu(
    output_tensor_list: Sequence[Any],
    input_tensor_lists: Sequence[Sequence[Any]],
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Reduce the lists of `input_tensor_lists`, one per array of this rank, over all of them and all ranks.

    With n arrays on every rank, rank r's `output_tensor_list[j]` becomes the reduction of all ranks'
    `input_tensor_lists[i][r * n + j]` over every i.

    Every rank has several arrays, all of one shape and dtype, as many on every rank; on GPUs, one array on each. What
    is reduced is reduced over all arrays of all ranks; `ReduceOp.AVG` divides by their number.

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
    return resolve(group).reduce_scatter_multigpu(output_tensor_list, input_tensor_lists, op, tag=tag, timeout=timeout)
