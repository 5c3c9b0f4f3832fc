"""``python -m bench.anatomy``: what small and large all_reduces through shared memory are made of.

The parts are measured by themselves (`bench.parts`), then added up for some all_reduces, which are measured beside
them. What the sum leaves out, and why a figure is not lower than it, is then in plain sight. ``--write`` puts the
tables into docs/benchmarks/anatomy.md.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from bench import parts
from bench.candidates import ASYNCDIST_DOORBELL, TRANSPORTS
from bench.cases import Case, format_bytes, percentile
from bench.machine import about
from bench.model import PROMISES, SMOKE, Cell, Profile, Subject
from bench.report import markdown_table
from bench.schedule import run_subject

PATH: Final = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "anatomy.md"
ROUNDS: Final = 3000
PASSES: Final = 5
RANKS: Final = (2, 4)
SPINNING, SLEEPING = TRANSPORTS["shm"].name, ASYNCDIST_DOORBELL.name
BESIDE: Final = "beside another process"
LARGE: Final = 64 << 20
READ: Final = "read as another process's by process_vm_readv"
READ_AND_ADDED: Final = "read like that and added to an array, 512 KiB at a time"
WAYS: Final = {
    "copied": parts.copying,
    "added to another array": parts.adding,
    "copied in and out of 256 KiB in the cache": parts.copying_twice,
    READ: parts.reading_a_process,
    READ_AND_ADDED: parts.reading_and_adding,
}
PARTS_HEADER: Final = ("part", "min", "p50", "p99")
SUMS_HEADER: Final = ("all_reduce", "parts", "sum", "measured p50")


class Row(NamedTuple):
    """An all_reduce and what it is made of."""

    nbytes: int
    ranks: int
    candidate: str
    formula: str
    sum_s: float


@click.command()
@click.option("--write", is_flag=True, help="Write docs/benchmarks/anatomy.md.")
@click.option("--profile", type=click.Choice([PROMISES.name, SMOKE.name]), default=PROMISES.name, show_default=True)
def main(write: bool, profile: str) -> None:
    """Measure the parts of an all_reduce, add them up, and measure the whole."""
    machine = about()
    smoke = profile == SMOKE.name
    found = measure_parts(50 if smoke else ROUNDS, 1 if smoke else PASSES, LARGE >> (6 if smoke else 0))
    rows = sums({name: statistics.median(samples) for name, samples in found.items()})
    cells = measure_wholes(SMOKE if smoke else PROMISES)
    tables = (PARTS_HEADER, _part_rows(found)), (SUMS_HEADER, _sum_rows(rows, cells))
    console = Console()
    for header, lines in tables:
        table = Table(*header)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    for cell in cells:
        for measurement in cell.measurements.values():
            if measurement.failure is not None or measurement.wrong:
                raise SystemExit(f"{cell.case.label}, {cell.ranks} ranks: {measurement.failure or 'wrong results'}")
    if write:
        PATH.write_text(_document(machine, *[markdown_table(header, lines) for header, lines in tables]))


def measure_parts(rounds: int, passes: int, nbytes: int) -> dict[str, list[float]]:
    """Return the samples of each part in seconds, by its name; copies and additions as seconds for `LARGE` bytes."""
    found = {
        "a word seen by the other core": parts.flags(rounds),
        "the core given to another process": parts.hand_overs(rounds),
        "woken by an eventfd, on another core": parts.wake_ups(rounds, (0, 1)),
        "woken by an eventfd, on the same core": parts.wake_ups(rounds, (0, 0)),
    }
    for ranks in RANKS:
        for name, samples in parts.interpreter(rounds, ranks).items():
            found[_python(name, ranks)] = samples
    for name, samples in parts.interpreter_on_a_shared_core(rounds, RANKS[-1]).items():
        found[f"{_python(name, RANKS[-1])}, {BESIDE}"] = samples
    for processes in (1, *RANKS):
        for what, make in WAYS.items():
            samples = parts.passes(passes, processes, nbytes, make)
            found[_pass(processes, what)] = [sample * LARGE / nbytes for sample in samples]
    return found


def sums(parts_s: Mapping[str, float]) -> list[Row]:
    """Return the all_reduces that are measured, with what their parts add up to."""
    two, four = ({name: parts_s[_python(name, ranks)] for name in parts.PARTS} for ranks in RANKS)
    word, hand_over = parts_s["a word seen by the other core"], parts_s["the core given to another process"]
    woken = parts_s["woken by an eventfd, on another core"]
    told = two["finish"] + two["await"]
    reads, additions = ({ranks: parts_s[_pass(ranks, what)] for ranks in RANKS} for what in (READ, READ_AND_ADDED))
    return [
        Row(4, 2, SPINNING, "call, word, finish, await", two["call"] + word + told),
        Row(
            4,
            2,
            SLEEPING,
            "woken from the barrier, finish, await; call, woken, finish, await",
            two["call"] + 2 * (woken + told),
        ),
        Row(
            4,
            4,
            SPINNING,
            "call, finish and await of the two ranks of a core, two hand-overs, a word",
            2 * (four["call"] + four["finish"] + four["await"]) + 2 * hand_over + word,
        ),
        Row(LARGE, 2, SPINNING, "half of it read and added, half read, by 2 at once", (additions[2] + reads[2]) / 2),
        Row(LARGE, 4, SPINNING, "3/4 of it read and added, 3/4 read, by 4 at once", 0.75 * (additions[4] + reads[4])),
    ]


def measure_wholes(profile: Profile) -> list[Cell]:
    """Return the cells of the all_reduces, pinned and free."""

    def cases(profile: Profile) -> list[Case]:
        sizes = (4, LARGE) if profile.neighbors else (4, 1 << 20)
        return [Case("all_reduce", nbytes, *profile.samples(large=nbytes > 4)) for nbytes in sizes]

    return run_subject(Subject("anatomy", "all_reduce", RANKS, cases, (TRANSPORTS["shm"], ASYNCDIST_DOORBELL)), profile)


def _python(part: str, ranks: int) -> str:
    what = {
        "call": "a call, not the last",
        "last": "the last call, which ends in it",
        "finish": "the look that finds all there",
        "await": "awaiting what is done",
    }[part]
    return f"Python, {ranks} ranks: {what}"


def _pass(processes: int, what: str) -> str:
    return f"{format_bytes(LARGE)} {what}, by {processes} at once" if processes > 1 else f"{format_bytes(LARGE)} {what}"


def _part_rows(found: Mapping[str, Sequence[float]]) -> list[tuple[str, ...]]:
    return [(name, *(_time(percentile(samples, at)) for at in (0, 0.5, 0.99))) for name, samples in found.items()]


def _sum_rows(rows: Sequence[Row], cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for row in rows:
        whole = {
            cell.mode: cell.measurements[row.candidate]
            for cell in cells
            if cell.ranks == row.ranks and (cell.case.nbytes > 4) == (row.nbytes > 4)
        }
        measured = ", ".join(f"{_time(one.p50_s())} {mode}" for mode, one in whole.items() if one.runs_s)
        how = ", by doorbell" if row.candidate == SLEEPING else ""
        name = f"{format_bytes(row.nbytes)}, {row.ranks} ranks{how}"
        lines.append((name, row.formula, _time(row.sum_s), measured))
    return lines


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} us" if seconds < 1e-4 else f"{seconds * 1e3:.2f} ms"


def _document(machine: Mapping[str, str], measured: str, summed: str) -> str:
    versions = {**machine, "load after": f"{os.getloadavg()[0]:.2f}"}
    facts = "\n".join(f"- {name}: {value}" for name, value in versions.items())
    return f"""# What an all_reduce is made of

Taken by `python -m bench.anatomy --write`. The parts are measured by themselves: those of the machine by bare processes
bound to cores, those of the interpreter by ranks in one process that never wait. Sums are of their medians.

They leave out that the ranks do not begin at the same moment: a sample is the slowest rank's time, so what the last one
still has to do for the barrier before it counts too, another `finish` and `await`. With two ranks on a core the slowest
may wait for the whole turn of a third: its `finish`, `await` and `call`. Where ranks sleep, whoever has to be woken
from the barrier begins that much later, and the other, whose time counts, sleeps as long: that sum has both.

{measured}

{summed}

## Machine and versions

{facts}
"""


if __name__ == "__main__":
    main()
