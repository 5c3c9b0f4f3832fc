"""Rounds of load on a daemon that is killed, stopped and cut off meanwhile, and everything that is then checked."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from chaos_proxy import Chaos, ChaosProxy, chaos_proxy
from daemon_process import DaemonProcess
from proof_audit import Findings, count_lost_and_twice, count_lost_of_relaxed, judge
from proof_load import COUNTERS, LOGS, QUEUES, REGISTERS, STUCK_S, LoadClient, Recorded
from proof_watch import SENTINEL, Watcher, problems_of

from asyncdist.errors import DistStoreError, QueueEmptyError
from asyncdist.store import TCPStore
from asyncdist.store.lease import Lease

CLIENTS = 8
HASTY_TIMEOUT_S = 0.25
"""One client gives up soon, so that nobody knows what became of its requests."""
CHAOS = Chaos(cut_after=40_000, early=0.1, delayed=0.02, delay=0.02, piece=3_000, stall=0.1)
GENTLE = Chaos(cut_after=200_000, stall=0.1)
"""For watches: one answer may hold thousands of events, and it comes whole or not at all."""
LEASE_S = 60.0
"""Time to live of leases that must never end: meeting a daemon that is killed every second may take many tries."""
MORTAL_S = 1.0
"""Time to live of a lease that nobody keeps alive."""
PATIENCE_S = 10.0
"""Who has not met the daemon for so long is waited for before it is killed again: a client gives up after a minute, and
so does a lease, which was renewed up to 20 s before. Two outages may come first."""
LONG_OUTAGE_S = 15.0
"""Longer ones may end leases."""
CLOCK_STEP_S = 0.002
"""uvloop's clock, by which the daemon goes, counts milliseconds, and stands still while callbacks run."""
RELAXED_MS = 50
RELAXED_SLACK_S = 0.5
"""How much later than promised a commit may be on a machine with fewer cores than busy processes."""
ROUND_ANSWERS = 1500
"""A round without kills is as long as this many answers."""
KILLS_PER_ROUND = 10
"""More would make the histories of the keys, which are new in every round, too long for people."""


@dataclass(frozen=True)
class Mode:
    """How the daemon runs, and what its clients may expect."""

    name: str
    options: tuple[str, ...]
    kills: bool
    """Whether it is killed; else it is stopped and continued."""
    forgets: bool
    """Whether a killed daemon comes back without its data."""
    proxied: int
    """How many of the clients have bad connections."""
    failpoints: tuple[str, ...] = ()
    """Where it may die by itself instead: at instants that a kill from outside hits too seldom."""


