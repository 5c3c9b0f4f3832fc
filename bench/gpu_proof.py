"""``python -m bench.gpu_proof``: test and measure on this machine's GPU, in parts, none of which can spoil the others.

Every part is a `Section`: a process of its own with a limit of its own; all of them together take less than eight
minutes. A library that hangs or crashes ends its own section only. What a section prints goes to one log. A section
that is stopped first writes down where each of its threads is. The document is written anew after each section, so that
the document holds what was found out, however the command ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import click

from bench.cuda_extra import extra, lacking
from bench.gpu import FAKE_VARIABLE, FOLDER_VARIABLE
from bench.nccl_figures import Figures, document, rows
from bench.nccl_ranks import SHARING

__all__ = [
    "BUDGET_S",
    "LIMIT_VARIABLE",
    "SHARING_VARIABLE",
    "Outcome",
    "Section",
    "Sections",
    "main",
    "sections",
    "sharing_facts",
]

DOCUMENT: Final = Path(__file__).parent.parent / "docs" / "benchmarks" / "gpu.md"

COMMAND: Final = "make gpu"

BUDGET_S: Final = 450.0
"""Of all parts. With what starts them it is under eight minutes: machines with a GPU are lent by the minute."""

SHARING_VARIABLE: Final = "ASYNCDIST_GPU_SHARING"
"""A file in which the tests write which way, if any, NCCL takes two ranks on one device: found out once, as it may take
a time-out each."""


ROOT: Final = Path(__file__).parent.parent

TRACE_S: Final = 0.3
"""How long each process of a section that is stopped may write where it was, one after the other: it is one log."""

MOST_TRACED: Final = 8
"""Processes of a section that write where they were: its own and the ranks that it has started."""

LEAST_S: Final = 5.0
"""A section for which less is left is not begun: an interpreter and a device take as long to start."""

TAIL_LINES: Final = 12
"""As many of a failed section's last lines are told at the end; the log has all."""

LINE_CHARACTERS: Final = 160

LIMIT_VARIABLE: Final = "ASYNCDIST_PART_LIMIT_S"
"""How many seconds a part really has, for the part: less than its limit where others have used up the time."""

PRINTED_CHARACTERS: Final = 11_500
"""Of all that is printed: what certainly arrives of a command's output. The files have everything."""

TAIL_CHARACTERS: Final = 1500
"""Of a failed part's last lines: what failed, and how it ended."""

PYTEST: Final = (
    *("-m", "pytest", "-v", "-rs", "-p", "pytest_asyncio.plugin", "-p", "no:cacheprovider", "--tb=short"),
    *("-o", "faulthandler_timeout=50"),
)

ALONE: Final = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""An interpreter that was made for something else has plugins of its own, whose warnings would be errors here."""

_VERDICT: Final = re.compile(r"^(tests/\S+::.*?) (PASSED|FAILED|SKIPPED|ERROR)\b")

_BEGUN: Final = re.compile(r"^(tests/\S+::\S+)")

_SKIPPED: Final = re.compile(r"^SKIPPED \[\d+\] (.*)")

_FRAME: Final = re.compile(r'^  File "(<frozen|.*/(_pytest|pluggy|pytest|pytest_asyncio|click)/)')
"""Of what calls the part's own code, in a trace."""


