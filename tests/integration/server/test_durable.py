"""The durable daemon as its clients see it: killed at bad instants and started again, it misses nothing it said."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from journal_kit import Daemon, daemon

from asyncdist.errors import DistStoreError, WatchCompactedError
from asyncdist.store import TCPStore
from asyncdist.store.watch import Watch, WatchEvent
from asyncdist_server.journal.journal_thread import FAILPOINT_VARIABLE

DEADLINE_S = 60.0


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Daemon]:
    with daemon(tmp_path / "data") as started:
        yield started.start()


def restart(running: Daemon) -> None:
    running.kill()
    running.start()


async def test_everything_acknowledged_is_there_after_kill(running: Daemon) -> None:
    async with TCPStore("127.0.0.1", running.port, namespace="job") as store:
        await asyncio.gather(*(store.set(f"key/{i}", str(i)) for i in range(500)))
        await store.add("counter", 7)
        await store.append("log", b"ab")
        for item in (b"1", b"2", b"3"):
            await store.queue_push("queue", item)
        assert await store.queue_pop("queue") == b"1"
        await store.delete_key("key/0")
        restart(running)
        assert await store.multi_get([f"key/{i}" for i in range(1, 500)]) == [str(i).encode() for i in range(1, 500)]
        assert not await store.check(["key/0"])
        assert await store.add("counter", 0) == 7
        assert await store.get("log") == b"ab"
        assert [await store.queue_pop("queue") for _ in range(2)] == [b"2", b"3"]
    async with TCPStore("127.0.0.1", running.port, namespace="other") as store:
        assert await store.num_keys() == 0


async def test_waiting_clients_survive_a_restart(running: Daemon) -> None:
    """Blocked get, wait, queue_pop, lock and watch across kill -9: none fails, each gets what comes later, once."""
    async with (
        TCPStore("127.0.0.1", running.port, namespace="job") as waiting,
        TCPStore("127.0.0.1", running.port, namespace="job") as writing,
    ):
        watch = waiting.watch("w/")
        async with watch, asyncio.timeout(DEADLINE_S):
            events = aiter(watch)
            await writing.set("w/1", "before")
            assert (await anext(events)).value == b"before"
            get = waiting.get("late")
            wait = waiting.wait(["late", "later"])
            pops = [waiting.queue_pop("queue") for _ in range(2)]
            event = asyncio.ensure_future(anext(events))
            await waiting.set("sent", "all of the above")
            restart(running)
            await writing.set("late", "value")
            await writing.set("later", "")
            await writing.queue_push("queue", b"one")
            await writing.queue_push("queue", b"two")
            await writing.set("w/2", "after")
            assert await get == b"value"
            await wait
            assert sorted([await pop for pop in pops]) == [b"one", b"two"]
            found = await event
            assert (found.key, found.value) == ("w/2", b"after")
            assert await writing.queue_len("queue") == 0


async def test_a_watch_that_was_behind_loses_no_event(running: Daemon) -> None:
    async with TCPStore("127.0.0.1", running.port, namespace="job") as store, asyncio.timeout(DEADLINE_S):
        async with store.watch("w/") as watch:
            for number in range(10):
                await store.set(f"w/{number}", "")
            restart(running)
            await store.delete_key("w/3")
            seen = [(event.kind, event.key) async for event in first(watch, 11)]
        assert seen == [("set", f"w/{number}") for number in range(10)] + [("delete", "w/3")]


async def first(watch: Watch, count: int) -> AsyncIterator[WatchEvent]:
    async for event in watch:
        yield event
        count -= 1
        if not count:
            return


@pytest.mark.parametrize("place", ["begun", "written", "committed"])
async def test_what_was_under_way_is_applied_once(tmp_path: Path, place: str) -> None:
    """The daemon dies just before, within and just after the commit of an add, an append, a push and a pop."""
    with daemon(tmp_path / "data") as running:
        running.start()
        async with TCPStore("127.0.0.1", running.port, namespace="job") as store, asyncio.timeout(DEADLINE_S):
            await store.set("there", "")
            await store.queue_push("queue", b"first")
            running.stop()
            running.start(**{FAILPOINT_VARIABLE: f"{place}:3"})  # 1: the client comes back; 2: the next line
            await store.set("again", "")
            replies: list[Any] = [
                store.add("n", 1),
                store.append("log", b"x"),
                store.queue_push("queue", b"second"),
                store.queue_pop("queue"),
                store.compare_set("new", b"", b"mine"),
            ]
            await asyncio.get_running_loop().run_in_executor(None, running.communicate)
            assert running.process is not None
            assert running.process.returncode == -9
            running.start()
            assert [await reply for reply in replies] == [1, None, None, b"first", b"mine"]
            assert await store.add("n", 0) == 1
            assert await store.get("log") == b"x"
            assert await store.queue_len("queue") == 1


@pytest.mark.slow("starts a daemon for each instant")
@pytest.mark.parametrize(
    ("place", "count"),
    [
        pytest.param("begun", 40, marks=pytest.mark.thorough),
        pytest.param("written", 60, marks=pytest.mark.thorough),
        ("written", 120),
        ("committed", 90),
        ("checkpointed", 2),
    ],
)
async def test_a_long_value_that_is_appended_to_survives_any_instant(tmp_path: Path, place: str, count: int) -> None:
    """Before, in and after the commit of a piece, while the journal gives up old pieces, after a checkpoint."""
    with daemon(tmp_path / "data") as running:
        running.start(**{FAILPOINT_VARIABLE: f"{place}:{count}"})
        async with TCPStore("127.0.0.1", running.port, namespace="job") as store, asyncio.timeout(DEADLINE_S):
            dying = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(None, running.communicate))
            pieces: list[bytes] = []
            while not dying.done():
                pieces.append(b"%d," % len(pieces) * 20_000)
                appending = store.append("log", pieces[-1])
                other = store.set("hot", b"x" * 100_000)
                await asyncio.wait([dying, asyncio.gather(appending, other)], return_when=asyncio.FIRST_COMPLETED)
            assert running.process is not None
            assert running.process.returncode == -9
            running.start()
            await asyncio.gather(appending, other)
            assert await store.get("log") == b"".join(pieces)
            await store.append("log", b"end")
            restart(running)
            assert await store.get("log") == b"".join(pieces) + b"end"
        running.stop()


async def test_leases_begin_anew_and_locks_stay_held(running: Daemon) -> None:
    async with (
        TCPStore("127.0.0.1", running.port, namespace="job") as holder,
        TCPStore("127.0.0.1", running.port, namespace="job") as other,
        asyncio.timeout(DEADLINE_S),
    ):
        lease = await holder.lease(30.0, bound=True)
        await holder.set("bound", "", lease=lease)
        async with holder.lock("lock") as token:
            next_one = asyncio.ensure_future(other.lock("lock").__aenter__())
            await other.set("asked", "")
            restart(running)
            assert await other.check(["bound", "lock/lock"])
            assert not next_one.done()
        assert await next_one > token
        await lease.revoke()
        assert not await other.check(["bound"])


async def test_a_job_goes_on_with_its_epoch_and_ranks(running: Daemon) -> None:
    async with (
        TCPStore("127.0.0.1", running.port, namespace="job") as one,
        TCPStore("127.0.0.1", running.port, namespace="job") as two,
        asyncio.timeout(DEADLINE_S),
    ):
        members = await asyncio.gather(one.join("j", 2, 2, name="a"), two.join("j", 2, 2, name="b"))
        restart(running)
        await asyncio.gather(*(member.rejoin() for member in members))
        assert [(member.epoch, member.rank) for member in members] == [(2, 0), (2, 1)]
        for member in members:
            await member.leave()


async def test_an_orderly_restart_loses_nothing_either(running: Daemon) -> None:
    async with TCPStore("127.0.0.1", running.port, namespace="job") as store, asyncio.timeout(DEADLINE_S):
        late = store.get("late")
        await store.set("key", "value")
        running.stop()
        running.start()
        assert await store.get("key") == b"value"
        await store.set("late", "x")
        assert await late == b"x"


async def test_relaxed_keeps_what_is_older_than_its_delay_and_what_an_orderly_end_leaves(tmp_path: Path) -> None:
    with daemon(tmp_path / "data", "--durability", "relaxed:60000") as running:
        running.start()
        async with TCPStore("127.0.0.1", running.port, namespace="job") as store, asyncio.timeout(DEADLINE_S):
            await store.set("key", "value")
            running.stop()
            running.start()
            assert await store.get("key") == b"value"
            await store.set("key", "lost: it was acknowledged a moment ago")
            async with store.watch("") as watch:
                await store.set("other", "lost too")
                restart(running)
                with pytest.raises(WatchCompactedError):
                    assert [event.key async for event in watch] == ["other"]
                assert await store.get("key") == b"value"
        running.stop()


async def test_a_durable_store_is_the_same_incarnation_after_a_restart(running: Daemon) -> None:
    async with TCPStore("127.0.0.1", running.port, namespace="job") as store:
        before = (await store.status())["incarnation"]
        restart(running)
        assert (await store.status())["incarnation"] == before


async def command(*arguments: str) -> str:
    """What `asyncdist-server` with these arguments prints; it must succeed."""
    process = forked.Popen([sys.executable, "-m", "asyncdist_server", *arguments], stdout=subprocess.PIPE, text=True)
    said, _ = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0
    return said.strip()


async def test_a_restored_backup_is_another_store(running: Daemon) -> None:
    directory = ("--data-dir", str(running.data_dir))
    async with TCPStore("127.0.0.1", running.port, namespace="job") as store, asyncio.timeout(DEADLINE_S):
        await store.set("key", "old")
        backup = await command("backup", *directory)
        await store.set("key", "new")
        running.stop()
        assert "sound, 1 namespaces, 1 keys" in await command("verify", backup)
        assert "the old journal is in" in await command("restore", backup, *directory)
        lost = store.add("n", 1)
        running.start()
        with pytest.raises(DistStoreError):
            await lost
        assert await store.get("key") == b"old"
        running.stop()
        assert "sound" in await command("verify", *directory)
        offline = await command("backup", *directory)
        assert sorted(map(str, (running.data_dir / "backups").iterdir())) == [backup, offline]
