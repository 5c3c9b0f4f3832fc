"""Random programs for simulated worlds: what each rank does, and what must come of it.

A `Scenario` is made from a seed. It holds groups, tracks (one task per member and track, each with a tag of its own)
and at most one fault. `sim_worlds` runs it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from asyncdist import ReduceOp

KINDS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_stacked",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "barrier",
)
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
OPS = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.PREMUL_SUM(2))
DTYPES = ("int64", "float32", "uint8")
FAULTS = ("kill", "abort", "leave", "raise", "stall", "mismatch", "break", "subgroup abort")
MAX_LATENESS_S = 0.02
"""How much later than another a rank may start."""
STALL_TAG = 50
"""Tag of the track in which a rank stalls or differs."""
PRELUDE_S = 0.1
"""Senders whose receiver lets receives expire first begin only then."""


@dataclass(frozen=True)
class Collective:
    """One collective of a track; `root` is a group rank, `refuser` the one that calls it with wrong arguments."""

    kind: str
    count: int
    dtype: str
    op: Any
    root: int
    refuser: int | None


@dataclass(frozen=True)
class Track:
    """What one task per member of group number `group` does, with a tag of its own.

    `collectives`: issues them in order. `pair`, `many`: `senders` send messages of these element counts to `receiver`.
    `batch`: everybody sends to the right and receives from the left.
    """

    what: str
    group: int
    tag: int
    collectives: tuple[Collective, ...] = ()
    counts: tuple[int, ...] = ()
    senders: tuple[int, ...] = ()
    receiver: int = 0
    prelude: bool = False


@dataclass(frozen=True)
class Fault:
    """What goes wrong `after_s`; `rank` is whose fault it is, `other` the other end of a broken pair."""

    kind: str
    rank: int
    other: int
    after_s: float
    track: int
    index: int


@dataclass
class Scenario:
    """A world of `size` ranks; `groups[0]` is all of them, the others are made by `new_group`."""

    seed: int
    size: int
    groups: list[tuple[int, ...]]
    tracks: list[Track] = field(default_factory=list)
    fault: Fault | None = None
    barrier: bool = False
    meets: bool = False
    latency_s: float = 0.0
    timeout_s: float | None = None

    def random(self, *where: int) -> random.Random:
        """Random numbers of one place in the program."""
        return random.Random(repr((self.seed, where)))


def scenario(seed: int, *, faulty: bool) -> Scenario:
    """The program of `seed`."""
    dice = random.Random(f"{seed} {faulty}")
    size = dice.randint(2, 6)
    groups = [tuple(range(size))]
    groups += [tuple(dice.sample(range(size), dice.randint(1, size))) for _ in range(dice.choice((0, 0, 1, 2)))]
    made = Scenario(seed, size, groups)
    made.latency_s = dice.choice((0.0, 0.0, 0.0005))
    made.barrier = not faulty and dice.random() < 0.7
    made.timeout_s = dice.choice((None, 60.0))
    for tag in range(dice.randint(2, 5)):
        made.tracks.append(_track(dice, dice.randrange(len(groups)), tag + 1, groups, refusals=True))
    # A receive from any source ends when all others have left, though its rank may have something to tell itself yet.
    if faulty:
        made.tracks = [
            replace(track, senders=tuple(rank for rank in track.senders if rank != track.receiver))
            if track.what == "many"
            else track
            for track in made.tracks
        ]
        _add_fault(dice, made)
    elif any(track.what == "many" and track.receiver in track.senders for track in made.tracks):
        made.barrier = True
    return made


def _track(dice: random.Random, group: int, tag: int, groups: Sequence[tuple[int, ...]], *, refusals: bool) -> Track:
    members = len(groups[group])
    what = dice.choice(("collectives", "collectives", "collectives", "pair", "many", "batch"))
    if what == "collectives":
        chosen = tuple(_collective(dice, members, refusals) for _ in range(dice.randint(1, 7)))
        return Track(what, group, tag, collectives=chosen)
    counts = tuple(_count(dice) for _ in range(dice.randint(1, 6)))
    receiver = dice.randrange(members)
    prelude = dice.random() < 0.3
    if what == "pair":
        return Track(what, group, tag, (), counts, (dice.randrange(members),), receiver, prelude)
    senders = tuple(dice.sample(range(members), dice.randint(1, members)))
    return Track(what, group, tag, (), counts, senders, receiver, prelude)


def _collective(dice: random.Random, members: int, refusals: bool) -> Collective:
    kind = dice.choice(KINDS)
    refuser = dice.randrange(members) if refusals and members > 1 and dice.random() < 0.08 else None
    op = dice.choice(OPS)
    dtype = dice.choice(DTYPES) if isinstance(op, ReduceOp) else "float32"
    return Collective(kind, _count(dice), dtype, op, dice.randrange(members), refuser)


def _count(dice: random.Random) -> int:
    return dice.choice((0, 1, 1, 5, 5, 100, 2_000, 8_192, 8_193, 20_000, 60_000))


def _add_fault(dice: random.Random, made: Scenario) -> None:
    kind = dice.choice(FAULTS)
    if kind == "subgroup abort" and len(made.groups) == 1:
        kind = "abort"
    if kind in ("stall", "mismatch"):
        chosen = tuple(_collective(dice, made.size, False) for _ in range(dice.randint(1, 4)))
        if kind == "mismatch":  # an operation without data may send nothing that could show it
            chosen = tuple(replace(op, count=op.count + 100) for op in chosen if op.kind != "barrier") or (_SUM,)
        made.tracks.append(Track("collectives", 0, STALL_TAG, collectives=chosen))
    track = len(made.tracks) - 1
    rank = dice.randrange(made.size)
    other = dice.choice([other for other in range(made.size) if other != rank])
    after_s = dice.choice((0.0, dice.random() * 0.01, dice.random() * 0.05))
    if kind == "subgroup abort":
        rank = dice.choice(made.groups[1])
    last = len(made.tracks[track].collectives) - 1
    # A rank that only receives from any source is connected to nobody, and no news reaches it.
    made.meets = kind in ("abort", "subgroup abort", "raise") and any(track.what == "many" for track in made.tracks)
    made.fault = Fault(kind, rank, other, after_s, track, dice.randint(0, max(last, 0)))


_SUM = Collective("all_reduce", 100, "int64", ReduceOp.SUM, 0, None)

# Values.


def values(dtype: str, count: int, *where: int) -> np.ndarray:
    """Small whole numbers that depend on where they are used; sums of six, doubled, are exact in every dtype."""
    start = sum((index + 1) * number * 7 for index, number in enumerate(where))
    repeated = ((np.arange(17) * 3 + start) % 17).astype(dtype)
    return np.tile(repeated, -(-count // 17))[:count].copy()


def reduced(op: Any, contributions: Sequence[np.ndarray]) -> np.ndarray:
    """What a reduction of `contributions` gives."""
    stacked = np.stack(contributions)
    found: np.ndarray
    if op is ReduceOp.MAX:
        found = stacked.max(axis=0)
    elif op is ReduceOp.MIN:
        found = stacked.min(axis=0)
    else:
        found = stacked.sum(axis=0, dtype=stacked.dtype)
        if op is ReduceOp.AVG:
            count = stacked.dtype.type(len(stacked))
            found = found / count if stacked.dtype.kind == "f" else found // count
        elif op is not ReduceOp.SUM:
            found = found * stacked.dtype.type(2)
    return found
