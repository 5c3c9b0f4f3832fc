"""CommunicationThread: the thread of a process that runs transport and reductions while no thread waits for them.

It is started when the first world needs it and ends with the last one. Everything that concerns a world of the thread
happens on its event loop, in the order in which `submit` and `call` were called. What happens there never waits for
another thread, so that any thread may wait for it.

A thread without an event loop waits in `Reply.wait` and nowhere else. It runs the loop itself there, if it finds the
`ProgressLock` free.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401 - what it does at the program's end must come after what we do then
import contextlib
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, Generic, TypeVar

from asyncdist.concurrency.trace import shorten_if_uncaught
from asyncdist.errors import ClosedError, DistError
from asyncdist.threads.progress_lock import ProgressLock
from asyncdist.work import Work

T = TypeVar("T")

SWITCH_INTERVAL_S: Final = 1e-4
"""The interpreter's switch interval while the thread runs. It is how long Python code beside it may keep the GIL, which
the thread needs again after every read of 64 KiB; with the default of 5 ms receiving is forty times slower beside a
loop of pure Python."""
LIVENESS_S: Final = 1.0
"""How often a thread that waits makes sure that there still is somebody to wait for."""
STOP_S: Final = 5.0
"""How long the end of the thread is waited for: nothing is left to do then but to cancel what was forgotten."""
EXIT_CLOSE_S: Final = 10.0
"""How long leaving may take at the end of a program that did not: peers get their messages, but cannot keep it here."""


class CommunicationThread:
    """An event loop (uvloop where installed) in a daemon thread. Made by `acquire`."""

    def __init__(self, switch_interval_s: float | None) -> None:
        self.progress_lock = ProgressLock()
        self.loop: asyncio.AbstractEventLoop = self.progress_lock.loop
        self.users = 0
        self.at_exit: dict[object, Callable[[BaseException | None], Coroutine[Any, Any, None]]] = {}
        """What leaves each open world at the end of the program, given the exception that ended it, if any."""
        self._switch_interval_s = switch_interval_s
        self._previous_s: float | None = None
        self._submitted: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._context = Context()  # a timer of ours would keep what is in a caller's for as long as it takes
        self._awake = False
        self._pid = os.getpid()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="asyncdist communication", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs, in this process."""
        return self._thread.is_alive() and self._pid == os.getpid()

    def is_current(self) -> bool:
        """Whether the caller runs the loop: what it needs done there, it does."""
        return self.progress_lock.is_mine()

    def take(self) -> bool:
        """Take the lock, as `ProgressLock.take`; what was submitted or called before has had its turn then."""
        if not self.progress_lock.take():
            return False
        if self._submitted or self.progress_lock.turn_due:
            try:
                self._work_off()
                self.progress_lock.run_once()
            except BaseException:  # a handler of a signal that is not put off raises
                self.progress_lock.give()
                raise
        return True

    def submit(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call `function(*arguments)`, which must not raise, on the thread, after all that was submitted before.

        Any thread may call it. Raises ClosedError once the thread has ended and in a forked child.
        """
        if self._pid != os.getpid():
            raise self._gone()
        self._submitted.append((function, arguments))
        if not self._awake:
            self._awake = True
            try:
                self.loop.call_soon_threadsafe(self._work_off, context=self._context)
            except BaseException as error:
                self._awake = False  # so that the next is told as well, or after Ctrl-C wakes the thread
                if isinstance(error, RuntimeError):
                    raise self._gone() from None
                raise

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """As `submit`, and wait for the result; what `function` raises is raised here."""
        if self.is_current():
            return function(*arguments)
        if self.take():
            try:
                result = function(*arguments)
                done = getattr(result, "_done", None)
                if done is None:  # it was no operation: to withdraw one, perhaps
                    self.progress_lock.owe_turn()
                elif not done:
                    self.progress_lock.owe(result if getattr(result, "_short", False) else None)  # type: ignore[arg-type]
                return result
            finally:
                self.progress_lock.give()
        reply: Reply[T] = Reply(self)
        self.submit(reply.run, function, arguments)
        return reply.wait()

    def ask(self, function: Callable[..., T], *arguments: Any) -> T:
        """As `call`, for a function that begins nothing and changes nothing."""
        if self.is_current() or not self.take():
            return self.call(function, *arguments)
        try:
            return function(*arguments)
        finally:
            self.progress_lock.give()

    def start_task(
        self, coroutine: Coroutine[Any, Any, T], context: Context, done: Callable[[asyncio.Task[T]], object]
    ) -> asyncio.Task[T]:
        """Run `coroutine` as a task of the thread in `context`; `done(task)` is called there at its end."""
        task = self.loop.create_task(coroutine, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(done)
        return task

    def check(self) -> None:
        """Raise ClosedError unless the thread runs, in this process."""
        if not self.alive:
            raise self._gone()

    def _gone(self) -> ClosedError:
        if self._pid != os.getpid():
            return ClosedError("the communication thread belongs to the process that this one was forked from")
        return ClosedError("the communication thread has ended")

    def _work_off(self) -> None:
        self._awake = False
        submitted = self._submitted
        while submitted:
            function, arguments = submitted.popleft()
            self.progress_lock.do(function, *arguments)

    # Start and end

    def start(self) -> None:
        """Start the thread; the switch interval changes from now on."""
        self._previous_s = sys.getswitchinterval()
        if self._switch_interval_s is not None and self._switch_interval_s < self._previous_s:
            sys.setswitchinterval(self._switch_interval_s)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, waiting at most STOP_S (not from the thread itself), and put the switch interval back.

        Unless others have changed that.
        """
        self.loop.call_soon_threadsafe(self._stop)
        if not self.is_current():
            self._thread.join(STOP_S)
        changed = abs(sys.getswitchinterval() - (self._switch_interval_s or 0.0)) < 1e-9
        if changed and self._previous_s is not None:
            sys.setswitchinterval(self._previous_s)

    def _stop(self) -> None:
        if not self.progress_lock.stopping:  # else what ends there now would be stopped
            self.progress_lock.stopping = True
            self.loop.stop()

    def _run(self) -> None:
        try:
            self.progress_lock.run_in_background()
        finally:
            self.progress_lock.stopping = True
            ending = self.loop.create_task(self._end())
            ending.add_done_callback(lambda _ending: self.loop.stop())
            while not ending.done():  # somebody may have stopped the loop to ask for the lock
                self.progress_lock.run()
            self.progress_lock.end()

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.loop.shutdown_asyncgens()
        with contextlib.suppress(RuntimeError):  # Python 3.12.0 to 3.12.2 start no thread at the end of a program
            await self.loop.shutdown_default_executor()


class Reply(Generic[T]):
    """A result or an exception to come, for one thread, which makes the progress itself if it can."""

    __slots__ = ("_error", "_lock", "_result", "_thread", "answered")

    def __init__(self, thread: CommunicationThread) -> None:
        self._thread = thread
        self.answered = False
        self._lock = _thread.allocate_lock()
        self._lock.acquire()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self, function: Callable[..., T], arguments: tuple[Any, ...] = ()) -> None:
        """Answer with what `function(*arguments)` returns or raises; called with the lock."""
        try:
            result = function(*arguments)
        except BaseException as error:
            self.set(None, error)
        else:
            self.set(result)

    def set(self, result: T | None = None, error: BaseException | None = None) -> None:
        """Answer; called with the lock, at most once."""
        self._result = result
        self._error = error
        self.answered = True
        self.rouse()
        self._thread.progress_lock.answered(self)

    def rouse(self) -> None:
        """See `Awaited`."""
        with contextlib.suppress(RuntimeError):  # it has been roused already
            self._lock.release()

    def wait(self, timeout_s: float | None = None, begin: Callable[[], Work[Any] | None] | None = None) -> T:
        """Wait for the answer; raises what the answer is. None if it does not come in time. Ctrl-C interrupts.

        `begin()` is called before, with the lock. It must not raise, and may return a Work whose end is the answer:
        that one's spinner looks for it. Raises ClosedError when no answer can come.
        """
        thread, end_s = self._thread, math.inf if timeout_s is None else time.monotonic() + timeout_s
        while begin is not None or not self.answered:
            if thread.take():
                try:
                    work = None if begin is None else begin()
                    begin = None
                    if not self.answered and (work is None or not look_for(work)):
                        self.run_loop(work, end_s)
                finally:
                    thread.progress_lock.give()
            else:
                if begin is not None:
                    thread.submit(begin)
                    begin = None
                thread.progress_lock.wait_for(self, lambda: self._lock.acquire(timeout=min(LIVENESS_S, _until(end_s))))
            if not self.answered:
                if time.monotonic() >= end_s:
                    return None  # type: ignore[return-value]
                thread.check()
        if self._error is not None:
            try:
                raise from_here(self._error)
            finally:
                self._error = None  # it refers to this frame, and so to us
        return self._result  # type: ignore[no-any-return]

    def run_loop(self, work: Work[Any] | None, end_s: float = math.inf) -> None:
        """With the lock: run the loop for the answer, until `end_s`; it may be the end of `work`."""
        self._thread.progress_lock.run_until(self, _until(end_s))
        if work is not None and work._spinner is not None:
            work._spinner.woken()


