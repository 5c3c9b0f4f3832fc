"""A page that is served from recorded jobs."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from aiohttp import web

from asyncdist.inspect.dumps import FORMAT, VERSION
from asyncdist.inspect.job import Job, checked
from asyncdist.page.look import clients_now
from asyncdist.page.routes import Page
from asyncdist.store.request_store import StoreClient, WaitingClient

TOKEN = "a token of 32 characters or more"


def document(rank: int, size: int, entries: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A document of a rank, as a dump has it."""
    now_s = time.time()
    found = {
        "format": FORMAT, "version": VERSION, "rank": rank, "world_size": size, "host": "host", "pid": 100 + rank,
        "time": now_s, "groups": [{"id": "0", "name": "default", "ranks": list(range(size))}], "entries": entries,
    }  # fmt: skip
    return dict(checked(found | more))


def all_reduce(sequence: int, issued_s: float, **more: Any) -> dict[str, Any]:
    """An entry of the recorder."""
    now_s = time.time()
    if "ended" in more:
        more["ended"] += now_s
    return {
        "kind": "collective", "collective": "all_reduce", "operation": "all_reduce", "group": "default",
        "group_id": "0", "tag": 0, "sequence": sequence, "bytes": 1 << 20, "issued": now_s + issued_s, **more,
    }  # fmt: skip


class RecordedJobs:
    """Jobs that tests change while the page is open."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.clients: list[StoreClient] = []
        self.waits: list[WaitingClient] = []
        self.asked = 0

    async def store(self) -> tuple[list[str], list[dict[str, Any]]]:
        return list(self.jobs), clients_now(self.clients, self.waits)

    async def ask(self, name: str, *, all_remembered: bool) -> Job | None:
        self.asked += 1
        return self.jobs.get(name)

    async def timeline(self, name: str) -> bytes | None:
        return b"a trace of " + name.encode() if name in self.jobs else None


class Served:
    """The page on a port of its own."""

    def __init__(self) -> None:
        self.jobs = RecordedJobs()
        self.tokens: list[str] = [TOKEN]
        self.page = Page(self.jobs, lambda: self.tokens, lambda: {"keys": 7, "connections": 2})
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()
        assert self._runner is not None
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _start(self) -> None:
        application = web.Application()
        self.page.add_to(application)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://localhost:{self._runner.addresses[0][1]}/"

    def break_streams(self) -> None:
        """End what browsers follow."""
        asyncio.run_coroutine_threadsafe(self.page.close(web.Application()), self._loop).result()

    def __enter__(self) -> Served:
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
