"""After a fork the child closes its copies of what the parent has open, so that two processes never share a stream."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["Forkable", "close_in_forked_child"]


class Forkable(Protocol):
    """What can be given up in a forked child."""

    def close_after_fork(self) -> None:
        """Close this process's descriptors, touching neither event loop nor peer; later use raises ClosedError."""


_open: weakref.WeakSet[Forkable] = weakref.WeakSet()
_registered = False


def close_in_forked_child(resource: Forkable) -> None:
    """Call `resource.close_after_fork()` in every child forked from now on, as long as `resource` lives."""
    global _registered
    if not _registered:
        os.register_at_fork(after_in_child=_close_all)
        _registered = True
    _open.add(resource)


def _close_all() -> None:
    for resource in list(_open):
        resource.close_after_fork()
    _open.clear()
