"""The candidates: asyncdist over its transports, the neighbors, the floors; and why a neighbor is missing here."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from bench.driver import BURSTS, GROUPS, IN_FLIGHT, MESSAGES, OBJECTS
from bench.model import Candidate
from bench.operations import COLLECTIVES


def missing_module(*names: str) -> str | None:
    """Return "not installed" with the first missing module's name, None when all are there."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            return f"not installed: {name}"
    return None


def missing_asyncdist(*functions: str) -> str | None:
    """Why asyncdist cannot be measured, or None; ``functions`` are what it must offer besides."""
    try:
        module = importlib.import_module("asyncdist")
    except ImportError as error:
        return f"not importable: asyncdist: {error}"
    absent = [name for name in ("init_process_group", *functions) if not hasattr(module, name)]
    return f"not available: asyncdist.{absent[0]}" if absent else None


def missing_torch() -> str | None:
    """Why torch cannot be measured, or None."""
    return missing_module("torch")


def missing_mpi() -> str | None:
    """Why Open MPI cannot be measured, or None."""
    if shutil.which("mpirun") is None:
        return "not installed: mpirun"
    return missing_module("mpi4py")


def missing_xoscar() -> str | None:
    """Why xoscar cannot be measured, or None."""
    return missing_module("xoscar")


ALL: Final = COLLECTIVES | MESSAGES | BURSTS | set(OBJECTS)

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
    options: dict[str, Any] = {"adapter": "bench.adapters:Asyncdist"}
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
    options={"adapter": "bench.adapters:Gloo"},
)

MPI = Candidate(
    "mpi",
    "bench.driver:AdapterRank",
    ALL - {IN_FLIGHT, GROUPS},
    missing=missing_mpi,
    launcher="mpirun",
    options={"adapter": "bench.adapters:Mpi"},
    lacks=dict.fromkeys((IN_FLIGHT, GROUPS), "not usable: hangs now and then"),
)

XOSCAR = Candidate(
    "xoscar",
    "bench.driver:AdapterRank",
    COLLECTIVES - {"all_to_all_uneven", "reduce_scatter", "scatter"},
    missing=missing_xoscar,
    environment=ONE_THREAD,
    options={"adapter": "bench.adapters:Xoscar"},
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
    options={"adapter": "bench.floors:Floor"},
    floor=True,
)

FLOOR_UNIX = Candidate(
    "floor unix",
    "bench.driver:AdapterRank",
    FLOOR,
    missing=lambda: missing_module("uvloop"),
    options={"adapter": "bench.floors:Floor", "family": "unix"},
    floor=True,
)

MEMCPY = Candidate(
    "memcpy",
    "bench.driver:AdapterRank",
    (COLLECTIVES - {"barrier"}) | {"one_way"},
    options={"adapter": "bench.floors:Memcpy"},
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
