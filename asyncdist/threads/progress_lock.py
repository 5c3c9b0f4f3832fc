"""The progress lock: which thread runs the event loop of the communication thread.

Whoever holds the lock does. A thread that waits for an operation takes it, as a rank of MPI does that makes the
progress itself: it need not wake another, nor be woken. It issues and looks for the end first, without running the loop
(the loop is *lent*), and runs the loop if the end does not come soon. At the end it lets go; a thread
that waits for the lock is woken and takes it.

The communication thread runs the loop while nobody waits. When there is nothing to do, it watches the loop's descriptor
without holding the lock, so that a call need not ask for it. It leaves the lock alone for `GRACE_S` after others had
it, as they come back soon as a rule; if it finds them there then, it has them run the loop once (`turn_due`). After
that it only runs what is due, and leaves the lock alone again when something comes, unless something was begun that
nobody waits for: a peer that calls first is heard just before this rank calls, and would have the lock taken away from
that call. A short operation is waited for soon as a rule, so one that was begun last is left alone for `GRACE_S` too.

In the main thread signal handlers are put off meanwhile, as what they raise, KeyboardInterrupt perhaps, would leave the
world half changed. A signal ends the waiting thread's turn, and then its handler is called.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # which is `signal` without its enumerations
import _thread
import asyncio
import contextlib
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any, Final, Protocol

from asyncdist.concurrency.loop import Place, due_ms, lendable, watched
from asyncdist.concurrency.spin import Pending

__all__ = ["Awaited", "ProgressLock"]

GRACE_S: Final = 2e-3
"""How long the communication thread leaves the lock alone after others had it. What no thread
waits for may be noticed that much later, or twice as much."""
DENSE: Final = 20
"""How often others have the lock within `GRACE_S` where it is left alone again, whether or not somebody has it at that
moment: a turn of the loop takes longer than they are away, so they would find it taken."""
LINGER_S: Final = 1e-3
"""How long it runs the loop at least once there is something to do: watching costs some system calls more."""
MOST_LINGER_S: Final = 20e-3
"""The same, while there is always more to do."""
ASK_S: Final = 2e-3
"""How long one who needs the lock waits for the communication thread to give it, at most: twice as long as functions
take there as a rule."""
HELD: Final = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
"""Signals whose handlers in Python are put off. All others' are called as they come: they must not raise."""


class Awaited(Protocol):
    """What a thread runs the loop for."""

    answered: bool

    def rouse(self) -> None:
        """Have the thread that waits look whether it is answered, or whether it can take the lock."""


