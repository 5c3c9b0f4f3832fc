"""The progress lock: which thread runs the event loop of the communication thread.

Whoever holds the lock does. A thread that waits for an operation takes it, as a rank of MPI does that makes the
progress itself: it need not wake another, nor be woken. It issues and looks for the end first, without running the loop
(the loop is *lent*), and runs the loop if the end does not come soon. At the end it lets go; a thread
that waits for the lock is woken and takes it.

The communication thread runs the loop while nobody waits. It is in one of four states:

    runs     has the lock; the loop runs what is due, and a moment longer if more may come (`LINGER_S`)
    watches  nothing is due: it sleeps on the loop's descriptor, without the lock, so that a call need not ask for it
    rests    others have had the lock lately, and come back soon as a rule: it leaves it alone for `GRACE_S`
    sleeps   another thread has the lock, which wakes it in `give`

After a rest it finds the lock free and runs, or finds others there still, who then run the loop once (`turn_due`).
While others come often, something that arrives makes it rest before it runs: a peer that calls first is heard just
before this rank calls, and would have the lock taken away from that call. What is begun and not waited for wakes it at
once (`_urgent`), but for a single short operation, which is waited for soon as a rule (`owe`).

In the main thread signal handlers are put off meanwhile, as what they raise, KeyboardInterrupt perhaps, would leave the
world half changed. A signal ends the waiting thread's turn, and then its handler is called.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any, Final, Protocol

from asyncdist.concurrency.loop import Place, due_ms, lendable, watched
from asyncdist.concurrency.spin import Pending
from asyncdist.threads.held_signals import HeldSignals

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
            if self._rest():
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
        self._rest()
        return None

    def _rest(self) -> bool:
        """Leave the lock alone for a while; whether this was ended."""
        self._resting = True
        ended = self._alarm.acquire(timeout=GRACE_S)
        self._resting = False
        return ended

    def _watch(self, poll: select.poll, timeout_ms: int) -> None:
        """Without the lock: sleep until there is something to do."""
        if self._watching:
            found = not self._alarm.acquire(False) and poll.poll(timeout_ms)
            self._watching = False
            if found and not self._linger_s:
                self._rest()
            self._alarm.acquire(False)
            if found:
                self._linger_s = max(LINGER_S, min(2 * self._linger_s, MOST_LINGER_S))
            else:
                self._linger_s = min(self._linger_s, LINGER_S)


def _nothing() -> None:
    return
