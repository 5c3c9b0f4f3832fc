"""Threads for calls into GPU libraries that may block: opening, aborting and destroying communicators.

They are daemons of their own, not an executor's: one that never returns from a library must not keep the process alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from asyncdist.cuda import Runtime

__all__ = ["Helpers", "in_thread", "stay_on"]

T = TypeVar("T")

OUR_THREADS: Final = "asyncdist "
"""What the names of our own threads begin with, the communication thread's too. No code of others runs there."""


def stay_on(runtime: Runtime, device: int) -> None:
    """Let `device` be the current one of this thread for good, if the thread is ours.

    Every call of ours puts the current device back, which costs least where it is the right one already; and CUDA opens
    a context on the device that is put back, hundreds of MiB of a GPU that other ranks use.
    """
    if threading.current_thread().name.startswith(OUR_THREADS):
        runtime.set_device(device)


def in_thread(
    loop: asyncio.AbstractEventLoop,
    function: Callable[..., T],
    *arguments: Any,
    on: tuple[Runtime, int],
    keep_alive: object = None,
) -> asyncio.Future[T]:
    """Call `function(*arguments)` in a thread of its own; a future of its result. Cancelling that ends the waiting.

    `on` is the device to be current there: a fresh thread's is the first, where CUDA would open a context as well.
    `keep_alive` is referenced until the call returns, whoever waits for it, and whatever becomes of the loop.
    """
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure, _kept = None, None, keep_alive
        try:
            on[0].set_device(on[1])
            result = function(*arguments)
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=f"asyncdist gpu {getattr(function, '__name__', '')}", daemon=True).start()
    return future


class Helpers:
    """Calls under way of which only the end matters, and what they need kept alive."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on: tuple[Runtime, int]) -> None:
        self._loop = loop
        self._on = on
        self._futures: set[asyncio.Future[Any]] = set()

    def start(self, function: Callable[..., object], *arguments: Any, keep_alive: object = None) -> None:
        """Call it in a thread. What it raises is not heard of: there is nobody left who could do anything about it."""
        self.keep(in_thread(self._loop, function, *arguments, on=self._on, keep_alive=keep_alive))

    def keep(self, future: asyncio.Future[Any]) -> None:
        """Wait for this, too; its failure is not heard of either."""
        self._futures.add(future)
        future.add_done_callback(self._ended)

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._futures.discard(future)
        if not future.cancelled():
            future.exception()

    async def wait(self, timeout_s: float) -> None:
        """Wait until all have ended, at most `timeout_s`; what waits for the others is then cancelled.

        Their threads go on, with what they keep alive: the GPU may still use it.
        """
        if self._futures:
            _, late = await asyncio.wait(set(self._futures), timeout=timeout_s)
            for future in late:
                future.cancel()
