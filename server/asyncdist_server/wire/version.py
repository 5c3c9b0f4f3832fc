"""Which version this is, for whoever looks after several daemons."""

from __future__ import annotations

import functools

__all__ = ["version"]


@functools.cache
def version() -> str:
    """Return the version of the installed package; `unknown` where the sources run without being installed."""
    import importlib.metadata  # which loads as much as all of the store client, for what few ask

    try:
        return importlib.metadata.version("asyncdist")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
