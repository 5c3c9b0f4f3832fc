"""A daemon's backups ask the disk where it costs the clients nothing."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path

import pytest

from asyncdist_server import ServerConfig, backups, serve
from asyncdist_server.backups import BackupRequests
from asyncdist_server.durability import parse_durability
from asyncdist_server.journal import JournalError

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


def test_who_waits_is_told_that_another_daemon_runs_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one does not know of the request, which a signal to the old one told."""
    holders = [(1, True), (1, True), (2, True)]
    (tmp_path / "backups").mkdir()
    monkeypatch.setattr(os, "kill", lambda process, number: None)
    monkeypatch.setattr(backups, "holder", lambda directory: holders.pop(0))
    with pytest.raises(JournalError, match="process 1, stopped before the backup was made"):
        backups.back_up(tmp_path, timeout_s=DEADLINE_S)
    assert not list((tmp_path / "backups").iterdir())