def from_here(error: BaseException) -> BaseException:
    """`error`, to be raised in the thread that called: one of ours is raised on purpose, and nobody asks where."""
    if isinstance(error, DistError):
        error.__traceback__ = None
        shorten_if_uncaught(error)
    return error


def look_for(work: Work[Any]) -> bool:
    """With the lock: look for the end of `work` without running the loop, as awaiting it does; whether it has come."""
    spinner = work._spinner
    if work._done or spinner is None or not spinner.look(work):
        return work._done
    spinner.turn_due()  # our next call will look again, and turns are the lock's business
    return True


def _until(end_s: float) -> float:
    return max(0.0, end_s - time.monotonic())


_lock = threading.Lock()
_current: CommunicationThread | None = None
_forked: list[CommunicationThread] = []
_hooked = False


def acquire() -> CommunicationThread:
    """Return the process's communication thread, started if need be; each call is matched by one of `release`.

    Raises ValueError for a bad ASYNCDIST_SWITCH_INTERVAL.
    """
    global _current, _hooked
    with _lock:
        if _current is None or not _current.alive:
            thread = CommunicationThread(_switch_interval_s())
            if not _hooked:
                _hooked = True
                os.register_at_fork(after_in_child=_forget)
                # Before executors are shut down, whose helpers leaving needs; atexit's functions come after that.
                getattr(threading, "_register_atexit", atexit.register)(_leave_at_exit)
            thread.start()
            _current = thread
        _current.users += 1
        return _current


