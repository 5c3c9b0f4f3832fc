"""send and recv in their forms; peers are global ranks, or `group_src` and `group_dst` group ranks."""

from __future__ import annotations

from typing import Any

from asyncdist.api.resolve import Group, peer_of, required_peer, resolve
from asyncdist.concurrency.deadline import Timeout
from asyncdist.group.methods.point_to_point import DEFAULT_MAX_BYTES
from asyncdist.work import Work

__all__ = ["irecv", "isend", "recv", "recv_array", "send"]


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
    """As `irecv`, but withdrawn when its last waiter is cancelled before a message matched; see `ProcessGroup.recv`."""
    found = resolve(group)
    source = peer_of(found, src, group_src, "src")
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
    """Receive an array of the sender's shape and dtype; see `ProcessGroup.recv_array`."""
    found = resolve(group)
    source = peer_of(found, src, group_src, "src")
    return found.pairs.receive_array(source, tag, max_bytes, timeout, in_global_ranks=True)
