"""The subjects of ``python -m bench``: operations, sizes and candidates, and which of them a user chose.

| subject | measures |
| --- | --- |
| p2p | messages of two ranks: half round trips, one-way transfers, windows of 64 |
| all_reduce | the sum of a float32 array in place, over TCP |
| collectives | every collective by size and ranks; from 1 MiB on each run also watches the event loop |
| objects | collectives of Python objects that hold an array |
| concurrency | 200 all_reduces in flight, the same one by one, 50 groups at once; a sample is the time of them all |
| stall | how long an all_reduce of 256 MiB holds the event loop, and how much memory it takes |

The others have files of their own. `P2P_PROMISED` and `ALL_REDUCE_PROMISED` are the cells that the main job promises.
In subject stall asyncdist runs on a loop that measures every callback (`bench.stall.TimedLoop`). A blocking library
holds the loop as long as the operation takes. Its processes have done nothing but small operations before, so their
memory is what the first large operation takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench import durable, many_connections, overlap, rendezvous, store, stress
from bench.candidates import (
    ASYNCDIST_TCP,
    ASYNCDIST_UNIX,
    FLOOR_TCP,
    FLOOR_UNIX,
    GLOO,
    MEMCPY,
    MPI,
    PEERS,
    TRANSPORTS,
    XOSCAR,
    asyncdist,
)
from bench.driver import GROUPS, IN_FLIGHT, OBJECTS, ONE_BY_ONE, WINDOW
from bench.model import LARGE_BYTES, Candidate, Case, Profile, Subject, format_bytes
from bench.operations import OPERATIONS

MESSAGE_SIZES = {
    "ping_pong": (4, 1 << 10, 64 << 10, 1 << 20),
    "one_way": (64 << 10, 1 << 20, 16 << 20, 64 << 20),
    "window": (1 << 10, 8 << 10, 64 << 10),
}
COMBINED = {"ping_pong": "half_round_trip", "one_way": "one_way", "window": "slowest"}


def message_case(operation: str, nbytes: int, profile: Profile) -> Case:
    """Return one cell."""
    samples, warmup = profile.samples(large=nbytes > LARGE_BYTES)
    if operation == "window":
        title = f"{WINDOW} x {format_bytes(nbytes)} in flight"
        return Case(operation, nbytes, max(1, samples // 4), warmup, COMBINED[operation], WINDOW, title=title)
    return Case(operation, nbytes, samples, warmup, COMBINED[operation])


def promised_messages(profile: Profile) -> Sequence[Case]:
    """Return the promised cells of a profile."""
    return [message_case("ping_pong", 4, profile), message_case("one_way", profile.large_bytes, profile)]


def message_cases(profile: Profile) -> Sequence[Case]:
    """Return every cell of a profile."""
    return [
        message_case(operation, nbytes, profile)
        for operation, several in MESSAGE_SIZES.items()
        for nbytes in several
        if nbytes <= profile.large_bytes
    ]


P2P_PROMISED = Subject(
    "p2p",
    "Point-to-point messages",
    (2,),
    promised_messages,
    (ASYNCDIST_TCP, FLOOR_TCP, GLOO, MPI, ASYNCDIST_UNIX, FLOOR_UNIX),
)
P2P = Subject(
    "p2p",
    "Point-to-point messages",
    (2,),
    message_cases,
    (*TRANSPORTS.values(), FLOOR_TCP, FLOOR_UNIX, GLOO, MPI, XOSCAR, MEMCPY),
    budgeted=True,
)

COLLECTIVE_SIZES = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
WATCHED_SAMPLES = 2


def collective_cases(
    profile: Profile,
    operations: Iterable[str] = tuple(OPERATIONS),
    sizes: Sequence[int] = COLLECTIVE_SIZES,
    *,
    stall: bool = True,
) -> Sequence[Case]:
    """Return a cell for each operation and size within the profile's limit, and one for a barrier."""
    found = []
    for operation in operations:
        for nbytes in sizes if operation != "barrier" else (0,):
            if nbytes <= profile.large_bytes:
                samples, warmup = profile.samples(large=nbytes > LARGE_BYTES)
                watched = WATCHED_SAMPLES if stall and nbytes >= LARGE_BYTES else 0
                found.append(Case(operation, nbytes, samples, warmup, stall_samples=watched))
    return found


