"""Subject all_reduce: the sum of a float32 array over all ranks, in place, over TCP.

4 B and 64 KiB are the cells the main job promises; 1 MiB and 64 MiB are printed for information. Each sample: an
untimed barrier, then one all_reduce; the slowest rank's time. asyncdist over TCP, the recursive-doubling floor over
TCP, gloo, Open MPI.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench import collectives
from bench.candidates import ASYNCDIST_TCP, FLOOR_TCP, GLOO, MPI
from bench.cases import Case
from bench.model import Profile, Subject

PROMISED_BYTES = (4, 64 << 10)
INFORMATION_BYTES = (1 << 20, 64 << 20)


def cases(profile: Profile, sizes: Sequence[int] = PROMISED_BYTES + INFORMATION_BYTES) -> Sequence[Case]:
    """Return the cells of a profile."""
    return collectives.cases(profile, ("all_reduce",), sizes, stall=False)


CANDIDATES = (ASYNCDIST_TCP, FLOOR_TCP, GLOO, MPI)
SUBJECT = Subject("all_reduce", "all_reduce, SUM of float32, TCP", (2, 4), cases, CANDIDATES)
PROMISED = Subject(
    "all_reduce",
    "all_reduce, SUM of float32, TCP",
    (2, 4),
    lambda profile: cases(profile, PROMISED_BYTES),
    CANDIDATES,
)
