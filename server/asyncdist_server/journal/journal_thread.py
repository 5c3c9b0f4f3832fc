"""The one thread that uses the journal, so that a slow disk delays answers and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from asyncdist_server.journal.journal import JournalError

Outcome = Callable[[Any, BaseException | None], None]


class JournalThread:
    """Runs functions one after the other, in the order in which they were given; started with the first of them.

    `close` comes last. Functions not yet run then are still run, whether or not the loop is still there.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Outcome] | None] = queue.SimpleQueue()
        self._ended = False
        threading.Thread(target=self._run, name="asyncdist-journal", daemon=True).start()

    def submit(self, function: Callable[[], Any], outcome: Outcome) -> None:
        """Have `function` run; `outcome` is called in the loop with its result, or with the exception it raised."""
        self._waiting.put((function, outcome))

    async def call(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns. Cancelling ends the waiting, not the function."""
        future: asyncio.Future[Any] = self._loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

        self.submit(function, settle)
        return await future

    def run_waiting(self) -> None:
        """Run what waits now. To be called from a function that takes long.

        Raises `JournalError` if one of them fails: after that nothing may use the journal any more.
        """
        while not self._ended:
            try:
                job = self._waiting.get_nowait()
            except queue.Empty:
                return
            error = self._do(job)
            if error is not None:
                raise JournalError(f"the journal failed meanwhile: {error}") from error

    def close(self) -> None:
        """End the thread after what it was given. Waits for nothing: the disk may hang."""
        self._waiting.put(None)

    def _run(self) -> None:
        while not self._ended:
            self._do(self._waiting.get())

    def _do(self, job: tuple[Callable[[], Any], Outcome] | None) -> BaseException | None:
        if job is None:
            self._ended = True
            return None
        function, outcome = job
        result: Any = None
        error: BaseException | None = None
        try:
            result = function()
        except BaseException as problem:
            error = problem
        with contextlib.suppress(RuntimeError):  # the loop is closed, as somebody was tired of waiting
            self._loop.call_soon_threadsafe(outcome, result, error)
        return error
