"""Subject p2p: messages from rank to rank (`bench.messages`): half round trips, one-way transfers, windows of 64.

asyncdist over every transport stands beside the bare-socket floors, gloo, Open MPI and raw copies of memory.
`PROMISED` are the cells that the main job promises, over TCP.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.candidates import ASYNCDIST_TCP, ASYNCDIST_UNIX, FLOOR_TCP, FLOOR_UNIX, GLOO, MEMCPY, MPI, TRANSPORTS, XOSCAR
from bench.cases import LARGE_BYTES, Case, format_bytes
from bench.messages import WINDOW
from bench.model import Profile, Subject

SIZES = {
    "ping_pong": (4, 1 << 10, 64 << 10, 1 << 20),
    "one_way": (64 << 10, 1 << 20, 16 << 20, 64 << 20),
    "window": (1 << 10, 8 << 10, 64 << 10),
}
COMBINED = {"ping_pong": "half_round_trip", "one_way": "one_way", "window": "slowest"}


def case(operation: str, nbytes: int, profile: Profile) -> Case:
    """Return one cell."""
    samples, warmup = profile.samples(large=nbytes > LARGE_BYTES)
    if operation == "window":
        title = f"{WINDOW} x {format_bytes(nbytes)} in flight"
        return Case(operation, nbytes, max(1, samples // 4), warmup, COMBINED[operation], WINDOW, title=title)
    return Case(operation, nbytes, samples, warmup, COMBINED[operation])


def cases(profile: Profile) -> Sequence[Case]:
    """Return the promised cells of a profile."""
    return [case("ping_pong", 4, profile), case("one_way", profile.large_bytes, profile)]


def all_cases(profile: Profile) -> Sequence[Case]:
    """Return every cell of a profile."""
    return [
        case(operation, nbytes, profile)
        for operation, several in SIZES.items()
        for nbytes in several
        if nbytes <= profile.large_bytes
    ]


PROMISED = Subject(
    "p2p",
    "Point-to-point messages",
    (2,),
    cases,
    (ASYNCDIST_TCP, FLOOR_TCP, GLOO, MPI, ASYNCDIST_UNIX, FLOOR_UNIX),
)
SUBJECT = Subject(
    "p2p",
    "Point-to-point messages",
    (2,),
    all_cases,
    (*TRANSPORTS.values(), FLOOR_TCP, FLOOR_UNIX, GLOO, MPI, XOSCAR, MEMCPY),
    budgeted=True,
)
