"""Items of queues that a torch client was sent: its protocol confirms nothing, so whether it has them is inferred."""

from __future__ import annotations

import sys

from asyncdist_server.engine.clients import Client
from asyncdist_server.engine.state import StoreState

__all__ = ["PoppedItems", "unacknowledged_bytes"]


class PoppedItems(list[tuple[bytes, bytes]]):
    """Queue and item of each pop whose answer one client may not have, oldest first.

    A client has read what it was sent if it asks for something more, or ends its connection in order: a kernel resets
    one whose process ends with something unread. `last_id` is always that of the client's last request.
    """

    __slots__ = ("_sent", "_sent_at", "unread")

    def __init__(self) -> None:
        super().__init__()
        self._sent = 0  # how many of the first are on their way
        self._sent_at = 0  # since the request of that id
        self.unread = False
        """Whether the client ended without having read what it was sent last."""

    def sent(self, anything: bool, last_id: int, state: StoreState, client: Client) -> None:
        """Note that all output was taken, and whether there was any."""
        if anything or last_id != self._sent_at:
            del self[: self._sent]
            self._sent = len(self)
            self._sent_at = last_id
            self._charge(sum(len(key) + len(item) for key, item in self), state, client)

    def end(self, last_id: int, state: StoreState, client: Client) -> None:
        """Keep those only that the client does not have."""
        if not self.unread or last_id != self._sent_at:
            del self[: self._sent]
        self._charge(0, state, client)

    def _charge(self, size: int, state: StoreState, client: Client) -> None:
        """Charge the store for the items that are on their way, and no longer for those that were."""
        grown_bytes = size - client.remembered_bytes
        state.remember(grown_bytes)
        if client.namespace.share is not None:
            client.namespace.share.bytes += grown_bytes
        client.remembered_bytes = size


if sys.platform == "linux":
    import fcntl
    import termios

    _INT_BYTES = 4

    def unacknowledged_bytes(descriptor: int) -> int:
        """Return how many bytes the other host's kernel has not acknowledged; 0 where that cannot be known."""
        try:
            answer = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(_INT_BYTES))  # SIOCOUTQ, of a TCP socket
        except OSError:
            return 0
        return int.from_bytes(answer, sys.byteorder)

else:

    def unacknowledged_bytes(descriptor: int) -> int:
        """Return 0: it cannot be known here."""
        return 0
