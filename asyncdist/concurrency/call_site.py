"""The line of a program that calls the library, for what is said about that call."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Final

__all__ = ["calling_frame"]

_OURS: Final = frozenset({"asyncdist", "asyncio", "threading", "concurrent", "contextvars", "uvloop"})
"""Packages whose lines are not what calls."""


def calling_frame() -> FrameType | None:
    """Return the innermost frame of neither the library nor what it runs on; None in the communication thread, say."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame = frame.f_back
    return frame
