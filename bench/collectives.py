"""Subject collectives: every collective by size and ranks, asyncdist over every transport beside everybody else.

Sizes are those of nccl-tests (`bench.operations`). From 1 MiB on each run also watches the event loop during two
further operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.candidates import FLOOR_TCP, FLOOR_UNIX, GLOO, MEMCPY, MPI, TRANSPORTS, XOSCAR
from bench.cases import LARGE_BYTES, Case
from bench.model import Profile, Subject
from bench.operations import OPERATIONS

SIZES = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
STALL_SAMPLES = 2


def cases(
    profile: Profile, operations: Iterable[str] = tuple(OPERATIONS), sizes: Sequence[int] = SIZES, *, stall: bool = True
) -> Sequence[Case]:
    """Return a cell for each operation and size within the profile's limit, and one for a barrier."""
    found = []
    for operation in operations:
        for nbytes in sizes if operation != "barrier" else (0,):
            if nbytes <= profile.large_bytes:
                samples, warmup = profile.samples(large=nbytes > LARGE_BYTES)
                watched = STALL_SAMPLES if stall and nbytes >= LARGE_BYTES else 0
                found.append(Case(operation, nbytes, samples, warmup, stall_samples=watched))
    return found


SUBJECT = Subject(
    "collectives",
    "Collectives, float32",
    (2, 4),
    cases,
    (*TRANSPORTS.values(), FLOOR_TCP, FLOOR_UNIX, GLOO, MPI, XOSCAR, MEMCPY),
    budgeted=True,
)
