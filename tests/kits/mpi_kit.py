"""Programs of some ranks that `mpirun` starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from jobs import OURS, PRELUDE

__all__ = ["Job", "mpirun", "need_mpi"]

LIMIT_S: Final = 90.0
"""No program takes nearly as long, on a machine that does other things as well."""

MPI: Final = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "UCX_LOG_LEVEL": "error",  # MPICH's UCX writes warnings to stdout of what an abort leaves behind
}

PYTHON: Final = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", "PYTHONWARNINGS": "error"}
"""What is printed goes out in one piece at the end, so that lines of several ranks are lines."""

MISSING: Final = [
    name for name, here in (("mpirun", shutil.which("mpirun")), ("mpi4py", find_spec("mpi4py"))) if not here
]


def need_mpi() -> None:
    """Skip the module that calls this where there is no MPI."""
    if MISSING:
        needed = " and ".join(MISSING)
        pytest.skip(f"needs {needed} (extra `peers`, and an MPI of the system)", allow_module_level=True)


class Job(NamedTuple):
    """How a job has ended."""

    returncode: int
    stdout: str
    stderr: str
    took_s: float

    @property
    def said(self) -> str:
        return f"mpirun returned {self.returncode} after {self.took_s:.1f} s\n{self.stdout}\n{self.stderr}"

    @property
    def is_clean(self) -> bool:
        """Whether nothing went wrong, and nothing was left behind in MPI; some MPIs have a word to say of the host."""
        wrong = "Traceback", "Warning", "of MPI leaves operations"
        return self.returncode == 0 and not any(word in self.stderr for word in wrong)


def mpirun(code: str, size: int, environ: Mapping[str, str] | None = None) -> Job:
    """Run `code` on `size` ranks, with asyncio, np and dist imported and this folder in the path; wait for its end."""
    kits = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    began_s = time.monotonic()
    ended = subprocess.run(
        ["mpirun", "-n", str(size), sys.executable, "-c", kits + PRELUDE + textwrap.dedent(code)],
        env={**inherited, **MPI, **PYTHON, **(environ or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return Job(ended.returncode, ended.stdout, ended.stderr, time.monotonic() - began_s)
