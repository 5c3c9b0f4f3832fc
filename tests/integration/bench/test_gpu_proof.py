"""What `make gpu` does when libraries hang, crash or are missing: other parts run, and what was measured is kept."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from jobs import free_port

ROOT = Path(__file__).parent.parent.parent.parent
sys.path.insert(0, str(ROOT))  # bench is not installed: it lives beside the packages

from bench import gpu_proof, nccl, nccl_ranks  # noqa: E402
from bench.gpu_proof import BUDGET_S, LIMIT_VARIABLE, SHARING_VARIABLE, Outcome, Section, Sections, sharing_facts  # noqa: E402
from bench.nccl_figures import Figures, document  # noqa: E402

LONGEST_OUTPUT = 12_000
"""Characters: as much as is certain to be seen of a command's output."""

LIMIT_S = 60.0

HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(f"<{child.pid}>", flush=True)
def in_a_library():
    time.sleep(1000)
in_a_library()
"""

BROKEN = """
import os, sys, time

def broken(part):
    if part == "stall":
        time.sleep(1000)
    if part == "torch":
        sys.modules["torch"] = None
    if part == "bare":
        opened = []
        def hook(event, arguments):
            if event == "open" and str(arguments[0]).endswith("figures.jsonl"):
                opened.append(arguments)
                if len(opened) == 3:
                    os.abort()
        sys.addaudithook(hook)

if "bench.nccl" in sys.orig_argv:
    broken(sys.orig_argv[sys.orig_argv.index("--part") + 1])
"""
"""What Python runs first: one part hangs, one has no torch, one crashes between the first size and the second."""


def section(code: str, limit_s: float = LIMIT_S, *more: str) -> Section:
    return Section("a part", ("-c", code, *more), limit_s)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_a_part_that_hangs_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    outcome = Sections(LIMIT_S, log).run(section(HANGS, 4.0))  # an interpreter may take two to start beside others
    assert outcome.problem == "stopped after 4 s"
    text = log.read_text()
    assert "in in_a_library" in text, "it says where it was"
    deadline_s = time.monotonic() + LIMIT_S
    [child] = re.findall(r"<(\d+)>", text)
    while alive(int(child)):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert outcome.seconds < LIMIT_S / 2


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("print('fine')", ""),
        ("import os; print('before', flush=True); os.abort()", "killed by SIGABRT"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("raise SystemExit('no device')", "exit code 1"),
    ],
)
def test_how_parts_end(code: str, problem: str, tmp_path: Path) -> None:
    sections = Sections(LIMIT_S, tmp_path / "log")
    outcome = sections.run(section(code))
    assert outcome.problem == problem
    assert bool(outcome.tail) is bool(problem)
    assert outcome.line().startswith("FAILED" if problem else "ok")
    assert sections.run(section("print('the next')")).problem == ""


@pytest.mark.parametrize(("budget_s", "begun"), [(0.9, False), (30.0, True)])
def test_nothing_is_begun_when_the_time_is_over(budget_s: float, begun: bool, tmp_path: Path) -> None:
    outcome = Sections(budget_s, tmp_path / "log").run(section("pass"))
    assert outcome.problem == ("" if begun else "not begun: the time is over")
    assert (tmp_path / "log").exists() is begun


def test_a_part_gets_no_more_than_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_proof, "LEAST_S", 0.1)
    assert Sections(1.0, tmp_path / "log").run(section(HANGS)).problem == "stopped after 1 s"


def test_a_part_is_told_what_is_left(tmp_path: Path) -> None:
    outcome = Sections(20.0, tmp_path / "log").run(section(f"import os; print(os.environ['{LIMIT_VARIABLE}']); 1 / 0"))
    assert 15.0 < float(outcome.tail[0]) <= 20.0


@pytest.mark.parametrize(("enough", "measured"), [(1.0, [4, 8]), (0.0, [])])
async def test_no_other_size_is_begun_when_time_is_short(
    enough: float, measured: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rather than that the ranks are stopped, and with them the part."""
    monkeypatch.setattr(nccl_ranks, "ENOUGH", enough)
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in {**environ, "ASYNCDIST_TEST_FAKE_CUDA": "1"}.items():
        monkeypatch.setenv(name, value)
    await nccl_ranks._rank([4, 8], 2, LIMIT_S, 0)
    assert [json.loads(line)[0] for line in capsys.readouterr().out.splitlines()] == measured


