"""A disk that hangs delays answers and the daemon's end, and never its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from journal_kit import MemoryJournal

from asyncdist_server.journal.journal import DURABLE
from asyncdist_server.journal.persistence import Persistence
from asyncdist_server.serving.config import ServerConfig
from asyncdist_server.serving.daemon import StoreServer

LONG_S = 20.0
"""When a disk that nobody frees comes back: after the test has failed."""


class HangingJournal(MemoryJournal):
    """Its reads and writes end when `freed`; one that hangs is `under_way`."""

    def __init__(self) -> None:
        super().__init__()
        self.freed = threading.Event()
        self.under_way = threading.Event()
        self.threads: list[threading.Thread] = []
        self.before_write = lambda number: self._hang()

    def _hang(self) -> None:
        self.threads.append(threading.current_thread())
        self.under_way.set()
        self.freed.wait(LONG_S)

    def read(self, *arguments: Any) -> None:
        self._hang()
        super().read(*arguments)

    def abandon(self) -> None:
        self.threads.append(threading.current_thread())
        self.calls.append("abandon")


@pytest.fixture
def journal() -> Iterator[HangingJournal]:
    made = HangingJournal()
    yield made
    made.freed.set()
    for thread in made.threads:
        thread.join()


def server_on(journal: HangingJournal) -> StoreServer:
    config = ServerConfig(port=0, durability=DURABLE, data_dir="/nowhere")
    return StoreServer(config, Persistence(DURABLE, config.data_dir, lambda path: journal))


async def cancel_while_it_hangs(task: asyncio.Task[None], journal: HangingJournal) -> None:
    await asyncio.to_thread(journal.under_way.wait)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert not journal.freed.is_set()
    assert journal.threads[0].is_alive()


async def test_a_start_that_hangs_can_be_cancelled(journal: HangingJournal) -> None:
    await cancel_while_it_hangs(asyncio.create_task(server_on(journal).start()), journal)
    assert journal.calls == []  # not while it is being read
    journal.freed.set()
    await asyncio.to_thread(journal.threads[0].join)
    assert journal.calls == ["abandon"]
    assert set(journal.threads) == {journal.threads[0]}


async def test_an_end_that_hangs_can_be_cancelled(journal: HangingJournal) -> None:
    server = server_on(journal)
    journal.freed.set()
    await server.start()
    journal.freed.clear()
    journal.under_way.clear()
    await cancel_while_it_hangs(asyncio.create_task(server.stop()), journal)


def test_a_disk_that_comes_back_after_the_loop_is_closed_harms_nobody(journal: HangingJournal) -> None:
    async def start_and_give_up() -> None:
        await cancel_while_it_hangs(asyncio.create_task(server_on(journal).start()), journal)

    asyncio.run(start_and_give_up())
    journal.freed.set()
    journal.threads[0].join()  # pytest fails the test where an exception ended the thread
    assert journal.calls == ["abandon"]
