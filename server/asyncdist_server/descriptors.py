"""How many file descriptors the daemon may have: each connection needs one."""

from __future__ import annotations

import contextlib
import sys
from typing import Final

if sys.platform != "win32":
    import resource

__all__ = ["SPARE_DESCRIPTORS", "descriptor_limit", "raise_descriptor_limit"]

SPARE_DESCRIPTORS: Final = 128
"""Those besides connections: listeners, the journal, the loop's own, 64 connections of HTTP, and some that just end."""


def descriptor_limit() -> int | None:
    """Return how many this process may have, None where nothing limits them."""
    if sys.platform == "win32":
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> None:
    """Ask for as many as this user may have: the usual 1,024 would stop at 1,000 ranks."""
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