MODES = {
    "cuts": Mode("cuts", (), kills=False, forgets=False, proxied=CLIENTS),
    "memory": Mode("memory", (), kills=True, forgets=True, proxied=CLIENTS // 2),
    "durable": Mode(
        "durable",
        ("--durability", "durable"),
        kills=True,
        forgets=False,
        proxied=CLIENTS // 2,
        failpoints=("begun", "written", "committed"),
    ),
    "relaxed": Mode("relaxed", ("--durability", f"relaxed:{RELAXED_MS}"), kills=True, forgets=False, proxied=0),
}


@asynccontextmanager
async def daemon_in(mode: Mode, folder: Path) -> AsyncIterator[DaemonProcess]:
    """A daemon of this mode, which keeps its data in `folder` where it keeps any."""
    where = ("--data-dir", str(folder)) if mode.options else ()
    async with DaemonProcess(*mode.options, *where) as daemon:
        yield daemon


class Round:
    """One round: its clients, its watchers, its leases, and what they saw."""

    def __init__(self, daemon: DaemonProcess, mode: Mode, seed: str) -> None:
        self.daemon = daemon
        self.mode = mode
        self.seed = seed
        self.rng = random.Random(seed)
        self.recorded = Recorded(f"{seed}/")
        self.clients: list[LoadClient] = []
        self.watchers: list[Watcher] = []
        self.findings = Findings()
        self._stack = AsyncExitStack()
        self._outages = len(daemon.outages)
        self._mortal_at = 0.0
        self._met: dict[TCPStore, float] = {}  # when each was last seen to be connected

    async def run(self, kills: int) -> Findings:
        """Let the clients work while the faults happen, read what is left, and judge."""
        async with self._stack:
            # Where nothing is killed rounds are short, and so are the values that have to get through.
            chaos = CHAOS if self.mode.kills else dataclasses.replace(CHAOS, cut_after=CHAOS.cut_after / 4)
            proxy, gentle = await self._proxy(chaos), await self._proxy(GENTLE)
            await self._open(proxy, gentle)
            final = LoadClient("c0", await self._connect(self.daemon.port), self.recorded, self.seed)
            leases = await self._lease(final.store, proxy)
            async with asyncio.TaskGroup() as tasks:
                watching = [tasks.create_task(watcher.run()) for watcher in self.watchers]
                for watcher in self.watchers:
                    await watcher.entered.wait()
                working = [tasks.create_task(client.run()) for client in self.clients]
                await (self._kill(kills) if self.mode.kills else self._pause())
                for client in self.clients:
                    client.stopping = True
                feeding = tasks.create_task(final.feed())
                await _all_ended(working, "clients")
                final.stopping = True
                await feeding
                await self._read_all(final)
                await self._check_leases(final.store, leases)
                await final.store.set(self.recorded.prefix + SENTINEL, b"")
                await _all_ended(watching, "watchers")
            for lease in leases:
                if not lease.lost:
                    try:
                        await lease.revoke()
                    except DistStoreError as error:
                        if not self.mode.forgets:  # else it is not known yet
                            self.findings.problems.append(f"{lease!r} could not be revoked: {error}")
            self.findings.cuts = proxy.cuts + gentle.cuts
        return self._judge()

    # ---- before

    async def _connect(self, port: int) -> TCPStore:
        store = await self._stack.enter_async_context(TCPStore("127.0.0.1", port, namespace="proof"))
        self._met[store] = time.monotonic()
        return store

    async def _proxy(self, chaos: Chaos) -> ChaosProxy:
        seed = self.rng.getrandbits(32)
        return await self._stack.enter_async_context(chaos_proxy("127.0.0.1", self.daemon.port, chaos, seed=seed))

    async def _open(self, proxy: ChaosProxy, gentle: ChaosProxy) -> None:
        for number in range(1, CLIENTS + 1):
            proxied = number > CLIENTS - self.mode.proxied
            store = await self._connect(proxy.port if proxied else self.daemon.port)
            hasty = number == CLIENTS
            if hasty:
                store.set_timeout(HASTY_TIMEOUT_S)
            name, pushes = f"c{number}", 3 if self.mode.forgets else 2
            client = LoadClient(name, store, self.recorded, f"{self.seed} {name}", hasty=hasty, pushes=pushes)
            self.clients.append(client)
        for port in (self.daemon.port, gentle.port):
            self.watchers.append(Watcher(await self._connect(port), self.recorded.prefix))

    async def _lease(self, store: TCPStore, proxy: ChaosProxy) -> list[Lease]:
        """Take leases that must never end, by time and by connection, and one that must, in its time."""
        prefix = self.recorded.prefix
        leases = []
        for bound, port in ((False, self.daemon.port), (True, self.daemon.port), (False, proxy.port)):
            own = await self._connect(port)
            leases.append(await own.lease(LEASE_S, bound=bound))
            await own.set(f"{prefix}alive/{len(leases)}", b"", lease=leases[-1])
        await store.hold(prefix, leases[0])  # so that the keys of the round go at its end
        mortal = await TCPStore.connect("127.0.0.1", self.daemon.port, namespace="proof")
        self._mortal_at = time.monotonic()
        await mortal.set(f"{prefix}mortal", b"", lease=await mortal.lease(MORTAL_S))
        mortal._abandon()  # as a process that was killed
        return leases

    # ---- meanwhile

    async def _kill(self, kills: int) -> None:
        daemon, rng = self.daemon, self.rng
        for left in range(kills, 0, -1):
            if daemon.doomed:
                await daemon.ended()
            else:
                await self._meet()
                # Each client has its turn: the longer requests wait, the more orders there are to be searched.
                await self.recorded.more_answers(rng.randint(30, 200), [client.name for client in self.clients])
                await asyncio.sleep(rng.uniform(0.0, 0.05))
                if rng.random() < 0.15:
                    daemon.stop()  # what is on its way meanwhile dies with it
                    await asyncio.sleep(rng.uniform(0.0, 0.1))
            if rng.random() < 0.2:  # twice: the second time while it reads what it has kept, if it does
                await self._kill_once()
                await asyncio.sleep(rng.uniform(0.1, 0.6))
                self._note_restart()  # it may have begun to serve
            doom = self.mode.failpoints and left > 1 and rng.random() < 0.4 and not self._lonely()
            await self._kill_once(f"{rng.choice(self.mode.failpoints)}:{rng.randint(5, 60)}" if doom else "")
            await daemon.ready()
            self._note_restart()

    async def _kill_once(self, failpoint: str = "") -> None:
        self.recorded.kills.append(time.monotonic())
        await self.daemon.kill()
        await self.daemon.spawn(failpoint)
        self.recorded.gone.append(time.monotonic())

    def _lonely(self) -> bool:
        """Look who is connected; returns whether somebody has not been for long."""
        now = time.monotonic()
        for store in self._met:
            if store._connection is not None:
                self._met[store] = now
        return any(now - met_at > PATIENCE_S for met_at in self._met.values())

    async def _meet(self) -> None:
        """Wait until nobody has been without the daemon for long; TimeoutError if somebody stays so."""
        deadline = time.monotonic() + STUCK_S
        while self._lonely():
            if time.monotonic() > deadline:
                raise TimeoutError("somebody does not find the daemon while it is there")
            await asyncio.sleep(0.01)

    def _note_restart(self) -> None:
        if self.mode.forgets:
            self.recorded.restarts.append((self.recorded.kills[-1], time.monotonic()))

    async def _pause(self) -> None:
        while self.recorded.answered < ROUND_ANSWERS:
            await self.recorded.more_answers(self.rng.randint(50, 300))
            self.daemon.stop()
            try:
                await asyncio.sleep(min(0.5, self.rng.expovariate(20)))
            finally:
                self.daemon.go_on()
            self.findings.pauses += 1

    # ---- after

    async def _read_all(self, final: LoadClient) -> None:
        """Read every key and empty every queue, as the last operations of the histories."""
        store, registers, queues = final.store, self.recorded.registers, self.recorded.queues
        counts = (("r", REGISTERS), ("n", COUNTERS), ("l", LOGS))
        for key in (*(f"{kind}{number}" for kind, count in counts for number in range(count)), "guarded"):
            await _ended(final.begin(registers, key, "get", ask=lambda k: store.get(k, timeout=0), write=False))
        both = lambda k: store.multi_get([f"{k}/1", f"{k}/2"], timeout=0)  # noqa: E731
        await _ended(final.begin(registers, "p", "get", ask=both, write=False))
        for key in (f"q{number}" for number in range(QUEUES)):
            while not isinstance(
                await _ended(final.begin(queues, key, "pop", ask=lambda k: store.queue_pop(k, False), write=True)),
                QueueEmptyError,
            ):
                pass
        while not isinstance(item := await _tried(store, f"{self.recorded.prefix}given-up"), QueueEmptyError):
            assert isinstance(item, bytes), item
            self.recorded.popped.append(item)

    async def _check_leases(self, store: TCPStore, leases: list[Lease]) -> None:
        """Leases of who is there are there, those of who is not have ended, and not before their time."""
        prefix, problems = self.recorded.prefix, self.findings.problems
        outages = [end - start for start, end in self.daemon.outages[self._outages :]]
        self.findings.longest_outage_s = max(outages, default=0.0)
        if self.mode.forgets:
            return
        if self.findings.longest_outage_s < LONG_OUTAGE_S:
            lost = [lease for lease in leases if lease.lost]
            gone = [n for n in range(1, len(leases) + 1) if not await store.check([f"{prefix}alive/{n}"])]
            if lost or gone:
                problems.append(f"lost while their holders were there: {lost}, keys {gone}")
        deadline = time.monotonic() + 2 * MORTAL_S + 10.0
        while await store.check([f"{prefix}mortal"]):
            if time.monotonic() > deadline:
                problems.append("a lease outlives its holder")
                return
            await asyncio.sleep(0.05)

    def _judge(self) -> Findings:
        findings, recorded = self.findings, self.recorded
        findings.add(judge(recorded))
        if not self.mode.forgets:
            count_lost_and_twice(recorded, findings)
            findings.problems += [f"failed: {error}" for error in recorded.errors[:5]]
        operations = [] if self.mode.forgets else recorded.registers.operations
        findings.problems += problems_of(self.watchers, operations, recorded.prefix)
        for watcher in self.watchers:
            findings.events += sum(len(stretch.events) for stretch in watcher.stretches)
            findings.compacted += len(watcher.stretches) - 1
            for stretch in watcher.stretches:
                for event, received_at in zip(stretch.events, stretch.received_at, strict=True):
                    early = event.kind == "expire" and received_at < self._mortal_at + MORTAL_S - CLOCK_STEP_S
                    if early and not self.mode.forgets:
                        findings.problems.append(f"{event} came {received_at - self._mortal_at:.3f} s after the lease")
        findings.problems = [f"round {self.seed}: {problem}" for problem in findings.problems]
        return findings


async def _all_ended(tasks: list[asyncio.Task[None]], what: str) -> None:
    _, hanging = await asyncio.wait(tasks, timeout=2 * STUCK_S)
    if hanging:
        raise TimeoutError(f"{what} hang: {hanging}")


async def _ended(asked: asyncio.Future[object]) -> object:
    """Return how an operation ended: its result or its error."""
    await asyncio.wait([asked])
    return asked.exception() or asked.result()


async def _tried(store: TCPStore, key: str) -> object:
    try:
        return await store.queue_pop(key, False)
    except QueueEmptyError as error:
        return error


async def relaxed_round(daemon: DaemonProcess, seed: str, kills: int) -> Findings:
    """One writer that asks one thing at a time, with noise beside it, on a daemon that may lose its last changes."""
    round_ = Round(daemon, MODES["relaxed"], seed)
    recorded, noise = Recorded(f"{seed}/"), Recorded(f"{seed}/noise/")
    async with AsyncExitStack() as stack:
        connect: Callable[[], TCPStore] = lambda: TCPStore("127.0.0.1", daemon.port, namespace="proof")  # noqa: E731
        writer = LoadClient("c1", await stack.enter_async_context(connect()), recorded, seed)
        others = [
            LoadClient(f"c{n}", await stack.enter_async_context(connect()), noise, f"{seed} {n}") for n in range(2, 5)
        ]
        stopping = False

        async def write() -> None:
            number = 0
            while not stopping:
                number += 1
                key, token = f"s{number % 3}", b"%d," % number
                ask = lambda k, t=token: writer.store.append(k, t)  # noqa: E731
                await _ended(writer.begin(recorded.registers, key, "append", token, ask=ask, write=True))

        round_.recorded = recorded
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(write())
            making_noise = [tasks.create_task(other.run()) for other in others]
            await round_._kill(kills)
            stopping = True
            await writing
            feeder = LoadClient("c0", others[0].store, noise, seed)
            feeding = tasks.create_task(feeder.feed())
            for other in others:
                other.stopping = True
            await asyncio.wait(making_noise)
            feeder.stopping = True
            await feeding
        for key in ("s0", "s1", "s2"):
            ask = lambda k: writer.store.get(k, timeout=0)  # noqa: E731
            await _ended(writer.begin(recorded.registers, key, "get", ask=ask, write=False))
    findings = Findings(rounds=1, kills=len(recorded.kills), operations=recorded.operations + noise.operations)
    count_lost_of_relaxed(recorded, findings, RELAXED_MS / 1000 + RELAXED_SLACK_S)
    findings.problems = [f"round {seed}: {problem}" for problem in findings.problems]
    return findings
