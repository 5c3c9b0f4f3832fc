"""What other jobs do to a client of the store's daemon: ``python -m bench.fairness``.

A healthy client of a namespace of its own does 50 operations a second: a small get, a get of 100 KiB, one of 1 MiB, and
a new connection, in turn. Meanwhile other processes, in another namespace, do what the row says. One table at the end,
with p50, p99 and the worst of each in milliseconds; an operation without an answer after five seconds counts as five.
The last column is the daemon's processor time: its clients wait for its loop, and for its other threads, as one runs at
a time.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import aiohttp
import click
from rich.console import Console
from rich.table import Table

import asyncdist as dist
from asyncdist_server.wire import messages as m
from asyncdist_server.wire.auth import AuthenticationError, ClientHandshake, store_context
from bench.command_line import Bar, ListOf
from bench.process import Child, die_with_parent, raise_file_limit, status_bytes
from bench.runner import ROOT, unused_port
from bench.servers import LOCALHOST, asyncdist_server

PERIOD_S: Final = 0.02
DEADLINE_S: Final = 5.0
RETRY_S: Final = 0.02
ATTACKER_DEADLINE_S: Final = 60.0
LARGE: Final = bytes(64 << 20)
READ_BYTES: Final = 1 << 20
WIDTH: Final = 150
READERS: Final = 100
HALF_OPEN: Final = 6000
WAITERS: Final = 200_000
WAITERS_OF_ONE: Final = 50_000
WAITERS_A_FRAME: Final = 10_000
VIEWERS: Final = 8
RANKS: Final = 16
REMEMBERED: Final = 2000
HTTP_PORT: Final = "BENCH_HTTP_PORT"


class Client:
    """One blocking connection to the daemon."""

    def __init__(self, port: int, namespace: str, deadline_s: float = DEADLINE_S) -> None:
        self.socket = socket.create_connection((LOCALHOST, port), deadline_s)
        self.socket.settimeout(deadline_s)
        self._encoder, self._reader = m.Encoder(), m.FrameReader()
        self._received = self._last_id = 0
        handshake = ClientHandshake(None, store_context(namespace))
        self.socket.sendall(handshake.start())
        while not handshake.done:
            self.socket.sendall(handshake.receive(self._read()))
        self.socket.sendall(self._encoder.hello(m.Hello(os.urandom(m.CLIENT_ID_BYTES))))
        m.decode_welcome(self.frame())

    def _read(self) -> bytes:
        data = self.socket.recv(READ_BYTES)
        if not data:
            raise ConnectionError("the daemon closed the connection")
        return data

    def frame(self) -> memoryview:
        """Return the next frame."""
        while True:
            payloads = self._reader.feed(self._read())
            if payloads:
                return payloads[0]

    def send(self, *requests: tuple[Any, ...]) -> None:
        """Send requests, given without ids, as one frame."""
        numbered = [(self._last_id + offset, *request) for offset, request in enumerate(requests, 1)]
        self._last_id += len(requests)
        self.socket.sendall(self._encoder.requests(self._received, numbered))

    def ask(self, *request: Any) -> None:
        """Send one request and wait for its answer."""
        self.send(request)
        self.frame()
        self._received += 1


# ---- what the others do, each in a process of its own: (port, say that it is under way)

Attack = Callable[[int, Callable[[], None]], None]


def read_nothing(port: int, ready: Callable[[], None]) -> None:
    """Ask for a large value with many connections and read none of it."""
    clients = [Client(port, "others", ATTACKER_DEADLINE_S) for _ in range(READERS)]
    clients[0].ask(m.SET, b"large", LARGE)
    for client in clients:
        client.send((m.GET, b"large", None))
    ready()
    time.sleep(1e9)


def set_large(port: int, ready: Callable[[], None]) -> None:
    """Set a large value again and again."""
    client = Client(port, "others", ATTACKER_DEADLINE_S)
    ready()
    while True:
        client.ask(m.SET, b"%d" % os.getpid(), LARGE)


def get_large(port: int, ready: Callable[[], None]) -> None:
    """Get a large value again and again."""
    client = Client(port, "others", ATTACKER_DEADLINE_S)
    client.ask(m.SET, b"large", LARGE)
    ready()
    buffer = bytearray(READ_BYTES)
    while True:
        client.send((m.GET, b"large", None))
        left = len(LARGE)
        while left > 0:  # what frames it is less than a read of it
            left -= client.socket.recv_into(buffer)


def stay_half_open(port: int, ready: Callable[[], None]) -> None:
    """Open connections that say nothing, anew as soon as the daemon ends one."""
    selector = selectors.DefaultSelector()

    def dial() -> None:
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex((LOCALHOST, port))
        selector.register(sock, selectors.EVENT_READ)

    for number in range(HALF_OPEN):
        dial()
        if number % 100 == 0:
            time.sleep(0.01)
    ready()
    while True:
        for key, _ in selector.select():
            sock: Any = key.fileobj
            selector.unregister(sock)
            sock.close()
            dial()


def wake_many(port: int, ready: Callable[[], None]) -> None:
    """Wait for one key a great many times, set it, and again."""
    clients = [Client(port, "others", ATTACKER_DEADLINE_S) for _ in range(WAITERS // WAITERS_OF_ONE)]
    setter = Client(port, "others", ATTACKER_DEADLINE_S)
    buffer = bytearray(READ_BYTES)
    ready()
    while True:
        for client in clients:
            for _ in range(WAITERS_OF_ONE // WAITERS_A_FRAME):
                client.send(*[(m.GET, b"awaited", None)] * WAITERS_A_FRAME)
        time.sleep(1.0)  # until all of them wait
        setter.ask(m.SET, b"awaited", b"")
        setter.ask(m.DELETE, b"awaited")
        for client in clients:
            client.socket.settimeout(0.5)
            try:
                while client.socket.recv_into(buffer):
                    pass
            except TimeoutError:
                client.socket.settimeout(ATTACKER_DEADLINE_S)


def look(port: int, ready: Callable[[], None]) -> None:
    """Look at the page of a job whose ranks remember much."""
    os.environ |= {"ASYNCDIST_STORE": f"{LOCALHOST}:{port}", "ASYNCDIST_JOB_ID": "others"}
    with dist.spawn(_remember, nprocs=RANKS, join=False, start_method="fork"):
        asyncio.run(_view(f"http://localhost:{os.environ[HTTP_PORT]}/page", ready))


async def _remember(_local_rank: int) -> None:
    async with dist.init_process_group() as group:
        for _ in range(REMEMBERED):
            await group.barrier()
        await asyncio.sleep(1e9)


async def _view(url: str, ready: Callable[[], None]) -> None:
    """What browsers ask, less what they draw."""
    seen = asyncio.Semaphore(0)

    async def stream(session: aiohttp.ClientSession, name: str) -> None:
        async with session.get(f"{url}/events", params={"job": name}, timeout=aiohttp.ClientTimeout()) as looks:
            async for line in looks.content.iter_any():
                if line:
                    seen.release()

    async def numbers(session: aiohttp.ClientSession) -> list[str]:
        async with session.get(f"{url}/state") as state:
            names: list[str] = (await state.json())["jobs"]
            return names

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as viewers:
        while not (names := await numbers(session)):  # noqa: ASYNC110 - the ranks are processes
            await asyncio.sleep(1.0)
        for _ in range(VIEWERS):
            viewers.create_task(stream(session, names[0]))
        for _ in range(VIEWERS):
            await seen.acquire()
        ready()
        while True:
            await asyncio.sleep(2.0 / VIEWERS)
            await numbers(session)


ATTACKS: Final[dict[str, Attack]] = {
    attack.__name__: attack for attack in (read_nothing, set_large, get_large, stay_half_open, wake_many, look)
}
ROWS: Final[dict[str, tuple[str, Attack | None, int]]] = {
    "nothing": ("nothing", None, 0),
    "unread": (f"{READERS} readers of 64 MiB that read nothing", read_nothing, 1),
    "killed": ("these have just been killed", read_nothing, 1),
    "set1": ("one sets 64 MiB again and again", set_large, 1),
    "set8": ("eight set 64 MiB", set_large, 8),
    "get1": ("one gets 64 MiB again and again", get_large, 1),
    "get8": ("eight get 64 MiB", get_large, 8),
    "halfopen": (f"{HALF_OPEN} half-open connections of one address", stay_half_open, 1),
    "wake": (f"one set wakes {WAITERS} waiters, again and again", wake_many, 1),
    "look": (f"{VIEWERS} look at the page of {RANKS} ranks that remember {REMEMBERED} operations", look, 1),
}
"""By name: what a row says, what the others do, in how many processes."""
COLUMNS: Final = ("get 8 B", "get 100 KiB", "get 1 MiB", "connect")


class Healthy:
    """The client that others are not to disturb."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._clients: dict[str, Client] = {}
        self.taken_ms: dict[str, list[float]] = {column: [] for column in COLUMNS}
        filler = Client(port, "healthy")
        for key, size in (("get 8 B", 8), ("get 100 KiB", 100 << 10), ("get 1 MiB", 1 << 20)):
            filler.ask(m.SET, key.encode(), bytes(size))
            self._clients[key] = Client(port, "healthy")

    def run(self, seconds: float) -> None:
        """Do one operation after the other, each kind on a connection of its own."""
        ends_s = time.perf_counter() + seconds
        number = 0
        while time.perf_counter() < ends_s:
            column = COLUMNS[number % len(COLUMNS)]
            number += 1
            began_s = time.perf_counter()
            try:
                self._operate(column)
                taken_s = time.perf_counter() - began_s
            except OSError:
                taken_s = DEADLINE_S
            self.taken_ms[column].append(1e3 * taken_s)
            time.sleep(max(0.0, PERIOD_S - taken_s))

    def _operate(self, column: str) -> None:
        if column == "connect":
            self._connect().socket.close()
            return
        client = self._clients.pop(column, None) or self._connect()
        client.ask(m.GET, column.encode(), None)
        self._clients[column] = client

    def _connect(self) -> Client:
        """Connect, again and again where the daemon has too many connections."""
        began_s = time.perf_counter()
        while True:
            try:
                return Client(self._port, "healthy")
            except AuthenticationError:
                if time.perf_counter() - began_s > DEADLINE_S:
                    raise TimeoutError from None
                time.sleep(RETRY_S)

    def cells(self) -> list[str]:
        """Return p50, p99 and the worst of each kind."""
        return [
            " / ".join(f"{ordered[int(part * (len(ordered) - 1))]:.1f}" for part in (0.5, 0.99, 1.0) if ordered)
            for ordered in map(sorted, self.taken_ms.values())
        ]


