"""What the tests on a GPU need once: which way, if any, lets NCCL take two ranks on one device."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_kit import SHARING, run_on_gpu

from bench.gpu import Gpu, open_gpu

ALL_REDUCE = """
async def main():
    with open_gpu() as gpu:
        async with dist.init_process_group(timeout=40) as group:
            x = gpu.full(1 << 20, group.rank + 1)
            await dist.all_reduce(x)
            assert (x.get() == 3).all()
            assert "path nccl" in repr(group), repr(group)
dist.run(main())
"""

REPORT_VARIABLE = "ASYNCDIST_GPU_REPORT"
"""A file to which facts are appended that docs/benchmarks/gpu.md tells."""


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """Device 0, in this process."""
    with open_gpu(0) as opened:
        opened.spin(0.0)  # compiled now, not where time is measured
        opened.synchronize()
        yield opened


@pytest.fixture(scope="session")
def sharing_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each way to put two ranks of NCCL on one device, and why it does not work; empty if it does."""
    results = {}
    for name, environ in SHARING.items():
        folder = tmp_path_factory.mktemp("sharing")
        try:
            ranks = run_on_gpu(ALL_REDUCE, 2, folder, {"ASYNCDIST_CUDA_PATH": "nccl", **environ}, limit_s=60)
            failed = [rank for rank in ranks if rank.returncode]
            lines = failed[0].stderr.strip().splitlines() if failed else []
            results[name] = (lines[-1][:300] if lines else f"exit code {failed[0].returncode}") if failed else ""
        except subprocess.TimeoutExpired:
            results[name] = "it hangs"
    report = os.environ.get(REPORT_VARIABLE)
    if report:
        with Path(report).open("a") as file:
            for name, problem in results.items():
                file.write(f"NCCL, two ranks on one device, {name}: {problem or 'works'}\n")
    return results


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
