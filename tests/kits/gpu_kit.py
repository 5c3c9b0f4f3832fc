"""What the tests on a GPU share: whether there is one, and ranks as processes that are never waited for too long.

With ASYNCDIST_TEST_FAKE_CUDA=1 (a number of devices) they run on fake devices, which tests the tests.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
from jobs import Ended, finish, start_ranks

from asyncdist import cuda

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # bench is not installed: it lives beside the packages

from bench.gpu import FAKE_VARIABLE, FOLDER_VARIABLE  # noqa: E402
from bench.nccl_ranks import SHARING  # noqa: E402

__all__ = ["FAKE", "LIMIT_S", "REASON", "SHARING", "on_gpu", "run_on_gpu", "succeeded"]

FAKE = os.environ.get(FAKE_VARIABLE, "")
LIMIT_S = 120.0 if FAKE else 45.0
"""Of any job of several processes: libraries may hang, tests may not. The fake is as slow as its machine is busy."""

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # cupy's, about what it finds or does not find
    REASON = "" if FAKE or cuda.find() else f"no GPU: {cuda.reason()}"

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.filterwarnings("default"),  # other libraries' warnings are not ours to fix
]

PROGRAM = """
from bench.gpu import open_gpu
from asyncdist import ReduceOp
"""


def run_on_gpu(
    code: str, size: int, folder: Path, environ: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
) -> list[Ended]:
    """Run `size` ranks of `code` on one device; TimeoutExpired, and no process left, after `limit_s`.

    `{rank}` in a value of `environ` becomes the rank (see `SHARING`).
    """
    everywhere = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PYTHONWARNINGS": "default",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_DEBUG": "WARN",
        **({FAKE_VARIABLE: FAKE, FOLDER_VARIABLE: str(folder)} if FAKE else {}),
        **(environ or {}),
    }
    by_rank = {name: value for name, value in everywhere.items() if "{rank}" in value}
    setting = "".join(
        f"os.environ[{name!r}] = {value!r}.format(rank=os.environ['RANK'])\n" for name, value in by_rank.items()
    )
    fixed = {name: value for name, value in everywhere.items() if name not in by_rank}
    return finish(start_ranks(f"{setting}{PROGRAM}{code}", size, fixed), limit_s)


def succeeded(ranks: list[Ended]) -> list[Ended]:
    """Fail with what the ranks said unless all of them ended well."""
    for rank in ranks:
        assert rank.returncode == 0, f"rank {rank.rank} exited with {rank.returncode}:\n{rank.stdout}\n{rank.stderr}"
    return ranks
