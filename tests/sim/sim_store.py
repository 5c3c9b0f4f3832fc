"""Runs a `StoreScenario`: the daemon and its clients, unchanged, on a simulated network and in virtual time.

`run_store_scenario` raises AssertionError with all that was wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import engine_books
from sim_store_client import PORT, TOKEN, SimulatedClient
from sim_store_daemon import SimulatedDaemon
from sim_store_ledger import Ledger
from sim_store_scenario import StoreScenario
from sim_store_strikes import Strikes

from asyncdist.errors import QueueEmptyError
from asyncdist.store import TCPStore
from asyncdist.testing.loop import DeadlockError
from asyncdist.testing.network import SimulatedNetwork, run_simulated
from asyncdist_server.engine.clients import Client
from asyncdist_server.wire.messages import Limits

__all__ = ["Outcome", "run_store_scenario"]

END_S: Final = 250.0
"""How long after the last fault everything must have ended: a silent connection, a reconnect, a time-out."""
GONE_S: Final = 70.0
"""How long a client that vanished may seem to be there: keepalive takes 55 s."""
LONGEST_TTL_S: Final = 20.0
LINGER_S: Final = 125.0
"""How long a client that went away is remembered, and a history that nobody reads."""
LONGEST_LIFE_S: Final = 15.0
"""How long a daemon runs at most that is restarted again and again."""
NOTED: Final = 0.5
"""Of such a life at least so much counts."""
CONFIRMED_S: Final = 4.0
"""How long it may take until the daemon knows that an item has arrived: a slow network, and a slow disk."""
BLIND_S: Final = 60.0
"""How long after it was cut off without knowing a client may believe in a lock that is no longer its own."""


@dataclass
class Outcome:
    """What a run came to."""

    trace_hash: str
    virtual_s: float
    verbs: Counter[str]
    outcomes: Counter[str]
    faults: Counter[str]
    network: Counter[str]
    undecided: int


class StoreWorld(Strikes):
    """One run."""

    def __init__(self, network: SimulatedNetwork, scenario: StoreScenario) -> None:
        self.network = network
        self.scenario = scenario
        self.ledger = Ledger(network.loop.time)
        self.ledger.may_have_told = self.may_have_told
        self.ledger.on_problem = lambda text: network.trace("PROBLEM", text)
        self.dice = random.Random(f"world {scenario.seed}")
        self.daemon = SimulatedDaemon(network, scenario)
        self.clients: list[SimulatedClient] = []
        self.faults: Counter[str] = Counter()
        self.took = asyncio.Event()

    async def run(self) -> None:
        """From the daemon's start to its end."""
        note_taken = Client.note_taken

        def noted(client: Client, request_id: int, key: bytes) -> None:
            note_taken(client, request_id, key)
            self.took.set()

        with mock.patch.object(Client, "note_taken", noted):
            await self._run()

    async def _run(self) -> None:
        await self.daemon.start()
        for index in range(self.scenario.clients):
            self.add_client(index)
        audit = asyncio.create_task(self.audit(), name="audit")
        faults = [asyncio.create_task(self.strike(fault), name=fault.kind) for fault in self.scenario.faults]
        await asyncio.sleep(self.scenario.duration_s)
        for task in faults:
            task.cancel()
        await asyncio.gather(*faults, return_exceptions=True)
        await self.daemon.start()
        await self.until_done(END_S)
        if self.daemon.disk is not None and self.dice.random() < 0.5:
            self.daemon.end(host_too=False)
            await self.daemon.start()
        audit.cancel()
        await asyncio.gather(audit, return_exceptions=True)
        if self.faults["kill taker"] or self.dice.random() < 0.5:
            await self.until_forgotten()
        if not self.ledger.problems:
            await self.finish()

    def add_client(self, index: int) -> None:
        """Start one more client."""
        host = self.network.host(f"c{len(self.clients)}")
        client = SimulatedClient(index, host, self.daemon.host.address, self.scenario, self.ledger, self.locked)
        self.clients.append(client)
        host.spawn(client.main(), f"{client.name} main")

    async def until_forgotten(self) -> None:
        """Wait until the store knows no client any more, over a restart if it keeps its state: items go back."""
        await asyncio.sleep(self.dice.random() * (GONE_S + LINGER_S))
        if self.daemon.disk is not None and self.dice.random() < 0.3:
            await self.until_forgotten_in_short_lives()
        else:
            if self.daemon.disk is not None:
                self.daemon.end(host_too=False)
                await self.daemon.start()
            await asyncio.sleep(GONE_S + LINGER_S)
        self.ledger.all_are_back = self.scenario.limits == Limits()  # else there may be no room

    async def until_forgotten_in_short_lives(self) -> None:
        """The same, over a restart every few seconds."""
        self.faults["short lives"] += 1
        until = self.network.loop.time() + LINGER_S / NOTED + LONGEST_LIFE_S
        while self.network.loop.time() < until:
            self.daemon.end(host_too=False)
            await self.daemon.start()
            await asyncio.sleep(2.0 + self.dice.random() * (LONGEST_LIFE_S - 2.0))
        if away := self.daemon.engine.statistics()["clients_away"]:
            self.ledger.problem(f"{away} clients are not forgotten by a daemon that is restarted again and again")

    def may_have_told(self, who: str, popped_at: float) -> bool:
        """Whether the store must know that a client has what it popped then: neither of them ended before it could."""
        client = next(client for client in self.clients if client.name == who)
        ends = [client.ended_at, *self.daemon.killed_at]
        return not any(0 <= end - popped_at < CONFIRMED_S for end in ends) and (
            client.ended_at == math.inf or not client.was_blind_since(popped_at)
        )

    async def until_done(self, within_s: float) -> None:
        """Wait until all clients that live have ended."""
        until = self.network.loop.time() + within_s
        while waiting := [client for client in self.clients if client.alive and not client.done]:
            if self.network.loop.time() > until:
                for client in waiting:
                    stuck = [f"{kind} {task.get_stack()}" for task, kind in client.tasks.items() if not task.done()]
                    self.ledger.problem(f"{client.name} hangs: {'; '.join(stuck) or 'closing'}")
                return
            await asyncio.sleep(0.5)

    # ---- what must be true all the time

    async def audit(self) -> None:
        """Look at everything now and then."""
        while True:
            await asyncio.sleep(self.scenario.duration_s / 300 * self.dice.random())
            for client in self.clients:
                self.look_at(client)
            if self.daemon.up:
                for problem in engine_books.problems(self.daemon.engine):
                    self.ledger.problem(f"the engine's books are wrong: {problem}")
                    return

    def look_at(self, client: SimulatedClient) -> None:
        """Note whether a client is cut off, and compare what it believes with the truth."""
        now = self.network.loop.time()
        if self.blind(client):
            client.blind_at = now
        if not client.alive or client.process.paused or now - client.resumed_at < 0.01 or not self.daemon.up:
            return
        space = self.daemon.engine.namespaces.get("job")
        for lease, incarnation, bound in client.leases:
            excused = bound and (client.closing or now - client.blind_at < BLIND_S)  # a goodbye ends bound ones
            if lease.lost or lease._valid_until < now + 1e-6 or excused:
                continue
            if incarnation == self.daemon.incarnation:
                if space is None or lease.id not in space.leases:
                    self.ledger.problem(f"{client.name} keeps {lease!r}, bound {bound}, which ended too early")
            elif not bound and now > self.daemon.started_at + lease.ttl + 0.01:
                self.ledger.problem(f"{client.name} still believes in {lease!r} of a daemon that is gone")

    def blind(self, client: SimulatedClient) -> bool:
        """Whether a client is cut off from the daemon and cannot know."""
        if not client.alive or client.process.paused:
            return True
        if self.daemon.host.process.paused or not self.network.reach_each_other(client.host, self.daemon.host):
            return True
        return any(
            end.error is None and (end.peer.closed or end.peer.error is not None) for end in client.process.endpoints
        )

    def locked(self, client: SimulatedClient, name: str) -> None:
        """Compare a lock that `client` was given now with what the others believe."""
        now = self.network.loop.time()
        for other in self.clients:
            if other is client or not other.alive or other.process.paused or name not in other.locks:
                continue
            lock, incarnation = other.locks[name]
            if lock.lost or self.blind(other) or now - other.blind_at < BLIND_S or now - other.resumed_at < BLIND_S:
                continue
            if other.store._connection is None and incarnation != client.incarnation:
                continue  # the daemon lost its data, and the other has not connected again; its token is smaller
            self.ledger.problem(f"{client.name} was given the lock {name}, which {other.name} holds")

    # ---- what must be true at the end

    async def finish(self) -> None:
        """Read everything, judge, and see that all goes away."""
        host = self.network.host("checker")
        self.ledger.outcomes["final reads"] += 1
        incarnation = self.daemon.incarnation
        final, items = await self.network.outcome(host.spawn(self.read_all(incarnation), "checker"))
        for client in self.clients:
            if client.alive and client.clean:
                self.ledger.lost_pops.subtract(client.unsure_pops)
        self.ledger.judge(incarnation, final, items)
        await self.settles("clients", GONE_S)
        await self.settles("leases", LONGEST_TTL_S + 1)
        await self.settles("waiters", 0.1)
        await asyncio.sleep(LINGER_S)
        await self.settles("clients_away", 1)
        for problem in engine_books.problems(self.daemon.engine):
            self.ledger.problem(f"the engine's books are wrong at the end: {problem}")
        began = self.network.loop.time()
        await self.daemon.stop()
        if self.network.loop.time() - began > 0.5:
            self.ledger.problem("a daemon without clients took time to stop")

    async def read_all(self, incarnation: str) -> tuple[dict[str, bytes], list[str]]:
        """Return all keys and all items that are left."""
        async with TCPStore(self.daemon.host.address, PORT, token=TOKEN, namespace="job", timeout=60) as store:
            final = {}
            for key in await store.list_keys():
                with contextlib.suppress(TimeoutError):  # a lease may have ended it
                    final[key] = await store.get(key, timeout=10)  # less, and a slow network looks like a loss
            for key in ("r0", "r1"):
                operation = self.ledger.history.call("checker", (incarnation, key), "get")
                operation.result = final.get(key)
                self.ledger.history.returned(operation)
            items = []
            with contextlib.suppress(QueueEmptyError):
                while True:
                    items.append((await store.queue_pop("queue", block=False)).decode())
        return final, items

    async def settles(self, what: str, within_s: float) -> None:
        """Wait until the daemon has none of something."""
        until = self.network.loop.time() + within_s
        while count := self.daemon.engine.statistics()[what]:
            if self.network.loop.time() > until:
                self.ledger.problem(f"{count} {what} are left after {within_s} s")
                return
            await asyncio.sleep(1.0)


