"""The store daemon and its clients, unchanged, on simulated networks by seed: every promise kept, whatever goes wrong.

`make test` runs some seeds, `make sim` thousands. A failure names its seed and how to replay it. A seed means something
else after every change to what clients do, so what was found is shown step by step in `test_store_faults`.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from sim_store import run_store_scenario
from sim_store_scenario import store_scenario
from sim_store_totals import run_seeds

from asyncdist.store.lease import Lease as ClientLease
from asyncdist.store.pipeline import Pipeline
from asyncdist.store.tcp_store import TCPStore
from asyncdist_server.engine.changes import ChangeLog
from asyncdist_server.engine.clients import Client
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.history import History
from asyncdist_server.engine.leases import Lease
from asyncdist_server.engine.state import StoreState
from asyncdist_server.journal.group_commit import GroupCommit
from asyncdist_server.journal.replay import Replay
from asyncdist_server.wire.messages import Welcome

SEEDS = 4
"""With the rare ones enough for everything to happen; `make sim` runs thousands."""
MORE_SEEDS = 10
"""Run at a time when something has not happened yet: a change moves it to another seed."""
MOST_SEEDS = 200
RARE_SEEDS = {"memory": (60, 43, 9, 69, 61, 41, 38, 26, 18), "durable": (48, 68, 69, 15, 39, 46, 51, 23)}
"""Quick ones that do everything between them, at the last change of them. Others may, after other changes."""
KEEN_SEEDS = {"memory": (31, 58, 17, 1, 11), "durable": (18, 58, 38, 37)}
"""One of these noticed each planted fault, at the last change of them: tried first. Others may, after other changes."""
CANARY_SEEDS = 200
"""One in sixty notices the planted fault that shows least."""


@pytest.mark.slow("runs until everything has happened")
@pytest.mark.parametrize("mode", [pytest.param("memory", marks=pytest.mark.thorough), "durable"])
def test_every_promise_is_kept(mode: str) -> None:
    totals = run_seeds(dict.fromkeys([*range(SEEDS), *RARE_SEEDS[mode]]), mode)
    for first in range(SEEDS, MOST_SEEDS, MORE_SEEDS):
        if totals.failures or not totals.untested(mode):
            break
        totals.merge(run_seeds(range(first, first + MORE_SEEDS), mode))
    assert not totals.failures, "\n".join(totals.failures)
    assert not totals.untested(mode), f"never happened: {totals.untested(mode)}\n{totals.report()}"


@pytest.mark.slow("starts an interpreter that runs the seeds again")
@pytest.mark.parametrize("mode", [pytest.param("memory", marks=pytest.mark.thorough), "durable"])
def test_a_seed_is_one_run(mode: str) -> None:
    """Also in another process, where sets and dicts of bytes have another order."""
    seeds = (5, 6)  # clients of the second ask for the status, too
    hashes = [run_store_scenario(store_scenario(seed, mode)).trace_hash for seed in seeds * 2]
    program = (
        "from sim_store import run_store_scenario; from sim_store_scenario import store_scenario; "
        f"print(*[run_store_scenario(store_scenario(seed, {mode!r})).trace_hash for seed in {seeds}])"
    )
    environ = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    told = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert told.stdout.split() == hashes[:2] == hashes[2:]
    assert hashes[0] != hashes[1]


# The simulation must notice what it is there for.

Patches = list[tuple[Any, str, Callable[..., Any]]]


def forgets_replies() -> Patches:
    return [(Client, "replies_to_resume", lambda self, pending: {})]


def loses_writes() -> Patches:
    put, count = StoreState.put, [0]

    def forgetful(self: StoreState, namespace: Any, key: bytes, value: bytes, **options: Any) -> str:
        count[0] += key == b"log"
        return "" if key == b"log" and count[0] % 10 == 0 else put(self, namespace, key, value, **options)

    return [(StoreState, "put", forgetful)]


def loses_events() -> Patches:
    append, count = History.append, [0]

    def forgetful(self: History, event: Any) -> None:
        count[0] += 1
        if count[0] % 5:
            append(self, event)

    return [(History, "append", forgetful)]


def ends_leases_early() -> Patches:
    def postpone(self: Lease, now: float) -> None:
        self.deadline = now + self.ttl_s * 0.3
        self._state.timers.arm(self)

    return [(Lease, "postpone", postpone)]


def never_ends_leases() -> Patches:
    return [(Lease, "fire", lambda self, now: self.postpone(now))]


def does_not_wake() -> Patches:
    wake, count = StoreState.wake, [0]

    def sleepy(self: StoreState, *arguments: Any) -> None:
        count[0] += 1
        if count[0] % 5:
            wake(self, *arguments)

    return [(StoreState, "wake", sleepy)]


def retries_into_an_empty_store() -> Patches:
    on_welcome = Pipeline.on_welcome

    def careless(self: Pipeline, welcome: Welcome) -> bool:
        self._incarnation = welcome.incarnation
        return on_welcome(self, welcome._replace(resumed=True))

    return [(Pipeline, "on_welcome", careless)]


def keeps_waiters() -> Patches:
    unblock = StoreState.unblock

    def leaky(self: StoreState, waiter: Any) -> None:
        unblock(self, waiter)
        self.waiter_count += waiter.client.closed

    return [(StoreState, "unblock", leaky)]


def gives_locks_twice() -> Patches:
    pass_on = StoreState.pass_lock_on

    def generous(self: StoreState, namespace: Any, key: bytes) -> None:
        pass_on(self, namespace, key)
        waiter = namespace.lockers.take_first(key)
        if waiter is not None:
            self.finish(waiter, self.take_lock(namespace, waiter.request_id, key, waiter.argument))

    return [(StoreState, "pass_lock_on", generous)]


def reuses_tokens() -> Patches:
    take_lock = StoreState.take_lock

    def frugal(self: StoreState, *arguments: Any) -> Any:
        reply = take_lock(self, *arguments)
        self.revision -= 1
        return reply

    return [(StoreState, "take_lock", frugal)]


def believes_in_leases() -> Patches:
    return [(ClientLease, "lost", property(lambda self: False))]  # type: ignore[list-item]


def never_gives_up() -> Patches:
    return [(TCPStore, "_on_watch", lambda self: None)]


def tells_before_it_is_on_the_disk() -> Patches:
    return [(GroupCommit, "needed", lambda self: 0)]


def forgets_clients() -> Patches:
    """What was told before a restart is not known after it."""
    return [(StoreEngine, "restore_client", lambda self, *arguments: None)]


def begins_times_anew() -> Patches:
    """With each restart, as the store's age is not known."""
    return [(Replay, "_take_age", lambda self, age, started_age: None)]


