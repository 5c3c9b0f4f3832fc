"""Subject store: requests of one client to a server in a process of its own, pinned to different cores or free.

* ``get 8 B`` and ``check``: one request at a time, the key exists.
* ``set+get, 128 in flight``: bursts of 64 sets and 64 gets issued together and then awaited. A sample is ten bursts,
  1,280 operations. Redis: a pipeline of 128 commands, through redis-py (blocking, and asyncio). torch offers no
  pipelining; multi_set and multi_get of 64 keys stand in for it.
* ``set+get, 128 tasks``: the same number of operations from 128 tasks, each doing one set and one get after the other.
* ``set+get, 8 clients``: eight connections at once, each with bursts as above and keys of its own.

Subject torch-store: torch's own unmodified client, one request at a time, to asyncdist's daemon and to torch's server.
Either server has a process of its own. One process is the client of both and asks them in turns, a block of requests
each; so wherever the kernel puts the process, both are measured from there. get is two round trips of torch's (wait,
then get). set has no answer, so a check that it has arrived follows.

``python -m bench.store`` measures narrow listings instead: ten members list the 10 keys of a prefix, in a loop, in a
store of a million keys, while another client sets a key 50 times a second.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
import multiprocessing
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter_ns
from typing import Any

import click

from bench.candidates import missing_module, missing_torch
from bench.model import Candidate, Case, Profile, Rank, RankContext, Record, Subject
from bench.servers import asyncdist_server, asyncdist_torch_server, redis_server, torch_store_server

IN_FLIGHT = 128
PAIRS = IN_FLIGHT // 2
BURSTS = 10
CLIENTS = 8
KEY = "bench/key"
CHECK_NUMBER_BYTES = 8
REDIS_BENCHMARK_TIMEOUT_S = 60.0

Operation = Callable[[int], int | Awaitable[int]]
"""Carry the sample of this number out; return, or give once awaited, how many answers were wrong."""


def value_of(number: int) -> bytes:
    """Return eight bytes that belong to this number only."""
    return number.to_bytes(CHECK_NUMBER_BYTES, "big")


def host_and_port(address: str) -> tuple[str, int]:
    """Split host:port."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def asyncdist_run() -> Callable[..., Any]:
    """Return `asyncdist.run`."""
    run: Callable[..., Any] = importlib.import_module("asyncdist").run
    return run


class StoreRank(Rank):
    """One client, or several; `_client` has a `set`. A request's method returns how many answers were wrong."""

    _client: Any = None

    async def measure(self, case: Case) -> Record:
        operation = self._operations()[case.operation]
        record = Record()
        for number in range(case.warmup + case.samples):
            stored = self._client.set(KEY, value_of(number))
            if inspect.isawaitable(stored):
                await stored
            start_ns = time.perf_counter_ns()
            wrong = operation(number)
            if not isinstance(wrong, int):
                wrong = await wrong
            end_ns = time.perf_counter_ns()
            record.wrong += wrong
            if number >= case.warmup:
                record.add(start_ns, end_ns)
        return record

    def _operations(self) -> dict[str, Operation]:
        return {"get": self._get, "check": self._check, "burst": self._burst}

    def _get(self, number: int) -> int | Awaitable[int]:
        raise NotImplementedError

    def _check(self, number: int) -> int | Awaitable[int]:
        raise NotImplementedError

    def _burst(self, number: int) -> int | Awaitable[int]:
        raise NotImplementedError


