"""What ordinary threads hold of an operation under way: its `Work`, or the `ChunkStream` of its chunks."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from asyncdist.concurrency.deadline import timeout_seconds
from asyncdist.errors import ClosedError, WaitTimeoutError
from asyncdist.threads.bridge import ItemsThere
from asyncdist.threads.thread import Reply
from asyncdist.transport.protocol.operations import anew
from asyncdist.work import Work as InnerWork

if TYPE_CHECKING:
    from asyncdist.blocking.group import Session

T = TypeVar("T")

SHORT_BYTES: Final = 64 << 10
"""What the communication thread is not woken for at once. A host of today moves so much in some 20 us, and being woken,
and having the lock taken away from it, costs the caller as much."""


def refuse_loop(name: str) -> None:
    """Raise RuntimeError inside a running event loop, which waiting would stop."""
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(
            f"asyncdist.blocking.{name} was called inside a running event loop, which it would stop: "
            f"use asyncdist.{name} there, and await it"
        )


class Work(Generic[T]):
    """An operation, issued when the call returned. Any number of threads may wait for it.

    Until it is done, the arrays it was given belong to it: do not touch them. What went wrong is raised by `wait`, with
    its own type, in each thread that waits; a failure nobody asked about is raised by `destroy_process_group`.
    """

    __slots__ = ("_callbacks", "_done", "_inner", "_issued_at", "_mutex", "_replies", "_session")

    _issued_at: tuple[str, int, str | None]
    """See the Work of the asynchronous API."""

    def __init__(self, session: Session, inner: InnerWork[T]) -> None:
        """Called in the communication thread, as long as nobody else knows `inner`."""
        self._session = session
        self._inner = inner
        self._mutex = _thread.allocate_lock()
        self._replies: list[Reply[bool]] = []
        self._callbacks: list[Callable[[Work[T]], object]] = []
        self._done = inner._done
        if not self._done:
            inner._listener = self

    @property
    def where(self) -> str:
        """The beginning of every message about this operation."""
        return self._inner.where

    @property
    def _short(self) -> bool:
        """Whether it takes no longer, as a rule, than the communication thread may leave it alone."""
        return self._inner.nbytes <= SHORT_BYTES and self._inner.on_device is None

    @property
    def _retrieved(self) -> bool:
        return self._inner._retrieved

    def work_ended(self) -> None:
        """Called by the operation at its end, in the communication thread."""
        with self._mutex:
            self._done = True
            replies, self._replies = self._replies, []
            callbacks, self._callbacks = self._callbacks, []
        if replies:
            self._inner._retrieved = True  # they will be told
        for reply in replies:
            reply.set(True)
        for callback in callbacks:
            self._inner._loop.call_soon(self._tell, callback)
            self._session.thread.progress_lock.owe_turn()

    def _tell(self, callback: Callable[[Work[T]], object]) -> None:
        try:
            callback(self)
        except BaseException as error:  # sys.exit() would end the thread, and with it everybody's worlds
            context = {"message": f"in a callback of {self!r}", "exception": error}
            self._inner._loop.call_exception_handler(context)

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait until the operation has ended; True, or raise what went wrong.

        `timeout` (seconds or a timedelta) bounds only the waiting: WaitTimeoutError leaves the operation as it is. So
        does Ctrl-C; but `destroy_process_group` aborts rather than waits for one whose waiting was interrupted.
        """
        timeout_s = None if timeout is None else timeout_seconds(timeout, None)
        if not self._done:
            refuse_loop("Work.wait")
            reply: Reply[bool] = Reply(self._session.thread)
            try:
                if not (
                    self._wait_with(reply) or reply.wait(timeout_s, lambda: self._inner) or self._stop_waiting(reply)
                ):
                    raise self._session.thread.call(self._inner.late, timeout_s)
            except BaseException as error:
                self._stop_waiting(reply)
                if not isinstance(error, WaitTimeoutError | ClosedError):
                    self._session.interrupted.add(self._inner)
                raise
        self._outcome()
        return True

    def _wait_with(self, reply: Reply[bool]) -> bool:
        """Have `reply` answered at the end; True if that has come already."""
        with self._mutex:
            if not self._done:
                self._replies.append(reply)
            return self._done

    def _stop_waiting(self, reply: Reply[bool]) -> bool:
        """Nobody waits for `reply`, and nobody will be told; True if the end has come."""
        with self._mutex:
            if reply in self._replies:
                self._replies.remove(reply)
            return self._done

    def _outcome(self) -> T:
        error = self._inner._error
        if error is not None:
            self._inner._retrieved = True
            raise anew(error)
        return self._inner._result  # type: ignore[return-value]

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not."""
        return self._done

    done = is_completed

    def is_success(self) -> bool:
        """Whether the operation has ended well."""
        return self._done and self._inner._error is None

    def result(self) -> T:
        """Wait, and return the result (the output array; the source rank of a receive) or raise what went wrong."""
        self.wait()
        return self._outcome()

    def exception(self) -> BaseException | None:
        """Wait, and return what went wrong, or None."""
        try:
            self.wait()
        except Exception:
            if self._inner._error is None:
                raise
        return self._inner._error

    def add_done_callback(self, callback: Callable[[Work[T]], object]) -> None:
        """Call `callback(work)` once the operation has ended, in the thread that makes the progress; here, if it has.

        That is the communication thread or one that waits for something. In the callback nothing may be waited for, or
        all operations stand still: what would wait raises RuntimeError. Hand over what takes long, for example to a
        `queue.Queue`. What the callback raises there is logged.
        """
        with self._mutex:
            done = self._done
            if not done:
                self._callbacks.append(callback)
        if done:
            callback(self)
        else:
            self._session.thread.progress_lock.hurry()

    def source_rank(self) -> int:
        """The rank a receive got its message from. Raises RuntimeError for anything but a completed receive."""
        return self._inner.source_rank()

    def cancel(self) -> bool:
        """Withdraw a send or receive that has not matched; True if it was withdrawn. False for all else."""
        return not self._done and self._session.thread.call(self._inner.cancel)

    def wait_stream(self, stream: Any = None) -> None:
        """Let what is queued on a CUDA stream from now on wait for an operation on GPU arrays, as torch's `wait` does.

        By default the stream is this thread's current one of cupy. Waits until the operation is queued on the GPU, not
        for its end. Raises what went wrong if it has failed; RuntimeError for operations on host arrays.
        """
        inner = self._inner
        if not self._done and inner.on_device is not None:
            refuse_loop("Work.wait_stream")
            reply: Reply[bool] = Reply(self._session.thread)
            if not self._wait_with(reply):
                try:
                    self._session.thread.call(inner.on_device.when_queued, lambda: self._queued(reply))
                    reply.wait()
                finally:
                    self._stop_waiting(reply)
        inner.wait_stream(stream)

    def _queued(self, reply: Reply[bool]) -> None:
        """In the communication thread: the operation is on the GPU's queues."""
        with self._mutex:
            if reply in self._replies:  # else its end was sooner
                self._replies.remove(reply)
                reply.set(True)

    def __repr__(self) -> str:
        return repr(self._inner)


class ChunkStream(ItemsThere[Any]):
    """A collective under way, to be iterated over once: `for chunk in stream`. See `asyncdist.ChunkStream`.

    `work` is the operation's `Work`. Ctrl-C ends only the waiting for a chunk: none is lost.
    """

    _bridge: Session

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """The next chunk; raises what ended the operation."""
        if not self._arrived:
            refuse_loop("ChunkStream")
            try:
                self._bridge.complete(self._next)
            except StopAsyncIteration:
                raise StopIteration from None
        return self._arrived.popleft()

    def close(self) -> None:
        """Take no more chunks: the rest comes in the background, until `work` is done."""
        refuse_loop("ChunkStream.close")
        self._arrived.clear()
        with contextlib.suppress(ClosedError):  # its world was closed before, and with it the stream
            self._bridge.complete(self._close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