def measure(name: str, seconds: float) -> list[str]:
    """Return the cells of one row."""
    title, attack, processes = ROWS[name]
    http_port = str(unused_port())
    server = asyncdist_server(None, "--http-port", http_port)
    others: list[Child] = []
    try:
        port = int(server.address.rpartition(":")[2])
        healthy = Healthy(port)
        if attack is not None:
            command = [sys.executable, "-m", "bench.fairness", "--attack", attack.__name__, "--port", str(port)]
            environment = {"PYTHONPATH": str(ROOT), HTTP_PORT: http_port}
            others += [Child(command, environment=environment, ready_line=True) for _ in range(processes)]
            for other in others:
                if other.read_line() != "ready":
                    raise click.ClickException(other.output_tail())
        if name == "killed":
            healthy.run(1.0)
            healthy.taken_ms = {column: [] for column in COLUMNS}
            for other in others:
                other.process.kill()
        before = _computed_s(server.child.pid)
        healthy.run(seconds)
        loop_s, other_s = (after - begun for after, begun in zip(_computed_s(server.child.pid), before, strict=True))
        peak = f"{status_bytes('VmHWM', server.child.pid) >> 20}"
        return [title, *healthy.cells(), peak, f"{loop_s / seconds:.1%} + {other_s / seconds:.1%}"]
    finally:
        for child in (*others, server.child):
            child.stop()


