"""Messages between two ranks of a group."""

from __future__ import annotations

from typing import Any, Final

from asyncdist.concurrency.deadline import Timeout
from asyncdist.group.methods.issuer import Issuer, check_rank
from asyncdist.work import Work

DEFAULT_MAX_BYTES: Final = 1 << 30
"""Largest message `recv_array` accepts unless told otherwise: 1 GiB, so that a peer cannot make us allocate more."""


class PointToPoint(Issuer):
    """send and recv in their forms. Peers are group ranks."""

    ranks: tuple[int, ...]

    def isend(self, tensor: Any, dst: int, tag: int = 0, *, timeout: Timeout = None) -> Work[None]:
        """Send `tensor` (any shape) to rank `dst`; done when `tensor` may be written again, not when it arrived.

        A send that ended well is received, in its place, if the two ranks live and `dst` receives it. A message of up
        to 256 KiB is mostly done at once; a longer one waits for its receive.

        Withdrawn by `work.cancel()` only, before a receive has matched: then it is as if it had never been sent, and
        `tensor` is free. A receive that has matched it without this rank's knowing raises CollectiveTimeoutError. No
        time-out unless one is given. Expiry withdraws the send or, if the message is on its way, ends that message and
        nothing else: its receive raises CollectiveTimeoutError, too. A send of a GPU array is never withdrawn, as a GPU
        cannot be stopped in the middle. Its expiry breaks the connection: the two ranks are lost to each other and, on
        every rank, to the collectives of all groups that have one of them. `dst` may be this rank.
        """
        return self.pairs.send(tensor, self._peer(dst, "dst"), tag, timeout, abandon=False)

    def send(self, tensor: Any, dst: int, tag: int = 0, *, timeout: Timeout = None) -> Work[None]:
        """As `isend`, but withdrawn also when the last task awaiting it is cancelled, before a receive has matched.

        A message that is on its way then still arrives: a task that may be cancelled keeps the Work and awaits it
        again.
        """
        return self.pairs.send(tensor, self._peer(dst, "dst"), tag, timeout, abandon=True)

    def irecv(self, tensor: Any, src: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> Work[int]:
        """Receive into `tensor`, of the sender's dtype and at least its size, from rank `src` (None: from any).

        The result is the source's rank. A message of another dtype or too large raises CollectiveMismatchError and is
        dropped; the pair stays usable. A receive from any source raises PeerLostError when a member is lost while it
        waits, and when all other members are gone; a receive posted after a loss waits for the members that are left.
        It connects to no rank. So it hears of the loss of a rank that this one never met only from ranks that lost it,
        or if that rank was rank 0 and hosted the store; give a time-out where that may not do. Withdrawn by
        `work.cancel()` only, before a message has matched. No time-out unless one is given. Expiry withdraws the
        receive or, if a message is coming in, throws that message away and ends nothing else (a GPU array's: as
        `isend`).
        """
        source = None if src is None else self._peer(src, "src")
        return self.pairs.receive(tensor, source, tag, timeout, abandon=False, number=self.pairs.group_rank)

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> Work[int]:
        """As `irecv`, but withdrawn also when the last task awaiting it is cancelled, before a message has matched.

        No message is lost then. A message that is coming in, as a large one does for a while, still comes into
        `tensor`: a task that may be cancelled keeps the Work and awaits it again. A message that came in the moment of
        cancelling goes to the next receive, behind those that receives posted meanwhile have got.
        """
        source = None if src is None else self._peer(src, "src")
        return self.pairs.receive(tensor, source, tag, timeout, abandon=True, number=self.pairs.group_rank)

    def recv_array(
        self, src: int | None = None, tag: int = 0, max_bytes: int = DEFAULT_MAX_BYTES, *, timeout: Timeout = None
    ) -> Work[Any]:
        """Receive an array of the sender's shape and dtype, at most `max_bytes` large, from rank `src` (None: any).

        The result is a new numpy array; `work.source_rank()` tells the source. Withdrawn as `recv` is.
        """
        source = None if src is None else self._peer(src, "src")
        return self.pairs.receive_array(source, tag, max_bytes, timeout, number=self.pairs.group_rank)

    def _peer(self, rank: int, name: str) -> int:
        """The global rank of group rank `rank`."""
        return self.ranks[check_rank(rank, self.size, name)]