def test_verdicts_are_read_as_far_as_they_came(tmp_path: Path) -> None:
    """The test that was under way when its process ended is named."""
    log = [
        "tests/gpu/test_x.py::test_a PASSED                 [ 20%]",
        "tests/gpu/test_x.py::test_b[staged and ipc] FAILED [ 40%]",
        "tests/gpu/test_x.py::test_c SKIPPED (no torch)     [ 60%]",
        "tests/gpu/test_x.py::test_d",
    ]
    outcome = Sections(LIMIT_S, tmp_path / "log").run(
        section(f"print({os.linesep.join(log)!r}); import os; os._exit(3)", LIMIT_S, "pytest")
    )
    assert outcome.problem == "exit code 3: tests/gpu/test_x.py::test_d"
    assert outcome.counts() == "1 passed, 1 failed, 1 skipped"
    quiet = Sections(LIMIT_S, tmp_path / "log").run(section("pass", LIMIT_S, "pytest"))
    assert quiet.problem == "no test ran"


def test_a_test_that_hangs_is_named_and_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(
        "import time\ndef test_a(): pass\ndef in_a_library(): time.sleep(1000)\ndef test_b(): in_a_library()\n"
    )
    monkeypatch.setattr(gpu_proof, "ROOT", tmp_path)
    part = Section("x", (*gpu_proof.PYTEST, "tests/test_x.py"), 10.0, gpu_proof.ALONE)
    outcome = Sections(LIMIT_S, tmp_path / "log").run(part)
    assert outcome.problem == "stopped after 10 s: tests/test_x.py::test_b"
    assert outcome.counts() == "1 passed"
    assert any("in in_a_library" in line for line in outcome.tail), outcome.tail


def test_the_parts_fit_eight_minutes(tmp_path: Path) -> None:
    assert BUDGET_S <= 480 - 30
    parts = gpu_proof.sections(tmp_path, smoke=False)
    assert all(part.limit_s <= 150 for part in parts)
    assert len({part.name for part in parts}) == len(parts)
    tested = {word for part in parts for word in part.arguments if word.startswith("tests/gpu")}
    assert tested == {f"tests/gpu/{file.name}" for file in (ROOT / "tests" / "gpu").glob("test_*.py")}


def test_what_is_known_of_sharing(tmp_path: Path) -> None:
    file = tmp_path / "sharing"
    assert sharing_facts(file) == {}
    file.write_text('{"one": "", "two": "it ha')
    assert sharing_facts(file) == {}
    file.write_text(json.dumps({"one": "", "two": "it hangs"}))
    assert sharing_facts(file) == {"one": "", "two": "it hangs"}


def test_what_is_printed_can_be_read_when_everything_fails(tmp_path: Path) -> None:
    """Everything was measured before, in all sizes, and every part has much to say of its end."""
    figures = Figures(about={f"what {number}": "x" * 40 for number in range(9)}, stall_s=1e-3, copy_bytes_per_s=4e12)
    for nbytes in nccl.SIZES:
        for name in nccl.NEIGHBORS:
            figures.take({"kind": "beside", "name": name, "nbytes": nbytes, "seconds": {"asyncdist": 1.0, name: 1.0}})
        for name in nccl.PATHS:
            figures.take({"kind": "path", "name": name, "nbytes": nbytes, "seconds": 1.0})
        for way in nccl_ranks.SHARING:
            figures.take(
                {"kind": "together", "name": way, "nbytes": nbytes, "seconds": {"asyncdist": 1.0, "torch": 1.0}}
            )
    figures.problems = dict.fromkeys(nccl.PATHS, "x" * nccl_ranks.REASON_CHARACTERS)
    figures.facts = ["x" * nccl_ranks.REASON_CHARACTERS for _ in nccl_ranks.SHARING]
    line = "x" * gpu_proof.LINE_CHARACTERS
    problem = "exit code 1: tests/gpu/test_shared_device.py::test_nccl_overlaps_with_a_kernel[one channel]"
    for part in gpu_proof.sections(tmp_path, smoke=False):
        tail = (line,) * gpu_proof.TAIL_LINES
        figures.outcomes.append(Outcome(part, problem, 1.0, tail, {"a": "FAILED"}, (line[:80],)))
    lines = "\n".join(one.line() for one in figures.outcomes)
    text = gpu_proof._summary(figures, figures.outcomes, document(figures, "make gpu"), len(lines))
    assert len(lines) + len(text) < LONGEST_OUTPUT
    assert text.splitlines()[-1].startswith("told"), "the promises are the last that is said"
    assert all(f"--- {one.section.name}: exit code 1" in text for one in figures.outcomes)
    fine = [Outcome(one.section) for one in figures.outcomes]
    figures.problems, figures.facts, figures.outcomes = {}, [], fine
    page = document(figures, "make gpu")
    text = gpu_proof._summary(figures, fine, page, len("\n".join(one.line() for one in fine)))
    assert text.startswith(page), "there is room for it where nothing failed"


