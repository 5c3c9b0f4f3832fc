"""What leaves a daemon when: nothing that depends on a change before that is committed, and nothing after a failure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from journal_kit import MemoryJournal
from torch_wire_kit import VALIDATE, blob, query
from waiting import eventually

from asyncdist.errors import WatchCompactedError
from asyncdist.store import TCPStore
from asyncdist.store.tcp_store import StoreObserver
from asyncdist_server.journal import group_commit
from asyncdist_server.journal.batch import TAKEN
from asyncdist_server.journal.group_commit import LATE_S, TIDY_BYTES
from asyncdist_server.journal.journal import DURABLE, Durability, Journal, JournalError, decode, parse_durability
from asyncdist_server.journal.journal_thread import Outcome
from asyncdist_server.journal.persistence import Persistence
from asyncdist_server.serving.config import ServerConfig
from asyncdist_server.serving.connection import HELD_BYTES
from asyncdist_server.serving.daemon import StoreServer
from asyncdist_server.torch.wire import Query
from asyncdist_server.wire.messages import OK, Encoder


class SlowDisk:
    """Runs the journal's methods in the loop; satisfies `group_commit.Runner`. Writes wait while it is `slow`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.slow = False
        self.waiting: list[tuple[Callable[[], Any], Outcome]] = []
        self.came = asyncio.Event()

    def submit(self, function: Callable[[], Any], outcome: Outcome) -> None:
        self.waiting.append((function, outcome))
        self.came.set()
        if not self.slow:
            self.loop.call_soon(self.run_waiting)

    async def call(self, function: Callable[[], Any]) -> Any:
        return function()

    def run_waiting(self) -> None:
        self.came.clear()
        waiting, self.waiting = self.waiting, []
        for function, outcome in waiting:
            try:
                result = function()
            except JournalError as error:
                outcome(None, error)
            else:
                outcome(result, None)

    def close(self) -> None:
        pass


class World:
    """A daemon in this loop with a journal in memory and a disk that waits when told to."""

    def __init__(self, durability: Durability, rows: dict[int, bytes] | None = None) -> None:
        self.journal = MemoryJournal()
        self.journal.rows.update(rows or {})
        self.disks: list[SlowDisk] = []
        config = ServerConfig(port=0, durability=durability, data_dir="/nowhere", torch=True)
        self.server = StoreServer(config, Persistence(durability, config.data_dir, self._new_journal, self._new_disk))

    def _new_journal(self, path: Path) -> Journal:
        return self.journal

    def _new_disk(self, loop: asyncio.AbstractEventLoop) -> SlowDisk:
        self.disks.append(SlowDisk(loop))
        return self.disks[0]

    @property
    def disk(self) -> SlowDisk:
        return self.disks[0]

    def store(self, namespace: str = "job") -> TCPStore:
        return TCPStore("127.0.0.1", self.server.port, namespace=namespace)


@asynccontextmanager
async def world(durability: Durability = DURABLE, rows: dict[int, bytes] | None = None) -> AsyncIterator[World]:
    made = World(durability, rows)
    await made.server.start()
    try:
        yield made
    finally:
        made.disk.slow = False
        made.disk.run_waiting()
        await made.server.stop()


async def turns() -> None:
    """Let everything happen that can happen without the disk: a round trip of each layer takes a few turns."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_commit_that_takes_long_is_told_while_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a disk that hangs is a daemon that does not answer, is ready, and says nothing."""
    caplog.set_level(logging.INFO)

    def told(name: str) -> list[dict[str, Any]]:
        return [record.msg.fields for record in caplog.records if str(record.msg).startswith(name)]

    async with world() as made, made.store() as store:
        await store.set("key", "old")
        monkeypatch.setattr(group_commit, "SLOW_COMMIT_S", 0.05)
        made.disk.slow = True
        write = asyncio.ensure_future(store.set("key", "newer"))
        async with asyncio.timeout(60):
            while not told("journal_slow"):  # noqa: ASYNC110  a line in a log sets no event
                await asyncio.sleep(0.001)
        assert told("journal_slow")[0]["connections"] == 1
        assert not write.done()
        assert not told("journal_goes_on")
        made.disk.slow = False
        made.disk.run_waiting()
        await write
        assert told("journal_goes_on")[0]["seconds"] >= 0.05


