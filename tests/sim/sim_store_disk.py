"""A simulated daemon's disk: a journal in memory that outlives the process, and a thread that takes virtual time."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from journal_kit import MemoryJournal

from asyncdist_server.journal.batch import HISTORIES, HOLDS, LEASES, QUEUES, VALUES, Batch
from asyncdist_server.journal.journal import DURABLE, JournalError, RowReader
from asyncdist_server.journal.journal_thread import Outcome
from asyncdist_server.journal.persistence import Persistence

__all__ = ["SimulatedDisk"]


class SimulatedDisk:
    """What is left when the daemon is killed. `slow` makes it slow, `fail_next` lets the next write fail."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(f"disk {seed}")
        self.typical_s = self.dice.choice((0.0, 0.0002, 0.01))
        self.slow = False
        self.fail_next = False
        self.writes = 0
        self.rows: dict[int, bytes] = {}
        self.incarnation = b""

    def delay_s(self) -> float:
        """Return how long half of an access takes: before it has its effect, and after it."""
        return self.dice.random() * (0.7 if self.slow else self.typical_s)

    def persistence(self) -> Persistence:
        """Return what makes a daemon keep its data here, and let nobody know what is not here."""
        return Persistence(
            DURABLE, Path("simulated"), lambda path: SimulatedJournal(self), lambda loop: SimulatedRunner(loop, self)
        )


class SimulatedJournal(MemoryJournal):
    """The journal of one process on a disk."""

    def __init__(self, disk: SimulatedDisk) -> None:
        super().__init__()
        self.rows = disk.rows
        self._disk = disk

    def read(self, row: RowReader) -> None:
        """See `Journal`."""
        disk = self._disk
        disk.incarnation = self.incarnation = disk.incarnation or secrets.token_bytes(16)
        super().read(row)

    def write(self, batch: Batch) -> None:
        """See `Journal`. One that fails may have had its effect."""
        disk = self._disk
        for kind, _, rows in (section for part in batch.parts for section in part):
            if kind in (VALUES, QUEUES, LEASES, HOLDS, HISTORIES):
                rows.sort(key=lambda row: row[0])  # they come from sets, whose order differs from process to process
        failing, disk.fail_next = disk.fail_next, False
        if not failing or disk.dice.random() < 0.5:
            super().write(batch)
            disk.writes += 1
        if failing:
            raise JournalError("the simulated disk failed")


class SimulatedRunner:
    """Satisfies `group_commit.Runner`: one function after the other, in the time the disk takes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, disk: SimulatedDisk) -> None:
        self._loop = loop
        self._disk = disk
        self._waiting: deque[tuple[Callable[[], Any], Outcome]] = deque()
        self._busy = False

    def submit(self, function: Callable[[], Any], outcome: Outcome) -> None:
        """See `Runner`."""
        self._waiting.append((function, outcome))
        self._begin()

    async def call(self, function: Callable[[], Any]) -> Any:
        """See `Runner`."""
        future: asyncio.Future[Any] = self._loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if not future.done():
                future.set_exception(error) if error is not None else future.set_result(result)

        self.submit(function, settle)
        return await future

    def run_waiting(self) -> None:
        """See `Runner`."""
        while self._waiting:
            outcome, result, error = self._run_first()
            self._loop.call_soon(outcome, result, error)

    def close(self) -> None:
        """See `Runner`."""
        self.run_waiting()

    def _begin(self) -> None:
        if self._waiting and not self._busy:
            self._busy = True
            self._loop.call_later(self._disk.delay_s(), self._work)

    def _work(self) -> None:
        if self._waiting:
            outcome, result, error = self._run_first()
            self._loop.call_later(self._disk.delay_s(), self._done, outcome, result, error)
        else:
            self._busy = False

    def _run_first(self) -> tuple[Outcome, Any, BaseException | None]:
        function, outcome = self._waiting.popleft()
        try:
            return outcome, function(), None
        except Exception as error:
            return outcome, None, error

    def _done(self, outcome: Outcome, result: Any, error: BaseException | None) -> None:
        self._busy = False
        outcome(result, error)
        self._begin()
