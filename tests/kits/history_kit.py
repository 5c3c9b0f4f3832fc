"""Histories written down by hand."""

from __future__ import annotations

import math
from typing import Any

from linearizability import UNKNOWN, Operation


def op(called_at: float, returned_at: float, name: str, *arguments: Any, to: Any = None, **others: Any) -> Operation:
    """One operation of key "k"; `to` is its result."""
    client = others.pop("client", f"c{called_at:g}")
    end = returned_at if others.pop("until", False) or to is not UNKNOWN else math.inf
    return Operation(client, "k", name, arguments, to, called_at, end, **others)