async def test_who_only_looks_comes_and_is_answered_while_the_disk_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as made, made.store() as store:
        await store.set("key", "old")
        monkeypatch.setattr(group_commit, "SLOW_COMMIT_S", 0.05)
        made.disk.slow = True
        write = asyncio.ensure_future(store.set("key", "newer"))
        await made.disk.came.wait()
        async with (
            asyncio.timeout(60),
            StoreObserver("127.0.0.1", made.server.port, namespace="job") as observer,
            StoreObserver("127.0.0.1", made.server.port, namespace="job") as other,
        ):
            while (status := await observer.status()).get("journal_stuck_s", 0) < 0.1:
                pass
            assert status["clients"] == 3
            assert await other.waits() == []
            assert not write.done()
            made.disk.slow = False
            made.disk.run_waiting()
            await write
            assert "journal_stuck_s" not in await observer.status()
        assert made.server.engine.statistics()["clients_away"] == 0


async def test_an_answer_waits_for_its_commit() -> None:
    async with world() as made, made.store() as store:
        await store.set("key", "old")
        made.disk.slow = True
        write = asyncio.ensure_future(store.set("key", "new"))
        await made.disk.came.wait()
        await turns()
        assert not write.done()
        assert made.server.gate is not None
        assert made.server.gate.waiting_count == 1
        made.disk.slow = False
        made.disk.run_waiting()
        await write


async def test_a_read_of_an_uncommitted_value_waits_too() -> None:
    async with world() as made, made.store() as writer, made.store() as reader, made.store("other") as stranger:
        await asyncio.gather(writer.set("key", "old"), reader.check(["key"]), stranger.check(["key"]))
        made.disk.slow = True
        write = asyncio.ensure_future(writer.set("key", "new"))
        await made.disk.came.wait()
        reads: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(reader.get("key")),
            asyncio.ensure_future(stranger.check(["key"])),
        ]
        await turns()
        assert not any(read.done() for read in reads)
        made.disk.slow = False
        made.disk.run_waiting()
        assert await asyncio.gather(*reads) == [b"new", False]
        await write


async def test_a_read_of_committed_values_waits_for_nothing() -> None:
    async with world() as made, made.store() as store:
        await store.set("key", "value")
        made.disk.slow = True
        assert await store.get("key") == b"value"


async def test_changes_that_gather_share_a_commit() -> None:
    async with world() as made, made.store() as one, made.store() as two:
        await asyncio.gather(one.set("a", ""), two.set("a", ""))
        before = made.journal.writes
        made.disk.slow = True
        first = asyncio.ensure_future(one.set("a", "1"))
        await made.disk.came.wait()
        more: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(store.set(key, "2")) for store in (one, two) for key in "abc"
        ]
        await turns()
        made.disk.run_waiting()
        await first
        assert not any(write.done() for write in more)
        await turns()
        made.disk.slow = False
        made.disk.run_waiting()
        await asyncio.gather(*more)
        assert made.journal.writes - before == 2


async def test_relaxed_answers_at_once_and_commits_after_its_delay() -> None:
    async with world(parse_durability("relaxed:1")) as made, made.store() as store:
        made.disk.slow = True
        await store.set("key", "value")
        await made.disk.came.wait()
        assert await store.get("key") == b"value"


async def test_what_relaxed_has_lost_is_not_numbered_again_although_the_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock_ns = 2 * 10**18
    monkeypatch.setattr("time.time_ns", lambda: clock_ns)
    relaxed = parse_durability("relaxed:1")
    async with world(relaxed) as made, made.store() as store:
        await store.set("key", "value")
        await eventually(lambda: any(b"value" in row for row in made.journal.rows.values()))
        made.disk.slow = True
        rows = dict(made.journal.rows)
        async with store.watch("") as watch:
            async with store.lock("lock") as token:
                await store.set("key", "lost")
            lost = [(await anext(watch)).revision for _ in range(3)]
    clock_ns //= 2
    async with world(relaxed, rows) as made, made.store() as store, store.watch("") as watch:
        assert await store.get("key") == b"value"
        async with store.lock("lock") as again:
            assert again > max(token, *lost)
        assert (await anext(watch)).revision > max(lost)
        with pytest.raises(WatchCompactedError):
            await anext(store.watch("", from_revision=lost[0] + 1))


async def test_a_confirmation_is_committed_soon_although_nobody_waits_for_it() -> None:
    async with world() as made, made.store() as store:
        await store.queue_push("queue", "item")
        before = made.journal.writes
        assert await store.queue_pop("queue") == b"item"
        async with asyncio.timeout(60):
            while made.journal.writes < before + 2:  # noqa: ASYNC110  a commit sets no event
                await asyncio.sleep(LATE_S / 10)
        assert TAKEN in [kind for kind, _, _ in decode(made.journal.rows[max(made.journal.rows)])[2]]


