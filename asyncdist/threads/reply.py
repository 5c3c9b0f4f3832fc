"""Reply: what a thread waits for that asked the communication thread something."""

from __future__ import annotations

import _thread
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from asyncdist.concurrency.trace import shorten_if_uncaught
from asyncdist.errors import DistError

if TYPE_CHECKING:
    from asyncdist.threads.thread import CommunicationThread

__all__ = ["LIVENESS_S", "Reply"]

T = TypeVar("T")

LIVENESS_S: Final = 1.0
"""How often a thread that waits makes sure that there still is somebody to wait for."""


class Reply(Generic[T]):
    """A result or an exception to come, for one waiting thread. Two context switches, and nothing else, on top."""

    __slots__ = ("_error", "_lock", "_result", "_worker")

    def __init__(self, worker: CommunicationThread) -> None:
        self._worker = worker
        self._lock = _thread.allocate_lock()
        self._lock.acquire()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self, function: Callable[..., T], arguments: tuple[Any, ...] = ()) -> None:
        """Answer with what `function(*arguments)` returns or raises; called by the worker."""
        try:
            self._result = function(*arguments)
        except BaseException as error:
            self._error = error
        self._lock.release()

    def set(self, result: T | None, error: BaseException | None = None) -> None:
        """Answer; called by the worker, at most once."""
        self._result = result
        self._error = error
        self._lock.release()

    def wait(self) -> T:
        """Wait for the answer; Ctrl-C interrupts. Raises what the answer is, or ClosedError when none can come."""
        while not self._lock.acquire(timeout=LIVENESS_S):
            self._worker.check()
        if self._error is not None:
            if isinstance(self._error, DistError):
                self._error.__traceback__ = None  # raised on purpose: nobody asks where in the other thread
                shorten_if_uncaught(self._error)
            try:
                raise self._error
            finally:
                self._error = None  # it refers to this frame, and so to us
        return self._result  # type: ignore[no-any-return]
