"""The one thread that uses the journal, so that a slow disk delays answers and nothing else.

And its failpoints, at which a test lets the daemon die as in a power cut: ASYNCDIST_SERVER_FAILPOINT=name:count kills
the process when it passes that place for the `count`-th time. Unset, as in every real daemon, a place costs a
comparison.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import queue
import signal
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

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
        with contextlib.suppress(RuntimeError):  # the loop was closed before the journal was
            self._loop.call_soon_threadsafe(outcome, result, error)
        return error


FAILPOINT_VARIABLE: Final = "ASYNCDIST_SERVER_FAILPOINT"
FAILPOINTS: Final = ("begun", "written", "committed", "checkpointed", "backed-up")
"""Before a batch is written, before its commit, before anyone is told; after a checkpoint; before a backup is named."""

_passed: Counter[str] = Counter()


@functools.cache
def _wanted() -> tuple[str, int]:
    name, _, count = os.environ.get(FAILPOINT_VARIABLE, "").partition(":")
    return name, int(count or 1)


def failpoint(name: str) -> None:
    """Die here if that is what a test asked for."""
    wanted, count = _wanted()
    if name == wanted:
        _passed[name] += 1
        if _passed[name] == count:
            os.kill(os.getpid(), signal.SIGKILL)
