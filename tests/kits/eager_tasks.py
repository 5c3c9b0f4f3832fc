"""Programs whose loop starts tasks at once: asyncio's eager task factory, from Python 3.12 on."""

from __future__ import annotations

import asyncio
import sys

import pytest
import uvloop

needs_eager_tasks = pytest.mark.skipif(sys.version_info < (3, 12), reason="asyncio has eager tasks from 3.12 on")


def use_eager_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Let the program's tasks begin at once; skips the test where this uvloop and this Python cannot do it together."""
    if isinstance(loop, uvloop.Loop) and (3, 13) <= sys.version_info < (3, 13, 3):
        pytest.skip("uvloop tells task factories what those of Python 3.13 before 3.13.3 do not take")
    loop.set_task_factory(getattr(asyncio, "eager_task_factory"))  # noqa: B009 - mypy checks for 3.11
