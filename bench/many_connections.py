"""Subject many-connections: four processes with 2,500 connections each, each of which waits for one key, then one set.

A sample is the time from the set to the last wake-up in any process, on the connections of the whole run. Connections
that are refused, lost or not woken count as wrong. ``connection_bytes`` is how much larger the server's resident memory
is while all of them wait than before the first one came, divided by their number; ``connect_s`` is what opening them
took. Redis has no waiting for a key: there each connection subscribes to a channel. torch's server is measured with a
tenth of the connections: it looks up the name of each client's host, one after the other, so that ten thousand would
take minutes to come in.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

from asyncdist_server.torch.wire import FIRST_BYTE, VALIDATE_MAGIC, Query
from asyncdist_server.wire import messages
from asyncdist_server.wire.auth import AuthenticationError, ClientHandshake, store_context
from bench.candidates import missing_module, missing_torch
from bench.model import Candidate, Case, Profile, Rank, RankContext, Record, Subject
from bench.process import raise_file_limit, status_bytes
from bench.servers import ServerProcess, asyncdist_server, asyncdist_torch_server, redis_server, torch_store_server
from bench.store import host_and_port, missing_redis

RANKS: Final = 4

CONNECTIONS: Final = 10_000

FEW_CONNECTIONS: Final = 1_000

SMOKE_CONNECTIONS: Final = 200

SAMPLES: Final = 3

OPENING: Final = 64
"""Connections that a process has on their way at a time: all processes together stay below what kernels queue."""

STEP_TIMEOUT_S: Final = 30.0
"""How long opening, waiting and waking may take before what is missing counts as lost."""

POLL_S: Final = 0.002

PING_NONCE: Final = 0x01020304

NAMESPACE: Final = "bench"


class WaitingRank(Rank):
    """One process with its share of the connections."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._wire = WIRES[context.options["wire"]]
        self._server_pid: int = context.options["server_pid"]
        self._clients: list[WaitingClient] = []
        self._setter: WaitingClient | None = None
        self._fleet = Fleet(0)
        self._bytes_before = 0
        self._run = 0

    async def open(self) -> None:
        """Look how large the server is without connections; the first process connects to set the key later."""
        raise_file_limit()
        self._bytes_before = status_bytes("VmRSS", self._server_pid)
        if self._context.rank == 0:
            self._setter = await self._connect(fleet := Fleet(1))
            if not await fleet.until("opened", 1, STEP_TIMEOUT_S):
                raise ConnectionError("the server lets nobody in")

    async def close(self) -> None:
        for client in (*self._clients, *([self._setter] if self._setter else [])):
            client.close()

    async def measure(self, case: Case) -> Record:
        """Wait on every connection, set once, and again."""
        record = Record()
        self._run += 1
        count = case.operations // self._context.world_size
        if len(self._clients) < count:
            record.extra["connect_s"] = await self._open_up_to(count)
        for number in range(case.samples):
            await self._sample(f"go-{self._run}-{number}", record)
        return record

    async def _open_up_to(self, count: int) -> float:
        began_s = time.perf_counter()
        self._fleet.size = count
        while len(self._clients) < count:
            chunk = [self._connect(self._fleet) for _ in range(min(OPENING, count - len(self._clients)))]
            self._clients += await asyncio.gather(*chunk)
            await self._fleet.until("opened", len(self._clients), STEP_TIMEOUT_S)
        return time.perf_counter() - began_s

    async def _connect(self, fleet: Fleet) -> WaitingClient:
        host, port = host_and_port(self._context.address)
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: self._wire(fleet), host, port))[1]

    async def _sample(self, key: str, record: Record) -> None:
        fleet = self._fleet
        fleet.armed = fleet.woken = 0
        for client in self._clients:
            if not client.gone:
                client.arm(key.encode())
        await fleet.until("armed", fleet.size, STEP_TIMEOUT_S)
        await self._meet(key)
        start_ns = time.perf_counter_ns()
        if self._setter is not None:
            grown = status_bytes("VmRSS", self._server_pid) - self._bytes_before
            record.extra["connection_bytes"] = grown / (fleet.size * self._context.world_size)
            start_ns = time.perf_counter_ns()
            self._setter.set(key.encode())
        await fleet.until("woken", fleet.size, STEP_TIMEOUT_S)
        end_ns = max(fleet.last_woken_ns, start_ns + 1)
        record.add(start_ns if self._setter is not None else end_ns - 1, end_ns)
        record.wrong += fleet.size - min(fleet.woken, fleet.size - fleet.lost)

    async def _meet(self, name: str) -> None:
        """Wait until every process waits on all its connections; the setter goes on when the last one is there."""
        directory = Path(self._context.directory)
        (directory / f"{name}.{self._context.rank}").touch()
        if self._context.rank:
            return
        while len(list(directory.glob(f"{name}.*"))) < self._context.world_size:  # noqa: ASYNC110, ASYNC240 - files
            await asyncio.sleep(POLL_S)  # of other processes set no event, and nothing else is to be done here