def release(thread: CommunicationThread) -> None:
    """A world of `thread` is closed; the last one ends it."""
    global _current
    if thread._pid != os.getpid():
        return
    with _lock:
        thread.users -= 1
        if thread.users == 0:
            if thread is _current:
                _current = None
            thread.stop()


def _switch_interval_s() -> float | None:
    """ASYNCDIST_SWITCH_INTERVAL in seconds; None where it says 0: leave the interpreter's as it is."""
    text = os.environ.get("ASYNCDIST_SWITCH_INTERVAL", "")
    if not text:
        return SWITCH_INTERVAL_S
    try:
        interval_s = float(text)
    except ValueError:
        interval_s = -1.0
    if not 0 <= interval_s < float("inf"):
        raise ValueError(f"environment variable ASYNCDIST_SWITCH_INTERVAL is not a number of seconds: {text!r}")
    return interval_s or None


def _forget() -> None:
    """In a forked child the thread does not exist. Its loop must not be touched: the kernel shares its epoll set."""
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _current.progress_lock.forget()
        _forked.append(_current)  # kept for ever, as the destructor of an event loop closes it
        _current = None


def _leave_at_exit() -> None:
    """The program ends without having closed its worlds: leave them, in order or with the exception that ends it."""
    thread = _current
    if thread is None or not thread.alive:
        return
    error = getattr(sys, "last_value", None)
    ended = threading.Event()

    async def leave() -> None:
        try:
            async with asyncio.timeout(EXIT_CLOSE_S):
                await asyncio.gather(*(close(error) for close in list(thread.at_exit.values())), return_exceptions=True)
        except TimeoutError:
            pass
        finally:
            ended.set()

    try:
        thread.submit(lambda: thread.start_task(leave(), Context(), lambda task: task.exception()))
        ended.wait(EXIT_CLOSE_S + STOP_S)
        thread.stop()
    except (ClosedError, RuntimeError):
        return