EVERY_COLLECTIVE = Subject(
    "collectives",
    "Collectives, float32",
    (2, 4),
    collective_cases,
    (*TRANSPORTS.values(), FLOOR_TCP, FLOOR_UNIX, GLOO, MPI, XOSCAR, MEMCPY),
    budgeted=True,
)

PROMISED_BYTES = (4, 64 << 10)
INFORMATION_BYTES = (1 << 20, 64 << 20)


def all_reduce_cases(profile: Profile, sizes: Sequence[int] = PROMISED_BYTES + INFORMATION_BYTES) -> Sequence[Case]:
    """Return the cells of a profile."""
    return collective_cases(profile, ("all_reduce",), sizes, stall=False)


ALL_REDUCE_CANDIDATES = (ASYNCDIST_TCP, FLOOR_TCP, GLOO, MPI)
ALL_REDUCE = Subject("all_reduce", "all_reduce, SUM of float32, TCP", (2, 4), all_reduce_cases, ALL_REDUCE_CANDIDATES)
ALL_REDUCE_PROMISED = Subject(
    "all_reduce",
    "all_reduce, SUM of float32, TCP",
    (2, 4),
    lambda profile: all_reduce_cases(profile, PROMISED_BYTES),
    ALL_REDUCE_CANDIDATES,
)

OBJECT_SIZES = (64, 64 << 10, 4 << 20)


def object_cases(profile: Profile) -> Sequence[Case]:
    """Return a cell for each operation and size within the profile's limit."""
    return [
        Case(
            operation, nbytes, *profile.samples(large=nbytes > LARGE_BYTES), title=f"{operation} {format_bytes(nbytes)}"
        )
        for operation in OBJECTS
        for nbytes in OBJECT_SIZES
        if nbytes <= profile.large_bytes
    ]


EVERY_OBJECT_CALL = Subject(
    "objects", "Collectives of objects", (2, 4), object_cases, (*TRANSPORTS.values(), GLOO, MPI), budgeted=True
)

BURST = 200
BURST_BYTES = 64 << 10
SMALL_BURST = 20
SMOKE_GROUPS = 5
CONCURRENT_GROUPS = 50
GROUP_BYTES = 1 << 10


def concurrency_cases(profile: Profile) -> Sequence[Case]:
    """Return the cells of a profile."""
    samples, warmup = profile.samples(large=True)
    burst, groups = (BURST, CONCURRENT_GROUPS) if profile.neighbors else (SMALL_BURST, SMOKE_GROUPS)
    size = format_bytes(BURST_BYTES)
    return [
        Case(IN_FLIGHT, BURST_BYTES, samples, warmup, operations=burst, title=f"{burst} x {size} in flight"),
        Case(ONE_BY_ONE, BURST_BYTES, samples, warmup, operations=burst, title=f"{burst} x {size} one by one"),
        Case(GROUPS, GROUP_BYTES, samples, warmup, operations=groups, title=f"{groups} groups at once, 1 KiB"),
        Case(ONE_BY_ONE, GROUP_BYTES, samples, warmup, operations=groups, title=f"{groups} x 1 KiB one by one"),
    ]


CONCURRENCY = Subject(
    "concurrency",
    "Many all_reduces at once",
    (2, 4),
    concurrency_cases,
    (*TRANSPORTS.values(), GLOO, MPI),
    budgeted=True,
)

STALL_BYTES = 256 << 20
STALL_SMOKE_BYTES = 1 << 20
STALL_RUNS = 2
STALL_SAMPLES = 3


def stall_cases(profile: Profile) -> Sequence[Case]:
    """Return the one cell."""
    nbytes = STALL_BYTES if profile.neighbors else STALL_SMOKE_BYTES
    return [Case("all_reduce", nbytes, STALL_RUNS, 1, stall_samples=STALL_SAMPLES, memory=True)]


