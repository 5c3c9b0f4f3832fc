"""Options of torch.distributed that have no meaning here."""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["warn_unused"]


def warn_unused(pg_options: Any, function: str) -> None:
    """Warn, at the line that calls `function`, of `pg_options` that are given to it."""
    if pg_options is not None:
        warnings.warn(
            f"{function}: pg_options= is an option of torch's backends and has no effect here; leave it out",
            UserWarning,
            stacklevel=3,
        )
