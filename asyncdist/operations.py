"""The operations of a group: one method per collective and per point-to-point verb.

Every method issues its operation at once, in call order, and returns a `Work`. Roots and peers are group ranks.
Wrong arguments raise TypeError or ValueError at the call, before a byte moves.

All collectives take `tag` (operations of one tag must be issued in the same order on all ranks; tasks that issue
concurrently use different tags) and `timeout` (seconds, a timedelta or None; by default the group's). When it expires
the group is aborted on every rank, naming the ranks that were missing. Cancelling a waiter ends only its waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from asyncdist.backend import call
from asyncdist.deadline import INHERIT, Timeout
from asyncdist.executor.work import Work
from asyncdist.pairs import Pairs, check_tag
from asyncdist.reduce_op import ReduceOp, ReduceOpLike

__all__ = ["DEFAULT_MAX_BYTES", "Operations", "check_rank"]

DEFAULT_MAX_BYTES: Final = 1 << 30
"""Largest message `recv_array` accepts unless told otherwise: 1 GiB, so that a peer cannot make us allocate more."""


class Operations:
    """What a group can do; `ProcessGroup` says how it is issued."""

    rank: int
    size: int
    pairs: Pairs

    def _collective(
        self, operation: str, tag: int, timeout: Timeout, prepare: Callable[..., call.Call], *arguments: Any
    ) -> Work[Any]:
        raise NotImplementedError

    def refuse(self, operation: str, tag: int, error: Exception) -> None:
        """A collective's arguments are wrong: it takes its place in the order, and the others are told."""
        raise NotImplementedError

    def _root(self, operation: str, root: int, tag: int) -> int:
        try:
            return check_rank(root, self.size, "root")
        except (TypeError, ValueError) as error:
            self.refuse(operation, check_tag(tag), error)
            raise

    def all_reduce(
        self, tensor: Any, op: ReduceOpLike = ReduceOp.SUM, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Reduce `tensor` (any shape, equal on all ranks) over all ranks, in place on every rank.

        All ranks hold bit-identical results. The result is `tensor`.
        """
        return self._collective("all_reduce", check_tag(tag), timeout, call.all_reduce, tensor, op)

    def broadcast(self, tensor: Any, root: int, *, tag: int = 0, timeout: Timeout = INHERIT) -> Work[Any]:
        """Copy the root's `tensor` (any shape, equal on all ranks) into everybody's. The result is `tensor`."""
        root = self._root("broadcast", root, tag)
        return self._collective("broadcast", check_tag(tag), timeout, call.broadcast, tensor, root, self.rank)

    def reduce(
        self, tensor: Any, root: int, op: ReduceOpLike = ReduceOp.SUM, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Reduce `tensor` over all ranks into the root's; the others' stay as they are. The result is `tensor`."""
        root = self._root("reduce", root, tag)
        return self._collective("reduce", check_tag(tag), timeout, call.reduce, tensor, root, op, self.rank)

    def all_gather(
        self, tensor_list: Sequence[Any], tensor: Any, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Fill `tensor_list` (one array per rank, shaped like `tensor`) with everybody's `tensor`; the result is it."""
        return self._collective("all_gather", check_tag(tag), timeout, call.all_gather, tensor_list, tensor, self.size)

    def all_gather_into_tensor(
        self, output_tensor: Any, input_tensor: Any, *, tag: int = 0, timeout: Timeout = INHERIT
    ) -> Work[Any]:
        """Fill `output_tensor` (`size` times the elements of `input_tensor`) with everybody's, in rank order."""
        return self._collective(
            "all_gather_into_tensor",
            check_tag(tag),
            timeout,
            call.all_gather_into_tensor,
            output_tensor,
            input_tensor,
            self.size,
        )

    def gather(
        self,
        tensor: Any,
        gather_list: Sequence[Any] | None = None,
        root: int = 0,
        *,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[Any]:
        """Fill the root's `gather_list` (one array per rank, shaped like `tensor`); None on the other ranks."""
        root = self._root("gather", root, tag)
        return self._collective(
            "gather", check_tag(tag), timeout, call.gather, tensor, gather_list, root, self.rank, self.size
        )

    def scatter(
        self,
        tensor: Any,
        scatter_list: Sequence[Any] | None = None,
        root: int = 0,
        *,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[Any]:
        """Fill `tensor` with this rank's entry of the root's `scatter_list`; None on the other ranks."""
        root = self._root("scatter", root, tag)
        return self._collective(
            "scatter", check_tag(tag), timeout, call.scatter, tensor, scatter_list, root, self.rank, self.size
        )

    def reduce_scatter(
        self,
        output: Any,
        input_list: Sequence[Any],
        op: ReduceOpLike = ReduceOp.SUM,
        *,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[Any]:
        """Reduce `input_list[r]` of all ranks into rank r's `output`; sizes may differ between entries."""
        return self._collective(
            "reduce_scatter", check_tag(tag), timeout, call.reduce_scatter, output, input_list, op, self.rank, self.size
        )

    def reduce_scatter_tensor(
        self,
        output: Any,
        input: Any,
        op: ReduceOpLike = ReduceOp.SUM,
        *,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[Any]:
        """Reduce `input` (`size` times the elements of `output`) over all ranks; rank r gets the r-th part."""
        return self._collective(
            "reduce_scatter_tensor",
            check_tag(tag),
            timeout,
            call.reduce_scatter_tensor,
            output,
            input,
            op,
            self.size,
        )

    def barrier(self, *, tag: int = 0, timeout: Timeout = INHERIT) -> Work[Any]:
        """Done once every rank has called it."""
        return self._collective("barrier", check_tag(tag), timeout, call.barrier)

    def isend(self, tensor: Any, dst: int, tag: int = 0, *, timeout: Timeout = None) -> Work[None]:
        """Send `tensor` (any shape) to rank `dst`; done when `tensor` may be written again, not when it arrived.

        No time-out unless one is given; expiry breaks the connection to `dst` and nothing else. `dst` may be this rank.
        """
        return self.pairs.send(tensor, check_rank(dst, self.size, "dst"), tag, timeout)

    send = isend

    def irecv(self, tensor: Any, src: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> Work[int]:
        """Receive into `tensor`, of the sender's dtype and at least its size, from rank `src` (None: from any).

        The result is the source's rank. A message of another dtype or too large raises CollectiveMismatchError and is
        dropped; the pair stays usable. From any source it raises PeerLostError when a member is lost, and when all the
        others have left. No time-out unless one is given. Withdrawn by `work.cancel()` only.
        """
        source = None if src is None else check_rank(src, self.size, "src")
        return self.pairs.receive(tensor, source, tag, timeout, abandon=False)

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> Work[int]:
        """As `irecv`, but withdrawn when the last task awaiting it is cancelled, or when it expires, before a message
        matched; no message is lost then."""
        source = None if src is None else check_rank(src, self.size, "src")
        return self.pairs.receive(tensor, source, tag, timeout, abandon=True)

    def recv_array(
        self,
        src: int | None = None,
        tag: int = 0,
        max_bytes: int = DEFAULT_MAX_BYTES,
        *,
        timeout: Timeout = None,
    ) -> Work[Any]:
        """Receive an array of the sender's shape and dtype, at most `max_bytes` large, from rank `src` (None: any).

        The result is a new numpy array; `work.source_rank()` tells the source. Withdrawn like `recv`.
        """
        source = None if src is None else check_rank(src, self.size, "src")
        return self.pairs.receive_array(source, tag, max_bytes, timeout)


def check_rank(rank: int, size: int, name: str) -> int:
    """Return `rank`. Raises TypeError for anything but an int, ValueError outside the group."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"{name} must be a rank (an int), not {type(rank).__name__}")
    if not 0 <= rank < size:
        raise ValueError(f"{name}={rank} is not in this group: its ranks are 0 to {size - 1}")
    return rank
