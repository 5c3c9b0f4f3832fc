"""Commits what changes, one batch at a time, and tells connections when what they have to say may be said.

While one batch is being written, changes gather for the next: the more clients wait, the more of them share an fsync.
`durable`: output that was made while changes were not on the disk waits for the batch that holds them, be it the
answer to a change or a value that was read meanwhile. `relaxed`: nothing waits, and a batch begins `delay_s` after
its first change.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

from asyncdist_server.engine.changes import ChangeLog
from asyncdist_server.engine.counters import COMMIT_BOUNDS_BYTES, COMMIT_BOUNDS_S, Histogram
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.namespace import TORCH_PREFIX
from asyncdist_server.journal.batch import CLEAN, GAPS, Batch, BatchMaker
from asyncdist_server.journal.journal import MAX_DELAY_MS, Durability, Journal, JournalError
from asyncdist_server.journal.journal_thread import Outcome
from asyncdist_server.journal.replay import Replay
from asyncdist_server.logs import EventLog

LATE_S: Final = 0.05
"""How long a change for which no answer waits may stay out of the journal; most go with an earlier commit."""
FIRST_AGE_S: Final = 1.0
"""A daemon that came back with something that ends by itself notes after this time how long it has run, and again when
it has run twice as long. So at least half of each longer run counts, with few commits, whatever ends the run."""
LOST_REVISIONS: Final = MAX_DELAY_MS * 1000
"""How many revisions a daemon leaves out that may have lost some: one for each microsecond of the longest delay. Else
locks might give tokens that other clients had before. (A clock that was not set back leaves out as many by itself.)"""
SLOW_COMMIT_S: Final = 1.0
"""A commit under way for this long is logged: clients that ask for more than the status wait for it."""
TIDY_BYTES: Final = 1024 * 1024
"""How much is written between two looks at whether the journal has something to tidy up."""
TIDY_S: Final = 1.0
"""And for how long after a commit at most: until then a power cut can take the note of what was acknowledged."""


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Collect no garbage: a journal's rows become a great many objects that all stay, and looking through them again
    and again takes longer than all else (measured: two thirds of the time)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _unheard(result: Any, error: BaseException | None) -> None:
    """Take the outcome of a commit for which no answer waits."""


class Runner(Protocol):
    """What runs the journal's methods; `JournalThread` is the real one."""

    def submit(self, function: Callable[[], Any], outcome: Outcome) -> None:
        """Have `function` run, and `outcome` be called in the loop with its result or exception."""

    async def call(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns."""

    def run_waiting(self) -> None:
        """Run what waits now, from within a function that takes long."""

    def close(self) -> None:
        """End when everything given has been run, without waiting for that."""


class Waiting(Protocol):
    """A connection whose output waits for commits."""

    def release(self, number: int) -> None:
        """Send what had to wait for the commits up to that number."""


class CommitStatistics:
    """How the commits went, for status and metrics."""

    def __init__(self) -> None:
        self.commits = 0
        self.durations = Histogram(COMMIT_BOUNDS_S)
        self.sizes = Histogram(COMMIT_BOUNDS_BYTES)

    def note(self, batch: Batch, seconds: float) -> None:
        """Count one commit."""
        self.commits += 1
        self.durations.observe(seconds)
        self.sizes.observe(batch.bytes)


class GroupCommit:
    """The journal of one engine on one loop. `await start()` first, `await close()` last.

    `on_failure` is called once, when the journal cannot be written any more: nothing that waits is ever released then.
    `on_released` is called after connections were released.
    """

    def __init__(
        self,
        engine: StoreEngine,
        durability: Durability,
        journal: Journal,
        runner: Runner,
        on_released: Callable[[], None],
        on_failure: Callable[[JournalError], None],
        events: EventLog,
    ) -> None:
        self.durability = durability
        self.statistics = CommitStatistics()
        self.journal = journal
        self._engine = engine
        self._changes = ChangeLog(TORCH_PREFIX)
        self._maker = BatchMaker(engine, self._changes)
        self._runner = runner
        self._on_released = on_released
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._number = 1  # of the batch that gathers
        self._gathering: dict[Waiting, None] = {}
        self._committing: dict[Waiting, None] = {}
        self._under_way = False
        self._untidy_bytes = 0
        self._tidy_timer: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None  # for the next commit
        self._patient = False  # whether no answer waits for that commit
        self._age_timer: asyncio.TimerHandle | None = None
        self._started_age = 0.0
        self._events = events
        self._slow_timer: asyncio.TimerHandle | None = None  # while something is written, since `_watched_at`
        self._watched_at = 0.0
        self._told_slow = False
        self._idle: asyncio.Future[None] | None = None
        self._failed = False
        self._closed = False
        self._backing_up = asyncio.Lock()

    @property
    def waiting_count(self) -> int:
        """Connections whose output waits for a commit."""
        return len(self._gathering) + len(self._committing)

    @property
    def journal_bytes(self) -> int:
        """Bytes of all rows in the journal."""
        return self._maker.bytes

    @property
    def journal_rows(self) -> int:
        """Rows in the journal: one or more for each commit."""
        return self._maker.rows

    @property
    def stuck_s(self) -> float:
        """For how long something has been written that takes longer than `SLOW_COMMIT_S`; 0 if nothing has."""
        return self._loop.time() - self._watched_at if self._told_slow else 0.0

    # ---- beginning and end

    async def start(self) -> Replay:
        """Bring the engine back to where the journal ends. Raises `JournalError`."""
        replay = Replay()
        try:
            with _without_collector():
                await self._runner.call(lambda: self.journal.read(replay.row))
                gaps = self.durability.delay_s is not None and not replay.clean
                if gaps:
                    replay.forget_histories()  # watchers may have seen what is gone
                    replay.revision += LOST_REVISIONS
                replay.restore(self._engine, self._changes, self._maker, self._loop.time())
            self._engine.incarnation = self.journal.incarnation
            if gaps:
                batch = self._maker.take(GAPS)
                await self._runner.call(lambda: self.journal.write(batch))
                self._maker.written(batch)
        except asyncio.CancelledError:
            self._runner.submit(self.journal.abandon, _unheard)  # behind what uses it, which may hang
            self._runner.close()
            raise
        except BaseException:
            self._runner.close()
            self.journal.abandon()
            raise
        self._started_age = replay.age
        if replay.timed:
            self._age_timer = self._loop.call_later(FIRST_AGE_S, self._note_age)
        return replay

    async def close(self) -> None:
        """Write what is left, say that nothing is missing, and close the journal."""
        try:
            self._cancel_timers()
            while self._under_way:
                self._idle = self._loop.create_future()
                await self._idle
            async with self._backing_up:
                self._closed = True
            if not self._failed:
                batch = self._maker.take(CLEAN)
                self._watch()
                await self._runner.call(lambda: self.journal.write(batch))
                await self._runner.call(self.journal.close)
        except JournalError as error:
            self._fail(error)
        finally:
            self._watch_no_more()
            self._runner.close()

    async def backup(self, path: Path) -> None:
        """Write a copy of the journal to the new file `path`, while commits go on. Raises `JournalError`."""
        async with self._backing_up:
            if self._failed or self._closed:
                raise JournalError("the journal is closed")
            await self._runner.call(lambda: self.journal.backup(path, self._runner.run_waiting))

    # ---- what connections ask

    def needed(self) -> int:
        """Return the number of the commit that output made now must wait for, 0 if it need not wait."""
        if self.durability.delay_s is not None and not self._failed:
            return 0
        if self._changes.dirty or self._changes.late or self._failed:
            return self._number
        return self._number - 1 if self._under_way else 0

    def hold(self, connection: Waiting, number: int) -> None:
        """Release `connection` when the commit of that number, which `needed` returned, is done."""
        (self._gathering if number == self._number else self._committing)[connection] = None

    def settle(self) -> None:
        """See to it that what changed is committed. To be called at the end of each turn."""
        if self._under_way or self._failed:
            return
        delay_s = self.durability.delay_s
        urgent = self._changes.dirty or bool(self._gathering)
        if urgent and delay_s is None:
            if self._timer is None or self._patient:
                if self._timer is not None:
                    self._timer.cancel()
                self._patient = False
                self._timer = self._loop.call_soon(self._begin)  # after all that has arrived by now
        elif (urgent or self._changes.late) and self._timer is None:
            self._patient = True
            self._timer = self._loop.call_later(LATE_S if delay_s is None else delay_s, self._begin)

    # ---- commits

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._age_timer, self._tidy_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._age_timer = self._tidy_timer = None

    def _note_age(self) -> None:
        """See to it that the journal knows of half the time for which this daemon has run, at least."""
        lived_s = self._engine.state.age() - self._started_age
        noted_s = self._maker.age - self._started_age
        if lived_s >= 2 * noted_s and not self._under_way:
            if self._timer is not None:
                self._timer.cancel()
            self._begin()
            noted_s = lived_s
        self._age_timer = self._loop.call_later(max(2 * noted_s - lived_s, FIRST_AGE_S), self._note_age)

    def _begin(self) -> None:
        self._timer = None
        if self._under_way or self._failed:
            return
        batch = self._maker.take()
        self._number += 1
        self._committing, self._gathering = self._gathering, {}
        self._under_way = True
        self._watch()
        self._runner.submit(functools.partial(self._write, batch), functools.partial(self._done, batch))

    def _write(self, batch: Batch) -> float:
        began_s = time.perf_counter()
        self.journal.write(batch)
        return time.perf_counter() - began_s

    def _done(self, batch: Batch, seconds: float, error: BaseException | None) -> None:
        self._under_way = False
        self._watch_no_more()
        if error is not None:
            self._fail(error)
        else:
            released, self._committing = self._committing, {}
            number = self._number - 1
            self._maker.written(batch)
            self.statistics.note(batch, seconds)
            self._untidy_bytes += batch.bytes
            if self._untidy_bytes > TIDY_BYTES:
                self._tidy()
            elif self._tidy_timer is None:
                self._tidy_timer = self._loop.call_later(TIDY_S, self._tidy)
            if (self._changes.dirty or self._gathering) and self.durability.delay_s is None:
                self._begin()  # the disk works while we write
            for connection in released:
                connection.release(number)
            self._on_released()
        if self._idle is not None and not self._under_way and not self._idle.done():
            self._idle.set_result(None)

    def _watch(self) -> None:
        """Tell if what is given to the journal now takes long."""
        self._watched_at = self._loop.time()
        self._slow_timer = self._loop.call_later(SLOW_COMMIT_S, self._tell_slow)

    def _tell_slow(self) -> None:
        self._told_slow = True
        meanwhile = "answers wait for it" if self.durability.delay_s is None else "a crash would lose what is answered"
        reason = f"a commit has taken {SLOW_COMMIT_S:g} s and is not done: look at the disk; {meanwhile}"
        self._events.warning("journal_slow", connections=self.waiting_count, reason=reason)

    def _watch_no_more(self) -> None:
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None
            if self._told_slow:
                self._told_slow = False
                self._events.info("journal_goes_on", seconds=round(self._loop.time() - self._watched_at, 3))

    def _tidy(self) -> None:
        if self._tidy_timer is not None:
            self._tidy_timer.cancel()
            self._tidy_timer = None
        self._untidy_bytes = 0
        if not self._failed and not self._closed:
            self._runner.submit(self.journal.tidy, self._tidied)

    def _tidied(self, _: None, error: BaseException | None) -> None:
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Stop for good. Waiting answers are not released; a failed write is never tried again."""
        if self._failed:
            return
        self._failed = True
        self._cancel_timers()
        self.journal.abandon()
        self._gathering.clear()
        self._committing.clear()
        self._on_failure(error if isinstance(error, JournalError) else JournalError(f"the journal failed: {error!r}"))
