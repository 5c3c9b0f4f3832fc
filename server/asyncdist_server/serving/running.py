"""The stores that threads of this process serve. A module of its own, so that a look at it loads no daemon."""

from __future__ import annotations

import weakref
from typing import Final, Protocol

__all__ = ["RunningServer", "running", "served_here"]


class RunningServer(Protocol):
    """A `ThreadedServer`."""

    @property
    def port(self) -> int:
        """The port listened on."""

    def close_after_fork(self) -> None:
        """Give up, in a forked child, what belongs to the parent."""


running: Final[weakref.WeakSet[RunningServer]] = weakref.WeakSet()


def served_here(port: int) -> bool:
    """Whether a thread of this process serves that port: looking for its answers would keep it from giving them."""
    return any(server.port == port for server in list(running))