def _computed_s(pid: int) -> tuple[float, float]:
    """Processor time of a process: of its main thread, and of its others."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    found = {int(thread.name): int((thread / "schedstat").read_text().split()[0]) / 1e9 for thread in threads}
    return found[pid], sum(found.values()) - found[pid]


def _ready() -> None:
    print("ready", flush=True)


@click.command(help=__doc__)
@click.option("--seconds", default=10.0, show_default=True, help="For how long each row is measured.")
@click.option("--only", type=ListOf(click.Choice(list(ROWS))), default=",".join(ROWS), help="Rows, with commas.")
@click.option("--attack", type=click.Choice(list(ATTACKS)), hidden=True)
@click.option("--port", type=int, default=0, hidden=True)
def main(seconds: float, only: tuple[str, ...], attack: str | None, port: int) -> None:
    raise_file_limit()
    if attack is not None:
        die_with_parent()
        ATTACKS[attack](port, _ready)
        return
    console = Console(width=max(Console().width, WIDTH))
    table = Table("meanwhile", *COLUMNS, "daemon's peak, MiB", "CPU", title="p50 / p99 / max in milliseconds")
    with Bar(console, len(only)) as bar:
        for name in only:
            bar.line(ROWS[name][0])
            table.add_row(*measure(name, seconds))
    console.print(table)


if __name__ == "__main__":
    main()
