"""run: the event loop at the edge of a program."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

__all__ = ["loop_factory", "run"]

T = TypeVar("T")

_TERMINATED: Final = 128 + signal.SIGTERM


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's loop factory where it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run `main` on a fresh event loop (uvloop where installed) and return its result.

    The first SIGTERM cancels `main`, so that groups are left in order and `finally` blocks run; SystemExit(143) is
    raised then. A second SIGTERM ends the process at once. Ctrl-C works as in `asyncio.run`. Raises RuntimeError within
    a running event loop, and TypeError for what cannot be awaited.
    """
    if not inspect.isawaitable(main):
        raise TypeError(f"asyncdist.run() takes a coroutine, as in run(main()), not {main!r}")
    if _is_running():
        main.close()
        raise RuntimeError("asyncdist.run() cannot be called from a running event loop: await the coroutine there")
    terminated = False

    async def supervised() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            loop.remove_signal_handler(signal.SIGTERM)
            task.cancel("SIGTERM")

        # Outside the main thread signals are its owner's business.
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
            loop.add_signal_handler(signal.SIGTERM, terminate)
        return await main

    with asyncio.Runner(debug=debug, loop_factory=loop_factory()) as runner:
        try:
            return runner.run(supervised())
        except asyncio.CancelledError:
            if terminated:
                raise SystemExit(_TERMINATED) from None
            raise


def _is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
