"""What `make gpu` runs is run on the fake GPU, so that it works where there is a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent.parent
sys.path.insert(0, str(ROOT))  # bench is not installed: it lives beside the packages

from bench import cuda_extra, nccl_document  # noqa: E402
from bench.nccl_alone import Alone  # noqa: E402


def run(folder: Path, *command: str, devices: int = 1) -> subprocess.CompletedProcess[str]:
    fake = {"ASYNCDIST_TEST_FAKE_CUDA": str(devices), "ASYNCDIST_TEST_FAKE_FOLDER": str(folder)}
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **fake},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_benchmark_runs(tmp_path: Path) -> None:
    facts = tmp_path / "facts"
    facts.write_text("Something that was found out\n")
    folder = tmp_path / "gpu"
    folder.mkdir()
    done = run(folder, "-m", "bench.nccl", "--smoke", "--facts", str(facts))
    assert done.returncode == 0, done.stderr
    for heading in ("# On a GPU", "Path ipc:", "Path staged:", "algbw", "- Something that was found out"):
        assert heading in done.stdout, done.stdout


@pytest.mark.parametrize(
    "selection",
    ["one_rank and uvloop and not dtypes", "takes_two_ranks or lists", "killed and ipc or host_array and staged"],
)
def test_the_gpu_tests_run(selection: str, tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "-k", selection)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
    assert "failed" not in done.stdout


def test_without_a_driver_make_gpu_says_so() -> None:
    name, reason = cuda_extra.extra("libnothing-of-that-name.so")
    assert not name
    assert "no NVIDIA driver here" in reason


def test_figures_are_judged() -> None:
    sixty_four = nccl_document.TORCH_BYTES
    alone = Alone(
        {4: {"asyncdist": 50e-6, "bare": 25e-6}, sixty_four: {"asyncdist": 1.0, "torch": 0.9}}, {}, 25e-6, 2e-3
    )
    figures = nccl_document.Figures(alone, {"ipc": {nccl_document.IPC_BYTES: 1e-3}}, {"staged": "it hangs"}, 1e12)
    text = nccl_document.document(figures, {"device": "one"}, "make gpu")
    assert "| 25.0 us | kept |" in text
    assert "| 2.00 ms | missed |" in text
    assert "| 0.90x | missed |" in text
    assert "| not measured | open |" in text
    assert "No figures of path staged: it hangs." in text
    assert "27% of 1000 GB/s" in text


def test_the_table_has_the_columns_of_nccl_tests() -> None:
    table = nccl_document.nccl_table({1 << 20: 1e-3}, 2).splitlines()
    assert table[0].split() == ["#", "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"]
    assert table[2].split() == ["1048576", "262144", "float", "sum", "-1", "1000.00", "1.05", "1.05", "0"]
