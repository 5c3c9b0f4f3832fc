"""SimulatedNetwork: TCP between simulated hosts, in virtual time and by seed.

    async def main(network: SimulatedNetwork) -> None:
        daemon, worker = network.host("daemon"), network.host("worker")
        server = StoreServer(ServerConfig(daemon.address, 29500, token=TOKEN))
        await network.outcome(daemon.spawn(server.start()))
        worker.spawn(train(daemon.address))
        await asyncio.sleep(3)
        network.cut(worker, daemon)     # silence; network.heal(worker, daemon) ends it
        daemon.kill()                   # kill -9; daemon.restart() begins a new process

    run_simulated(main, seed=1)

Programs use the network unchanged: sockets, `loop.sock_*`, `loop.add_reader`, `loop.create_server`. Calls that are not
simulated are refused. The seed gives latency, the pieces of streams and the size of buffers. All events go into
`trace_hash`, so that two runs of a seed can be compared. `seeded` makes a program's randomness and wall clock a
function of the seed too.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import hashlib
import os
import random
import secrets
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, TypeVar
from unittest import mock

from asyncdist.testing.endpoint import Endpoint, join
from asyncdist.testing.hosts import PROCESS, SimulatedHost, SimulatedProcess
from asyncdist.testing.loop import SimulatedLoop
from asyncdist.testing.simulated_socket import SimulatedSocket

T = TypeVar("T")

LATENCIES_S: Final = (0.0, 0.00005, 0.001, 0.02)
"""A seed's usual latency: one process, one host, one building, one continent."""

BUFFERS_BYTES: Final = (600, 5_000, 64 * 1024, 4 * 1024 * 1024)
"""What a stream holds at most between its ends; small ones push back."""

