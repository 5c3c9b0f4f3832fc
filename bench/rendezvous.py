"""Subject rendezvous: 250 to 2,000 connections from 4 processes join one rendezvous at a daemon of its own process.

Each process opens a quarter of the clients. asyncdist: every client joins one world as one rank of 64 hosts and
publishes its address, through the same `Rendezvous` that `init_process_group` uses. The number of requests of a rank
must not depend on the size of the world: the most that any rank made are told, and in brackets those of the rank that
found all others there. torch, with 1,000: every client sets its address, counts itself in and waits for the last one's
word, one after the other as its blocking client can. A sample runs from before the first connection to the moment the
last rank knows that all are there and (asyncdist) has published where it listens. The server's peak resident memory is
printed beside it.

torch's client and server ask the resolver for the reverse name of every connection. Where name servers drop some of
many questions, that alone takes minutes; then torch is left out and the table says why.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
import time
from collections.abc import Sequence
from typing import Any

from asyncdist.store import TCPStore
from bench.candidates import missing_torch
from bench.model import Candidate, Case, Profile, Rank, RankContext, Record, Subject
from bench.process import raise_file_limit
from bench.servers import asyncdist_server, torch_store_server
from bench.store import asyncdist_run, host_and_port, missing_store

PROCESSES = 4
HOSTS = 64
CONNECTIONS = (250, 500, 1000, 2000)
SMOKE_CONNECTIONS = (20,)
TORCH_CONNECTIONS = (20, 1000)
JOIN_TIMEOUT_S = 60.0
RESOLVER_PROBES = 100
RESOLVER_STALL_S = 0.5
FIRST_PORT = 20_000
"""Published, never listened on: the joins are measured, not the mesh."""


class CountingStore(TCPStore):
    """Counts its requests."""

    requests = 0

    def _request(self, operation: int, *arguments: Any, **options: Any) -> asyncio.Future[Any]:
        self.requests += 1
        return super()._request(operation, *arguments, **options)


class AsyncdistRendezvousRank(Rank):
    """One of the processes: many ranks of one world."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._rounds = 0
        self.run = asyncdist_run()

    async def open(self) -> None:
        raise_file_limit()
        self._rendezvous_class: Any = importlib.import_module("asyncdist.world.rendezvous").Rendezvous
        self._address_module: Any = importlib.import_module("asyncdist.transport.addresses")
        self._deadline_class: Any = importlib.import_module("asyncdist.concurrency.deadline").Deadline

    async def measure(self, case: Case) -> Record:
        """Join ``case.operations`` ranks, spread evenly over the processes."""
        record = Record()
        ranks = range(self._context.rank, case.operations, self._context.world_size)
        for number in range(case.warmup + case.samples):
            self._rounds += 1
            start_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
            joined = await asyncio.gather(*(self._join(rank, case.operations) for rank in ranks))
            end_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns() - cpu_ns
            for store, world, rank in joined:
                name = "decider_requests" if rank == world.decider else "rank_requests"
                record.extra[name] = max(store.requests, record.extra.get(name, 0))
            record.wrong += sum(world.world_id != joined[0][1].world_id for _, world, _ in joined)
            record.wrong += len({id_ for _, _, id_ in joined}) != len(ranks)
            await self._meet_and_close([store for store, _, _ in joined])
            if number >= case.warmup:
                record.add(start_ns, end_ns, cpu_ns)
        return record

    async def _join(self, rank: int, world_size: int) -> tuple[Any, Any, int]:
        host, port = host_and_port(self._context.address)
        store = CountingStore(host, port)
        place = rank * HOSTS // world_size
        rendezvous = self._rendezvous_class(store, rank, world_size, f"bench-{self._rounds}")
        loop = asyncio.get_running_loop()
        deadline = self._deadline_class.after(JOIN_TIMEOUT_S, loop.time())

        async def listen(_world_id: bytes) -> Any:
            return self._address_module.PeerAddress(
                host_id=f"host-{place}", endpoints=((f"10.0.0.{place}", FIRST_PORT + rank),), unix=b"\0bench-%d" % rank
            )

        return store, await rendezvous.join(f"host-{place}", False, {}, listen, deadline), rank

    async def _meet_and_close(self, stores: Sequence[Any]) -> None:
        """Let every process finish its sample before connections go (untimed)."""
        key = f"bench/closing/{self._rounds}"
        if await stores[0].add(key, 1) == self._context.world_size:
            await stores[0].set(f"{key}/go", b"1")
        await stores[0].wait([f"{key}/go"])
        for store in stores:
            await store.close()


class TorchRendezvousRank(Rank):
    """One of the processes: many blocking torch clients, one after the other."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._rounds = 0
        self._store_class: Any = None

    async def open(self) -> None:
        self._store_class = importlib.import_module("torch.distributed").TCPStore

    async def measure(self, case: Case) -> Record:
        """Join ``case.operations`` clients, spread evenly over the processes."""
        record = Record()
        host, port = host_and_port(self._context.address)
        per_process = case.operations // self._context.world_size
        for number in range(case.warmup + case.samples):
            self._rounds += 1
            prefix = f"bench-{self._rounds}"
            start_ns = time.perf_counter_ns()
            clients = []
            for i in range(per_process):
                client = self._store_class(host, port, is_master=False, wait_for_workers=False)
                client.set(f"{prefix}/{self._context.rank * per_process + i}", socket.gethostname())
                if client.add(f"{prefix}/joined", 1) == case.operations:
                    client.set(f"{prefix}/ready", prefix)
                clients.append(client)
            record.wrong += sum(client.get(f"{prefix}/ready").decode() != prefix for client in clients)
            end_ns = time.perf_counter_ns()
            if clients[0].add(f"{prefix}/closing", 1) == self._context.world_size:
                clients[0].set(f"{prefix}/go", "1")
            clients[0].wait([f"{prefix}/go"])
            clients.clear()
            if number >= case.warmup:
                record.add(start_ns, end_ns)
        return record


def cases(profile: Profile) -> Sequence[Case]:
    """Return the cells of a profile."""
    sizes = SMOKE_CONNECTIONS if profile.name == "smoke" else CONNECTIONS
    return [Case("rendezvous", 0, 1, 0, "span", size, title=f"{size} connections join") for size in sizes]


def _wanted(candidate: Candidate, case: Case, _processes: int) -> bool:
    return candidate.own or case.operations in TORCH_CONNECTIONS


def missing_torch_or_resolver() -> str | None:
    """Why torch cannot be measured, or None: not installed, or reverse name look-ups stall on this machine."""
    failure = missing_torch()
    if failure is None:
        for port in range(RESOLVER_PROBES):
            start_s = time.monotonic()
            socket.getnameinfo(("::ffff:127.0.0.1", port, 0, 0), 0)  # as torch looks at its IPv6 sockets
            if time.monotonic() - start_s > RESOLVER_STALL_S:
                return "not run: reverse look-ups stall"
    return failure


RENDEZVOUS = frozenset({"rendezvous"})
ASYNCDIST = Candidate(
    "asyncdist",
    "bench.rendezvous:AsyncdistRendezvousRank",
    RENDEZVOUS,
    missing=missing_store,
    server=asyncdist_server,
    own=True,
)
TORCH = Candidate(
    "torch",
    "bench.rendezvous:TorchRendezvousRank",
    RENDEZVOUS,
    missing=missing_torch_or_resolver,
    server=torch_store_server,
)
SUBJECT = Subject(
    "rendezvous",
    "Rendezvous of ranks of 64 hosts",
    (PROCESSES,),
    cases,
    (ASYNCDIST, TORCH),
    modes=("free",),
    wanted=_wanted,
)
