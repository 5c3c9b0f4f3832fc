"""send and recv in their forms, and several of them in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncdist.arrays.device import any_array
from asyncdist.concurrency.deadline import Timeout
from asyncdist.group.default_group import Group, peer_of, required_peer, resolve
from asyncdist.group.methods.point_to_point import DEFAULT_MAX_BYTES
from asyncdist.group.point_to_point import check_tag
from asyncdist.work import Work


def isend(
    tensor: Any,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    *,
    group_dst: int | None = None,
    timeout: Timeout = None,
) -> Work[None]:
    """Send `tensor` (any shape) to rank `dst`; done when `tensor` may be written again, not when it arrived.

    A send that ended well is received, in its place, if the two ranks live and `dst` receives it. A message of up to
    256 KiB is mostly done at once; a longer one waits for its receive.

    Withdrawn by `work.cancel()` only, before a receive has matched: then it is as if it had never been sent, and
    `tensor` is free. A receive that has matched it without this rank's knowing raises CollectiveTimeoutError. No
    time-out unless one is given. Expiry withdraws the send or, if the message is on its way, ends that message and
    nothing else: its receive raises CollectiveTimeoutError, too. A send of a GPU array is never withdrawn, as a GPU
    cannot be stopped in the middle. Its expiry breaks the connection: the two ranks are lost to each other and, on
    every rank, to the collectives of all groups that have one of them. `dst` may be this rank.

    `dst` is a global rank, also in a smaller group; `group_dst` is one of the group.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation.

    Matched by source and `tag` (an int of at least 0), in order. `timeout` (seconds or a timedelta; None, the default,
    is no limit) bounds the operation: CollectiveTimeoutError, and the message is withdrawn if no receive has matched
    it.

    Raises TypeError and ValueError at the call for wrong arguments, PeerLostError (`.rank`) where the other rank is
    lost; messages between other ranks go on.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
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
    """As `isend`, but withdrawn also when the last task awaiting it is cancelled, before a receive has matched.

    A message that is on its way then still arrives: a task that may be cancelled keeps the Work and awaits it again.

    `dst` is a global rank, also in a smaller group; `group_dst` is one of the group.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation.

    Matched by source and `tag` (an int of at least 0), in order. `timeout` (seconds or a timedelta; None, the default,
    is no limit) bounds the operation: CollectiveTimeoutError, and the message is withdrawn if no receive has matched
    it.

    Raises TypeError and ValueError at the call for wrong arguments, PeerLostError (`.rank`) where the other rank is
    lost; messages between other ranks go on.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; when the last
    waiter is cancelled before message and receive have matched, it is withdrawn, and no other message is lost.
    """
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
    """Receive into `tensor`, of the sender's dtype and at least its size, from rank `src` (None: from any).

    The result is the source's global rank. A message of another dtype or too large raises CollectiveMismatchError and
    is dropped; the pair stays usable. A receive from any source raises PeerLostError when a member is lost while it
    waits, and when all other members are gone; a receive posted after a loss waits for the members that are left. It
    connects to no rank. So it hears of the loss of a rank that this one never met only from ranks that lost it, or if
    that rank was rank 0 and hosted the store; give a time-out where that may not do. Withdrawn by `work.cancel()` only,
    before a message has matched. No time-out unless one is given. Expiry withdraws the receive or, if a message is
    coming in, throws that message away and ends nothing else (a GPU array's: as `isend`).

    `src` is a global rank, also in a smaller group; `group_src` is one of the group.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation.

    Matched by source and `tag` (an int of at least 0), in order. `timeout` (seconds or a timedelta; None, the default,
    is no limit) bounds the operation: CollectiveTimeoutError, and nothing is lost if no message has matched.

    Raises TypeError and ValueError at the call for wrong arguments, PeerLostError (`.rank`) where the other rank is
    lost; messages between other ranks go on.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
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
    """As `irecv`, but withdrawn also when the last task awaiting it is cancelled, before a message has matched.

    No message is lost then. A message that is coming in, as a large one does for a while, still comes into `tensor`: a
    task that may be cancelled keeps the Work and awaits it again. A message that came in the moment of cancelling goes
    to the next receive, behind those that receives posted meanwhile have got.

    `src` is a global rank, also in a smaller group; `group_src` is one of the group.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation.

    Matched by source and `tag` (an int of at least 0), in order. `timeout` (seconds or a timedelta; None, the default,
    is no limit) bounds the operation: CollectiveTimeoutError, and nothing is lost if no message has matched.

    Raises TypeError and ValueError at the call for wrong arguments, PeerLostError (`.rank`) where the other rank is
    lost; messages between other ranks go on.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; when the last
    waiter is cancelled before message and receive have matched, it is withdrawn, and no other message is lost.
    """
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
    """Receive an array of the sender's shape and dtype, at most `max_bytes` large, from rank `src` (None: any).

    The result is a new numpy array; `work.source_rank()` tells the source, as a global rank. Withdrawn as `recv` is.

    `src` is a global rank, also in a smaller group; `group_src` is one of the group.

    Matched by source and `tag` (an int of at least 0), in order. `timeout` (seconds or a timedelta; None, the default,
    is no limit) bounds the operation: CollectiveTimeoutError, and nothing is lost if no message has matched.

    Raises TypeError and ValueError at the call for wrong arguments, PeerLostError (`.rank`) where the other rank is
    lost; messages between other ranks go on.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; when the last
    waiter is cancelled before message and receive have matched, it is withdrawn, and no other message is lost.
    """
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
