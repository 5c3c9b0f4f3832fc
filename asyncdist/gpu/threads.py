"""Threads for calls into GPU libraries that may block: to open, abort and close what belongs to a GPU.

They are daemons, not an executor's threads: a thread that never returns from a library must not keep the process alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, TypeVar

from asyncdist.cuda.interface import Resource, Runtime, Stream
from asyncdist.errors import DistBackendError

T = TypeVar("T")

OUR_THREADS: Final = "asyncdist "
"""How the names of our own threads begin, also of the communication thread. Code of others does not run there."""

CLOSED_LOOK_S: Final = 0.1
"""How often a thread that has made something looks whether the loop that is to take the result was closed."""


def stay_on(runtime: Runtime, device: int) -> None:
    """Make `device` the current device of this thread for good, if the thread is ours; else of ours that runs the loop.

    Every call of ours restores the current device, which costs least where nothing changes. And CUDA opens a context on
    the device that is restored: hundreds of MiB of a GPU that other ranks use.
    """
    if threading.current_thread().name.startswith(OUR_THREADS):
        runtime.set_device(device)
    elif (place := getattr(asyncio._get_running_loop(), "place", None)) is not None:
        place.errands = [partial(runtime.set_device, device)]


def settle(future: asyncio.Future[T], result: T, error: BaseException | None) -> None:
    """End a future with `result`, or with `error` if there is one; do nothing if the future has ended."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def in_thread(
    loop: asyncio.AbstractEventLoop,
    function: Callable[..., T],
    *arguments: Any,
    on: tuple[Runtime, int],
    keep_alive: object = None,
    discard: Callable[[T], object] | None = None,
) -> asyncio.Future[T]:
    """Call `function(*arguments)` in a thread of its own; a future of the result. Cancelling it ends the waiting.

    `on` says which device is current there. A new thread's device is the first, and CUDA would open a context on it.
    `keep_alive` is referenced until the call returns, whatever becomes of the future and of the loop.
    `discard(result)` is called in the thread if the future was cancelled, or the loop closed, before it had the result.
    """
    future: asyncio.Future[T] = loop.create_future()
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def answer(result: Any, error: BaseException | None) -> None:
        answers.put(not future.done())
        settle(future, result, error)

    def run() -> None:
        result, failure, _kept = None, None, keep_alive
        try:
            on[0].set_device(on[1])
            result = function(*arguments)
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(answer, result, failure)
        if discard is not None and failure is None and not _is_taken(loop, answers):
            with contextlib.suppress(DistBackendError):
                discard(result)  # type: ignore[arg-type]

    threading.Thread(target=run, name=f"asyncdist gpu {getattr(function, '__name__', '')}", daemon=True).start()
    return future


def _is_taken(loop: asyncio.AbstractEventLoop, answers: queue.SimpleQueue[bool]) -> bool:
    """In a thread: whether the loop took the result. The loop says so in `answers` unless it is closed."""
    while True:
        closed = loop.is_closed()
        try:
            return answers.get(timeout=0 if closed else CLOSED_LOOK_S)
        except queue.Empty:
            if closed:
                return False


async def made_in_thread(
    loop: asyncio.AbstractEventLoop,
    function: Callable[..., T],
    *arguments: Any,
    on: tuple[Runtime, int],
    discard: Callable[[T], object],
) -> T:
    """What `function(*arguments)` makes in a thread of its own.

    If the caller is cancelled, the result is discarded in a thread as soon as there is one.
    """
    future = in_thread(loop, function, *arguments, on=on, discard=discard)
    try:
        return await future
    except BaseException:
        discard_made(future, on, discard)
        raise


def discard_made(future: asyncio.Future[T], on: tuple[Runtime, int], discard: Callable[[T], object]) -> None:
    """Discard what `in_thread(..., discard=discard)` makes, or has made."""
    loop = future.get_loop()
    if future.done():
        if not future.cancelled() and future.exception() is None:
            in_thread(loop, discard, future.result(), on=on).add_done_callback(_is_over)
    elif not loop.is_closed():  # else the thread sees that
        future.cancel()


def _is_over(future: asyncio.Future[Any]) -> None:
    """Read the failure, so that asyncio does not complain: nothing is left to be done about it."""
    if not future.cancelled():
        future.exception()


class Helpers:
    """Calls in threads that are under way. Only their end matters; Helpers keeps alive what they need."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on: tuple[Runtime, int]) -> None:
        self.loop = loop
        self.on = on
        self._futures: set[asyncio.Future[Any]] = set()

    def start(self, function: Callable[..., object], *arguments: Any, keep_alive: object = None) -> None:
        """Call `function` in a thread. What it raises is dropped: nothing is left to be done about it."""
        self.keep(in_thread(self.loop, function, *arguments, on=self.on, keep_alive=keep_alive))

    def keep(self, future: asyncio.Future[Any]) -> None:
        """Wait for this future as well. Its failure is dropped too."""
        self._futures.add(future)
        future.add_done_callback(self._ended)

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._futures.discard(future)
        _is_over(future)

    async def wait(self, timeout_s: float) -> None:
        """Wait until all have ended, at most `timeout_s`; then cancel the futures of the others.

        Their threads go on, with what they keep alive: the GPU may still use it.
        """
        if self._futures:
            _, late = await asyncio.wait(set(self._futures), timeout=timeout_s)
            for future in late:
                future.cancel()


def close_all(*resources: Resource) -> None:
    """Close all of them. Failures are dropped: CUDA reports here, as in any call, what has failed before."""
    for resource in resources:
        with contextlib.suppress(DistBackendError):
            resource.close()


def close_behind(runtime: Runtime, device: int, streams: Iterable[Stream], used: Iterable[Resource]) -> None:
    """Close `streams`, and what they may still use, once they are through. Blocks: for a thread of its own.

    `device` becomes the thread's current device. By default CUDA would open a context on the first device as well.
    """
    with contextlib.suppress(DistBackendError):
        runtime.set_device(device)
    for stream in streams:
        with contextlib.suppress(DistBackendError):  # it does nothing any more
            stream.synchronize()
        close_all(stream)
    close_all(*used)
