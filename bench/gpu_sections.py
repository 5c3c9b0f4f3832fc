"""Sections of a proof: programs that run one after the other, each for so long and no longer, whatever becomes of them.

A library that hangs or crashes takes its own section with it and nothing else. All that a section prints goes to one
log; a section that is stopped first writes down where each of its threads is.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

__all__ = ["LIMIT_VARIABLE", "Outcome", "Section", "Sections"]

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
            problem = _run(section, limit_s, log)
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


def _run(section: Section, limit_s: float, log: IO[bytes]) -> str:
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
