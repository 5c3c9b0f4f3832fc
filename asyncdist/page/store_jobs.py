"""Jobs as the daemon that serves the page knows them: the worlds in its keys, whose ranks are asked."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from asyncdist.inspect.endpoint import ALL, WAITS
from asyncdist.inspect.job import Job
from asyncdist.inspect.perfetto import trace
from asyncdist.page.look import clients_now
from asyncdist.store import TCPStore
from asyncdist.store.dialer import client_name
from asyncdist.store.tcp_store import StoreObserver
from asyncdist.world.inspection import FoundWorld, worlds_of
from asyncdist.world.live import asked_by_store, jobs_of, title

if TYPE_CHECKING:
    from asyncdist_server.serving.daemon import StoreServer

TIMEOUT_S: Final = 2.0
"""Of each request to the store, which is this very process."""
ALL_RANKS: Final = 16
"""Of larger worlds only what is under way is asked: the daemon has other things to do."""

MAX_BYTES: Final = 64 << 20
"""Of the answers of all ranks of a job, as this is the daemon's memory: of some hundred that remember all they can."""

T = TypeVar("T")


class StoreJobs:
    """See `routes.Jobs`. The store is asked as any client asks it, from a thread: its own loop serves meanwhile."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server

    async def store(self) -> tuple[list[str], list[dict[str, Any]]]:
        """The worlds, as `world.live.title` has them, and the other clients."""
        return await self._run(self._store)

    async def ask(self, name: str, *, all_remembered: bool) -> Job | None:
        """What the ranks of a world say now."""
        return await self._run(lambda: self._ask(name, ALL_RANKS if all_remembered else 0))

    async def timeline(self, name: str) -> bytes | None:
        """The timeline of all that the ranks remember."""
        job = await self._run(lambda: self._ask(name, None))
        if job is None:
            return None
        documents = [document for rank, document in job.documents.items() if rank not in job.missing]
        return await asyncio.to_thread(lambda: b"".join(trace(documents)))

    async def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        return await asyncio.to_thread(lambda: asyncio.run(_awaited(work())))

    async def _store(self) -> tuple[list[str], list[dict[str, Any]]]:
        async with self._client(StoreObserver) as observer:
            clients = await observer.clients(all_namespaces=True)
            waits = await observer.waits(all_namespaces=True)
            worlds = await self._worlds(observer)
        others = [each for each in clients if each.client != client_name()]
        return sorted(title(job, world.name) for job, world in worlds), clients_now(others, waits)

    async def _worlds(self, observer: TCPStore) -> list[tuple[str, FoundWorld]]:
        found = []
        for job in await jobs_of(observer):
            async with self._client(TCPStore, job) as store:
                found += [(job, world) for world in await worlds_of(store)]
        return found

    async def _ask(self, name: str, all_ranks: int | None) -> Job | None:
        async with self._client(StoreObserver) as observer:
            worlds = await self._worlds(observer)
        for job, world in worlds:
            if title(job, world.name) == name:
                question = ALL if all_ranks is None or world.size <= all_ranks else WAITS
                async with self._client(TCPStore, job) as store:
                    asked = await asked_by_store(store, job, world.name, question, MAX_BYTES)
                return Job(asked[0].documents.values(), asked[0].size) if asked else None
        return None

    def _client(self, kind: type[TCPStore], namespace: str = "") -> TCPStore:
        """A client of this daemon. Its certificate need not name the address: this is the process itself."""
        tls = None
        if self._server.config.tls_cert is not None:
            tls = ssl.create_default_context()
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
            tls.load_cert_chain(self._server.config.tls_cert, self._server.config.tls_key)
        host, _, port = self._server.address.rpartition(":")
        host = {"0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host.strip("[]"))
        return kind(host, int(port), timeout=TIMEOUT_S, token=self._server.token, tls=tls, namespace=namespace)


async def _awaited(work: Awaitable[T]) -> T:
    return await work