class AsyncdistStoreRank(StoreRank):
    """The client of asyncdist's daemon."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._clients: list[Any] = []
        self.run = asyncdist_run()

    async def open(self) -> None:
        store_class: Any = importlib.import_module("asyncdist.store").TCPStore
        self._clients = [store_class(*host_and_port(self._context.address)) for _ in range(CLIENTS)]
        self._client = self._clients[0]
        await self._client.set(KEY, value_of(0))

    async def close(self) -> None:
        for store in self._clients:
            await store.close()

    def _operations(self) -> dict[str, Operation]:
        return {**super()._operations(), "tasks": self._tasks, "clients": self._all_clients}

    async def _get(self, number: int) -> int:
        return int(await self._client.get(KEY) != value_of(number))

    async def _check(self, _number: int) -> int:
        return int(await self._client.check([KEY]) is not True)

    async def _burst(self, number: int) -> int:
        return await self._bursts(self._client, "bench", number)

    async def _all_clients(self, number: int) -> int:
        every = (self._bursts(store, f"bench/{name}", number) for name, store in enumerate(self._clients))
        return sum(await asyncio.gather(*every))

    async def _bursts(self, store: Any, prefix: str, number: int) -> int:
        wrong = 0
        for burst in range(BURSTS):
            value = value_of(number * BURSTS + burst)
            sets = [store.set(f"{prefix}/{i}", value) for i in range(PAIRS)]
            gets = [store.get(f"{prefix}/{i}") for i in range(PAIRS)]
            for pending in sets:
                await pending
            for pending in gets:
                wrong += await pending != value
        return wrong

    async def _tasks(self, number: int) -> int:
        store = self._client

        async def one(index: int) -> int:
            wrong = 0
            for burst in range(BURSTS // 2):
                value = value_of(number * BURSTS + burst)
                await store.set(f"bench/{index}", value)
                wrong += await store.get(f"bench/{index}") != value
            return wrong

        return sum(await asyncio.gather(*(one(index) for index in range(IN_FLIGHT))))


class TorchStoreRank(StoreRank):
    """The client of torch's TCPStore."""

    async def open(self) -> None:
        distributed = importlib.import_module("torch.distributed")
        host, port = host_and_port(self._context.address)
        self._client = distributed.TCPStore(host, port, is_master=False, wait_for_workers=False)

    async def close(self) -> None:
        self._client = None

    def _get(self, number: int) -> int:
        return int(self._client.get(KEY) != value_of(number))

    def _check(self, _number: int) -> int:
        return int(self._client.check([KEY]) is not True)

    def _burst(self, number: int) -> int:
        wrong = 0
        keys = [f"bench/{i}" for i in range(PAIRS)]
        for burst in range(BURSTS):
            value = value_of(number * BURSTS + burst)
            self._client.multi_set(keys, [value.decode("latin-1")] * PAIRS)
            wrong += sum(found != value.decode("latin-1").encode() for found in self._client.multi_get(keys))
        return wrong


class RedisRank(StoreRank):
    """The client of Redis: redis-py, blocking."""

    async def open(self) -> None:
        host, port = host_and_port(self._context.address)
        self._client = importlib.import_module("redis").Redis(host, port)
        self._client.ping()

    async def close(self) -> None:
        self._client.close()

    def _get(self, number: int) -> int:
        return int(self._client.get(KEY) != value_of(number))

    def _check(self, _number: int) -> int:
        return int(self._client.exists(KEY) != 1)

    def _burst(self, number: int) -> int:
        wrong = 0
        for burst in range(BURSTS):
            value = value_of(number * BURSTS + burst)
            wrong += sum(found != value for found in redis_pipeline(self._client, value).execute()[PAIRS:])
        return wrong


class RedisAsyncClient(Rank):
    """A client of Redis that is opened and closed: redis-py, asyncio."""

    _client: Any = None

    async def open(self) -> None:
        host, port = host_and_port(self._context.address)
        self._client = importlib.import_module("redis.asyncio").Redis(host=host, port=port)
        await self._client.ping()

    async def close(self) -> None:
        await self._client.aclose()


class RedisAsyncRank(RedisAsyncClient, StoreRank):
    """The client of Redis: redis-py, asyncio."""

    async def _get(self, number: int) -> int:
        return int(await self._client.get(KEY) != value_of(number))

    async def _check(self, _number: int) -> int:
        return int(await self._client.exists(KEY) != 1)

    async def _burst(self, number: int) -> int:
        wrong = 0
        for burst in range(BURSTS):
            value = value_of(number * BURSTS + burst)
            wrong += sum(found != value for found in (await redis_pipeline(self._client, value).execute())[PAIRS:])
        return wrong


def redis_pipeline(client: Any, value: bytes) -> Any:
    """Return a pipeline of 64 sets of ``value`` and as many gets."""
    pipeline = client.pipeline(transaction=False)
    for i in range(PAIRS):
        pipeline.set(f"bench/{i}", value)
    for i in range(PAIRS):
        pipeline.get(f"bench/{i}")
    return pipeline


