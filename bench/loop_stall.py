"""Subject stall: how long the event loop is held, and how much memory is taken, during an all_reduce of 256 MiB.

asyncdist runs on a loop that measures every callback (`bench.stall.TimedLoop`). Blocking libraries hold the loop for as
long as the operation takes; xoscar is the one whose users expect it not to. Each is measured in processes of its own
that have done nothing but small operations before, so its memory is what the first large operation takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.candidates import GLOO, MPI, XOSCAR, asyncdist
from bench.cases import Case
from bench.model import Profile, Subject

BYTES = 256 << 20
SMOKE_BYTES = 1 << 20
SAMPLES = 2
STALL_SAMPLES = 3


def cases(profile: Profile) -> Sequence[Case]:
    """Return the one cell."""
    nbytes = BYTES if profile.neighbors else SMOKE_BYTES
    return [Case("all_reduce", nbytes, SAMPLES, 1, stall_samples=STALL_SAMPLES, memory=True)]


def memory_cases(profile: Profile) -> Sequence[Case]:
    """Return the cell without the watch on the loop."""
    return [dataclasses.replace(case, stall_samples=0) for case in cases(profile)]


SUBJECT = Subject(
    "stall",
    "The event loop and memory during a large all_reduce",
    (2, 4),
    cases,
    (
        asyncdist("asyncdist shm", "auto", timed_loop=True),
        asyncdist("asyncdist tcp", "tcp", timed_loop=True),
        GLOO,
        MPI,
        XOSCAR,
    ),
    modes=("free",),
)