def redis_for_many(core: int | None) -> ServerProcess:
    """Start Redis with room for all: it allows 10,000 by itself, which does not leave one for the setter."""
    return redis_server(core, "--maxclients", str(CONNECTIONS + 100))


def cases(profile: Profile) -> Sequence[Case]:
    """Return the cells: few connections, then many, which the few are part of."""
    if not profile.neighbors:
        return [_case("wake few", SMOKE_CONNECTIONS)]
    return [_case("wake few", FEW_CONNECTIONS), _case("wake many", CONNECTIONS)]


def _case(operation: str, count: int) -> Case:
    title = f"{count:,} connections woken by one set"
    timeout_s = 2 * STEP_TIMEOUT_S * (SAMPLES + count // OPENING)
    return Case(operation, 0, SAMPLES, 0, "span", operations=count, timeout_s=timeout_s, title=title)


FEW: Final = frozenset({"wake few"})

ALL: Final = FEW | {"wake many"}

ENTRY: Final = "bench.many_connections:WaitingRank"

ASYNCDIST = Candidate(
    "asyncdist",
    ENTRY,
    ALL,
    missing=lambda: missing_module("asyncdist_server"),
    server=asyncdist_server,
    options={"wire": "native"},
    own=True,
)

ASYNCDIST_TORCH = Candidate(
    "asyncdist, torch's protocol",
    ENTRY,
    ALL,
    missing=lambda: missing_module("asyncdist_server"),
    server=asyncdist_torch_server,
    options={"wire": "torch"},
    own=True,
)

TORCH = Candidate("torch", ENTRY, FEW, missing=missing_torch, server=torch_store_server, options={"wire": "torch"})

REDIS = Candidate("redis", ENTRY, ALL, missing=missing_redis, server=redis_for_many, options={"wire": "redis"})

SUBJECT = Subject(
    "many-connections",
    "Many connections that wait for one key",
    (RANKS,),
    cases,
    (ASYNCDIST, ASYNCDIST_TORCH, TORCH, REDIS),
    modes=("free",),
)


class Fleet:
    """The waiting connections of one process: how many are open, wait and were woken, and when the last one was."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.opened = self.armed = self.woken = self.lost = 0
        self.last_woken_ns = 0
        self.changed = asyncio.Event()
        self._wanted, self._enough = "opened", size  # what is being waited for

    def note_woken(self) -> None:
        self.woken += 1
        self.last_woken_ns = time.perf_counter_ns()
        self._note()

    def note_armed(self) -> None:
        """Count a connection whose wait the server has taken in."""
        self.armed += 1
        self._note()

    def note_opened(self) -> None:
        self.opened += 1
        self._note()

    def note_lost(self) -> None:
        self.lost += 1
        self._note()

    def _note(self) -> None:
        if getattr(self, self._wanted) + self.lost >= self._enough:
            self.changed.set()

    async def until(self, name: str, count: int, timeout_s: float) -> bool:
        """Wait until so many connections are `name` or lost; false if one is lost or it took too long."""
        self._wanted, self._enough = name, count
        try:
            async with asyncio.timeout(timeout_s):
                while getattr(self, name) + self.lost < count:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return False
        return not self.lost


class WaitingClient(asyncio.Protocol):
    """One connection; each wire says how it opens, waits and is woken."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.transport: asyncio.Transport
        self.gone = False
        """Whether nothing can be said any more."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by name
        self.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it, unless it was closed here."""
        if not self.gone:
            self.gone = True
            self.fleet.note_lost()

    def close(self) -> None:
        if not self.gone:
            self.gone = True
            self.transport.abort()

    def begin(self) -> None:
        """Say what comes first."""
        raise NotImplementedError

    def arm(self, key: bytes) -> None:
        """Wait for `key`, and ask for a sign that the server knows."""
        raise NotImplementedError

    def set(self, key: bytes) -> None:
        """Wake all connections that wait for `key`."""
        raise NotImplementedError


class NativeClient(WaitingClient):
    """asyncdist's own protocol."""

    def begin(self) -> None:
        self._handshake: ClientHandshake | None = ClientHandshake(None, store_context(NAMESPACE))
        self._reader = messages.FrameReader()
        self._encoder = messages.Encoder()
        self._welcomed = False
        self._last_id = self._received = self._waiting_id = 0
        self.transport.write(self._handshake.start())

    def data_received(self, data: bytes) -> None:
        if self._handshake is not None:
            try:
                self.transport.write(self._handshake.receive(data))
            except AuthenticationError:
                self.transport.abort()  # refused
                return
            if not self._handshake.done:
                return
            data = self._handshake.leftover
            self._handshake = None
            self.transport.write(self._encoder.hello(messages.Hello(os.urandom(messages.CLIENT_ID_BYTES))))
        for payload in self._reader.feed(data):
            if not self._welcomed:
                messages.decode_welcome(payload)
                self._welcomed = True
                self.fleet.note_opened()
                continue
            self._received += 1
            for request_id, code, _ in messages.decode_replies(payload):
                if request_id == self._waiting_id and code == messages.OK:
                    self.fleet.note_woken()
                elif request_id == self._waiting_id + 1:
                    self.fleet.note_armed()

    def _ask(self, *requests: tuple[object, ...]) -> None:
        numbered = [(self._last_id + number, *request) for number, request in enumerate(requests, 1)]
        self._last_id += len(requests)
        self.transport.write(self._encoder.requests(self._received, numbered))

    def arm(self, key: bytes) -> None:
        self._waiting_id = self._last_id + 1
        self._ask((messages.WAIT, (key,), None), (messages.PING,))

    def set(self, key: bytes) -> None:
        self._ask((messages.SET, key, b"go"))


def _blob(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


class TorchClient(WaitingClient):
    """torch's TCPStore protocol."""

    def begin(self) -> None:
        """Say the magic number, and see that the server is there."""
        self._asked = ["opened"]
        self.transport.write(bytes([FIRST_BYTE]) + struct.pack("<I", VALIDATE_MAGIC) + self._ping())

    def _ping(self) -> bytes:
        return bytes([Query.PING]) + struct.pack("<I", PING_NONCE)

    def data_received(self, data: bytes) -> None:
        """Take the echoes of pings, and the zero byte that ends a wait."""
        pong = struct.pack("<I", PING_NONCE)
        while data:
            if data.startswith(pong):
                data = data[len(pong) :]
                (self.fleet.note_opened if self._asked.pop() == "opened" else self.fleet.note_armed)()
            else:
                data = data[1:]
                self.fleet.note_woken()

    def arm(self, key: bytes) -> None:
        """Wait, and ping meanwhile."""
        self._asked.append("armed")
        self.transport.write(bytes([Query.WAIT]) + struct.pack("<Q", 1) + _blob(key) + self._ping())

    def set(self, key: bytes) -> None:
        self.transport.write(bytes([Query.SET]) + _blob(key) + _blob(b"go"))


class RedisClient(WaitingClient):
    """Redis, which has no waiting for a key: a channel to which all connections subscribe, and one message."""

    def begin(self) -> None:
        self._buffer = b""
        self.transport.write(b"PING\r\n")

    def data_received(self, data: bytes) -> None:
        """Look for the three answers that can come; they never begin or end within one another."""
        self._buffer += data
        for sign, note in (
            (b"+PONG\r\n", self.fleet.note_opened),
            (b"subscribe\r\n", self.fleet.note_armed),
            (b"$2\r\ngo\r\n", self.fleet.note_woken),
        ):
            _, found, rest = self._buffer.rpartition(sign)
            if found:
                self._buffer = rest
                note()

    def arm(self, key: bytes) -> None:
        self.transport.write(b"SUBSCRIBE " + key + b"\r\n")

    def set(self, key: bytes) -> None:
        self.transport.write(b"PUBLISH " + key + b" go\r\n")


WIRES: Final[dict[str, type[WaitingClient]]] = {"native": NativeClient, "torch": TorchClient, "redis": RedisClient}
