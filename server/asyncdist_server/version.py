"""Which version this is, for whoever looks after several daemons."""

from __future__ import annotations

import functools
import importlib.metadata

__all__ = ["version"]


@functools.cache
def version() -> str:
    """Return the version of the installed package; `unknown` where the sources run without being installed."""
    try:
        return importlib.metadata.version("asyncdist")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
