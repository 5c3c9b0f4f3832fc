"""What the tests on a GPU need once: which way, if any, lets NCCL take two ranks on one device."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_kit import SHARING, run_on_gpu

from bench.gpu import Gpu, open_gpu
from bench.gpu_proof import SHARING_VARIABLE, sharing_facts
from bench.nccl_ranks import reason_in

ALL_REDUCE = """
async def main():
    with open_gpu() as gpu:
        async with dist.init_process_group(timeout=25) as group:
            x = gpu.full(1 << 20, group.rank + 1)
            await dist.all_reduce(x)
            assert (x.get() == 3).all()
            assert "path nccl" in repr(group), repr(group)
dist.run(main())
"""

SHARING_LIMIT_S = 40.0
"""Of each try: NCCL may hang on a shared device, and there is more to be tested."""


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """Device 0, in this process."""
    with open_gpu(0) as opened:
        opened.spin(0.0)  # compiled now, not where time is measured
        opened.synchronize()
        yield opened


@pytest.fixture(scope="session")
def sharing_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each way to put two ranks of NCCL on one device, and why it does not work; empty if it does.

    What has been found out already, in other sessions of the same proof, is in the file that SHARING_VARIABLE names.
    """
    file = Path(os.environ.get(SHARING_VARIABLE) or tmp_path_factory.mktemp("sharing") / "results")
    results = sharing_facts(file)
    for name, environ in SHARING.items():
        if name not in results:
            results[name] = "it hangs"  # so it is written down, should this process be stopped meanwhile
            file.write_text(json.dumps(results))
            results[name] = _try_sharing(environ, tmp_path_factory.mktemp("sharing"))
            file.write_text(json.dumps(results))
    return results


def _try_sharing(environ: dict[str, str], folder: Path) -> str:
    try:
        ranks = run_on_gpu(ALL_REDUCE, 2, folder, {"ASYNCDIST_CUDA_PATH": "nccl", **environ}, limit_s=SHARING_LIMIT_S)
    except subprocess.TimeoutExpired:
        return "it hangs"
    failed = [rank for rank in ranks if rank.returncode]
    if not failed:
        return ""
    return reason_in(f"{failed[0].stdout}\n{failed[0].stderr}") or f"exit code {failed[0].returncode}"


@pytest.fixture(scope="session")
def nccl_sharing(sharing_results: dict[str, str]) -> dict[str, str]:
    """The environment that lets two ranks of NCCL share a device; skips where nothing does."""
    for name, problem in sharing_results.items():
        if not problem:
            return {"ASYNCDIST_CUDA_PATH": "nccl", **SHARING[name]}
    pytest.skip("NCCL takes no two ranks on one device here: " + "; ".join(map(": ".join, sharing_results.items())))


@pytest.fixture(params=["ipc", "staged", "nccl"])
def path_environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment for each path by which two ranks on one device can communicate."""
    if request.param == "nccl":
        environ: dict[str, str] = request.getfixturevalue("nccl_sharing")
        return environ
    return {"ASYNCDIST_CUDA_PATH": request.param}
