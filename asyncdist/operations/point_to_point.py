"""Messages between two ranks of a group."""

from __future__ import annotations

from typing import Any, Final

from asyncdist.deadline import Timeout
from asyncdist.executor.work import Work
from asyncdist.operations.issuer import Issuer, check_rank

__all__ = ["DEFAULT_MAX_BYTES", "PointToPoint"]

DEFAULT_MAX_BYTES: Final = 1 << 30
"""Largest message `recv_array` accepts unless told otherwise: 1 GiB, so that a peer cannot make us allocate more."""


class PointToPoint(Issuer):
    """send and recv in their forms. Peers are group ranks."""

    def isend(self, tensor: Any, dst: int, tag: int = 0, *, timeout: Timeout = None) -> Work[None]:
        """Send `tensor` (any shape) to rank `dst`; done when `tensor` may be written again, not when it arrived.

        No time-out unless one is given; expiry breaks the connection to `dst`. The two are lost to each other then, and
        to the collectives of all groups that have one of them, on every rank; messages of others go on. `dst` may be
        this rank.
        """
        return self.pairs.send(tensor, check_rank(dst, self.size, "dst"), tag, timeout)

    send = isend

    def irecv(self, tensor: Any, src: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> Work[int]:
        """Receive into `tensor`, of the sender's dtype and at least its size, from rank `src` (None: from any).

        The result is the source's rank. A message of another dtype or too large raises CollectiveMismatchError and is
        dropped; the pair stays usable. From any source it raises PeerLostError when a member is lost, and when all the
        others have left; it connects to nobody, so it does not hear of one that went before they were connected: where
        that may be, give a time-out. Withdrawn by `work.cancel()` only, before a message has matched. No time-out
        unless one is given; expiry withdraws the receive or, if a message is coming in, breaks the connection to its
        source, with what `isend` says of that.
        """
        source = None if src is None else check_rank(src, self.size, "src")
        return self.pairs.receive(tensor, source, tag, timeout, abandon=False)

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> Work[int]:
        """As `irecv`, but withdrawn also when the last task awaiting it is cancelled, before a message has matched.

        No message is lost then. One that is coming in, as a large one does for a while, still comes into `tensor`: who
        may be cancelled keeps the Work and awaits it again.
        """
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

        The result is a new numpy array; `work.source_rank()` tells the source. Withdrawn as `recv` is.
        """
        source = None if src is None else check_rank(src, self.size, "src")
        return self.pairs.receive_array(source, tag, max_bytes, timeout)
