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

pytestmark = [
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun"),
    pytest.mark.slow("mpirun and the launchers take seconds to start and to end"),
]

SUM = """
    import asyncdist as dist, numpy as np
    async def main():
        async with dist.init_process_group() as group:
            x = np.ones(1)
            await dist.all_reduce(x)
            print(f"{group.rank} of {group.size}: {x[0]:.0f}, local {dist.get_node_local_rank()}", flush=True)
    dist.run(main())
"""


def mpirun(*command: str) -> list[str]:
    as_root = ("--allow-run-as-root",) if os.getuid() == 0 else ()
    done = subprocess.run(
        ["mpirun", *as_root, "--oversubscribe", "-n", "2", *command],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"\d of \d: \d, local \d", done.stdout))  # mpirun may mix the lines of ranks


def test_processes_of_mpirun_are_ranks(tmp_path: Path) -> None:
    assert mpirun(sys.executable, write_script(tmp_path, SUM)) == ["0 of 2: 2, local 0", "1 of 2: 2, local 1"]


def test_launchers_of_mpirun_are_nodes(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "asyncdist", "run", "--nproc-per-node", "2", write_script(tmp_path, SUM))
    assert mpirun(*command) == [f"{rank} of 4: 4, local {rank % 2}" for rank in range(4)]
