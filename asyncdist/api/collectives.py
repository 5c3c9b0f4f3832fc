"""torch.distributed's collectives, natively awaitable: each acts on `group`, or on the default group.

Ranks are global ranks (`group_src`, `group_dst` take group ranks instead). Every function that communicates issues its
operation at once and returns a `Work`. What the operations do, raise and promise is said at `ProcessGroup`'s methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.api.ranks import root_of
from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.group.default_group import Group, resolve
from asyncdist.group.methods.streams import DEFAULT_CHUNK_BYTES, ChunkStream
from asyncdist.work import Work

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_stream",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_stream",
    "exscan",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scan",
    "scatter",
]


def all_reduce(
    tensor: Any, op: ReduceOpLike = ReduceOp.SUM, group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT
) -> Work[Any]:
    """Reduce `tensor` over all ranks, in place on every rank; see `ProcessGroup.all_reduce`."""
    return resolve(group).all_reduce(tensor, op, tag=tag, timeout=timeout)


def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    *,
    group_src: int | None = None,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Copy rank `src`'s `tensor` into everybody's; see `ProcessGroup.broadcast`."""
    found = resolve(group)
    root = root_of(found, "broadcast", tag, src, group_src, "src")
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
    """Reduce `tensor` over all ranks into rank `dst`'s; the others stay untouched; see `ProcessGroup.reduce`."""
    found = resolve(group)
    root = root_of(found, "reduce", tag, dst, group_dst, "dst")
    return found.reduce(tensor, root, op, tag=tag, timeout=timeout)


def all_gather(
    tensor_list: Sequence[Any], tensor: Any, group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT
) -> Work[Any]:
    """Fill `tensor_list` with everybody's `tensor`; see `ProcessGroup.all_gather`."""
    return resolve(group).all_gather(tensor_list, tensor, tag=tag, timeout=timeout)


def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT
) -> Work[Any]:
    """Fill `output_tensor` with everybody's `input_tensor`; see `ProcessGroup.all_gather_into_tensor`."""
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
    """Fill `gather_list` on rank `dst` (the group's first by default); see `ProcessGroup.gather`."""
    found = resolve(group)
    root = root_of(found, "gather", tag, dst, group_dst, "dst", default=0)
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
    """Fill `tensor` from rank `src`'s `scatter_list` (the group's first by default); see `ProcessGroup.scatter`."""
    found = resolve(group)
    root = root_of(found, "scatter", tag, src, group_src, "src", default=0)
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
    """Reduce `input_list[r]` of all ranks into rank r's `output`; see `ProcessGroup.reduce_scatter`."""
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
    """Reduce `input` over all ranks; rank r gets the r-th part; see `ProcessGroup.reduce_scatter_tensor`."""
    return resolve(group).reduce_scatter_tensor(output, input, op, tag=tag, timeout=timeout)


reduce_scatter_single = reduce_scatter_tensor


def barrier(group: Group = None, *, device_ids: Any = None, tag: int = 0, timeout: Timeout = INHERIT) -> Work[Any]:
    """Done once every rank of the group has called it; see `ProcessGroup.barrier`.

    `device_ids` is accepted for torch's sake and not used: a group for GPU arrays alone knows its GPU.
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
    """Fill `output_tensor_list[r]` with what group rank r has for this rank; see `ProcessGroup.all_to_all`."""
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
    """Send rows of `input` to every rank and fill `output` with theirs; see `ProcessGroup.all_to_all_single`."""
    return resolve(group).all_to_all_single(
        output, input, output_split_sizes, input_split_sizes, tag=tag, timeout=timeout
    )


def scan(
    tensor: Any, op: ReduceOpLike = ReduceOp.SUM, group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT
) -> Work[Any]:
    """Reduce `tensor` over the group's ranks up to this one, in place; see `ProcessGroup.scan`."""
    return resolve(group).scan(tensor, op, tag=tag, timeout=timeout)


def exscan(
    tensor: Any, op: ReduceOpLike = ReduceOp.SUM, group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT
) -> Work[Any]:
    """Reduce `tensor` over the group's ranks below this one, in place; see `ProcessGroup.exscan`."""
    return resolve(group).exscan(tensor, op, tag=tag, timeout=timeout)


def monitored_barrier(
    group: Group = None, timeout: Timeout = INHERIT, wait_all_ranks: bool = False, *, tag: int = 0
) -> Work[Any]:
    """A barrier whose expiry names the ranks that did not come; see `ProcessGroup.monitored_barrier`."""
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
    """Copy rank `src`'s `tensor` into everybody's, chunk by chunk; see `ProcessGroup.broadcast_stream`."""
    found = resolve(group)
    root = root_of(found, "broadcast_stream", tag, src, group_src, "src")
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
    """Gather everybody's `input` in `output`, chunk by chunk; see `ProcessGroup.all_gather_stream`."""
    return resolve(group).all_gather_stream(
        output, input, chunk_bytes=chunk_bytes, tag=tag, timeout=timeout, in_global_ranks=True
    )
