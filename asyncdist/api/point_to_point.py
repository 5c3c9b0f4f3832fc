"""send and recv in their forms; peers are global ranks, or `group_src` and `group_dst` group ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncdist.api.ranks import peer_of, required_peer
from asyncdist.arrays.device import any_array
from asyncdist.concurrency.deadline import Timeout
from asyncdist.group.default_group import Group, resolve
from asyncdist.group.methods.point_to_point import DEFAULT_MAX_BYTES
from asyncdist.group.point_to_point import check_tag
from asyncdist.work import Work

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "recv_array", "send"]


def isend(
    tensor: Any,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    *,
    group_dst: int | None = None,
    timeout: Timeout = None,
) -> Work[None]:
    """Send `tensor` to rank `dst`; see `ProcessGroup.isend`."""
    found = resolve(group)
    return found.pairs.send(tensor, required_peer(found, dst, group_dst, "dst"), tag, timeout, abandon=False)


def send(
    tensor: Any,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    *,
    group_dst: int | None = None,
    timeout: Timeout = None,
) -> Work[None]:
    """As `isend`, but withdrawn when its last waiter is cancelled before it matched; see `ProcessGroup.send`."""
    found = resolve(group)
    return found.pairs.send(tensor, required_peer(found, dst, group_dst, "dst"), tag, timeout, abandon=True)


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

    See `ProcessGroup.irecv`.
    """
    found = resolve(group)
    source = peer_of(found, src, group_src, "src")
    return found.pairs.receive(tensor, source, tag, timeout, abandon=False)


def recv(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    *,
    group_src: int | None = None,
    timeout: Timeout = None,
) -> Work[int]:
    """As `irecv`, but withdrawn when its last waiter is cancelled before a message matched; see `ProcessGroup.recv`."""
    found = resolve(group)
    source = peer_of(found, src, group_src, "src")
    return found.pairs.receive(tensor, source, tag, timeout, abandon=True)


def recv_array(
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    max_bytes: int = DEFAULT_MAX_BYTES,
    *,
    group_src: int | None = None,
    timeout: Timeout = None,
) -> Work[Any]:
    """Receive an array of the sender's shape and dtype; see `ProcessGroup.recv_array`."""
    found = resolve(group)
    source = peer_of(found, src, group_src, "src")
    return found.pairs.receive_array(source, tag, max_bytes, timeout)


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
        self.group_peer = self.group.group_rank_of(required_peer(self.group, peer, group_peer, "peer"))
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
