"""Jobs of a real Slurm on two nodes: what `asyncdist manifest sbatch` prints runs, and ranks need no options."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_kit import Hosts, Namespaces
from slurm_kit import NEEDED, Slurm

pytestmark = pytest.mark.skipif(bool(NEEDED), reason=f"needs {', '.join(NEEDED)}, of Debian's slurm-wlm and munge")

SAYS = """
import asyncio, os, signal, sys
import numpy as np
import asyncdist as dist

async def main():
    async with dist.init_process_group() as group:
        x = np.full(1000, group.rank + 1.0)
        await dist.all_reduce(x)
        assert (x == sum(range(1, group.size + 1))).all()
        place = f"{group.rank} of {group.size}, {dist.get_node_local_rank()} of {os.environ['LOCAL_WORLD_SIZE']}"
        print(place, os.uname().nodename, flush=True)
        await after(group)
"""
ENDS = (
    SAYS
    + """
async def after(group): pass
dist.run(main())
"""
)
ONE_DIES = (
    SAYS
    + """
async def after(group):
    if group.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    await group.barrier()
dist.run(main())
"""
)
STAYS = (
    SAYS
    + """
warned = asyncio.Event()
async def after(group):
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, warned.set)
    print("ready", os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
    await warned.wait()
    print("warned", flush=True)
    await group.barrier()
dist.run(main())
"""
)


@pytest.fixture
def slurm(namespaces: Hosts, tmp_path: Path) -> Iterator[Slurm]:
    """A cluster of two nodes."""
    assert isinstance(namespaces, Namespaces)
    yield Slurm(namespaces, tmp_path)
    for job in tmp_path.glob("job-*.log"):
        print(f"--- {job.name}\n{job.read_text()}")


def manifest(slurm: Slurm, source: str, *options: str) -> str:
    """What `asyncdist manifest sbatch` prints for a program on two nodes."""
    program = slurm.folder / "program.py"
    program.write_text(source)
    command = [sys.executable, "-m", "asyncdist", "manifest", "sbatch", "--name", "job", *options, str(program)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def places(slurm: Slurm, job: str) -> list[str]:
    return sorted(re.findall(r"(\d of \d, \d of \d node\d)$", slurm.output(job), re.MULTILINE))


ENDED = "COMPLETED|FAILED|CANCELLED"
FOUR = ["0 of 4, 0 of 2 node1", "1 of 4, 1 of 2 node1", "2 of 4, 0 of 2 node2", "3 of 4, 1 of 2 node2"]


@pytest.mark.parametrize(("tasks", "workers"), [("1", "2"), ("2", "1")])
def test_the_printed_file_runs(slurm: Slurm, tasks: str, workers: str) -> None:
    script = manifest(slurm, ENDS, "--tasks-per-node", tasks, "--nproc-per-node", workers)
    job = slurm.submit(script)
    assert slurm.until(job, ENDED) == "COMPLETED 0:0"
    assert places(slurm, job) == FOUR


def test_processes_of_srun_are_ranks(slurm: Slurm) -> None:
    (slurm.folder / "program.py").write_text(ENDS)
    token = "export ASYNCDIST_TOKEN=$(asyncdist token)"
    job = slurm.submit(
        f"#!/bin/sh\n{token}\nsrun python {slurm.folder}/program.py\n", "--nodes=2", "--ntasks-per-node=2"
    )
    assert slurm.until(job, ENDED) == "COMPLETED 0:0"
    assert places(slurm, job) == FOUR


@pytest.mark.parametrize(("tasks", "workers"), [("1", "2"), ("2", "1")])
def test_a_killed_rank_ends_the_step_and_is_named(slurm: Slurm, tasks: str, workers: str) -> None:
    job = slurm.submit(manifest(slurm, ONE_DIES, "--tasks-per-node", tasks, "--nproc-per-node", workers))
    assert slurm.until(job, ENDED) == "FAILED 137:0"
    assert re.search(r"PeerLostError: .* lost rank 3: ", slurm.output(job))
    assert re.search(r"rank 3 .*SIGKILL", slurm.output(job))


def test_workers_are_warned_and_a_requeued_job_meets_anew(slurm: Slurm) -> None:
    slurm.hosts.start_store()
    store = f"{slurm.hosts.address('store')}:29500"
    script = manifest(slurm, STAYS, "--nproc-per-node", "2", "--store", store)
    job = slurm.submit(script, "--requeue", "--export=ALL,ASYNCDIST_TOKEN=the-token-of-the-hosts-of-tests")
    slurm.until_said(job, "ready 0")
    slurm.said("scontrol", "requeue", job)
    slurm.until(job, "PENDING")
    slurm.said("scontrol", "update", f"job={job}", "StartTime=now")  # else in two minutes
    slurm.until_said(job, "ready 1")  # sbatch begins the file anew
    slurm.said("scancel", "--signal=TERM", job)
    slurm.until(job, ENDED)
    assert (slurm.output(job).count("warned"), slurm.output(job).count("job slurm-1.0r1, node")) == (4, 2)
