"""How much of what a socket was given has not arrived: the only thing known where a protocol confirms nothing."""

from __future__ import annotations

import sys

__all__ = ["unacknowledged_bytes"]

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