def prove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *only: str, **limits_s: float) -> Result:
    """Run the parts of these names on a fake GPU; some for less long, by the last word of their names."""
    real = gpu_proof.sections

    def hurried(figures: Path, *, smoke: bool) -> list[Section]:
        parts = real(figures, smoke=smoke)
        return [dataclasses.replace(one, limit_s=limits_s.get(one.name.split()[-1], LIMIT_S)) for one in parts]

    monkeypatch.setattr(gpu_proof, "sections", hurried)
    monkeypatch.setenv("ASYNCDIST_TEST_FAKE_CUDA", "1")
    monkeypatch.setenv(SHARING_VARIABLE, "")
    monkeypatch.delenv("ASYNCDIST_FEWER_CASES", raising=False)  # the parts run tests of their own
    chosen = [word for name in only for word in ("--only", name)]
    return CliRunner().invoke(gpu_proof.main, ["--smoke", "--write", "--logs", str(tmp_path / "logs"), *chosen])


@pytest.mark.parametrize("lacks", ["a driver", "cupy"])
def test_nothing_is_begun_where_there_is_no_gpu(lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCDIST_TEST_FAKE_CUDA", raising=False)
    monkeypatch.setattr(gpu_proof, "extra", lambda: ("", "no driver") if lacks == "a driver" else ("cuda13", ""))
    monkeypatch.setattr(gpu_proof, "lacking", lambda: "lacks cupy")
    before = gpu_proof.DOCUMENT.read_text()
    result = CliRunner().invoke(gpu_proof.main, ["--write", "--logs", str(tmp_path / "logs")])
    assert (result.exit_code, result.output) == (1, "no driver\n" if lacks == "a driver" else "lacks cupy\n")
    assert not (tmp_path / "logs").exists()
    assert gpu_proof.DOCUMENT.read_text() == before


def test_a_hang_a_crash_and_a_missing_module_cost_one_part_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = gpu_proof.DOCUMENT.read_text()
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), *sys.path])))
    result = prove(tmp_path, monkeypatch, "bare", "measure torch", "stall", "copy", stall=2.0)
    assert result.exit_code == 1, result.output
    assert len(result.output) < LONGEST_OUTPUT
    said = {line.split()[2]: line for line in result.output.splitlines() if line[8:16] == "measure "}
    assert said["bare"].startswith("FAILED")
    assert "killed by SIGABRT" in said["bare"]
    assert "stopped after" in said["stall"]
    assert said["torch"].startswith("ok")
    assert said["copy"].startswith("ok")
    page = (tmp_path / "logs" / "gpu.md").read_text()
    assert page in result.output
    assert "| 4 B |" in page, "what was measured before the crash"
    assert "| 4 KiB |" not in page
    assert "Not measured: torch (ModuleNotFoundError" in page
    assert "| measure stall | " in page
    assert "parts: 2 of 4 ended well; not: measure bare, measure stall" in result.output
    promises = [line.split()[0] for line in result.output.splitlines()[-6:]]
    assert promises[0] == "open"
    assert promises[1] in ("kept", "missed")
    assert promises[2:] == ["open"] * 4
    assert gpu_proof.DOCUMENT.read_text() == before, "a fake GPU's figures are nobody's"


def test_parts_that_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests too; what they found NCCL to refuse is not measured, and is no failure."""
    real = Sections.run

    def run(self: Sections, one: Section) -> Outcome:
        if one.tests:
            one = dataclasses.replace(one, arguments=(*one.arguments, "-k", "takes_two_ranks"))
        return real(self, one)

    monkeypatch.setattr(Sections, "run", run)
    result = prove(tmp_path, monkeypatch, "shared device", "measure nccl (distinct")
    assert result.exit_code == 0, result.output
    assert "parts: 2 of 2 ended well" in result.output
    facts = sharing_facts(tmp_path / "logs" / "sharing.json")
    assert facts["NCCL_MULTI_RANK_GPU_ENABLE=1"] == ""
    assert "Duplicate GPU" in facts["distinct NCCL_HOSTID"]
    page = (tmp_path / "logs" / "gpu.md").read_text()
    assert "- NCCL, two ranks on one device, NCCL_MULTI_RANK_GPU_ENABLE=1: works" in page
    assert "| `tests/gpu` | all pass | 1 passed, 0 not, 0 skipped | kept |" in page
