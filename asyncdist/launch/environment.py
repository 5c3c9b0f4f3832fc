"""The environment a worker is given: torchrun's names, and ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from string import Template
from typing import Final

from asyncdist.errors import LaunchError
from asyncdist.launch.config import Endpoint
from asyncdist.store.credentials import TLS_VARIABLES

__all__ = ["NodePlace", "line_prefix", "own_device", "worker_environment"]

_PREFIX_VARIABLE: Final = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"

_INHERITED: Final = (
    "ASYNCDIST_ROUND",
    "ASYNCDIST_STORE_OUTAGE",
    "ASYNCDIST_TOKEN",
    "ASYNCDIST_TOKEN_FILE",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""What concerns the launcher alone: its own secret, and its place in a job around this one."""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """This node's place in a job: which ranks are its own, and where the store is.

    `master` is what MASTER_ADDR and MASTER_PORT say: the store's address, unless the user named another. `tls` says
    whether the store has TLS. All ranks of a job have one `role`, which is for the script to read. With
    `virtual_local_rank` each worker sees only its GPU. `interface` is the network interface to use, if one was chosen.
    `restarts` is how many restarts an elastic job has had: its rounds, the attempts, may be more.
    """

    node_rank: int
    nnodes: int
    first_rank: int
    nproc: int
    world_size: int
    run_id: str
    store: Endpoint
    master: Endpoint
    token: str | None
    tls: bool = False
    role: str = "default"
    virtual_local_rank: bool = False
    interface: str | None = None
    restarts: int | None = None


def worker_environment(
    place: NodePlace, local_rank: int, attempt: int, max_restarts: int, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return `base` with what a worker must know about its job.

    RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_* ROLE_* MASTER_ADDR MASTER_PORT as torchrun sets them,
    ASYNCDIST_STORE ASYNCDIST_JOB_ID ASYNCDIST_TOKEN for asyncdist, TORCHELASTIC_* where scripts look for them. The job
    id carries the attempt number, so that a restarted group never reads what the failed one wrote. The token goes by
    environment and never by argument vector, which every user of the machine can read.

    Raises LaunchError if each worker is to see a GPU of its own and there are too few.
    """
    environment = dict(base)
    for inherited in _INHERITED:
        environment.pop(inherited, None)
    if not place.tls:  # what was meant for a daemon does not hold for a store on loopback
        for name in TLS_VARIABLES:
            environment.pop(name, None)
    environment.update(
        RANK=str(place.first_rank + local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_WORLD_SIZE=str(place.nproc),
        GROUP_RANK=str(place.node_rank),
        GROUP_WORLD_SIZE=str(place.nnodes),
        ROLE_NAME=place.role,
        ROLE_RANK=str(place.first_rank + local_rank),
        ROLE_WORLD_SIZE=str(place.world_size),
        MASTER_ADDR=place.master.host,
        MASTER_PORT=str(place.master.port),
        ASYNCDIST_STORE=str(place.store),
        ASYNCDIST_JOB_ID=f"{place.run_id}.{attempt}",
        TORCHELASTIC_RUN_ID=place.run_id,
        TORCHELASTIC_RESTART_COUNT=str(attempt if place.restarts is None else place.restarts),
        TORCHELASTIC_MAX_RESTARTS=str(max_restarts),
    )
    if place.restarts is not None:
        environment["ASYNCDIST_ROUND"] = str(attempt)
    if place.token is not None:
        environment["ASYNCDIST_TOKEN"] = place.token
    if place.virtual_local_rank:
        environment.update(LOCAL_RANK="0", CUDA_VISIBLE_DEVICES=own_device(local_rank, base))
    if place.interface is not None:
        environment["ASYNCDIST_SOCKET_IFNAME"] = place.interface
    environment.setdefault("PYTHONUNBUFFERED", "1")
    if place.nproc > 1:
        # As torchrun: several workers that each start a thread per core would fight over the cores.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def line_prefix(rank: int, local_rank: int, role: str, environ: Mapping[str, str] = os.environ) -> bytes:
    """What stands before a worker's lines on the terminal: `[rank 3] `, unless torchrun's variable says otherwise.

    TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE may have ${role_name}, ${rank} and ${local_rank}; other names are left alone.
    """
    template = environ.get(_PREFIX_VARIABLE)
    if not template:
        return f"[rank {rank}] ".encode()
    text = Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank)
    return os.fsencode(text.replace("\r", " ").replace("\n", " "))


def own_device(local_rank: int, environ: Mapping[str, str]) -> str:
    """The one GPU of a worker, in the words of CUDA_VISIBLE_DEVICES. Raises LaunchError if that names too few."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(local_rank)
    devices = [device.strip() for device in visible.split(",")]
    if local_rank >= len(devices):
        raise LaunchError(f"local rank {local_rank} has no GPU of its own: CUDA_VISIBLE_DEVICES is {visible!r}")
    return devices[local_rank]