@dataclass(frozen=True, slots=True)
class Section:
    """`arguments` of this interpreter, for at most `limit_s`."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def tests(self) -> bool:
        """Whether it runs tests, rather than measures."""
        return "pytest" in self.arguments


@dataclass(slots=True)
class Outcome:
    """How a section ended; `problem` is empty if it ended well."""

    section: Section
    problem: str = ""
    seconds: float = 0.0
    tail: tuple[str, ...] = ()
    tests: dict[str, str] = field(default_factory=dict)
    """By test, `PASSED`, `FAILED`, `SKIPPED` or `ERROR`; empty for the one that did not end."""
    skipped: tuple[str, ...] = ()
    """Why tests were skipped."""

    def count(self, verdict: str) -> int:
        """How many tests had it."""
        return sum(one == verdict for one in self.tests.values())

    def counts(self) -> str:
        """`12 passed, 1 failed`; empty if no test ended."""
        found = {verdict.lower(): self.count(verdict) for verdict in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
        return ", ".join(f"{number} {verdict}" for verdict, number in found.items() if number)

    def line(self) -> str:
        """One line about it."""
        state = "ok" if not self.problem else "FAILED"
        what = "; ".join(filter(None, (self.problem, self.counts())))
        return f"{state:<7} {self.section.name:<32} {self.seconds:6.1f} s  {what}".rstrip()


class Sections:
    """Runs sections within `budget_s` altogether, and appends what they say to `log`."""

    def __init__(self, budget_s: float, log: Path) -> None:
        self._end_s = time.monotonic() + budget_s
        self._log = log

    def run(self, section: Section) -> Outcome:
        """Run one, to its end or its limit's."""
        left_s = self._end_s - time.monotonic()
        if left_s < min(LEAST_S, section.limit_s):
            return Outcome(section, "not begun: the time is over")
        limit_s = min(section.limit_s, left_s)
        with self._log.open("ab") as log:
            log.write(f"\n===== {section.name} (at most {limit_s:.0f} s): {' '.join(section.arguments)}\n".encode())
            log.flush()
            begun_at = log.tell()
            start_s = time.monotonic()
            problem = _run_section(section, limit_s, log)
            seconds = time.monotonic() - start_s
        with self._log.open("rb") as log:
            log.seek(begun_at)
            lines = log.read().decode(errors="replace").splitlines()
        outcome = Outcome(section, problem, seconds)
        if section.tests:
            _read_tests(outcome, lines)
        if problem:
            telling = [line[:LINE_CHARACTERS] for line in lines if line.strip() and not _FRAME.search(line)]
            outcome.tail = tuple(telling[-TAIL_LINES:])
        return outcome


