"""A daemon's backups ask the disk where it costs the clients nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from pathlib import Path

import pytest

from asyncdist_server import ServerConfig, serve
from asyncdist_server.journal import sqlite_journal
from asyncdist_server.journal.batch import VALUES, Batch
from asyncdist_server.journal.data_directory import DataDirectory
from asyncdist_server.journal.journal import JournalError, parse_durability
from asyncdist_server.journal.journal_thread import JournalThread
from asyncdist_server.journal.sqlite_journal import SqliteJournal
from asyncdist_server.ops import backups
from asyncdist_server.ops.backups import BackupRequests

DEADLINE_S = 60.0


@pytest.mark.parametrize("slow", ["_requests", "write_durably"])
async def test_a_slow_directory_does_not_keep_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    began, goes_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    quick = getattr(backups, slow)

    def hangs(*arguments: object) -> object:
        assert threading.current_thread() is not threading.main_thread()
        loop.call_soon_threadsafe(began.set)
        goes_on.wait(DEADLINE_S)
        return quick(*arguments)

    config = ServerConfig(port=0, durability=parse_durability("durable"), data_dir=tmp_path)
    async with asyncio.timeout(DEADLINE_S), serve(config) as server:
        assert server.gate is not None
        requests = BackupRequests(server, server.gate, tmp_path)
        (tmp_path / "backups" / "request-1").touch()
        monkeypatch.setattr(backups, slow, hangs)
        requests.notice()
        await began.wait()
        goes_on.set()
        await requests.close()
    (made,) = (tmp_path / "backups").glob("*.sqlite")
    assert json.loads((tmp_path / "backups" / "answer-1").read_text()) == {"path": str(made)}


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread")]
)
async def test_a_daemon_that_cannot_look_for_requests_says_so_and_serves_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """It ended with that error otherwise, when it was stopped days later."""

    def fails(directory: Path) -> list[Path]:
        raise error

    config = ServerConfig(port=0, durability=parse_durability("durable"), data_dir=tmp_path)
    async with asyncio.timeout(DEADLINE_S), serve(config) as server:
        assert server.gate is not None
        requests = BackupRequests(server, server.gate, tmp_path)
        (tmp_path / "backups" / "request-1").touch()
        with monkeypatch.context() as patch:
            patch.setattr(backups, "_requests", fails)
            requests.notice()
            await requests.close()
        assert f"cannot look for requests in {tmp_path}/backups: {error}" in caplog.text
        requests.notice()
        await requests.close()
    (made,) = (tmp_path / "backups").glob("*.sqlite")
    assert json.loads((tmp_path / "backups" / "answer-1").read_text()) == {"path": str(made)}


def test_who_waits_is_told_that_another_daemon_runs_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one does not know of the request, which a signal to the old one told."""
    holders = [(1, True), (1, True), (2, True)]
    (tmp_path / "backups").mkdir()
    monkeypatch.setattr(os, "kill", lambda process, number: None)
    monkeypatch.setattr(backups, "holder", lambda directory: holders.pop(0))
    with pytest.raises(JournalError, match="process 1, stopped before the backup was made"):
        backups.back_up(tmp_path, timeout_s=DEADLINE_S)
    assert not list((tmp_path / "backups").iterdir())


async def test_a_failed_write_ends_the_backup_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing touches a journal that failed; its open transaction would keep copy and end waiting for ever."""
    journal = SqliteJournal(DataDirectory(tmp_path))
    thread = JournalThread(asyncio.get_running_loop())
    queued = threading.Event()

    def copy() -> None:
        queued.wait(DEADLINE_S)
        journal.backup(tmp_path / "backups" / "one.sqlite", thread.run_waiting)

    def fails(name: str) -> None:
        if name == "written":
            raise OSError("no such disk")

    def write(number: int) -> None:
        journal.write(Batch(number, number, 0, 1, [[(VALUES, "job", [(b"key", bytes(1 << 20), 0)])]]))

    outcome: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    async with asyncio.timeout(DEADLINE_S):
        await thread.call(lambda: journal.read(lambda *row: None))
        await thread.call(lambda: [write(number) for number in range(1, 4)])
        monkeypatch.setattr(sqlite_journal, "failpoint", fails)
        made = asyncio.ensure_future(thread.call(copy))
        await asyncio.sleep(0)
        thread.submit(lambda: write(4), lambda result, error: outcome.set_result(error))
        queued.set()
        with pytest.raises(JournalError, match=r"failed meanwhile: cannot write to .*: no such disk"):
            await made
        assert isinstance(await outcome, JournalError)
    assert not list((tmp_path / "backups").iterdir())
    thread.close()
    journal.abandon()
