"""What `make gpu` runs is run on the fake GPU, so that it works where there is a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent.parent
sys.path.insert(0, str(ROOT))  # bench is not installed: it lives beside the packages

from bench import cuda_extra, nccl_document  # noqa: E402
from bench.nccl import refusal_among  # noqa: E402
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


@pytest.mark.parametrize("devices", [0, 2])
def test_a_driver_with_and_without_devices(
    devices: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line either way: the extra, or why there is none."""

    class Driver:
        def __init__(self, name: str) -> None:
            self.name = name

        def cuInit(self, flags: int) -> int:
            return 0

        def cuDeviceGetCount(self, count: Any) -> int:
            count._obj.value = devices
            return 0

        def cuDriverGetVersion(self, version: Any) -> int:
            version._obj.value = 13000
            return 0

    monkeypatch.setattr("bench.cuda_extra.ctypes.CDLL", Driver)
    assert cuda_extra.main([]) == (0 if devices else 1)
    said = capsys.readouterr()
    assert (said.out, said.err) == (
        ("cuda13\n", "") if devices else ("", "make gpu: the NVIDIA driver sees no GPU here\n")
    )


def test_what_an_interpreter_lacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cuda_extra, "extra", lambda: ("cuda13", ""))
    monkeypatch.setattr(cuda_extra, "NEEDED", {"numpy": "numpy"})
    assert cuda_extra.main(["--installed"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(cuda_extra, "NEEDED", {"numpy": "numpy", "nosuchmodule": "no-such-package"})
    assert cuda_extra.main(["--installed"]) == 1
    assert capsys.readouterr().err == f"make gpu: {sys.executable} lacks no-such-package\n"


def test_what_a_test_saw_fail_is_not_waited_for_again() -> None:
    facts = (
        "NCCL, two ranks on one device, NCCL_MULTI_RANK_GPU_ENABLE=1: works",
        "NCCL, two ranks on one device, distinct NCCL_HOSTID: Duplicate GPU detected",
        "something else: fails",
    )
    assert refusal_among(facts, "nccl (NCCL_MULTI_RANK_GPU_ENABLE=1)") == ""
    assert refusal_among(facts, "nccl (distinct NCCL_HOSTID)") == "Duplicate GPU detected"
    assert refusal_among(facts, "ipc") == ""
    assert refusal_among((), "nccl (distinct NCCL_HOSTID)") == ""


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