def _run_section(section: Section, limit_s: float, log: IO[bytes]) -> str:
    """What was wrong."""
    environ = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **section.environ}
    environ[LIMIT_VARIABLE] = str(limit_s)
    process = subprocess.Popen(
        [sys.executable, *section.arguments],
        env=environ,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # so that what it has started can be ended with it
    )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        for pid in _members(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
                time.sleep(TRACE_S)
        return f"stopped after {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # those that it has left behind, too
        process.wait()
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""


def _members(group: int) -> list[int]:
    """The processes of a section, its first one first, a few seconds' worth of them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            pid = int(entry.name)
            if os.getpgid(pid) == group:
                found.append(pid)
        except (ProcessLookupError, PermissionError):
            continue
    return sorted(found)[:MOST_TRACED]


def _read_tests(outcome: Outcome, lines: list[str]) -> None:
    skipped = []
    for line in lines:
        verdict = _VERDICT.match(line)
        begun = _BEGUN.match(line)
        reason = _SKIPPED.match(line)
        if verdict:
            outcome.tests[verdict[1].strip()] = verdict[2]
        elif begun:
            outcome.tests.setdefault(begun[1], "")
        elif reason:
            skipped.append(reason[1])
    outcome.skipped = tuple(skipped)
    stuck = [name for name, verdict in outcome.tests.items() if not verdict]
    failed = [name for name, verdict in outcome.tests.items() if verdict in ("FAILED", "ERROR")]
    if outcome.problem and (stuck or failed):
        outcome.problem += f": {(stuck or failed)[-1]}"
    if not outcome.problem and not outcome.count("PASSED"):
        outcome.problem = "no test ran"


def sections(figures: Path, *, smoke: bool) -> list[Section]:
    """All parts, those first that must not be missed, should time be short."""

    def tests(name: str, limit_s: float, *files: str) -> Section:
        return Section(name, (*PYTEST, *files), limit_s, ALONE)

    def measure(part: str, limit_s: float) -> Section:
        options = ["--part", part, "--figures", str(figures), *(["--smoke"] if smoke else ())]
        return Section(f"measure {part}", ("-m", "bench.nccl", *options), limit_s)

    fake = bool(os.environ.get(FAKE_VARIABLE))
    return [
        *([] if fake else [tests("cupy's surface", 60, "tests/unit/cuda/test_cupy_surface.py")]),
        tests("conformance", 120, "tests/gpu/test_conformance.py"),
        tests("one rank", 90, "tests/gpu/test_one_rank.py"),
        measure("bare", 45),
        measure("torch", 60),
        measure("stall", 30),
        measure("copy", 30),
        measure("ipc", 60),
        measure("staged", 75),
        tests("shared device", 150, "tests/gpu/test_shared_device.py"),
        *(measure(f"nccl beside torch ({way})", 60) for way in SHARING),
        tests("failures", 120, "tests/gpu/test_failures.py"),
        tests("random programs", 120, "tests/gpu/test_random_programs.py"),
        measure("cupyx", 45),
        *(measure(f"nccl ({way})", 60) for way in SHARING),
    ]


def sharing_facts(file: Path) -> dict[str, str]:
    """Why each way to let NCCL take two ranks on one device does not work; empty if it does. Only those tried."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return {str(way): str(why) for way, why in found.items()}


@click.command()
@click.option("--smoke", is_flag=True, help="Measure only to see that it runs.")
@click.option("--write", is_flag=True, help=f"Write {DOCUMENT.name} into docs/benchmarks, unless --only.")
@click.option("--logs", type=click.Path(path_type=Path), help="A folder for log.txt, figures.jsonl and gpu.md.")
@click.option("--only", multiple=True, help="Only the parts whose name contains this.")
@click.option("--budget-s", default=BUDGET_S, show_default=True, help="Seconds for all parts together.")
def main(smoke: bool, write: bool, logs: Path | None, only: tuple[str, ...], budget_s: float) -> None:
    """Test and measure on this machine's GPU; the exit code is 1 if a part failed."""
    fake = bool(os.environ.get(FAKE_VARIABLE))
    reason = "" if fake else extra()[1] or lacking()
    if reason:
        click.echo(reason, err=True)
        sys.exit(1)
    place = logs or Path(tempfile.mkdtemp(prefix="asyncdist-gpu-"))
    place.mkdir(parents=True, exist_ok=True)
    file, log, sharing = place / "figures.jsonl", place / "log.txt", place / "sharing.json"
    for old in (file, log, sharing):
        old.unlink(missing_ok=True)
    os.environ[SHARING_VARIABLE] = str(sharing)
    runner, outcomes, text = Sections(budget_s, log), list[Outcome](), ""
    said = 0

    def say(line: str) -> None:
        nonlocal said
        said += len(line) + 1
        click.echo(line)

    say(f"asyncdist on this machine's GPU, at most {budget_s:.0f} s; all output is in {log}")
    figures = Figures()
    for section in sections(file, smoke=smoke):
        if only and not any(part in section.name for part in only):
            continue
        outcome = _refused(section, sharing_facts(sharing)) or _run(runner, section, fake=fake)
        outcomes.append(outcome)
        say(outcome.line())
        figures = Figures.read(file)
        figures.outcomes = outcomes
        figures.facts = [
            f"NCCL, two ranks on one device, {way}: {why or 'works'}" for way, why in sharing_facts(sharing).items()
        ]
        text = document(figures, COMMAND)
        (place / DOCUMENT.name).write_text(text)
        if write and not fake and not only:  # a part of it is no page
            DOCUMENT.write_text(text)
    click.echo(_summary(figures, outcomes, text, said))
    if logs is None and not any(outcome.problem for outcome in outcomes):
        shutil.rmtree(place)
    sys.exit(any(outcome.problem for outcome in outcomes))


def _refused(section: Section, facts: dict[str, str]) -> Outcome | None:
    """What a test has seen fail is not waited for again: that NCCL takes no two ranks on a device is no failure."""
    for way, why in facts.items():
        if why and section.name.startswith("measure nccl ") and section.name.endswith(f"({way})"):
            return Outcome(section)
    return None


def _run(runner: Sections, section: Section, *, fake: bool) -> Outcome:
    if not fake or section.tests:
        return runner.run(section)
    # Of its own: what a part leaves behind is not the next one's. The path of a socket in it must be short.
    with tempfile.TemporaryDirectory(prefix="asyncdist-") as folder:
        os.environ[FOLDER_VARIABLE] = folder
        try:
            return runner.run(section)
        finally:
            del os.environ[FOLDER_VARIABLE]


def _summary(figures: Figures, outcomes: Sequence[Outcome], page: str, said: int) -> str:
    """What is to be read, shortest last: the page if there is room, the ends of what failed, the promises."""
    failed = [outcome for outcome in outcomes if outcome.problem]
    last = ["", f"parts: {len(outcomes) - len(failed)} of {len(outcomes)} ended well"]
    if failed:
        last[-1] += f"; not: {', '.join(outcome.section.name for outcome in failed)}"
    last += [f"{row.verdict or 'told':<7} {row.name}: {row.value} ({row.promise})" for row in rows(figures)]
    promises = "\n".join(last)
    room = PRINTED_CHARACTERS - said - len(promises)
    tails = [f"--- {one.section.name}: {one.problem}\n" + "\n".join(one.tail) for one in failed if one.tail]
    share = max(0, min(TAIL_CHARACTERS, room // max(1, len(tails)) - 1))
    tails = [tail[: share // 3] + tail[-(share - share // 3) :] if len(tail) > share else tail for tail in tails]
    room -= sum(len(tail) + 1 for tail in tails)
    pages = [page] if len(page) < room else []
    return "\n".join([*pages, *tails, promises])


if __name__ == "__main__":
    main()
