"""The constants that `--constants` names."""

from __future__ import annotations

import os
from pathlib import Path

from asyncdist.plan.cost.constants import BUILT_IN, Constants
from asyncdist.world.tuning_file import read_file, stored_constants

__all__ = ["named_constants", "transport_here"]


def transport_here() -> str:
    """Return the transport that the environment names, auto if it names none."""
    return os.environ.get("ASYNCDIST_TRANSPORT", "").strip().lower() or "auto"


def named_constants(source: str, transport: str) -> Constants:
    """Return a built-in set, or those for `transport` of a file of `asyncdist tune`. Raises ValueError and OSError."""
    if source in BUILT_IN:
        return BUILT_IN[source]
    if not Path(source).exists():
        raise ValueError(f"constants {source!r} are no file and no built-in set; those are {', '.join(BUILT_IN)}")
    constants = stored_constants(Path(source), transport)
    if constants is None:
        known = ", ".join(read_file(Path(source))["transports"])
        raise ValueError(f"{source} has no constants for transport {transport!r}; it has: {known}")
    return constants