class ProgressLock:
    """See the module."""

    def __init__(self) -> None:
        self.loop: Any = lendable(self._called)
        self.stopping = False
        """Whether the communication thread ends the loop, and nobody else runs it any more."""
        self.turn_due = False
        """Whether who takes the lock is to run the loop once before anything else."""
        self._place: Place = self.loop.place
        self._lock = _thread.allocate_lock()
        self._pid, self._main = os.getpid(), threading.main_thread().ident
        self._before: asyncio.AbstractEventLoop | None = None
        """The loop that runs in the thread that has the lock, below ours."""
        self._for: Awaited | None = None
        self._held = HeldSignals(self.loop)
        self._waiting: deque[Awaited] = deque()
        self._taken = 0
        """How often others than the communication thread have had the lock."""
        self._called_since = False
        """Whether other threads have called the loop, which may not have run since."""
        self._put_off: Pending | None = None
        """An operation that nobody waits for, and that the communication thread was not woken for."""
        # Of the communication thread.
        self._alarm = _thread.allocate_lock()
        self._alarm.acquire()
        self._background = self._seen = 0
        self._linger_s = LINGER_S  # 0 after others had the lock
        self._watching = self._sleeping = self._resting = self._asked = self._urgent = False

    def is_mine(self) -> bool:
        """Whether the caller has the lock."""
        return get_ident() == self._place.thread

    # For those who wait.

    def take(self) -> bool:
        """Take the lock, if it is free, or the communication thread gives it soon. Then `give` must follow."""
        thread = get_ident()
        main = thread == self._main
        if main:
            self._held.hold()
        try:
            taken = self._pid == os.getpid() and not self.stopping and (self._lock.acquire(False) or self._ask())
        except BaseException:
            if main:
                self._held.put_back()
            raise
        if taken:
            self._taken += 1
            self._place.thread = thread
            self._before = asyncio._get_running_loop()
            asyncio._set_running_loop(self.loop)
            self.loop.lent = True
            return True
        if main:
            self._held.release()
        return False

    def _ask(self) -> bool:
        if self._place.thread != self._background:
            return False  # who runs the loop answers those who wait
        self._asked = True
        with contextlib.suppress(RuntimeError):  # it is closed
            self.loop.wake(self.loop.stop)
        return self._lock.acquire(timeout=ASK_S)

    def give(self) -> None:
        """Leave the lock to the next. Raises what the handlers of signals raise that came meanwhile."""
        main = self._held.holds and get_ident() == self._main
        self.loop.lent = False
        asyncio._set_running_loop(self._before)
        self._before = None
        self._place.thread = 0
        self._lock.release()
        if self._waiting:
            self._rouse()
        if self._called_since:
            self.call_background()
        elif self._watching or self._sleeping:
            self._alert()
        if main:
            self._held.release()

    def forget(self) -> None:
        """In a forked child: nobody has the lock, whoever had it in the parent."""
        self._place.thread = 0
        self.loop.lent = False
        self._waiting.clear()
        self._held.put_back()

    def end(self) -> None:
        """Close the loop. Another thread may get the number of this one later, and must not pass for it."""
        self._place.thread = 0
        self.loop.close()

    def owe(self, short: Pending | None = None) -> None:
        """With the lock: what was begun goes on at once after `give`, though nobody waits for it.

        A `short` operation goes on within `GRACE_S`, unless the one before it is under way, too.
        """
        before = self._put_off
        if short is None or not self._resting or not (before is None or before._done):
            self._called_since = True
        else:
            self._put_off = short

    def hurry(self) -> None:
        """Without the lock: what was put off goes on at once, as it calls somebody back."""
        if self._put_off is not None:
            self.call_background()

    def owe_turn(self) -> None:
        """With the lock: the loop has called others back, who are to be called before it does anything else."""
        self.turn_due = self._called_since = True

    def run_until(self, awaited: Awaited, timeout_s: float) -> None:
        """With the lock: run the loop until `awaited` is answered, a signal comes or `timeout_s` is over."""
        loop = self.loop
        timer = loop.call_later(timeout_s, loop.stop) if timeout_s < threading.TIMEOUT_MAX else None
        self._for = awaited
        loop.lent = False
        asyncio._set_running_loop(None)
        try:
            if not (awaited.answered or self._held.came or self.stopping):
                self.run()
        finally:
            asyncio._set_running_loop(loop)
            loop.lent = True
            self._for = None
            if timer is not None:
                timer.cancel()

    def run_once(self) -> None:
        """With the lock: run what is due, but wait for nothing."""
        self.loop.lent = False
        asyncio._set_running_loop(None)
        try:
            self.loop.call_soon(self.loop.stop)
            self.run()
        finally:
            asyncio._set_running_loop(self.loop)
            self.loop.lent = True

    def answered(self, awaited: Awaited) -> None:
        """`awaited` is answered now, by who has the lock."""
        if awaited is self._for:
            self.loop.stop()

    def wait_for(self, awaited: Awaited, wait: Callable[[], object]) -> None:
        """Without the lock: `wait`, until `awaited` is roused. That happens once nobody runs the loop any more, too."""
        self._waiting.append(awaited)
        try:
            if self._lock.locked():
                wait()
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(awaited)

    def _rouse(self) -> None:
        for awaited in tuple(self._waiting):
            if not awaited.answered:
                awaited.rouse()
                return

    def run(self) -> None:
        """With the lock: run the loop until it is stopped."""
        self._called_since = self.turn_due = False
        self.do(self.loop.run_forever)  # which raises SystemExit and KeyboardInterrupt of a function of the user's

    def do(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function, and report what it raises."""
        try:
            function(*arguments)
        except BaseException as error:
            self.loop.call_exception_handler({"message": "in the communication thread", "exception": error})

    # For the communication thread.

    def _called(self) -> None:
        """Another thread has called the loop: who has the lock, or else the communication thread, makes it run soon."""
        self._called_since = True
        if not self._lock.locked():
            self.call_background()

    def call_background(self) -> None:
        """Have the communication thread take the lock at once, if nobody else has."""
        self._urgent = True
        self._alert()

    def _alert(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has been released already
            self._alarm.release()
        if self._watching:
            with contextlib.suppress(RuntimeError):  # it is closed
                self.loop.wake(_nothing)

    def run_in_background(self) -> None:
        """Run the loop whenever nobody else does, until `stopping`; returns with the lock."""
        self._background = get_ident()
        descriptor, poll = watched(self.loop), select.poll()
        if descriptor >= 0:
            poll.register(descriptor, select.POLLIN)
        while not self.stopping:
            if self._may_take():
                timeout_ms = self._run_on(descriptor)
                if timeout_ms is not None:
                    self._watch(poll, timeout_ms)
        if not self.is_mine():
            self._lock.acquire()
            self._place.thread = self._background

    def _may_take(self) -> bool:
        """Take the lock, unless others have it, or had it lately and may come back."""
        if self._taken != self._seen and not self._urgent:
            self._seen = self._taken
            self._linger_s = 0.0
            self._resting = True
            alerted = self._alarm.acquire(timeout=GRACE_S)
            self._resting = False
            if alerted:
                return False
            others = self._taken - self._seen
            if others >= DENSE or self._lock.locked():
                self.turn_due |= others > 0
                return False
        if not self._lock.acquire(False):
            self._sleeping = True
            if not self._lock.acquire(False):
                self._alarm.acquire()
                self._sleeping = False
                return False
            self._sleeping = False
        self._place.thread = self._background
        while self._place.errands:
            self.do(self._place.errands.pop())
        self._seen = self._taken
        put_off, self._put_off = self._put_off, None
        if self._urgent or not (put_off is None or put_off._done):
            self._linger_s = max(self._linger_s, LINGER_S)
        self._urgent = self._asked = False
        return True

    def _run_on(self, descriptor: int) -> int | None:
        """Run the loop for a while. Returns after how long it has to run again, if nothing comes; -1 for never.

        Returns None if others wait for the lock, or if it is kept for the end.
        """
        timer = None if descriptor < 0 else self.loop.call_later(self._linger_s, self.loop.stop)
        self.run()
        if timer is not None:
            timer.cancel()
        if self.stopping:
            return None
        timeout_ms = due_ms(self.loop) if descriptor >= 0 else 0
        self._watching = timeout_ms != 0 and not self._asked
        self._place.thread = 0
        self._lock.release()
        if not (self._asked or self._waiting):
            return timeout_ms
        self._watching = self._asked = False
        self._rouse()
        self._alarm.acquire(timeout=GRACE_S)
        return None

    def _watch(self, poll: select.poll, timeout_ms: int) -> None:
        """Without the lock: sleep until there is something to do."""
        if self._watching:
            found = not self._alarm.acquire(False) and poll.poll(timeout_ms)
            self._watching = False
            if found and not self._linger_s:
                self._alarm.acquire(timeout=GRACE_S)
            self._alarm.acquire(False)
            if found:
                self._linger_s = max(LINGER_S, min(2 * self._linger_s, MOST_LINGER_S))
            else:
                self._linger_s = min(self._linger_s, LINGER_S)


def _nothing() -> None:
    return


class HeldSignals:
    """Handlers of signals, put off. Of the main thread."""

    def __init__(self, loop: Any) -> None:
        self.came: deque[tuple[int, Any, int]] = deque()
        self.holds = False
        self._loop = loop
        self._own = self._come
        self._handlers: dict[int, Any] = {}
        """Those that were put off last. Where one that was put back raised, others may still stand here alone."""

    def hold(self) -> None:
        """Call no handler until `release`. Raises what a handler raises now."""
        own = self._own
        try:
            for number in HELD:
                handler = _signal.getsignal(number)
                if callable(handler) and handler is not own:
                    self._handlers[number] = handler
                    _signal.signal(number, own)
        except BaseException:
            self.put_back()
            raise
        self.holds = True

    def _come(self, number: int, frame: Any) -> None:
        if not self.holds:
            self._handlers[number](number, frame)
            return
        self.came.append((number, frame, _wakeup_fd()))
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.wake(self._loop.stop)

    def put_back(self) -> None:
        """Have handlers called as signals come. Raises what a handler raises now."""
        self.holds = False
        for number in reversed(self._handlers):  # Ctrl-C's last: it may come at once
            if _signal.getsignal(number) is self._own:
                _signal.signal(number, self._handlers[number])

    def release(self) -> None:
        """Call handlers as signals come, and now those of the signals that came; raises what they raise."""
        try:
            self.put_back()
        finally:
            self._call()

    def _call(self) -> None:
        if self.came:
            number, frame, heard_by = self.came.popleft()
            try:
                self._handlers[number](number, frame)
                listening = _wakeup_fd()
                if listening not in (-1, heard_by):  # our loop was told in the place of the one below it
                    with contextlib.suppress(OSError):
                        os.write(listening, bytes((number,)))
            finally:
                self._call()


def _wakeup_fd() -> int:
    """Where the interpreter tells an event loop of signals, -1 for nowhere."""
    descriptor = _signal.set_wakeup_fd(-1)
    _signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    return int(descriptor)
