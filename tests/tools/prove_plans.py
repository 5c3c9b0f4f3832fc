"""`make prove`: prove every plan, in as many processes as there are cores."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from asyncdist.collectives.shared.layout import MAX_LANE_RANKS
from asyncdist.launch.config import usable_cores
from asyncdist.plan.algorithms.registry import ALGORITHMS, algorithms, needs_lane

sys.path.insert(0, str(Path(__file__).parents[1] / "kits"))
from plan_proof.prove import MAX_STEPS, Proof, prove
from plan_proof.symbols import PlanError

__all__ = ["parse_worlds", "prove_command"]

QUEUED_PER_PROCESS: Final = 4
"""Tasks given to the pool ahead of time: enough that no process waits, few enough that a failure stops the rest."""

WORLDS: Final = "1..257,322,384,511..513,768,1025"
"""All sizes to one past 256, and samples to one past 1024, some with even counts and some with uneven ones."""

IN_ORDER: Final = 64
"""Up to here worlds are proven in order, so that a mistake shows at once; above it the largest come first, so that no
process is left alone with a long task at the end."""

LOGGED_PERCENT: Final = 10
"""Progress between two lines where the output is no terminal."""


class Task(NamedTuple):
    """One algorithm in one world."""

    collective: str
    algorithm: str
    world: int

    @property
    def name(self) -> str:
        """As in ASYNCDIST_ALGO."""
        return f"{self.collective}:{self.algorithm}"


class Outcome(NamedTuple):
    """What came of a task; `failure` is empty if it is proven."""

    task: Task
    proof: Proof
    cpu_s: float
    failure: str


@dataclass
class Report:
    """All outcomes, by algorithm."""

    proofs: dict[str, Proof] = field(default_factory=dict)
    worlds: dict[str, int] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """The first of each algorithm; its other worlds are not tried."""

    def add(self, outcome: Outcome) -> None:
        """Note one."""
        name = outcome.task.name
        self.proofs.setdefault(name, Proof()).add(outcome.proof)
        self.worlds[name] = self.worlds.get(name, 0) + (not outcome.failure)
        self.cpu_s[name] = self.cpu_s.get(name, 0.0) + outcome.cpu_s
        if outcome.failure:
            self.failures.setdefault(name, f"in a world of {outcome.task.world}: {outcome.failure}")


def parse_worlds(text: str) -> list[int]:
    """Read "N", "A..B" or several with commas. Raises ValueError."""
    worlds: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        worlds.extend(range(int(first), int(last if dots else first) + 1))
    if not worlds or min(worlds) < 1:
        raise ValueError(f"no world sizes in {text!r}")
    return sorted(set(worlds))


@click.command("prove")
@click.option("--worlds", default=WORLDS, show_default=True, help="World sizes: N, A..B, or several with commas.")
@click.option("--collective", help="Only this one.")
@click.option("--algorithm", help="Only this one.")
@click.option("--thorough", is_flag=True, help="All counts and roots, whatever the world.")
@click.option("--jobs", type=click.IntRange(1), help="Processes; as many as there are cores by default.")
def prove_command(worlds: str, collective: str | None, algorithm: str | None, thorough: bool, jobs: int | None) -> None:
    """Verify the plans of every algorithm symbolically. Exits with 1 if one is wrong, and names it."""
    try:
        sizes = parse_worlds(worlds)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--worlds") from None
    tasks = _tasks(sizes, collective, algorithm)
    if not tasks:
        raise click.UsageError("there is no such algorithm")
    console = Console()
    started = time.perf_counter()
    report = _run(tasks, thorough=thorough or None, jobs=jobs or usable_cores(), console=console)
    console.print(_table(report))
    left_out = sum(proof.left_out for proof in report.proofs.values())
    if left_out:
        console.print(f"{left_out} problems of more than {MAX_STEPS:,} steps were left out")
    problems = sum(proof.proven for proof in report.proofs.values())
    console.print(f"{problems:,} problems proven in {time.perf_counter() - started:.0f} s")
    for name, failure in report.failures.items():
        click.echo(f"{name} FAILED {failure}", err=True)
    if report.failures:
        raise SystemExit(1)


def _tasks(worlds: list[int], collective: str | None, algorithm: str | None) -> list[Task]:
    names = [
        (group, name)
        for group in ALGORITHMS
        for name in algorithms(group, shared=True)
        if collective in (None, group) and algorithm in (None, name)
    ]
    order = [world for world in worlds if world <= IN_ORDER]
    order += [world for world in reversed(worlds) if world > IN_ORDER]
    return [
        Task(group, name, world)
        for world in order
        for group, name in names
        if world <= MAX_LANE_RANKS or not needs_lane(group, name)
    ]


def _run(tasks: list[Task], *, thorough: bool | None, jobs: int, console: Console) -> Report:
    report = Report()
    columns = (TextColumn("{task.description:40}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        # Small worlds take no time: progress is counted in ranks times ranks.
        bar = progress.add_task("", total=sum(task.world**2 for task in tasks))
        outcomes = _alone(tasks, thorough, report) if jobs == 1 else _in_processes(tasks, thorough, report, jobs)
        for outcome in outcomes:
            report.add(outcome)
            before = progress.tasks[bar].percentage
            progress.update(bar, advance=outcome.task.world**2, description=f"{outcome.task.name} {outcome.task.world}")
            percentage = progress.tasks[bar].percentage
            if not console.is_terminal and percentage // LOGGED_PERCENT > before // LOGGED_PERCENT:
                console.print(f"{percentage:.0f} %")  # a log shows no bar
    return report


def _alone(tasks: list[Task], thorough: bool | None, report: Report) -> Iterator[Outcome]:
    for task in tasks:
        if task.name not in report.failures:
            yield _prove(task, thorough)


def _in_processes(tasks: list[Task], thorough: bool | None, report: Report, jobs: int) -> Iterator[Outcome]:
    context = multiprocessing.get_context("spawn")  # a fork would take the progress bar's thread's locks along
    left = iter(tasks)
    running: set[Future[Outcome]] = set()
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start) as pool:
        while True:
            for task in left:
                if task.name not in report.failures:
                    running.add(pool.submit(_prove, task, thorough))
                if len(running) == QUEUED_PER_PROCESS * jobs:
                    break
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def _start() -> None:
    gc.disable()  # plans have no cycles, and looking for some would take a fifth of the time


def _prove(task: Task, thorough: bool | None) -> Outcome:
    started = time.process_time()
    proof, failure = Proof(), ""
    try:
        proof = prove(*task, thorough=thorough)
    except PlanError as error:
        failure = str(error)
    except Exception as error:  # a mistake of an algorithm, not of a plan: named like one
        failure = f"{type(error).__name__}: {error}"
    return Outcome(task, proof, time.process_time() - started, failure)


def _table(report: Report) -> Table:
    table = Table(title="Proven plans", caption="run: all ranks; rotated: one for all; renamed: another root")
    for title in ("algorithm", "worlds", "run", "rotated", "renamed", "CPU s"):
        table.add_column(title, justify="left" if title == "algorithm" else "right")
    for name, proof in sorted(report.proofs.items()):
        style = "bold red" if name in report.failures else None
        numbers = (report.worlds[name], proof.run, proof.rotated, proof.renamed)
        table.add_row(name, *(f"{number:,}" for number in numbers), f"{report.cpu_s[name]:.1f}", style=style)
    return table


if __name__ == "__main__":
    prove_command()
