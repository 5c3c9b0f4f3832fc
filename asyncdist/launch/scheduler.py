"""The place of this process among those that a scheduler has started together: Slurm, an MPI launcher, Kubernetes.

| scheduler | variables that tell |
| --- | --- |
| Open MPI, PRRTE (`mpirun`) | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` |
| MPICH, Intel MPI (`mpiexec.hydra`) | `PMI_RANK`, `PMI_SIZE` |
| Slurm (`srun`) | `SLURM_STEP_ID` of a step, `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_STEP_NODELIST` ... |
| another PMIx server | `PMIX_RANK` |
| Kubernetes (Indexed Job, JobSet, TrainJob) | `JOB_COMPLETION_INDEX`, and the pod's own name |

An MPI launcher comes before Slurm: Slurm may have started the launcher, and counts the launcher's own processes then. A
shell of `salloc` and the script of `sbatch` are no step: they stand for all tasks of the job, and are none of them.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from asyncdist.launch.config import DEFAULT_PORT

_FIRST_PORT: Final = 61440
_PORTS: Final = 4096
"""The job chooses the store's port among these: Linux gives out ports up to 60999 by itself."""

_FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0
"""Slurm numbers the steps of `srun` from 0; the batch script and an interactive shell have numbers from here on."""


@dataclass(frozen=True, slots=True)
class Place:
    """Process number `rank` of `size`, started by `by`; what that does not say is None.

    `host` is where process 0 runs, and `port` where it may host a store. `job` is the name of the job, or empty.
    """

    by: str
    rank: int
    size: int | None
    job: str
    port: int
    host: str | None = None
    local_rank: int | None = None
    local_size: int | None = None


def find_place(environ: Mapping[str, str], fqdn: Callable[[], str] = socket.getfqdn) -> Place | None:
    """Return the place of this process; None where no scheduler tells.

    Raises ValueError, naming the variables, where some of them are missing or are no numbers.
    """
    mpi = _mpi(environ, "Open MPI", "OMPI_COMM_WORLD_", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    mpi = mpi or _mpi(environ, "MPICH", "PMI_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    slurm = _slurm(environ)
    by_srun = slurm is not None and environ.get("PMI_JOBID", "") == slurm.job.removeprefix("slurm-").partition("r")[0]
    if mpi is not None and not by_srun:
        return mpi
    return slurm or _pmix(environ) or _kubernetes(environ, fqdn)


def torchrun_variables(environ: Mapping[str, str], fqdn: Callable[[], str] = socket.getfqdn) -> dict[str, str]:
    """Return those of torchrun's variables that are not set, as a scheduler says them; none where RANK is set.

    Raises ValueError, naming what to set, where the scheduler does not say how many processes there are, or where they
    meet.
    """
    place = None if environ.get("RANK") else find_place(environ, fqdn)
    if place is None:
        return {}
    said = f"{place.by} has started this process as number {place.rank}"
    size = environ.get("WORLD_SIZE") or place.size
    if size is None:
        raise ValueError(f"{said}, but of how many? set WORLD_SIZE")
    if place.size is not None and str(size) != str(place.size):
        raise ValueError(f"{said} of {place.size}, but WORLD_SIZE is {size}")
    host = "127.0.0.1" if str(size) == "1" else place.host
    if host is None and not environ.get("MASTER_ADDR") and not environ.get("ASYNCDIST_STORE"):
        raise ValueError(f"{said} of {size}, but where do they meet? set MASTER_ADDR to the host of number 0")
    values = {
        "RANK": place.rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": place.port,
        "ASYNCDIST_JOB_ID": place.job or None,
    }
    return {name: str(value) for name, value in values.items() if value is not None and not environ.get(name)}


def _mpi(environ: Mapping[str, str], by: str, prefix: str, local_rank: str, local_size: str) -> Place | None:
    if not environ.get(f"{prefix}RANK") and not environ.get(f"{prefix}SIZE"):
        return None
    rank, size = _numbers(environ, by, f"{prefix}RANK", f"{prefix}SIZE")
    place = _numbers(environ, by, local_rank, local_size) if environ.get(local_rank) else (None, None)
    job = environ.get("PMIX_NAMESPACE") or environ.get("PMI_JOBID") or ""
    if not job and environ.get(
        "SLURM_JOB_ID"
    ):  # MPICH names no job; srun starts its launcher on each node, as one step
        job = f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
    nodes = environ.get("SLURM_JOB_NODELIST")
    host = "127.0.0.1" if place[1] == size else _first_host(nodes) if nodes else None
    return Place(by, rank, size, job and f"mpi-{job}", _port(job or f"user {os.getuid()}"), host, *place)


def _slurm(environ: Mapping[str, str]) -> Place | None:
    if not environ.get("SLURM_STEP_ID"):
        return None
    (step,) = _numbers(environ, "Slurm", "SLURM_STEP_ID")
    if step >= _FIRST_SPECIAL_STEP:
        return None
    names = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES")
    job, rank, size, local_rank, nodes = _numbers(environ, "Slurm", *names, and_set=("SLURM_STEP_NODELIST",))
    host = "127.0.0.1" if nodes == 1 else _first_host(environ["SLURM_STEP_NODELIST"])
    counts = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = environ.get("SLURM_NODEID", "")
    local_size = counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None
    restarts = environ.get("SLURM_RESTART_COUNT", "0")  # `scontrol requeue` numbers job and steps as before
    name = f"{job}.{step}" if restarts == "0" else f"{job}.{step}r{restarts}"
    return Place("Slurm", rank, size, f"slurm-{name}", _port(name), host, local_rank, local_size)


def _pmix(environ: Mapping[str, str]) -> Place | None:
    if not environ.get("PMIX_RANK"):
        return None
    (rank,) = _numbers(environ, "PMIx", "PMIX_RANK")
    job = environ.get("PMIX_NAMESPACE", "")
    return Place("PMIx", rank, None, job and f"mpi-{job}", _port(job))


def _kubernetes(environ: Mapping[str, str], fqdn: Callable[[], str]) -> Place | None:
    """A pod of an Indexed Job is called `<job>-<index>`, in the domain of its service if it has one."""
    if not environ.get("JOB_COMPLETION_INDEX"):
        return None
    (rank,) = _numbers(environ, "Kubernetes", "JOB_COMPLETION_INDEX")
    pod, _, domain = fqdn().partition(".")
    job, _, index = pod.rpartition("-")
    host = f"{job}-0.{domain}" if domain and index == str(rank) else None
    return Place("Kubernetes", rank, None, job, DEFAULT_PORT, host)


def _numbers(environ: Mapping[str, str], by: str, *names: str, and_set: tuple[str, ...] = ()) -> list[int]:
    missing = [name for name in (*names, *and_set) if not environ.get(name)]
    if missing:
        raise ValueError(f"{by} has started this process, but does not say all: {', '.join(missing)} not set")
    for name in names:
        if not environ[name].isdecimal():
            raise ValueError(f"environment variable {name} is not a number: {environ[name]!r}")
    return [int(environ[name]) for name in names]


def _first_host(nodes: str) -> str:
    """Return the first host of Slurm's `rack[1-2]node[03,05-07],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", "" if first is None else first[0])


def _tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's `2(x3),1`."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _port(job: str) -> int:
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