def forgets_who_has_items() -> Patches:
    restore = StoreEngine.restore_client

    def forgetful(
        self: StoreEngine, client_id: bytes, space: str, replies: Any, taken: Any, since: float, now: float
    ) -> None:
        restore(self, client_id, space, replies, {}, since, now)

    return [(StoreEngine, "restore_client", forgetful)]


def forgets_what_has_arrived() -> Patches:
    """Neither item by item nor by what is said beside later replies."""
    return [
        (ChangeLog, "let_go", lambda self, *arguments: None),
        (Client, "oldest_remembered", lambda self, most: 0),
    ]


def believes_that_replies_arrive_at_once() -> Patches:
    return [(Client, "oldest_remembered", lambda self, most: 2**62)]


def keeps_items_of_lost_clients() -> Patches:
    return [(Client, "unacknowledged_items", lambda self: [])]


@pytest.mark.parametrize(
    ("plant", "noticed"),
    [
        (forgets_who_has_items, "items are lost"),
        (forgets_what_has_arrived, "popped 2 times"),
        (tells_before_it_is_on_the_disk, "acknowledged|linearizable|which .* holds|popped 2 times|told"),
        (forgets_clients, "was forgotten|items are lost"),
        (begins_times_anew, "are not forgotten"),
        (
            believes_that_replies_arrive_at_once,
            r"appended 2 times|popped|is \d+ after|linearizable|same sum|items are lost",
        ),
    ],
)
def test_a_planted_fault_of_the_journal_is_noticed(plant: Callable[[], Patches], noticed: str) -> None:
    expect_noticed(plant, noticed, "durable")


@pytest.mark.parametrize(
    ("plant", "noticed"),
    [
        (forgets_replies, r"appended 2 times|popped|is \d+ after|linearizable|same sum|items are lost"),
        (loses_writes, "acknowledged appends"),
        (loses_events, "missed|did not see"),
        (ends_leases_early, "ended too early"),
        (never_ends_leases, "leases are left"),
        (does_not_wake, "was not woken"),
        (retries_into_an_empty_store, "done by|another incarnation|this incarnation"),
        (keeps_waiters, "books"),
        (gives_locks_twice, "which .* holds"),
        (reuses_tokens, "token"),
        (believes_in_leases, "ended too early|believes|which .* holds"),
        (never_gives_up, "took|hangs"),
        (keeps_items_of_lost_clients, "items are lost"),
    ],
)
def test_a_planted_fault_is_noticed(plant: Callable[[], Patches], noticed: str) -> None:
    expect_noticed(plant, noticed, "memory")


def expect_noticed(plant: Callable[[], Patches], noticed: str, mode: str) -> None:
    with contextlib.ExitStack() as stack:
        for patch in plant():
            stack.enter_context(mock.patch.object(*patch))
        totals = run_seeds(dict.fromkeys([*KEEN_SEEDS[mode], *range(CANARY_SEEDS)]), mode, most_failures=1)
    assert totals.failures, f"{CANARY_SEEDS} seeds noticed nothing"
    assert re.search(noticed, totals.failures[0]), totals.failures[0]
