"""P2POp and batch_isend_irecv: several sends and receives in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncdist.api.point_to_point import irecv, isend, recv, send
from asyncdist.api.resolve import Group, required_peer, resolve
from asyncdist.arrays.device import any_array
from asyncdist.group.point_to_point import check_tag
from asyncdist.work import Work

__all__ = ["P2POp", "batch_isend_irecv"]


class P2POp:
    """One send or receive of a batch.

    `op` is `isend` or `irecv` (or `send`, `recv`), `tensor` an array as these take, `peer` a global rank,
    `group_peer` a rank in `group`. Raises TypeError for what is no array or no tag, ValueError for another `op`, a
    tag out of range, and where the peer is missing or given twice.
    """

    __slots__ = ("group", "group_peer", "op", "tag", "tensor")

    def __init__(
        self,
        op: Callable[..., Work[Any]],
        tensor: Any,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv, send, recv):
            raise ValueError("op must be asyncdist.isend or asyncdist.irecv")
        any_array(tensor)
        self.op = op
        self.tensor = tensor
        self.group = resolve(group)
        self.group_peer = required_peer(self.group, peer, group_peer, "peer")
        self.tag = check_tag(tag)

    @property
    def peer(self) -> int:
        """The other side's global rank."""
        return self.group.ranks[self.group_peer]

    def __repr__(self) -> str:
        return f"P2POp({self.op.__name__}, group_peer={self.group_peer}, tag={self.tag})"


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work[Any]]:
    """Issue all operations, receives first, and return their Works in the order of `p2p_op_list`.

    The Works are those of `isend` and `irecv`, without time-outs: each may be awaited, the results are None and the
    source's global rank. Raises TypeError for anything but P2POps, ValueError for an empty list or operations of
    several groups; nothing is issued then. For a receive into an array that cannot be written ValueError as well: the
    receives before it are withdrawn.
    """
    if not p2p_op_list:
        raise ValueError("p2p_op_list must not be empty")
    for operation in p2p_op_list:
        if not isinstance(operation, P2POp):
            raise TypeError(f"p2p_op_list must hold P2POps, not {type(operation).__name__}")
        if operation.group is not p2p_op_list[0].group:
            raise ValueError("all operations of a batch must be on the same group")
    works: dict[int, Work[Any]] = {}
    receives_first = sorted(range(len(p2p_op_list)), key=lambda index: p2p_op_list[index].op in (isend, send))
    try:
        for index in receives_first:
            works[index] = _issue(p2p_op_list[index])
    except BaseException:
        for work in works.values():
            work.cancel()
        raise
    return [works[index] for index in range(len(p2p_op_list))]


def _issue(operation: P2POp) -> Work[Any]:
    if operation.op in (isend, send):
        return operation.group.isend(operation.tensor, operation.group_peer, operation.tag)
    return irecv(operation.tensor, None, operation.group, operation.tag, group_src=operation.group_peer)