async def test_a_confirmation_is_committed_before_anything_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncdist_server.journal.group_commit.LATE_S", 1000.0)
    async with world() as made, made.store() as store:
        await store.queue_push("queue", "item")
        await store.queue_pop("queue")
        made.disk.slow = True
        read = asyncio.ensure_future(store.check(["key"]))
        await made.disk.came.wait()
        await turns()
        assert not read.done()
        made.disk.slow = False
        made.disk.run_waiting()
        assert not await read


async def test_confirmations_share_the_commits_of_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncdist_server.journal.group_commit.LATE_S", 1000.0)
    async with world() as made, made.store() as store:
        await store.queue_push("queue", "item")
        before = made.journal.writes
        for _ in range(20):
            await store.queue_pop("queue")
            await turns()  # by now it is confirmed
            await store.queue_push("queue", "item")
        assert made.journal.writes - before == 40


async def test_after_a_failed_write_nothing_leaves_and_nothing_is_written() -> None:
    async with world() as made, made.store() as store:
        await store.set("key", "old")

        def fail(number: int) -> None:
            raise JournalError("cannot write to here: no")

        made.journal.before_write = fail
        write = asyncio.ensure_future(store.set("key", "new"))
        await made.server.failed.wait()
        read = asyncio.ensure_future(store.get("key"))
        await turns()
        assert str(made.server.failure) == "cannot write to here: no"
        assert made.server.connection_count == 0
        assert not write.done()
        assert not read.done()
        await made.server.stop()
        assert made.journal.calls[-2:] == ["write", "abandon"]
        assert not write.done()
        write.cancel()
        read.cancel()


async def test_the_journal_is_tidied_after_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "TIDY_S", 3600.0)
    async with world() as made, made.store() as store:
        for _ in range(3):
            await store.set("key", b"x" * (TIDY_BYTES // 2))
        await store.set("key", "small")
        assert made.journal.calls.count("tidy") == 1


async def test_the_journal_is_tidied_soon_after_a_commit_and_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is noted of the commit is on the disk then, also if nothing is written any more."""
    monkeypatch.setattr(group_commit, "TIDY_S", 0.01)
    async with world() as made, made.store() as store:
        await store.set("key", "value")
        await eventually(lambda: made.journal.calls[-1] == "tidy")
        assert made.server.gate is not None
        assert made.server.gate._tidy_timer is None


async def test_the_end_says_that_nothing_is_missing() -> None:
    async with world() as made, made.store() as store:
        await store.set("key", "value")
    assert made.journal.calls[-2:] == ["write", "close"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  what the daemon has run sets no event
            await asyncio.sleep(0)


async def test_torch_clients_never_wait_for_the_disk() -> None:
    """Neither with changes of their own nor with reads, while others' changes are being written and gather."""
    async with world() as made, made.store() as one, made.store() as two:
        await asyncio.gather(one.check(["key"]), two.check(["key"]))
        reader, writer = await asyncio.open_connection("127.0.0.1", made.server.port)
        made.disk.slow = True
        writes = [asyncio.ensure_future(one.set("key", "new"))]
        await made.disk.came.wait()
        writes.append(asyncio.ensure_future(two.set("key", "newer")))
        assert made.server.gate is not None
        await until(lambda: made.server.gate is not None and made.server.gate.waiting_count == 2)
        writer.write(VALIDATE + query(Query.SET, b"key", b"value") + query(Query.GET, b"key"))
        async with asyncio.timeout(60):
            assert await reader.readexactly(len(blob(b"value"))) == blob(b"value")
        assert made.server.gate.waiting_count == 2
        assert not any(write.done() for write in writes)
        writer.close()
        await writer.wait_closed()
        made.disk.slow = False
        made.disk.run_waiting()
        await asyncio.gather(*writes)


@pytest.mark.parametrize("past", [0, 1])
async def test_who_has_more_than_the_limit_held_back_is_not_read_until_the_commit(past: int) -> None:
    overhead = len(Encoder().replies([(1, OK, bytes(HELD_BYTES))])) - HELD_BYTES
    value = bytes(HELD_BYTES - overhead + past)
    async with world() as made, made.store() as writer, made.store() as reader:
        await writer.set("full", value)
        await reader.check(["full"])
        values = made.server.engine.namespaces["job"].values
        made.disk.slow = True
        write = asyncio.ensure_future(writer.set("key", "new"))
        await made.disk.came.wait()
        read = asyncio.ensure_future(reader.get("full"))
        await until(lambda: made.server.gate is not None and made.server.gate.waiting_count == 2)
        more = asyncio.ensure_future(reader.set("more", ""))
        if past:
            await turns()
            assert b"more" not in values
        else:
            await until(lambda: b"more" in values)
        made.disk.slow = False
        made.disk.run_waiting()
        assert await read == value
        await asyncio.gather(write, more)
        assert b"more" in values