CONNECT_RETRIES_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""When Linux sends the first packet of a connection again."""

FIRST_DESCRIPTOR: Final = 1_000_000

TRACE_BYTES: Final = 64
"""Bytes of each piece shown in a trace that is kept."""


EPOCH_NS: Final = 1_700_000_000_000_000_000
"""When simulated time begins, as nanoseconds of the wall clock."""


class SimulatedNetwork:
    """See the module. Every line of the trace is added to `lines`, if given; else only its hash is known."""

    def __init__(self, seed: int | str, *, lines: list[str] | None = None) -> None:
        self.dice = random.Random(f"network {seed}")
        self.loop = SimulatedLoop(self)
        self.dead: list[SimulatedProcess] = []
        self._lines = lines
        self.counts: Counter[str] = Counter()
        """How often each kind of event happened, as `trace` counts them."""
        self.typical_latency_s = self.dice.choice(LATENCIES_S)
        self.slow_factor = 1.0
        """How many times the usual latency everything takes now."""
        self._buffers_bytes = [self.dice.choice(BUFFERS_BYTES) for _ in range(3)]
        self._context = contextvars.Context()
        self._hash = hashlib.blake2b(digest_size=16)
        self._last_pid = 1000
        self._last_descriptor = FIRST_DESCRIPTOR
        self._connections = 0
        self._hosts: dict[str, SimulatedHost] = {}
        self._cut: dict[tuple[SimulatedHost, SimulatedHost], None] = {}
        self._sockets: dict[int, SimulatedSocket] = {}
        self._local: SimulatedProcess | None = None

    # ---- hosts and what separates them

    def host(self, name: str) -> SimulatedHost:
        address = f"10.0.{len(self._hosts) // 250}.{len(self._hosts) % 250 + 1}"
        made = self._hosts[address] = SimulatedHost(self, name, address)
        return made

    def cut(self, source: SimulatedHost, target: SimulatedHost, *, both_ways: bool = True) -> None:
        """Let nothing more through from `source` to `target`. Neither is told."""
        self.trace("cut", source.name, target.name, both_ways)
        self._cut[source, target] = None
        if both_ways:
            self._cut[target, source] = None
        self.reachability_changed()

    def heal(self, source: SimulatedHost, target: SimulatedHost) -> None:
        """Let everything through again, in both directions. Lost bytes are sent again."""
        self.trace("heal", source.name, target.name)
        self._cut.pop((source, target), None)
        self._cut.pop((target, source), None)
        self.reachability_changed()

    def reset(self, one: SimulatedHost, other: SimulatedHost) -> int:
        """Break all connections between two hosts, as a firewall that forgets them does; returns how many."""
        self.trace("reset", one.name, other.name)
        ends = [end for end in one.process.endpoints if end.peer.host is other]
        for end in ends:
            self.break_connection(end)
        return len(ends)

    def break_connection(self, end: Endpoint) -> None:
        """Break the connection of `end`. What is under way is lost."""
        for side in (end, end.peer):
            side.incoming.drop()
            side.fail(ConnectionResetError(errno.ECONNRESET, "the connection was reset"))

    def blocked(self, source: SimulatedHost, target: SimulatedHost) -> bool:
        """Return whether packets from `source` to `target` are lost now."""
        return (source, target) in self._cut or not (source.up and target.up)

    def reach_each_other(self, one: SimulatedHost, other: SimulatedHost) -> bool:
        """Return whether packets go both ways."""
        return not (self.blocked(one, other) or self.blocked(other, one))

    def reachability_changed(self) -> None:
        """Send held back bytes again, and have each end look whether its peer has vanished."""
        for host in self._hosts.values():
            for endpoint in list(host.process.endpoints):
                endpoint.outgoing.go_on()
                endpoint.incoming.go_on()
                endpoint.watch_peer()

    # ---- chance

    def latency_s(self, source: SimulatedHost, target: SimulatedHost) -> float:
        """Return how long the next piece takes."""
        spread = self.dice.random()
        if spread > 0.98:
            spread *= 20
        return self.typical_latency_s * self.slow_factor * (0.5 + spread)

    def work_s(self) -> float:
        """Return how long work in a thread takes, before its effect and after."""
        return self.dice.choice((0.0, 0.0001, 0.001, 0.02)) * self.dice.random()

    def buffer_bytes(self) -> int:
        """Return how much a new stream holds."""
        return self.dice.choice(self._buffers_bytes)

    def cut_up(self, data: bytes) -> list[bytes]:
        """Return `data` in the pieces in which it arrives."""
        if len(data) < 2 or self.dice.random() < 0.6:
            return [data]
        places = sorted({self.dice.randrange(1, len(data)) for _ in range(self.dice.choice((1, 1, 2, 5)))})
        return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]

    def loses_unread(self, endpoint: Endpoint) -> bool:
        """Return whether a reset loses bytes that have arrived and were not read: systems differ."""
        return self.dice.random() < 0.5

    # ---- what hosts, sockets and the loop need

    def next_pid(self) -> int:
        self._last_pid += 1
        return self._last_pid

    def next_descriptor(self) -> int:
        """Return a number that no socket has."""
        self._last_descriptor += 1
        return self._last_descriptor

    def new_socket(self, family: int, kind: int, proto: int = 0) -> SimulatedSocket:
        """Return a socket of the process that runs now."""
        process = PROCESS.get()
        if process is None:
            if self._local is None:
                self._local = self.host("local").process
            process = self._local
        number = self.next_descriptor()
        made = self._sockets[number] = SimulatedSocket(self, process, number, family)
        return made

    def socket_of(self, descriptor: int) -> SimulatedSocket | None:
        """Return the socket with that number."""
        return self._sockets.get(descriptor)

    def forget(self, sock: SimulatedSocket) -> None:
        self._sockets.pop(sock.fileno(), None)
        sock.process.sockets.pop(sock, None)

    async def connect(self, sock: SimulatedSocket, address: tuple[str, int]) -> None:
        """Connect; raises ConnectionRefusedError, and TimeoutError after two minutes without an answer."""
        here = sock.process.host
        there = self._hosts.get(address[0])
        if there is None and self._local is not None and address[0] in ("127.0.0.1", "::1"):
            there = self._local.host
        if there is None:
            raise OSError(errno.ENETUNREACH, f"there is no host {address[0]}")
        tries = iter(CONNECT_RETRIES_S)
        while not self.reach_each_other(here, there):
            pause_s = next(tries, None)
            if pause_s is None:
                raise TimeoutError(errno.ETIMEDOUT, "nobody answers")
            await asyncio.sleep(pause_s)
        await asyncio.sleep(self.latency_s(here, there))
        listener = there.listeners.get(address[1])
        if listener is None or there.refusing:
            await asyncio.sleep(self.latency_s(there, here))
            self.trace("refused", here.name, there.name)
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
        if sock.fileno() < 0:
            raise OSError(errno.EBADF, "the socket is closed")
        self._establish(sock, listener, (there.address, address[1]))
        await asyncio.sleep(self.latency_s(there, here))

    def _establish(self, sock: SimulatedSocket, listener: SimulatedSocket, remote: tuple[str, int]) -> None:
        here, there = sock.process.host, listener.process.host
        self._connections += 1
        name = f"{here.name}-{there.name} {self._connections}"
        here.last_port += 1
        sock.local, sock.remote = (here.address, here.last_port), remote
        near = Endpoint(self, sock.process, f"{name} <", sock.options)
        far = Endpoint(self, listener.process, f"{name} >", {})
        join(self, near, far)
        self.trace("connect", name, near.outgoing.capacity, far.outgoing.capacity)
        sock.endpoint = near
        near.user = sock
        listener.incoming(far, sock.local)

    def call_at(self, when: float, callback: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        """Call back as the network, which belongs to no process."""
        return self.loop.call_at(when, callback, *arguments, context=self._context)

    def call_later(self, delay_s: float, callback: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        """Call back as the network, which belongs to no process."""
        return self.call_at(self.loop.time() + delay_s, callback, *arguments)

    # ---- looking back

    def trace(self, kind: str, *details: object) -> None:
        self.counts[kind] += 1
        line = f"{self.loop.time():.9f} {kind} {details}"
        self._hash.update(line.encode())
        if self._lines is not None:
            shown = [each[:TRACE_BYTES] if isinstance(each, bytes) else each for each in details]
            self._lines.append(f"{self.loop.time():12.6f} {kind} {' '.join(map(str, shown))}")

    @property
    def trace_hash(self) -> str:
        """A hash of all events: equal in two runs of one seed."""
        return self._hash.hexdigest()

    async def outcome(self, task: asyncio.Task[T]) -> T:
        """Return what a task of a host's process returns or raises. Cancelling ends the waiting only."""
        return await asyncio.shield(task)

    def bury_the_dead(self) -> None:
        """Close the suspended coroutines of killed processes."""
        for process in self.dead:
            process.bury()