class RedisBenchmarkRank(Rank):
    """redis-benchmark, Redis' own C client: what the server can do. One run gives one rate; it verifies nothing."""

    async def measure(self, case: Case) -> Record:
        """Run sets and gets; every sample is the run's mean time for ``case.operations``."""
        requests = str(case.operations * case.samples // 2)
        clients = str(CLIENTS if case.operation == "clients" else 1)
        return self._run(case, "-c", clients, "-P", str(IN_FLIGHT), "-n", requests, "-t", "set,get")

    def _run(self, case: Case, *arguments: str) -> Record:
        port = str(host_and_port(self._context.address)[1])
        command = ["redis-benchmark", "-p", port, "-d", "8", "--csv", *arguments]
        output = subprocess.run(command, capture_output=True, check=True, timeout=REDIS_BENCHMARK_TIMEOUT_S).stdout
        lines = output.decode().splitlines()
        rates = [float(line.split(",")[1].strip('"')) for line in lines if line.startswith(('"S', '"G'))]
        sample_ns = int(case.operations * 1e9 * sum(1 / rate for rate in rates) / len(rates))
        record = Record()
        for _ in range(case.samples):
            record.add(0, sample_ns)
        return record


def cases(profile: Profile) -> Sequence[Case]:
    """Return the cells of a profile."""
    samples, warmup = profile.samples(large=False)
    many = IN_FLIGHT * BURSTS
    return [
        Case("get", 8, samples, warmup),
        Case("check", 0, samples, warmup),
        Case("burst", 8, samples, warmup, operations=many, title="set+get 8 B, 128 in flight"),
        Case("tasks", 8, samples, warmup, operations=many, title="set+get 8 B, 128 tasks"),
        Case("clients", 8, samples, warmup, operations=CLIENTS * many, title="set+get 8 B, 8 clients"),
    ]


def missing_store() -> str | None:
    """Why asyncdist's store cannot be measured, or None."""
    failure = missing_module("asyncdist", "asyncdist_server")
    if failure is None and not hasattr(importlib.import_module("asyncdist.store"), "TCPStore"):
        failure = "not available: asyncdist.store.TCPStore"
    return failure


def missing_redis() -> str | None:
    """Why Redis cannot be measured, or None."""
    if shutil.which("redis-server") is None:
        return "not installed: redis-server"
    return missing_module("redis")


def missing_redis_benchmark() -> str | None:
    """Why redis-benchmark cannot be run, or None."""
    return (
        None if shutil.which("redis-server") and shutil.which("redis-benchmark") else "not installed: redis-benchmark"
    )


ONE_AT_A_TIME = frozenset({"get", "check", "burst"})
ASYNCDIST = Candidate(
    "asyncdist",
    "bench.store:AsyncdistStoreRank",
    ONE_AT_A_TIME | {"tasks", "clients"},
    missing=missing_store,
    server=asyncdist_server,
    own=True,
)
TORCH = Candidate(
    "torch", "bench.store:TorchStoreRank", ONE_AT_A_TIME, missing=missing_torch, server=torch_store_server
)
REDIS = Candidate("redis", "bench.store:RedisRank", ONE_AT_A_TIME, missing=missing_redis, server=redis_server)
REDIS_ASYNC = Candidate(
    "redis asyncio", "bench.store:RedisAsyncRank", ONE_AT_A_TIME, missing=missing_redis, server=redis_server
)
REDIS_BENCHMARK = Candidate(
    "redis-benchmark",
    "bench.store:RedisBenchmarkRank",
    frozenset({"burst", "clients"}),
    missing=missing_redis_benchmark,
    server=redis_server,
)
SUBJECT = Subject("store", "Store requests", (1,), cases, (ASYNCDIST, TORCH, REDIS, REDIS_ASYNC, REDIS_BENCHMARK))


MEMBERS = 10
LISTED = 10
OTHERS_PERIOD_S = 0.02
FILL_BATCH = 10_000


async def list_in_a_loop(address: str, seconds: float) -> list[float]:
    """Return how long each listing took of ten members that ask one after the other, each for the keys of a prefix."""
    stores = await open_stores(address, MEMBERS)
    took_s: list[float] = []
    end_s = time.perf_counter() + seconds

    async def member(store: Any) -> None:
        while (start_s := time.perf_counter()) < end_s:
            if len(await store.list_keys("few/")) != LISTED:
                raise RuntimeError("a listing is wrong")
            took_s.append(time.perf_counter() - start_s)

    await asyncio.gather(*map(member, stores))
    for store in stores:
        await store.close()
    return took_s


async def open_stores(address: str, count: int) -> list[Any]:
    """Connect so many clients."""
    store_class: Any = importlib.import_module("asyncdist.store").TCPStore
    return [await store_class.connect(*host_and_port(address)) for _ in range(count)]


def list_in_a_process(address: str, seconds: float, results: Any) -> None:
    """Run `list_in_a_loop` and hand its figures over."""
    results.put(asyncdist_run()(list_in_a_loop(address, seconds)))


async def measure_listings(address: str, keys: int, seconds: float) -> None:
    """Fill the store, then print how long its filling, the listings and the sets meanwhile took."""
    (store,) = await open_stores(address, 1)
    start_s = time.perf_counter()
    for first in range(0, keys, FILL_BATCH):
        await asyncio.gather(*(store.set(f"many/{number:08}", b"") for number in range(first, first + FILL_BATCH)))
    print(f"{keys:,} keys set at {keys / (time.perf_counter() - start_s):,.0f} a second")
    await asyncio.gather(*(store.set(f"few/{number}", b"") for number in range(LISTED)))
    start_s = time.perf_counter()
    listed = len(await store.list_keys("many/"))
    print(f"all {listed:,} listed in {time.perf_counter() - start_s:.3f} s")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    members = context.Process(target=list_in_a_process, args=(address, seconds, results))
    members.start()
    others_s: list[float] = []
    while results.empty():
        start_s = time.perf_counter()
        await store.set("others/key", b"")
        others_s.append(time.perf_counter() - start_s)
        await asyncio.sleep(OTHERS_PERIOD_S)
    for title, took_s in (("list_keys of 10", results.get()), ("set of another client", others_s)):
        took_s.sort()
        p50_s, p99_s, most_s = (took_s[int(len(took_s) * part)] for part in (0.5, 0.99, 1 - 1 / len(took_s)))
        figures = f"p50 {p50_s * 1e3:.3f} p99 {p99_s * 1e3:.3f} max {most_s * 1e3:.3f} ms"
        print(f"{title}: {figures}, {len(took_s):,} samples")
    members.join()
    await store.close()


@click.command()
@click.option("--keys", default=1_000_000, show_default=True, help="Keys in the store; a multiple of 10,000.")
@click.option("--seconds", default=10.0, show_default=True, help="How long ten members list.")
def listings(keys: int, seconds: float) -> None:
    """Measure narrow listings among many keys."""
    server = asyncdist_server(None)
    try:
        asyncdist_run()(measure_listings(server.address, keys, seconds))
    finally:
        server.close()


TORCH_OPERATIONS = frozenset({"get", "set", "add", "check"})
COUNTER = "bench/counter"
TORCH_BLOCKS = 8
"""A run of 200 requests is as long as a few turns of the kernel's scheduler; of 25, one."""


class TorchClientRank(TorchStoreRank):
    """torch's client, one request at a time."""

    async def beside(self, address: str) -> TorchClientRank:
        """Return a client of the server at `address`, in this process."""
        other = TorchClientRank(dataclasses.replace(self._context, address=address))
        await other.open()
        return other

    async def measure(self, case: Case) -> Record:
        operation = {"get": self._get, "set": self._set, "add": self._add, "check": self._check}[case.operation]
        self._client.set(KEY, value_of(0))
        record = Record()
        base = self._client.add(COUNTER, 0)
        for number in range(case.warmup + case.samples):
            if case.operation == "get":
                self._client.set(KEY, value_of(number))
            start_ns = perf_counter_ns()
            wrong = operation(number if case.operation != "add" else base + number + 1)
            end_ns = perf_counter_ns()
            record.wrong += wrong
            if number >= case.warmup:
                record.add(start_ns, end_ns)
        return record

    def _set(self, number: int) -> int:
        self._client.set(KEY, value_of(number))
        return int(self._client.check([KEY]) is not True)

    def _add(self, expected: int) -> int:
        return int(self._client.add(COUNTER, 1) != expected)


def missing_torch_daemon() -> str | None:
    """Why torch's client cannot be measured on asyncdist's daemon, or None."""
    return missing_torch() or missing_module("asyncdist_server")


def torch_cases(profile: Profile) -> Sequence[Case]:
    """Return the cells of a profile."""
    samples, warmup = profile.samples(large=False)
    return [
        Case("get", 8, samples, warmup),
        Case("set", 8, samples, warmup, title="set 8 B and check"),
        Case("add", 0, samples, warmup),
        Case("check", 0, samples, warmup),
    ]


TORCH_TO_ASYNCDIST = Candidate(
    "asyncdist's daemon",
    "bench.store:TorchClientRank",
    TORCH_OPERATIONS,
    missing=missing_torch_daemon,
    server=asyncdist_torch_server,
    own=True,
)
TORCH_TO_TORCH = Candidate(
    "torch's server",
    "bench.store:TorchClientRank",
    TORCH_OPERATIONS,
    missing=missing_torch,
    server=torch_store_server,
    ranks_of=TORCH_TO_ASYNCDIST.name,
)
TORCH_SUBJECT = Subject(
    "torch-store",
    "Store requests of torch's client",
    (1,),
    torch_cases,
    (TORCH_TO_ASYNCDIST, TORCH_TO_TORCH),
    blocks=TORCH_BLOCKS,
)


if __name__ == "__main__":
    listings()
