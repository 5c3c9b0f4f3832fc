"""Processes and launchers that `mpirun` starts find each other without an option."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import DEADLINE_S, clean_environment, write_script

pytestmark = pytest.mark.slow("mpirun and the launchers take seconds to start and to end")

OPEN_MPI = ["mpirun", *(["--allow-run-as-root"] if os.getuid() == 0 else []), "--oversubscribe"]
HYDRA = ["mpiexec.hydra"]

SUM = """
    import asyncdist as dist, numpy as np
    async def main():
        async with dist.init_process_group() as group:
            x = np.ones(1)
            await dist.all_reduce(x)
            print(f"{group.rank} of {group.size}: {x[0]:.0f}, local {dist.get_node_local_rank()}", flush=True)
    dist.run(main())
"""


def started(launcher: list[str], size: int, *command: str) -> list[str]:
    """Run `command` on `size` ranks of that launcher, and return what they say, once they have ended well."""
    if shutil.which(launcher[0]) is None or (launcher is OPEN_MPI and "Open MPI" not in version_of(launcher[0])):
        pytest.skip(f"needs {launcher[0]} of {'Open MPI' if launcher is OPEN_MPI else 'MPICH'}")
    done = subprocess.run(
        [*launcher, "-n", str(size), *command],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"\d of \d: \d, local \d", done.stdout))  # they may mix the lines of ranks


def version_of(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, timeout=DEADLINE_S).stdout


@pytest.mark.parametrize("launcher", [OPEN_MPI, HYDRA], ids=["Open MPI", "MPICH"])
def test_processes_are_ranks(tmp_path: Path, launcher: list[str]) -> None:
    said = started(launcher, 2, sys.executable, write_script(tmp_path, SUM))
    assert said == [f"{rank} of 2: 2, local {rank}" for rank in range(2)]


@pytest.mark.parametrize(
    "launcher", [OPEN_MPI, pytest.param(HYDRA, marks=pytest.mark.thorough)], ids=["Open MPI", "MPICH"]
)
def test_launchers_are_nodes(tmp_path: Path, launcher: list[str]) -> None:
    command = (sys.executable, "-m", "asyncdist", "run", "--nproc-per-node", "2", write_script(tmp_path, SUM))
    assert started(launcher, 2, *command) == [f"{rank} of 4: 4, local {rank}" for rank in range(4)]


def test_the_wrong_mpis_launcher_makes_no_worlds_of_one(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="needs mpi4py, on Open MPI")
    wrong = SUM.replace("init_process_group()", "init_process_group('mpi')")
    if shutil.which(HYDRA[0]) is None or "Open MPI" not in version_of("mpirun"):
        pytest.skip("needs mpiexec.hydra, and Open MPI for mpi4py")
    done = subprocess.run(
        [*HYDRA, "-n", "2", sys.executable, "-W", "ignore", write_script(tmp_path, wrong)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode != 0
    assert "MPICH has started this process as number 1 of 2, but mpi4py has loaded Open MPI" in done.stderr
