"""Errors that are kept, and raised once for every call that meets them."""

from __future__ import annotations

from typing import Final, TypeVar

__all__ = ["NO_GOODBYE", "anew"]

NO_GOODBYE: Final = (
    "the connection was closed without a goodbye (it failed, was killed, broke off, or ended without "
    "destroy_process_group(): see its own output)"
)
"""What is known of a peer that is lost, and where to look for more."""

E = TypeVar("E", bound=BaseException)


def anew(error: E) -> E:
    """An exception like `error`, to be raised in its place.

    Whenever an exception is raised it takes hold of the frames it passes, with all that their variables refer to, and
    never lets go: one that is raised for every message to a rank that is lost would keep every array.
    """
    kind = type(error)
    fresh: E = (OSError if isinstance(error, OSError) else kind).__new__(kind)
    fresh.args = error.args
    fresh.__dict__.update(error.__dict__)
    fresh.__cause__ = error.__cause__
    return fresh
