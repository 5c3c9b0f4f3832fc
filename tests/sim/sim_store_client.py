"""One simulated client: a process with a TCPStore, which asks and notes what it was told."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

from sim_store_ledger import Ledger
from sim_store_scenario import StoreScenario

from asyncdist.errors import (
    ClosedError,
    DistError,
    LeaseLostError,
    QueueEmptyError,
    StoreLimitError,
    StoreTimeoutError,
    WatchCompactedError,
)
from asyncdist.store import TCPStore
from asyncdist.store.lease import Lease, Lock
from asyncdist.store.pipeline import EXPIRY_GRACE_S
from asyncdist.testing.hosts import SimulatedHost
from asyncdist_server.wire.messages import MAX_MEMORY_BYTES, MUTATIONS, Welcome

__all__ = ["PORT", "TOKEN", "Asked", "SimulatedClient"]

PORT: Final = 29_500
TOKEN: Final = "a token for simulated daemons, long enough"
SLACK_S: Final = 0.01
"""How much later than promised an operation may end."""

FORGETTING_S: Final = 70.0
"""A client that was away for less is known to the store, even if the store noticed before the client."""

UNANSWERED: Final = "did not answer in time"
"""How the client, not the daemon, says that the time is over."""

OUTCOMES: Final = (
    (QueueEmptyError, "empty"),
    (StoreTimeoutError, "timeout"),
    (StoreLimitError, "limit"),
    (LeaseLostError, "lease lost"),
    (WatchCompactedError, "compacted"),
    (ClosedError, "closed"),
    (DistError, "failed"),
    (asyncio.CancelledError, "cancelled"),
)
MUTATING: Final = {"set", "compare_set", "delete_key", "append", "add", "multi_set", "queue_push", "queue_pop"} | {
    "set_leased",
    "lease",
    "hold",
    "lock",
    "join",
}


class Asked:
    """What became of one request."""

    def __init__(self, verb: str, incarnation: str) -> None:
        self.verb = verb
        self.asked_of = incarnation
        self.outcome = "killed"  # what it stays if the process ends first
        self.value: Any = None
        self.error: BaseException | None = None

    @property
    def ok(self) -> bool:
        """Whether it was acknowledged."""
        return self.outcome == "ok"

    @property
    def refused(self) -> bool:
        """Whether the store said that it changed nothing."""
        return self.outcome in ("limit", "lease lost", "empty") or (self.outcome == "timeout" and not self.unanswered)

    @property
    def unanswered(self) -> bool:
        """Whether the client gave up without having heard from the store."""
        return UNANSWERED in str(self.error)


class SimulatedClient:
    """One process. What it holds and believes is open to the simulation, which compares it with the truth."""

    def __init__(
        self,
        index: int,
        host: SimulatedHost,
        daemon_address: str,
        scenario: StoreScenario,
        ledger: Ledger,
        on_locked: Callable[[SimulatedClient, str], None],
    ) -> None:
        self.name = name = host.name
        self.index = index
        self.on_locked = on_locked
        self.host = host
        self.process = host.process
        self.scenario = scenario
        self.ledger = ledger
        self.dice = random.Random(f"client {scenario.seed} {name}")
        self.daemon_address = daemon_address
        self.store: TCPStore = None  # type: ignore[assignment]
        self.leases: list[tuple[Lease, str, bool]] = []
        self.locks: dict[str, tuple[Lock, str]] = {}
        self.done = False
        self.closing = False
        self.clean = True
        """Whether every request was answered or given back: nothing of it can be lost."""
        self.blind_at = -1e9
        """When it was last cut off without knowing."""
        self.resumed_at = -1e9
        self.ended_at = math.inf
        """When its process was killed, or began to close."""
        self.tasks: dict[asyncio.Task[None], str] = {}
        self.unsure_pops: list[str] = []
        self.last_read = b""
        self._number = 0

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process.alive

    @property
    def incarnation(self) -> str:
        """Which incarnation of the store it has last heard of."""
        pipeline = self.store._pipeline
        return "" if pipeline is None or pipeline._incarnation is None else pipeline._incarnation.hex()[:8]

    def now(self) -> float:
        """Virtual seconds."""
        return self.ledger.clock()

    def was_blind_since(self, when_s: float) -> bool:
        """Return whether it was cut off, paused or disconnected after that."""
        return self.blind_at >= when_s or self.resumed_at >= when_s

    def fresh(self) -> str:
        """Return a value nobody else writes, which tells the incarnation it was meant for."""
        self._number += 1
        return f"{self.name}.{self._number}.{self.incarnation}"

    async def pause(self, factor: float = 1.0) -> None:
        """Do nothing for some time."""
        pause_s = self.dice.choice((0.0, 0.01, 0.3, 1.0, 1.0, 3.0)) * self.scenario.pace_s * factor
        await asyncio.sleep(min(pause_s, max(self.scenario.duration_s - self.now(), 0.0) + 1.0))

    # ---- asking

    async def ask(
        self,
        verb: str,
        issue: Callable[[], Awaitable[Any]],
        *,
        limit_s: float | None = -1.0,
        cancel: float = 0.06,
    ) -> Asked:
        """Issue a request, or not wait for its answer, and note what became of it.

        It must end within `limit_s` (by default the store's time-out), and an acknowledged change must have been made
        in the incarnation of the store that was known when it was asked for.
        """
        asked = Asked(verb, self.incarnation)
        if limit_s is not None and limit_s < 0:
            limit_s = self.scenario.timeout_s
        started, stopped = self.now(), self.process.stopped_s
        timer: asyncio.TimerHandle | None = None
        try:
            answer = asyncio.ensure_future(issue())
            if self.dice.random() < cancel:
                timer = asyncio.get_running_loop().call_later(self.dice.choice((0.0, 0.001, 0.05, 2.0)), answer.cancel)
            asked.value = await answer
            asked.outcome = "ok"
        except (DistError, asyncio.CancelledError) as error:
            asked.error = error
            asked.outcome = next(name for kind, name in OUTCOMES if isinstance(error, kind))
        finally:
            if timer is not None:
                timer.cancel()
        self.ledger.verbs[verb] += 1
        self.ledger.outcomes[asked.outcome] += 1
        took_s = self.now() - started - (self.process.stopped_s - stopped)
        if limit_s is not None and took_s > limit_s + EXPIRY_GRACE_S + SLACK_S:
            self.ledger.problem(f"{self.name}: {verb} took {took_s:.3f} s, allowed were {limit_s:g}: {asked.error!r}")
        if asked.ok and verb in MUTATING and asked.asked_of != self.incarnation:
            self.ledger.problem(f"{self.name}: {verb} was asked of {asked.asked_of}, done by {self.incarnation}")
        if asked.outcome in ("failed", "closed"):
            self.clean = False
        self.host.network.trace("asked", self.name, verb, asked.outcome, asked.value, f"{took_s:.6f} s")
        return asked

    # ---- the whole of its life

    async def main(self) -> None:
        """Connect, run all tracks, close."""
        from sim_store_tracks import run_track

        try:
            self.store = await TCPStore.connect(
                self.daemon_address, PORT, token=TOKEN, namespace="job", timeout=self.scenario.timeout_s
            )
        except DistError:
            self.ledger.outcomes["could not connect"] += 1
            self.done = True
            return
        self._note_losses()
        self.tasks = {
            asyncio.create_task(run_track(self, kind), name=f"{self.name} {kind}"): kind
            for kind in self.scenario.tracks[self.index % len(self.scenario.tracks)]
        }
        await asyncio.wait(self.tasks)
        for task in self.tasks:
            if (error := task.exception()) is not None:
                self.ledger.problem(f"{self.name}: {self.tasks[task]} raised {error!r}")
        self.closing = True
        self.ended_at = self.now()
        started, stopped = self.now(), self.process.stopped_s
        full = self.scenario.limits.memory_bytes < MAX_MEMORY_BYTES  # there may be no room for what it gives back
        self.clean = self.clean and self.store._connection is not None and not (full and self.unsure_pops)
        await self.store.close()
        took_s = self.now() - started - (self.process.stopped_s - stopped)
        if took_s > 2.0 + SLACK_S:
            self.ledger.problem(f"{self.name}: close took {took_s:.3f} s")
        if took_s > 1.9:
            self.clean = False
        self.done = True

    def _note_losses(self) -> None:
        """Have it noted when the client drops requests nobody waits for any more, which may have taken items."""
        pipeline = self.store._pipeline
        assert pipeline is not None
        fail_all, on_welcome, on_lost = pipeline.fail_all, pipeline.on_welcome, pipeline.on_lost
        lost_at = [self.now()]

        def lost() -> None:
            lost_at[0] = self.now()
            on_lost()

        def failing(why: str) -> None:
            self.clean = False
            fail_all(why)

        def welcomed(welcome: Welcome) -> bool:
            self.clean = self.clean and welcome.resumed
            sent = [each for number, each in pipeline._pending.items() if number <= pipeline._last_ever_sent]
            changes = [each.request for each in sent if each.request[1] in MUTATIONS and not each.done()]
            same = pipeline._incarnation == welcome.incarnation
            if same and changes and not welcome.resumed and self.now() - lost_at[0] < FORGETTING_S:
                self.ledger.problem(f"{self.name} was forgotten, and with it {changes[:3]}")
            self.ledger.outcomes["resumed" if welcome.resumed else "not resumed"] += 1
            changed = on_welcome(welcome)
            self.ledger.outcomes["new incarnations"] += changed
            return changed

        pipeline.on_lost = lost  # type: ignore[method-assign]
        pipeline.fail_all = failing  # type: ignore[method-assign]
        pipeline.on_welcome = welcomed  # type: ignore[method-assign]
