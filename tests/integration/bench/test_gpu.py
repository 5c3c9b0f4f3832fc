"""What `make gpu` runs is run on the fake GPU, so that it works where there is a real one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fewer_cases
import pytest

ROOT = Path(__file__).parent.parent.parent.parent
sys.path.insert(0, str(ROOT))  # bench is not installed: it lives beside the packages

from bench import cuda_extra  # noqa: E402
from bench.gpu_proof import Outcome, Section  # noqa: E402
from bench.nccl_figures import IPC_BYTES, TORCH_BYTES, Figures, document, nccl_table, notes_to, rows  # noqa: E402  # noqa: E402
from bench.nccl_ranks import REASON_CHARACTERS, reason_in  # noqa: E402

BENCHMARK = """
import subprocess, sys
from types import SimpleNamespace
sys.path.insert(0, "tests/kits")
import forked
from bench import nccl, nccl_ranks
nccl_ranks.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": forked.Popen})
nccl.main()
"""
"""`python -m bench.nccl`, whose dozen of ranks are forked."""


def run(folder: Path, *command: str, devices: int = 1) -> subprocess.CompletedProcess[str]:
    fake = {"ASYNCDIST_TEST_FAKE_CUDA": str(devices), "ASYNCDIST_TEST_FAKE_FOLDER": str(folder)}
    fake[fewer_cases.VARIABLE] = ""  # what is run is no part of this run
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
    folder, file = tmp_path / "gpu", tmp_path / "figures"
    folder.mkdir()
    done = run(folder, "-c", BENCHMARK, "--smoke", "--figures", str(file))
    assert done.returncode == 0, done.stderr
    for heading in (
        "# bare, one rank, taking turns with asyncdist",
        "# path ipc, 2 ranks",
        "# path staged, 2 ranks",
        "algbw",
        "# cupyx: ",
    ):
        assert heading in done.stdout, done.stdout
    figures = Figures.read(file)
    assert figures.about["device"] == "fake"
    assert set(figures.beside["bare"]) == {4, 4096} == set(figures.paths["ipc"]) == set(figures.paths["staged"])
    assert figures.copy_bytes_per_s
    assert figures.stall_s is not None
    assert "Duplicate GPU" in figures.problems["nccl (distinct NCCL_HOSTID)"]
    assert "torch" in figures.problems["nccl beside torch (NCCL_MULTI_RANK_GPU_ENABLE=1)"]


def test_the_gpu_tests_run(tmp_path: Path) -> None:
    """One of every kind, in one process: to start and to collect takes as long as some of them.

    That NCCL takes two ranks is found out where parts of the proof end well (test_gpu_proof.py).
    """
    kinds = ("one_rank and uvloop and not dtypes", "lists", "killed and ipc", "host_array and staged")
    selection = " or ".join(f"({kind})" for kind in kinds)
    done = run(tmp_path, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/gpu", "-k", selection)
    assert done.returncode == 0, done.stdout
    assert "failed" not in done.stdout
    for name in ("one_rank", "lists", "killed", "host_array"):
        assert re.search(rf"{name}.* PASSED", done.stdout), done.stdout


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


@pytest.mark.parametrize(
    ("found", "enough"), [("2.1.2", True), ("2.10.0rc1", True), ("2.1.1", False), ("2.0.2", False), ("1.26.4", False)]
)
def test_what_an_interpreter_has_too_old(found: str, enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_extra, "NEEDED", {"numpy": "numpy"})
    monkeypatch.setattr(cuda_extra, "OLDEST", {"numpy": (2, 1, 2)})
    monkeypatch.setattr(cuda_extra.importlib.metadata, "version", lambda package: found)
    said = cuda_extra.lacking()
    assert said == ("" if enough else f"{sys.executable} lacks numpy 2.1.2 or newer (it has {found})")


def test_figures_are_judged() -> None:
    figures = Figures()
    for record in (
        {"kind": "about", "values": {"device": "one"}},
        {"kind": "beside", "name": "bare", "nbytes": 4, "seconds": {"asyncdist": 50e-6, "bare": 25e-6}},
        {"kind": "beside", "name": "bare", "nbytes": 1024, "seconds": {"asyncdist": 1.0, "bare": 25e-6}},
        {"kind": "beside", "name": "torch", "nbytes": TORCH_BYTES, "seconds": {"asyncdist": 1.0, "torch": 0.9}},
        {"kind": "missing", "name": "cupyx", "why": "it is broken"},
        {"kind": "stall", "seconds": 2e-3, "idle_s": 1e-4},
        {"kind": "copy", "bytes_per_s": 1e12},
        {"kind": "path", "name": "ipc", "nbytes": IPC_BYTES, "seconds": 1e-3},
        {"kind": "problem", "name": "staged", "why": "not through after 50 s"},
    ):
        figures.take(record)
    text = document(figures, "make gpu")
    assert "| 25.0 us | kept |" in text
    assert "| 2.00 ms | missed |" in text
    assert "| 0.90x | missed |" in text
    assert "| not measured | open |" in text
    assert "Path staged: not through after 50 s." in text
    assert "Not measured: cupyx (it is broken)." in text
    assert "27% of 1000 GB/s" in text
    assert [row.verdict for row in rows(figures)] == ["open", "kept", "missed", "missed", "open", ""]
    assert {row.verdict for row in rows(Figures())} == {"open"}
    figures.take({"kind": "together", "name": "way", "nbytes": 4, "seconds": {"asyncdist": 1.0, "torch": 2.0}})
    assert [row.verdict for row in rows(figures)] == ["open", "kept", "missed", "missed", "open", ""], "it is no size"
    seconds = {"asyncdist": 1.0, "torch": 0.95}
    figures.take({"kind": "together", "name": "way", "nbytes": TORCH_BYTES, "seconds": seconds})
    assert [row.verdict for row in rows(figures)] == ["open", "kept", "missed", "kept", "", "open", ""]
    assert "| 64 MiB | 1000000.0 | 950000.0 |" in document(figures, "make gpu")
    with pytest.raises(ValueError, match="no such record: nonsense"):
        figures.take({"kind": "nonsense"})


def test_the_page_says_what_is_open() -> None:
    """Until there are figures it has every promise, as they will be written."""
    page = (ROOT / "docs" / "benchmarks" / "gpu.md").read_text()
    if "No figures yet" in page:
        assert all(f"| {' | '.join(row)} |" in page for row in rows(Figures()))


def test_all_tests_must_have_passed() -> None:
    """A part that hung, or did not begin, is none that passed."""
    section = Section("one", ("-m", "pytest", "tests/gpu/test_one.py"), 1.0)
    passed = Outcome(section, tests={"a": "PASSED", "b": "SKIPPED"})
    for others, verdict, value in (
        ([], "kept", "1 passed, 0 not, 1 skipped"),
        ([Outcome(section, "exit code 1", tests={"c": "FAILED"})], "missed", "1 passed, 1 not, 1 skipped"),
        ([Outcome(section, "stopped", tests={"c": "PASSED", "d": ""})], "missed", "2 passed, 1 not, 1 skipped"),
        ([Outcome(section, "not begun")], "missed", "1 passed, 0 not, 1 skipped; 1 of 2 parts did not run"),
    ):
        row = rows(Figures(outcomes=[passed, *others]))[0]
        assert (row.verdict, row.value) == (verdict, value)


def test_records_survive_one_that_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "figures"
    assert Figures.read(file) == Figures()
    notes_to(file)("copy", bytes_per_s=3.0)
    with file.open("a") as opened:
        opened.write('{"kind": "copy", "bytes_per')
    assert Figures.read(file).copy_bytes_per_s == 3.0


def test_the_table_has_the_columns_of_nccl_tests() -> None:
    table = nccl_table({1 << 20: 1e-3}, 2).splitlines()
    assert table[0].split() == ["#", "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"]
    assert table[2].split() == ["1048576", "262144", "float", "sum", "-1", "1000.00", "1.05", "1.05", "0"]


def test_the_reason_is_in_nccls_words() -> None:
    said = "[[4, 1]\nhost:1:2 [0] init.cc:1 NCCL WARN Duplicate GPU detected : ranks 1 and 0\nx\nDistBackendError: no\n"
    assert reason_in(said) == "Duplicate GPU detected : ranks 1 and 0; DistBackendError: no"
    assert reason_in("Error: " + "x" * 1000) == "Error: " + "x" * (REASON_CHARACTERS - 7)
    assert reason_in("\n") == ""
