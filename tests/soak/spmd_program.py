"""Random SPMD programs: what a seed means. Every rank makes the whole program of its seed.

A program is one or two worlds at once, each with a few tracks: tasks that issue the same random operations on
all members of a group, several in flight. One thing may go wrong with a rank, and a track may end with something that a
rank does not do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from spmd_values import DTYPES, dtype_of, ops_of

REDUCING = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "scan",
    "exscan",
)
COLLECTIVES = (
    *REDUCING,
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "barrier",
    "monitored_barrier",
    "all_to_all",
    "all_to_all_single",
    "all_gather_array",
    "gather_array",
    "broadcast_array",
    "scatter_array",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "broadcast_coalesced",
    "all_gather_coalesced",
    "all_gather_into_tensor_coalesced",
    "broadcast_stream",
    "all_gather_stream",
)
MESSAGES = ("ring", "ring", "crossed", "crossed", "batch", "message_array", "message_objects", "burst", "withdrawn")
FROM_ANY = ("fan_in", "fan_in")
SILENCE = ("silence",)
"""A receive with a time-out of what nobody sends."""
BYTES = (0, 0, 8, 64, 1000, 4 << 10, 8 << 10, 32 << 10, 64 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10)
LARGE_BYTES = (1 << 20, 3 << 20, 4 << 20, 12 << 20)
LARGE_SHARE = 0.04

FAULTS = ("kill", "kill", "leave", "raise", "abort", "stop")
FAULTY_SHARE = 0.45
TAGS_OF_TRACK = 1000
"""Tags that a track may use, from its own on."""


@dataclass(frozen=True)
class Step:
    """One operation of all members; `root` counts modulo their number."""

    kind: str
    dtype: str
    op: str
    octets: int
    root: int

    def __str__(self) -> str:
        return f"{self.kind} {self.op} {self.dtype} {self.octets} B root {self.root}"


@dataclass(frozen=True)
class Track:
    """What one task of every member does, in the world's group or, with `parts`, in groups of their own.

    One part is a group made by `new_group`, several come from `split_group`. At the end of the steps, in `ending`
    `stall`, group rank `culprit` leaves out a collective that has a time-out, in `abort` it gives the group up.
    """

    world: int
    number: int
    parts: tuple[tuple[int, ...], ...]
    window: int
    steps: tuple[Step, ...]
    ending: str = ""
    culprit: int = 0

    @property
    def tag(self) -> int:
        return self.number * TAGS_OF_TRACK

    def part_of(self, rank: int, size: int) -> tuple[int, ...]:
        """The members of its group on `rank`; none where it has no part."""
        parts = self.parts or (tuple(range(size)),)
        return next((part for part in parts if rank in part), ())

    def __str__(self) -> str:
        members = " | ".join(" ".join(map(str, part)) for part in self.parts) or "all"
        end = f", then rank {self.culprit} of it: {self.ending}" if self.ending else ""
        steps = ", ".join(map(str, self.steps))
        return f"  world {self.world}, track {self.number}, ranks {members}, {self.window} in flight: {steps}{end}"


@dataclass(frozen=True)
class Fault:
    """What befalls global rank `rank`: killed, stopped for a while, or it leaves the last world in some way."""

    kind: str
    rank: int
    after_s: float
    for_s: float = 0.0


@dataclass
class Program:
    """See the module."""

    seed: int
    size: int
    loops: tuple[str, ...]
    threads: tuple[bool, ...]
    environ: dict[str, str]
    meet: str
    worlds: int
    at_once: bool
    pauses: bool
    connects: bool
    fault: Fault | None = None
    tracks: list[Track] = field(default_factory=list)

    def endless(self, track: Track, rank: int) -> bool:
        """Whether `rank` goes on with that track until the fault ends it."""
        fault = self.fault
        if fault is None or fault.kind == "stop" or fault.rank not in track.part_of(rank, self.size):
            return False
        return fault.kind == "kill" or track.world == self.worlds - 1

    def __str__(self) -> str:
        loops = " ".join(loop + "+thread" * thread for loop, thread in zip(self.loops, self.threads, strict=True))
        words = [f"seed {self.seed}: {self.size} ranks ({loops}), {self.meet}, {self.environ}"]
        words += ["2 worlds " + ("at once" if self.at_once else "in turn")] * (self.worlds > 1)
        words += (
            ["pauses"] * self.pauses + ["all connected first"] * self.connects + [str(self.fault)] * bool(self.fault)
        )
        return "\n".join([", ".join(words), *map(str, self.tracks)])


def program(seed: int) -> Program:
    """The program of that seed."""
    dice = random.Random(seed)
    size = dice.choice((2, 2, 3, 3, 4, 4, 5, 6))
    one = dice.random() < 0.6
    loops = [dice.choice(("uvloop", "asyncio"))] * size if one else dice.choices(("uvloop", "asyncio"), k=size)
    threads = [dice.random() < 0.25] * size if one else dice.choices((True, False), k=size)
    environ = {"ASYNCDIST_TRANSPORT": dice.choice(("auto", "auto", "auto", "shm", "unix", "tcp"))}
    for name, choices in (
        ("ASYNCDIST_SPIN_US", ("0", "20", "300")),
        ("ASYNCDIST_SHM_BYTES", ("2000000", "8000000")),
        ("ASYNCDIST_EMPTY_BYTES", ("0", "65536", "1000000")),
        ("ASYNCDIST_SINGLE_COPY", ("off", "auto")),
        ("ASYNCDIST_CHECK", ("full",)),
        ("ASYNCDIST_TUNING", ("off",)),
    ):
        if dice.random() < 0.3 and (name != "ASYNCDIST_SHM_BYTES" or environ["ASYNCDIST_TRANSPORT"] != "shm"):
            environ[name] = dice.choice(choices)
    made = Program(
        seed,
        size,
        tuple(loops),
        tuple(threads),
        environ,
        meet=dice.choice(("env", "env", "file")),
        worlds=dice.choice((1, 1, 2)),
        at_once=dice.random() < 0.7,
        pauses=dice.random() < 0.3,
        connects=dice.random() < 0.5,
    )
    if dice.random() < FAULTY_SHARE:
        made.fault = _fault(dice, made)
    for world in range(made.worlds):
        made.tracks += [_track(dice, made, world, number) for number in range(1, dice.randint(2, 5))]
    fault = made.fault
    if fault is not None and not any(track.part_of(fault.rank, size) for track in made.tracks):
        made.fault = None
    return made


def _fault(dice: random.Random, made: Program) -> Fault:
    kind = dice.choice(FAULTS)
    # A killed rank that hosts the store takes with it what connections, and worlds, yet to be made depend on.
    met = made.connects and (made.worlds == 1 or made.at_once)
    rank = dice.randrange(1 if kind == "kill" and made.meet == "env" and not met else 0, made.size)
    after_s = dice.choice((0.0, 0.05, 0.2, 0.5)) * dice.random()
    return Fault(kind, rank, after_s, dice.choice((0.2, 1.0, 2.0)) if kind == "stop" else 0.0)


def _track(dice: random.Random, made: Program, world: int, number: int) -> Track:
    parts: tuple[tuple[int, ...], ...] = ()
    choice = dice.random()
    if choice < 0.35:
        parts = (tuple(dice.sample(range(made.size), dice.randint(1, made.size))),)
    elif choice < 0.5:
        order = dice.sample(range(made.size), made.size)
        cut = dice.randrange(1, made.size)
        parts = (tuple(sorted(order[:cut])), tuple(sorted(order[cut:])))
    ending = ""
    broken = made.fault is not None and made.fault.kind != "stop"
    if len(parts) == 1 and len(parts[0]) > 1 and not broken:
        ending = dice.choice(("", "", "stall", "abort"))
    kinds = [*COLLECTIVES, *MESSAGES, *MESSAGES]
    kinds += [*FROM_ANY, *FROM_ANY] if made.connects or not broken else []
    kinds += [] if broken else [*SILENCE, *["nested", "nested"] * bool(parts)]
    steps = tuple(draw_step(dice, dice.choice(kinds)) for _ in range(dice.choice((3, 8, 15, 25))))
    culprit = dice.randrange(len(parts[0])) if ending else 0
    return Track(world, number, parts, dice.choice((1, 3, 10)), steps, ending, culprit)


def draw_step(dice: random.Random, kind: str) -> Step:
    """A step of that kind."""
    dtype = dice.choice(DTYPES)
    octets = dice.choice(LARGE_BYTES if dice.random() < LARGE_SHARE else BYTES)
    octets = max(0, octets + dice.choice((-1, 0, 0, 1, 3)) * dtype_of(dtype).itemsize)
    ops = ops_of(dtype) if kind in REDUCING else [""]
    if kind in ("scan", "exscan"):  # which have no mean
        ops = [op for op in ops if op != "avg"]
    return Step(kind, dtype, dice.choice(ops), octets, dice.randrange(60))
