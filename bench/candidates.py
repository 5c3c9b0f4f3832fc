"""Who is measured: asyncdist over its transports, the neighbors, the floors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from bench import bursts, messages, object_calls
from bench.missing import missing_asyncdist, missing_module, missing_mpi, missing_torch, missing_xoscar
from bench.model import Candidate
from bench.operations import COLLECTIVES

ALL: Final = COLLECTIVES | messages.OPERATIONS | bursts.OPERATIONS | set(object_calls.OPERATIONS)
PAIR: Final = frozenset({"ping_pong", "one_way"})
FLOOR: Final = PAIR | {"all_reduce", "barrier"}
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}


def asyncdist(
    name: str,
    transport: str,
    *,
    environment: Mapping[str, str] | None = None,
    shared_arrays: bool = False,
    timed_loop: bool = False,
) -> Candidate:
    """Return asyncdist over a transport (ASYNCDIST_TRANSPORT: auto, shm, unix, tcp)."""
    options: dict[str, Any] = {"adapter": "bench.adapters.ours:Asyncdist"}
    if shared_arrays:
        options["shared_arrays"] = True
    if timed_loop:
        options["timed_loop"] = True
    return Candidate(
        name,
        "bench.driver:AdapterRank",
        ALL,
        missing=partial(missing_asyncdist, "empty") if shared_arrays else missing_asyncdist,
        environment={"ASYNCDIST_TRANSPORT": transport, **ONE_THREAD, **(environment or {})},
        options=options,
        own=True,
    )


ASYNCDIST_TCP = asyncdist("asyncdist", "tcp")
ASYNCDIST_UNIX = asyncdist("asyncdist unix", "unix")
ASYNCDIST_SHM = asyncdist("asyncdist", "auto")
"""The fastest transport that connects: on one host, shared memory."""
ASYNCDIST_DOORBELL = asyncdist("asyncdist doorbell", "auto", environment={"ASYNCDIST_SPIN_US": "0"})
"""Shared memory without spinning: every wait sleeps and is woken."""
ASYNCDIST_EMPTY = asyncdist("asyncdist empty", "auto", shared_arrays=True)
"""Shared memory with the arrays in it (`asyncdist.empty`), which saves the copies in and out."""
TRANSPORTS: Final[Mapping[str, Candidate]] = {
    "shm": asyncdist("asyncdist shm", "auto"),
    "unix": ASYNCDIST_UNIX,
    "tcp": asyncdist("asyncdist tcp", "tcp"),
}
GLOO = Candidate(
    "gloo",
    "bench.driver:AdapterRank",
    ALL,
    missing=missing_torch,
    environment={"GLOO_SOCKET_IFNAME": "lo", **ONE_THREAD},
    options={"adapter": "bench.adapters.gloo:Gloo"},
)
MPI = Candidate(
    "mpi",
    "bench.driver:AdapterRank",
    ALL - {bursts.IN_FLIGHT, bursts.GROUPS},
    missing=missing_mpi,
    launcher="mpirun",
    options={"adapter": "bench.adapters.mpi:Mpi"},
    lacks=dict.fromkeys((bursts.IN_FLIGHT, bursts.GROUPS), "not usable: hangs now and then"),
)
XOSCAR = Candidate(
    "xoscar",
    "bench.driver:AdapterRank",
    COLLECTIVES - {"all_to_all_uneven", "reduce_scatter", "scatter"},
    missing=missing_xoscar,
    environment=ONE_THREAD,
    options={"adapter": "bench.adapters.xoscar:Xoscar"},
    lacks={
        **dict.fromkeys(("reduce_scatter", "scatter"), "not usable: corrupts its heap"),
        **dict.fromkeys(ALL - COLLECTIVES | {"all_to_all_uneven"}, "not offered"),
    },
)
FLOOR_TCP = Candidate(
    "floor",
    "bench.driver:AdapterRank",
    FLOOR,
    missing=lambda: missing_module("uvloop"),
    options={"adapter": "bench.adapters.floor:Floor"},
    floor=True,
)
FLOOR_UNIX = Candidate(
    "floor unix",
    "bench.driver:AdapterRank",
    FLOOR,
    missing=lambda: missing_module("uvloop"),
    options={"adapter": "bench.adapters.floor:Floor", "family": "unix"},
    floor=True,
)
MEMCPY = Candidate(
    "memcpy",
    "bench.driver:AdapterRank",
    (COLLECTIVES - {"barrier"}) | {"one_way"},
    options={"adapter": "bench.adapters.floor:Memcpy"},
    floor=True,
)
PEERS: Final[Mapping[str, tuple[Candidate, ...]]] = {
    "gloo": (GLOO,),
    "mpi": (MPI,),
    "xoscar": (XOSCAR,),
    "floors": (FLOOR_TCP, FLOOR_UNIX),
    "memcpy": (MEMCPY,),
}
"""What `--peers` names."""
