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