def run_store_scenario(scenario: StoreScenario, *, keep_trace: list[str] | None = None) -> Outcome:
    """Run it, with its trace in `keep_trace`. Raises AssertionError."""
    network = SimulatedNetwork(scenario.seed, lines=keep_trace)
    world: list[StoreWorld] = []
    unhandled: list[str] = []

    def on_unhandled(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not of_the_dead(context, world):
            unhandled.append(f"unhandled in the loop: {context}")

    async def main(network: SimulatedNetwork) -> None:
        world.append(StoreWorld(network, scenario))
        await world[0].run()
        dead = {task for process in network.dead for task in process.tasks}
        left = asyncio.all_tasks() - dead - {asyncio.current_task()}
        world[0].ledger.problems.extend(f"task left: {task!r}" for task in left if not world[0].ledger.problems)

    network.loop.set_exception_handler(on_unhandled)
    with quiet(scenario):
        try:
            run_simulated(main, scenario.seed, network=network)
        except DeadlockError as error:
            unhandled.append(str(error))
    ledger = world[0].ledger
    problems = unhandled + ledger.problems
    if problems:
        described = "\n  ".join(problems[:12])
        raise AssertionError(f"seed {scenario.seed} ({scenario.mode}), {len(problems)} problems:\n  {described}")
    return Outcome(
        network.trace_hash,
        network.loop.time(),
        ledger.verbs,
        ledger.outcomes,
        world[0].faults,
        network.counts,
        ledger.undecided,
    )


def of_the_dead(context: dict[str, Any], world: list[StoreWorld]) -> bool:
    """Whether something nobody looked at belonged to a process that was killed: nobody could look."""
    future = context.get("future") or context.get("task")
    owner = getattr(future, "owner", None)
    if owner is None or not world:
        return future is not None and any(future in process.tasks for process in world[0].network.dead)
    return any(
        client.store is not None and client.store._pipeline is owner for client in world[0].clients if not client.alive
    )


@contextlib.contextmanager
def quiet(scenario: StoreScenario) -> Iterator[None]:
    """Log nothing, always occupy the same memory, and remember few events where the scenario says so."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.ExitStack() as stack:
            # A client may ask for that, and then it is in the trace.
            stack.enter_context(mock.patch("asyncdist_server.serving.daemon.resident_bytes", return_value=2**26))
            if scenario.remembered_events is not None:
                few = mock.patch("asyncdist_server.engine.history.HISTORY_EVENTS", scenario.remembered_events)
                stack.enter_context(few)
            if scenario.mode == "durable" and scenario.seed % 2:  # clean the journal all the time
                stack.enter_context(mock.patch("asyncdist_server.journal.batch.SLACK_BYTES", 0))
                stack.enter_context(mock.patch("asyncdist_server.journal.batch.CLEAN_AT_ONCE_BYTES", 300))
            yield
    finally:
        logging.disable(level)
