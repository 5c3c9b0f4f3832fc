"""Subject p2p: one message from rank to rank.

* ``ping_pong 4 B``: half a round trip with isend/irecv, each side's next receive posted before it sends.
* ``one_way 64 MiB``: rank 1 posts its receive, an untimed barrier, rank 0 sends; from before isend to the receiver's
  Work done (one clock serves the whole machine).

asyncdist over TCP stands beside the bare-socket floor over TCP, gloo and Open MPI; over Unix sockets it and its floor
are printed for information.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.baselines import FLOOR_TCP, FLOOR_UNIX, GLOO, MPI
from bench.cases import Case
from bench.ours import ASYNCDIST_TCP, ASYNCDIST_UNIX
from bench.runner import Profile, Subject


def cases(profile: Profile) -> Sequence[Case]:
    """Return the cells of a profile."""
    samples, warmup = profile.samples(large=False)
    large_samples, large_warmup = profile.samples(large=True)
    return [
        Case("ping_pong", 4, samples, warmup, "half_round_trip"),
        Case("one_way", profile.large_bytes, large_samples, large_warmup, "one_way"),
    ]


SUBJECT = Subject(
    "p2p",
    "Point-to-point messages",
    (2,),
    cases,
    (ASYNCDIST_TCP, FLOOR_TCP, GLOO, MPI, ASYNCDIST_UNIX, FLOOR_UNIX),
)