def memory_cases(profile: Profile) -> Sequence[Case]:
    """Return the cell without the watch on the loop."""
    return [dataclasses.replace(case, stall_samples=0) for case in stall_cases(profile)]


STALL = Subject(
    "stall",
    "The event loop and memory during a large all_reduce",
    (2, 4),
    stall_cases,
    (
        asyncdist("asyncdist shm", "auto", timed_loop=True),
        asyncdist("asyncdist tcp", "tcp", timed_loop=True),
        GLOO,
        MPI,
        XOSCAR,
    ),
    modes=("free",),
)

SUBJECTS: Mapping[str, Subject] = {
    subject.name: subject
    for subject in (
        P2P,
        ALL_REDUCE,
        EVERY_COLLECTIVE,
        EVERY_OBJECT_CALL,
        CONCURRENCY,
        STALL,
        store.SUBJECT,
        store.TORCH_SUBJECT,
        many_connections.SUBJECT,
        durable.SUBJECT,
        rendezvous.SUBJECT,
        overlap.SUBJECT,
        stress.SUBJECT,
    )
}
FLOORS = "floors"
ANY_RANKS = frozenset({"all_reduce", "collectives", "concurrency", "objects", "stall"})
"""Subjects whose number of ranks may be chosen."""
TRANSPORT_NAMES = ("shm", "unix", "tcp")


@dataclass(frozen=True)
class Selection:
    """What is asked for; None means everything."""

    only: frozenset[str] | None = None
    transports: frozenset[str] | None = None
    peers: frozenset[str] | None = None
    sizes: tuple[int, ...] | None = None
    operations: tuple[str, ...] | None = None

    def keeps(self, candidate: Candidate) -> bool:
        if self.only is not None and candidate.name not in self.only:
            return False
        transport = candidate.environment.get("ASYNCDIST_TRANSPORT")
        if candidate.own:
            named = "shm" if transport == "auto" else transport
            return self.transports is None or named is None or named in self.transports
        group = next((name for name, members in PEERS.items() if candidate in members), None)
        return self.peers is None or group is None or group in self.peers

    def narrow(self, subject: Subject) -> Subject:
        """Return the subject with no more candidates and cases than asked for."""
        kept = tuple(candidate for candidate in subject.candidates if self.keeps(candidate))
        narrowed = dataclasses.replace(subject, candidates=kept)
        if self.sizes is None and self.operations is None:
            return narrowed
        if subject is EVERY_COLLECTIVE:
            return dataclasses.replace(narrowed, cases=self._collectives)
        if subject is P2P:
            return dataclasses.replace(narrowed, cases=self._messages)
        if subject is ALL_REDUCE and self.sizes is not None:
            sizes = self.sizes
            return dataclasses.replace(narrowed, cases=lambda profile: all_reduce_cases(profile, sizes))
        return narrowed

    def _collectives(self, profile: Profile) -> Sequence[Case]:
        chosen = [name for name in OPERATIONS if self.operations is None or name in self.operations]
        return collective_cases(profile, chosen, self.sizes or COLLECTIVE_SIZES)

    def _messages(self, profile: Profile) -> Sequence[Case]:
        chosen = [name for name in MESSAGE_SIZES if self.operations is None or name in self.operations]
        return [message_case(name, nbytes, profile) for name in chosen for nbytes in self.sizes or MESSAGE_SIZES[name]]


def chosen_subjects(names: Sequence[str], selection: Selection) -> list[Subject]:
    """Return the subjects named (all by default; ``floors``: the bare sockets of two), narrowed."""
    found = []
    for name in names or tuple(SUBJECTS):
        if name == FLOORS:
            bare = Selection(only=frozenset({"floor", "floor unix"}), sizes=selection.sizes)
            found += [bare.narrow(SUBJECTS[other]) for other in ("p2p", "all_reduce")]
        else:
            found.append(selection.narrow(SUBJECTS[name]))
    return found
