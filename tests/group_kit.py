"""What tests of groups share."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import asyncdist as dist

Group = dist.ProcessGroup


async def outcome(awaitable: Awaitable[Any]) -> BaseException | Any:
    """What awaiting gives, be it an exception."""
    try:
        return await awaitable
    except dist.DistError as error:
        return error
