"""ThreadWork: a Work of the caller's event loop, for an operation that the communication thread carries out."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any, TypeVar

from asyncdist.errors import ClosedError, WaitTimeoutError
from asyncdist.messages.work import RecvWork
from asyncdist.threads.thread import CommunicationThread
from asyncdist.work import Work

T = TypeVar("T")


class Courier:
    """Brings ends of operations from the communication thread to one event loop, one wake-up for all that is there."""

    def __init__(self, thread: CommunicationThread, loop: asyncio.AbstractEventLoop) -> None:
        self.thread = thread
        self.loop = loop
        self._ended: deque[ThreadWork[Any]] = deque()
        self._awake = False

    def bring(self, work: ThreadWork[Any]) -> None:
        """`work`'s operation has ended; called by the communication thread."""
        self._ended.append(work)
        if not self._awake:
            self._awake = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._awake = False
        while self._ended:
            self._ended.popleft().deliver()


class ThreadWork(Work[T]):
    """As the Work of the operation itself, `inner`, which lives in the communication thread."""

    __slots__ = ("_asked", "_courier", "_given_back", "_inner")

    def __init__(self, courier: Courier, operation: str, nbytes: int = 0) -> None:
        self._courier = courier
        self._inner: Work[T] | None = None
        self._asked = False
        self._given_back = False
        super().__init__(courier.loop, operation, nbytes)

    # Whether somebody has asked about a failure is for the operation's group to know, when it closes.

    @property
    def _retrieved(self) -> bool:
        return self._asked

    @_retrieved.setter
    def _retrieved(self, asked: bool) -> None:
        self._asked = asked
        if asked and self._inner is not None:
            self._inner._retrieved = True

    # In the communication thread.

    def follow(self, inner: Work[T]) -> ThreadWork[T]:
        """Bring the end of `inner` to our loop; returns ourselves."""
        self._inner = inner
        self.sequence = inner.sequence
        if inner._done:
            self.work_ended()
        else:
            inner._listener = self
        return self

    def adopt(self, inner: Work[T]) -> ThreadWork[T]:
        """As `follow`, for a Work that nobody has seen yet: what has ended already is done at once."""
        if not inner._done:
            return self.follow(inner)
        self._inner = inner
        self.sequence = inner.sequence
        self.deliver()
        return self

    def work_ended(self) -> None:
        """`inner` has ended (see `Listener`). Somebody knows of its failure if somebody waits for us."""
        inner = self._inner
        assert inner is not None
        if self._asked or self._waiters:
            inner._retrieved = True
        self._courier.bring(self)

    def refuse(self, error: BaseException) -> None:
        """The operation could not be issued."""
        failed: Work[T] = Work(self._courier.thread.loop, self.operation, self.nbytes)
        failed._fail(error)
        self._inner = failed
        self._courier.bring(self)

    def _give_up(self) -> None:
        """The last waiter has gone: withdraw what may be withdrawn; a message that has come is kept for the next."""
        inner = self._inner
        if inner is None:
            return
        if inner._done:
            self._given_back = isinstance(inner, RecvWork) and inner.give_back()
        else:
            inner._abandoned()

    # In the caller's.

    def deliver(self) -> None:
        """Take over how `inner` has ended."""
        inner = self._inner
        if self._done or inner is None:
            return
        if self._waiters and isinstance(inner, RecvWork) and all(waiter.cancelled() for waiter in self._waiters):
            with contextlib.suppress(ClosedError):  # the message comes on the heels of a cancellation
                self._courier.thread.call(self._give_up)
        self.nbytes = inner.nbytes
        self._source = inner._source
        if self._given_back:
            self._asked = True
            self._fail(self._withdrawn())
        elif inner._error is not None:
            if self._waiters:
                inner._retrieved = True  # they will be told, if perhaps after the group has closed
            self._fail(inner._error)
        else:
            self._finish(inner._result)
        self.entry = inner.entry

    @property
    def where(self) -> str:
        """See `Work.where`."""
        return super().where if self._inner is None else self._inner.where

    def late(self, timeout_s: float) -> WaitTimeoutError:
        """See `Work.late`; only the communication thread knows what is missing."""
        return self._courier.thread.call(lambda: super(ThreadWork, self).late(timeout_s))

    def waiting_for(self) -> tuple[int, ...]:
        """See `Work.waiting_for`; called in the communication thread."""
        return () if self._inner is None else self._inner.waiting_for()

    def cancel(self) -> bool:
        """See `Work.cancel`; decided in the communication thread, which this waits for."""
        inner = self._inner
        if self._done or inner is None:
            return False
        try:
            withdrawn = self._courier.thread.call(inner.cancel)
        except ClosedError:
            return False
        if withdrawn:
            self.deliver()
        return withdrawn

    def wait_stream(self, stream: Any = None) -> None:
        """See `Work.wait_stream`; the current stream is this thread's."""
        if self._inner is None:
            self._courier.thread.call(_nothing)  # what was issued before has come there then
        if not self._done and self._inner is not None:
            self.on_device = self._inner.on_device
        super().wait_stream(stream)

    async def enqueued(self) -> None:
        queued = asyncio.Event()
        self.add_done_callback(lambda _work: queued.set())
        loop = self._courier.loop

        def ask() -> None:
            tail = None if self._inner is None else self._inner.on_device
            if tail is None:
                loop.call_soon_threadsafe(queued.set)
            else:
                tail.when_queued(lambda: loop.call_soon_threadsafe(queued.set))

        if not self._done:
            self._courier.thread.call(ask)
            await queued.wait()

    def _has_ended(self) -> bool:
        if self._inner is not None and self._inner._done:
            self.deliver()
        return self._done

    def _abandoned(self) -> None:
        inner = self._inner
        if inner is None or type(inner)._abandoned is Work._abandoned:
            return
        with contextlib.suppress(ClosedError):
            self._courier.thread.call(self._give_up)
        if inner._done:
            self.deliver()

    def _unnoticed(self) -> None:
        with contextlib.suppress(ClosedError):
            self._courier.thread.call(self._give_up)
        if self._given_back:
            self._source = None
            self._asked = True
            self._error = self._withdrawn()

    def _untold(self) -> None:
        with contextlib.suppress(ClosedError):
            self._courier.thread.call(self._untold_there)

    def _untold_there(self) -> None:
        if self._inner is not None:
            self._inner._retrieved = False
            self._inner._untold()

    def _withdrawn(self) -> ClosedError:
        return ClosedError(f"{self.where}: was withdrawn")


def _nothing() -> None:
    return
