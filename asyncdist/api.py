"""torch.distributed's functions, natively awaitable: each acts on `group`, or on the default group.

Ranks are global ranks (`group_src`, `group_dst` take group ranks instead). Every function that communicates issues its
operation at once and returns a `Work`. What the operations do, raise and promise is said at `Operations`' methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from asyncdist import context
from asyncdist.backend.base import parse_backend
from asyncdist.deadline import INHERIT, Timeout, timeout_seconds
from asyncdist.executor.work import Work
from asyncdist.group import ProcessGroup
from asyncdist.non_member import NonMember
from asyncdist.operations import DEFAULT_MAX_BYTES, check_rank
from asyncdist.pairs import check_tag
from asyncdist.reduce_op import ReduceOp, ReduceOpLike

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "barrier",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "new_group",
    "recv",
    "recv_array",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]

Group: TypeAlias = ProcessGroup | NonMember | None


def resolve(group: Group) -> ProcessGroup:
    """Return the group a call acts on. Raises ValueError where there is none, TypeError for anything else."""
    if group is None:
        return context.default_group()
    if isinstance(group, NonMember):
        group.refuse()
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or None, not {type(group).__name__}")
    return group


def _peer(group: ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int | None:
    """Return the group rank meant by a global rank or a group rank; None if neither is given."""
    if group_rank is not None:
        if rank is not None:
            raise ValueError(f"give {name}= (global rank) or group_{name}= (rank in the group), not both")
        return check_rank(group_rank, group.size, f"group_{name}")
    return None if rank is None else group.group_rank_of(rank, name)


def _required(group: ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int:
    peer = _peer(group, rank, group_rank, name)
    if peer is None:
        raise ValueError(f"give {name}= (global rank) or group_{name}= (rank in the group)")
    return peer


def _root(
    group: ProcessGroup,
    operation: str,
    tag: int,
    rank: int | None,
    group_rank: int | None,
    name: str,
    default: int | None = None,
) -> int:
    """As `_required`, for the root of a collective: the other ranks hear of a wrong one."""
    try:
        if default is not None and rank is None and group_rank is None:
            return default
        return _required(group, rank, group_rank, name)
    except (TypeError, ValueError) as error:
        group.refuse(operation, check_tag(tag), error)
        raise


def all_reduce(
    tensor: Any, op: ReduceOpLike = ReduceOp.SUM, group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT
) -> Work[Any]:
    """Reduce `tensor` over all ranks, in place on every rank; see `Operations.all_reduce`."""
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
    """Copy rank `src`'s `tensor` into everybody's; see `Operations.broadcast`."""
    found = resolve(group)
    root = _root(found, "broadcast", tag, src, group_src, "src")
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
    """Reduce `tensor` over all ranks into rank `dst`'s; the others stay untouched; see `Operations.reduce`."""
    found = resolve(group)
    root = _root(found, "reduce", tag, dst, group_dst, "dst")
    return found.reduce(tensor, root, op, tag=tag, timeout=timeout)


def all_gather(
    tensor_list: Sequence[Any], tensor: Any, group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT
) -> Work[Any]:
    """Fill `tensor_list` with everybody's `tensor`; see `Operations.all_gather`."""
    return resolve(group).all_gather(tensor_list, tensor, tag=tag, timeout=timeout)


def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT
) -> Work[Any]:
    """Fill `output_tensor` with everybody's `input_tensor`; see `Operations.all_gather_into_tensor`."""
    return resolve(group).all_gather_into_tensor(output_tensor, input_tensor, tag=tag, timeout=timeout)


all_gather_single = all_gather_into_tensor


