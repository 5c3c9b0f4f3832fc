"""How jobs of torch's backend "asyncdist" begin and end: stores, torchrun, torch's own suite, ranks that are killed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from daemon_kit import Daemon
from torch_kit import Jobs, clean_environment
from torch_later import Later

torch = Later("torch")

pytestmark = pytest.mark.peers

ROOT = Path(__file__).parents[3]
FAST_SUITE = ("test_all_reduce_sum", "test_all_to_all_group", "test_send_recv_with_tag", "test_ddp_logging_data_cpu")


def run(*command: str, timeout_s: float = 100, **variables: str) -> str:
    """Run a program of this tree; returns what it said."""
    environment = {**clean_environment(), "PYTHONPATH": ":".join(filter(None, sys.path)), **variables}
    done = subprocess.run(
        [sys.executable, *command], env=environment, timeout=timeout_s, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow("two processes import torch, one after the other")
def test_torchs_own_suite() -> None:
    pytest.importorskip("expecttest")
    said = run("tests/tools/torch_suite.py", "--worlds", "3", "--backends", "asyncdist", "--", *FAST_SUITE)
    assert f"3 ranks, asyncdist: {len(FAST_SUITE)} passed, 0 failed" in said, said


@pytest.mark.slow("imports torch, and a program with torch ends in a second")
@pytest.mark.parametrize(
    "program",
    ["killed_in_backward", "aborted_under_load", "destroyed_under_load", "left_waiting", "never_destroyed"],
)
def test_ends(program: str) -> None:
    assert "all ended" in run("tests/kits/torch_failures.py", program, "--ranks", "3", "--trials", "1")


def entry_points(directory: Path) -> str:
    """A place on the path where Python finds the entry points of pyproject.toml, as after an installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = directory / "asyncdist_of_this_tree-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: asyncdist-of-this-tree\nVersion: 0\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return str(directory)


@pytest.mark.slow("imports torch")
def test_torch_finds_the_backend_by_itself(tmp_path: Path) -> None:
    program = (
        "import sys, torch, torch.distributed as dist; "
        "assert not any(name == 'asyncdist' or name.startswith('asyncdist.') for name in sys.modules); "
        "dist.init_process_group('asyncdist', store=dist.HashStore(), rank=0, world_size=1); "
        "tensor = torch.ones(1); dist.all_reduce(tensor); dist.destroy_process_group()"
    )
    run("-c", program, PYTHONPATH=":".join([entry_points(tmp_path), *filter(None, sys.path)]))


SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("asyncdist")
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert tensor.item() == int(os.environ["WORLD_SIZE"]) == 4
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os._exit(3)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow("torchrun starts workers that import torch, twice")
@pytest.mark.parametrize("rendezvous", ["asyncdist", "standalone"])
def test_torchrun(daemon: Daemon, tmp_path: Path, rendezvous: str) -> None:
    """A job that is started anew once, as one rank fails; with asyncdist the same id can be used again."""
    (tmp_path / "script.py").write_text(SCRIPT)
    path = ":".join([entry_points(tmp_path), *filter(None, sys.path)])
    options = ["--standalone"]
    if rendezvous == "asyncdist":
        options = ["--rdzv-backend", "asyncdist", "--rdzv-endpoint", f"127.0.0.1:{daemon.port}", "--rdzv-id", "again"]
    run(
        *("-m", "torch.distributed.run", *options, "--nproc-per-node", "4", "--max-restarts", "1"),
        str(tmp_path / "script.py"),
        PYTHONPATH=path,
    )


TWO_BACKENDS = """
import torch, torch.distributed as dist
for backend in ("gloo", "asyncdist", "gloo"):
    dist.init_process_group(backend)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2
    dist.destroy_process_group()
"""


@pytest.mark.slow("two workers import torch")
def test_workers_of_asyncdist_run_meet_by_its_store(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TWO_BACKENDS)
    path = ":".join([entry_points(tmp_path), *filter(None, sys.path)])
    run("-m", "asyncdist", "run", "--nproc-per-node", "2", str(tmp_path / "script.py"), PYTHONPATH=path)


@pytest.mark.slow("imports torch")
def test_the_page_begins_with_a_program_that_runs() -> None:
    code = (ROOT / "docs" / "torch.md").read_text().split("```python\n")[1].split("```")[0]
    run("-c", code)


def test_a_store_of_asyncdist(jobs: Jobs, daemon: Daemon) -> None:
    jobs.run("store_verbs", 2, daemon.port)


def test_a_world_by_a_store_of_asyncdist(jobs: Jobs, daemon: Daemon) -> None:
    jobs.run("world_by_store", 3, daemon.port)


def test_another_backend_for_another_device(jobs: Jobs, daemon: Daemon) -> None:
    jobs.run("mixed_devices", 2, daemon.port)
