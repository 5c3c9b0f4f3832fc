"""Subject concurrency: 200 all_reduces in flight, the same one after the other, and 50 groups at once (`bench.bursts`).

A sample is the time of them all; the rate is operations a second.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.bursts import GROUPS, IN_FLIGHT, ONE_BY_ONE
from bench.candidates import GLOO, MPI, TRANSPORTS
from bench.cases import Case, format_bytes
from bench.model import Profile, Subject

BURST = 200
BURST_BYTES = 64 << 10
SMALL_BURST = 20
SMOKE_GROUPS = 5
CONCURRENT_GROUPS = 50
GROUP_BYTES = 1 << 10


def cases(profile: Profile) -> Sequence[Case]:
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


SUBJECT = Subject(
    "concurrency", "Many all_reduces at once", (2, 4), cases, (*TRANSPORTS.values(), GLOO, MPI), budgeted=True
)