def gather(
    tensor: Any,
    gather_list: Sequence[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    *,
    group_dst: int | None = None,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Fill `gather_list` on rank `dst` (the group's first by default); see `Operations.gather`."""
    found = resolve(group)
    root = _root(found, "gather", tag, dst, group_dst, "dst", default=0)
    return found.gather(tensor, gather_list, root, tag=tag, timeout=timeout)


def scatter(
    tensor: Any,
    scatter_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    *,
    group_src: int | None = None,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Fill `tensor` from rank `src`'s `scatter_list` (the group's first by default); see `Operations.scatter`."""
    found = resolve(group)
    root = _root(found, "scatter", tag, src, group_src, "src", default=0)
    return found.scatter(tensor, scatter_list, root, tag=tag, timeout=timeout)


def reduce_scatter(
    output: Any,
    input_list: Sequence[Any],
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Reduce `input_list[r]` of all ranks into rank r's `output`; see `Operations.reduce_scatter`."""
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
    """Reduce `input` over all ranks; rank r gets the r-th part; see `Operations.reduce_scatter_tensor`."""
    return resolve(group).reduce_scatter_tensor(output, input, op, tag=tag, timeout=timeout)


reduce_scatter_single = reduce_scatter_tensor


def barrier(group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT) -> Work[Any]:
    """Done once every rank of the group has called it."""
    return resolve(group).barrier(tag=tag, timeout=timeout)


def isend(
    tensor: Any,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    *,
    group_dst: int | None = None,
    timeout: Timeout = None,
) -> Work[None]:
    """Send `tensor` to rank `dst`; see `Operations.isend`."""
    found = resolve(group)
    return found.pairs.send(tensor, _required(found, dst, group_dst, "dst"), tag, timeout)


send = isend


def irecv(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    *,
    group_src: int | None = None,
    timeout: Timeout = None,
) -> Work[int]:
    """Receive into `tensor` from rank `src`, or from any; the result is the source's global rank.

    See `Operations.irecv`.
    """
    found = resolve(group)
    source = _peer(found, src, group_src, "src")
    return found.pairs.receive(tensor, source, tag, timeout, abandon=False, in_global_ranks=True)


def recv(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    *,
    group_src: int | None = None,
    timeout: Timeout = None,
) -> Work[int]:
    """As `irecv`, but withdrawn when its last waiter is cancelled before a message matched; see `Operations.recv`."""
    found = resolve(group)
    source = _peer(found, src, group_src, "src")
    return found.pairs.receive(tensor, source, tag, timeout, abandon=True, in_global_ranks=True)


def recv_array(
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    max_bytes: int = DEFAULT_MAX_BYTES,
    *,
    group_src: int | None = None,
    timeout: Timeout = None,
) -> Work[Any]:
    """Receive an array of the sender's shape and dtype; see `Operations.recv_array`."""
    found = resolve(group)
    source = _peer(found, src, group_src, "src")
    return found.pairs.receive_array(source, tag, max_bytes, timeout, in_global_ranks=True)


def new_group(
    ranks: Iterable[int] | None = None,
    timeout: Timeout = INHERIT,
    backend: str | None = None,
    *,
    group: Group = None,
    group_desc: str | None = None,
    sort_ranks: bool = True,
) -> ProcessGroup | NonMember:
    """Make a group of `ranks` (global; None: all of the parent's) out of `group` or the default group.

    Local and immediate: nothing is sent. All ranks of the parent must call it in the same order, members or not; who
    is no member gets a `NonMember`, whose operations raise. The time-out is the parent's unless one is given. Group
    ranks follow global ranks, or, with `sort_ranks=False`, the order given. Raises ValueError for ranks that are
    empty, repeated or not in the parent.
    """
    parent = resolve(group)
    parent.check_usable("new_group")
    chosen = list(parent.ranks) if ranks is None else list(ranks)
    if not chosen:
        raise ValueError("ranks must not be empty")
    for rank in chosen:
        if not isinstance(rank, int):
            raise TypeError(f"ranks must be ints, not {type(rank).__name__}")
        if rank not in parent.ranks:
            raise ValueError(f"rank {rank} is not in group {parent.name}: its ranks are {_spell(parent.ranks)}")
    if len(set(chosen)) != len(chosen):
        raise ValueError("ranks must not contain a rank twice")
    named = None if backend is None else parse_backend(backend)["cpu"]
    members = sorted(chosen) if sort_ranks else chosen
    made = parent.make_subgroup(members, timeout_seconds(timeout, parent.timeout_s), group_desc, named)
    return NonMember(group_desc or f"ranks {_spell(members)}", parent.world.rank) if made is None else made


def _spell(ranks: Sequence[int]) -> str:
    if len(ranks) > 8:
        return f"{', '.join(map(str, ranks[:6]))}, ..., {ranks[-1]}"
    return ", ".join(map(str, ranks))
