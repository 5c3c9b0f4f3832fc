"""uninterrupted: cleaning up to the end.

`asyncio.shield` ends the waiting at the first cancellation. Cleaning up then goes on with nobody to wait for it, and
what follows meets what it was to take away. Cancellations do come in numbers: from a time-out within a task that is
cancelled as well, and from a cancel scope of anyio at every await until its block is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["uninterrupted"]

T = TypeVar("T")


async def uninterrupted(cleaning: Coroutine[Any, Any, T]) -> T:
    """Run `cleaning`, which must be bounded in time, to its end; return its result or raise what it raised.

    Cancelling raises CancelledError in their place, once that end has come. Raises RuntimeError, and does nothing,
    where no loop runs any more: whoever waits is destroyed after its loop.
    """
    try:
        task = asyncio.get_running_loop().create_task(cleaning)
    except RuntimeError:
        cleaning.close()
        raise
    task.add_done_callback(_ask)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        if cancelled is None:
            return task.result()
        raise cancelled
    finally:
        del task, cancelled  # what is raised refers to this frame


def _ask(task: asyncio.Future[Any]) -> None:
    """Nobody may ask what it raised: whoever waited was cancelled, or destroyed with its loop."""
    if not task.cancelled():
        task.exception()