def run_simulated(
    main: Callable[[SimulatedNetwork], Awaitable[T]], seed: int, *, network: SimulatedNetwork | None = None
) -> T:
    """Run `main(network)` in virtual time and return what it returns.

    All randomness of the program, and its wall clock, come from `seed`. Raises `DeadlockError` when nothing can happen
    any more. The calling thread must have no running event loop.
    """
    network = network or SimulatedNetwork(seed)
    loop = network.loop
    with seeded(seed, loop.time), asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            return runner.run(_awaited(main(network)))
        finally:
            network.bury_the_dead()


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


@contextlib.contextmanager
def seeded(seed: int | str, clock_s: Callable[[], float]) -> Iterator[None]:
    """Until the block ends, take secrets and random numbers from `seed` and the time from `clock_s`.

    For one thread at a time: functions of `secrets`, `time`, `os` and `socket` are replaced.
    """
    dice = random.Random(f"secrets {seed}")
    state = random.getstate()
    random.seed(f"random {seed}")
    host_name, pid = socket.gethostname, os.getpid

    def process_pid() -> int:
        process = PROCESS.get()
        return pid() if process is None else process.pid

    def process_host() -> str:
        process = PROCESS.get()
        return host_name() if process is None else process.host.name

    replaced: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (secrets, "token_bytes", lambda count=32: dice.randbytes(count)),
        (secrets, "token_hex", lambda count=32: dice.randbytes(count).hex()),
        (secrets, "randbelow", dice.randrange),
        (time, "time_ns", lambda: EPOCH_NS + round(clock_s() * 1e9)),
        (time, "time", lambda: EPOCH_NS / 1e9 + clock_s()),
        (time, "monotonic", clock_s),
        (time, "perf_counter", clock_s),
        (os, "getpid", process_pid),
        (socket, "gethostname", process_host),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, state)
        for module, name, function in replaced:
            stack.enter_context(mock.patch.object(module, name, function))
        yield
