"""``python -m bench.gpu_proof``: test and measure on this machine's GPU, in parts, none of which can spoil the others.

Every part is a process of its own with a limit of its own, and all of them together take less than eight minutes. The
document is written anew after each, so that whatever ends early, what was found out is there.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from bench.cuda_extra import extra, lacking
from bench.gpu import FAKE_VARIABLE, FOLDER_VARIABLE
from bench.gpu_sections import Outcome, Section, Sections
from bench.nccl_document import document, rows
from bench.nccl_figures import Figures
from bench.nccl_ranks import SHARING

__all__ = ["BUDGET_S", "SHARING_VARIABLE", "main", "sections", "sharing_facts"]

DOCUMENT: Final = Path(__file__).parent.parent / "docs" / "benchmarks" / "gpu.md"
COMMAND: Final = "make gpu"

BUDGET_S: Final = 450.0
"""Of all parts. With what starts them it is under eight minutes: machines with a GPU are lent by the minute."""

SHARING_VARIABLE: Final = "ASYNCDIST_GPU_SHARING"
"""A file in which the tests write which way, if any, NCCL takes two ranks on one device: found out once, as it may take
a time-out each."""

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
