"""Work: an operation of torch's, made of those of asyncdist that carry it out; and how a coroutine waits for any Work.

torch's futures call back in the thread that completes them. What they call may wait for further operations, as hooks of
DistributedDataParallel do, so that it must never be the communication thread: `callbacks` runs it.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as PlainFuture
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from asyncdist import blocking
from asyncdist.errors import CollectiveTimeoutError, DistError

NO_TIMEOUT: Final = timedelta(0)
"""What torch passes where no time-out is given."""
MAX_CALLBACK_THREADS: Final = 64
"""Callbacks that may wait for each other's operations at one time; threads are made as they are needed."""
POLL_S: Final = (50e-6, 1e-3)
"""How often `wait` asks a Work of another backend: at first, and in the end."""

callbacks: Final = ThreadPoolExecutor(MAX_CALLBACK_THREADS, "asyncdist torch callback")
"""Where futures complete. A thread starts with the first of them."""


TIMED_OUT: Final = "asyncdist: Timed out waiting for other ranks"
"""How gloo's message begins, which programs look for."""


def in_torch_words(error: DistError, words: str) -> DistError:
    """The same error, with words before its message that programs for torch look for."""
    told = copy.copy(error)
    told.args = (f"{words}: {error}",)
    return told


@contextmanager
def outside_loop() -> Iterator[None]:
    """Let this thread wait even inside a running event loop, which stands still meanwhile: as torch's Works do."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)


class Work(dist.Work):  # type: ignore[misc] # torch is not typed here
    """An operation issued through torch.distributed. Errors are asyncdist's and are raised by `wait`."""

    def __init__(
        self,
        works: Sequence[blocking.Work[Any]],
        tensors: Any,
        finish: Callable[[list[Any]], None] | None = None,
    ) -> None:
        """`finish(results)` turns what the operations return into the contents of `tensors`, once."""
        super().__init__()
        self._works = works
        self._tensors = tensors
        self._finish = finish
        self._recorded: PlainFuture[None] | None = None
        self._mutex = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for the end; True, or raise what went wrong. An expired `timeout` ends only the waiting."""
        limit_s = timeout.total_seconds()
        end_s = time.monotonic() + limit_s if limit_s > 0 else None
        try:
            for work in self._works:
                left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
                if work.is_completed() or asyncio._get_running_loop() is None:
                    work.wait(left_s)
                else:
                    with outside_loop():
                        work.wait(left_s)
        except CollectiveTimeoutError as error:
            raise in_torch_words(error, TIMED_OUT) from None
        if self._recorded is not None:
            self._recorded.result()
        if self._finish is not None:
            with self._mutex:
                if self._finish is not None:
                    self._finish([work.result() for work in self._works])
                    self._finish = None
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether the operation has ended well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """What went wrong with an operation that has ended, or None."""
        return next((work.exception() for work in self._works if work.is_completed() and not work.is_success()), None)

    def result(self) -> Any:
        """Wait, and return the tensors."""
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """The group rank that a receive got its message from."""
        if not self._works:
            raise RuntimeError("only a receive has a source rank")
        return self._works[0].source_rank()

    _source_rank = source_rank

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback()` at the end, in any thread; it must not wait."""
        left = len(self._works)
        if not left:
            callback()

        def ended(_work: object) -> None:
            nonlocal left
            with self._mutex:
                left -= 1
                last = not left
            if last:
                callback()

        for work in self._works:
            work.add_done_callback(ended)

    def record(self, records: list[Any]) -> None:
        """End a profiler's record, the only one in `records`, with the operation, and in another thread.

        It is told from synchronous ones by that, and by nothing else that torch lets Python say. The record ends where
        it is let go, so nothing else may refer to it.
        """
        recorded: PlainFuture[None] = PlainFuture()
        self._recorded = recorded

        def end() -> None:
            records.pop().__exit__(None, None, None)
            recorded.set_result(None)

        self.add_done_callback(lambda: callbacks.submit(end))

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors; it fails as `wait` does."""
        if self._future is None:
            ended: torch.futures.Future[None] = torch.futures.Future()
            # A future that fails by `set_exception` ends the process in DistributedDataParallel's backward; one whose
            # callback raises does not.
            self._future = ended.then(lambda _ended: self.result())
            if self._works:
                self.add_done_callback(lambda: callbacks.submit(ended.set_result, None))
            else:
                ended.set_result(None)
        return self._future


async def wait(work: Any) -> bool:
    """Wait for a Work of torch.distributed in a coroutine; True, or raise what `work.wait()` raises.

    Works of backend "asyncdist" wake the event loop; those of other backends are asked again and again, at last once a
    millisecond. Cancelling ends only the waiting. For CUDA tensors of NCCL the operation is over then, not only queued.
    """
    if isinstance(work, Work):
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ended.done():
                ended.set_result(None)

        work.add_done_callback(lambda: loop.call_soon_threadsafe(wake))
        await ended
    else:
        pause_s, longest_s = POLL_S
        while not work.is_completed():
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
    return bool(work.wait())
