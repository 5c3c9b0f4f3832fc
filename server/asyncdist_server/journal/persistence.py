"""Puts a daemon's engine and its journal together when the daemon starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from asyncdist_server.clock import exact_clock
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.journal.data_directory import DataDirectory
from asyncdist_server.journal.group_commit import GroupCommit, Runner
from asyncdist_server.journal.journal import Durability, Journal, JournalError
from asyncdist_server.journal.journal_thread import JournalThread
from asyncdist_server.journal.sqlite_journal import SqliteJournal
from asyncdist_server.logs import EventLog

NewJournal = Callable[[Path], Journal]
NewRunner = Callable[[asyncio.AbstractEventLoop], Runner]


def sqlite_journal(path: Path) -> Journal:
    """Return the journal in the data directory `path`, which is this process's from now on."""
    return SqliteJournal(DataDirectory(path))


class Persistence:
    """How a daemon keeps its data; tests and simulations put other journals and threads in place."""

    def __init__(
        self,
        durability: Durability,
        data_dir: Path | str | None,
        new_journal: NewJournal = sqlite_journal,
        new_runner: NewRunner = JournalThread,
    ) -> None:
        self.durability = durability
        self._data_dir = None if data_dir is None else Path(data_dir)
        self._new_journal = new_journal
        self._new_runner = new_runner

    async def open(
        self,
        engine: StoreEngine,
        on_released: Callable[[], None],
        on_failure: Callable[[JournalError], None],
        events: EventLog,
    ) -> GroupCommit | None:
        """Bring `engine` back and keep a journal of it from now on; None in memory mode. Raises `JournalError`."""
        engine.tell_time(exact_clock(asyncio.get_running_loop()))
        if not self.durability.journaled:
            return None
        assert self._data_dir is not None
        journal = self._new_journal(self._data_dir)
        runner = self._new_runner(asyncio.get_running_loop())
        events.info("recovering", durability=self.durability.name, kept_in=journal.description)
        gate = GroupCommit(engine, self.durability, journal, runner, on_released, on_failure, events)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        replay = await gate.start()
        found = engine.statistics()
        events.info(
            "journal",
            durability=self.durability.name,
            kept_in=journal.description,
            bytes=gate.journal_bytes,
            rows=gate.journal_rows,
            seconds=round(loop.time() - began_s, 3),
            **{name: found[name] for name in ("keys", "queues", "leases", "clients_away")},
        )
        if self.durability.delay_s is not None and not replay.clean:
            reason = f"the last {self.durability.delay_s * 1000:g} ms of what was acknowledged may be missing"
            events.warning("journal_not_ended", reason=reason)
        return gate
