"""Waiting is refused where it would stop an event loop."""

from __future__ import annotations

import asyncio

__all__ = ["refuse_loop"]


def refuse_loop(name: str) -> None:
    """Raise RuntimeError inside a running event loop, which waiting would stop."""
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(
            f"asyncdist.blocking.{name} was called inside a running event loop, which it would stop: "
            f"use asyncdist.{name} there, and await it"
        )
