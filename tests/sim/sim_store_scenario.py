"""What one seed of the simulated store does: how many clients, what they do, and what goes wrong when."""

from __future__ import annotations

import dataclasses
import random

from asyncdist_server.serving.config import limits_for
from asyncdist_server.wire.messages import Limits

__all__ = ["CLIENT_FAULTS", "DAEMON_FAULTS", "DISK_FAULTS", "TRACKS", "Fault", "StoreScenario", "store_scenario"]

TRACKS = (
    "registers",
    "counters",
    "logs",
    "queue",
    "pairs",
    "flags",
    "leases",
    "locks",
    "watch",
    "membership",
    "questions",
)
"""What a client does beside other things; see `sim_store_tracks`."""
CLIENT_FAULTS = (
    "reset",
    "reset in the handshake",
    "lose answers",
    "lose answers",
    "cut",
    "cut to the daemon",
    "cut to the client",
    "pause client",
    "kill client",
    "kill taker",
    "vanish client",
)
DISK_FAULTS = ("slow disk", "disk error")
"""Only with a disk."""
DAEMON_FAULTS = ("kill daemon", "vanish daemon", "stop daemon", "pause daemon", "refuse", "slow")
LENGTHS_S = (0.01, 0.3, 3.0, 15.0, 50.0, 130.0)
"""How long a fault lasts: shorter and longer than latencies, leases, keepalive, and what a daemon remembers."""
TIMEOUTS_S = (0.5, 4.0, 30.0)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    at_s: float
    kind: str
    client: int
    length_s: float


@dataclasses.dataclass(frozen=True)
class StoreScenario:
    """One run. `mode` is the daemon's durability; its state survives kills in all but "memory"."""

    seed: int
    clients: int
    duration_s: float
    pace_s: float
    timeout_s: float
    tracks: tuple[tuple[str, ...], ...]
    faults: tuple[Fault, ...]
    limits: Limits
    remembered_events: int | None
    mode: str


def store_scenario(seed: int, mode: str = "memory") -> StoreScenario:
    """Return what `seed` stands for."""
    dice = random.Random(f"scenario {seed}")
    clients = dice.randrange(2, 6)
    duration_s = dice.choice((10.0, 40.0, 100.0, 250.0))
    focus = dice.sample(TRACKS, dice.choice((2, 4, len(TRACKS))))
    tracks = tuple(tuple(dice.choices(focus, k=dice.randrange(2, 6))) for _ in range(clients))
    faults = []
    kinds = CLIENT_FAULTS + (DAEMON_FAULTS if dice.random() < 0.85 else ())
    if "queue" in focus:
        kinds += ("kill taker",) * 4  # it takes somebody who pops
    if mode == "durable":
        kinds += (*DISK_FAULTS, "kill daemon", "kill daemon")
    for _ in range(dice.choice((0, 1, 3, 6, 10))):
        at_s = dice.random() * duration_s
        faults.append(Fault(at_s, dice.choice(kinds), dice.randrange(clients), dice.choice(LENGTHS_S)))
    faults.sort(key=lambda fault: fault.at_s)
    tight = dice.random() < 0.15
    limits = limits_for(4_000, memory_bytes=15_000, waiters=3, in_flight=40, items=20) if tight else Limits()
    return StoreScenario(
        seed,
        clients,
        duration_s,
        duration_s / dice.choice((8, 25)),
        dice.choice(TIMEOUTS_S),
        tracks,
        tuple(faults),
        limits,
        dice.choice((None, 8, 2)),
        mode,
    )
