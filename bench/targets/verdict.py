"""One promise about one cell: what was promised, what was measured just now, met or not; and the written report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.driver import BURSTS
from bench.model import Cell, Mode
from bench.report import LEGEND, format_time, gigabytes_per_second, markdown, markdown_table, operations_per_second

HEADER = ("measure", "cores", "promised", "measured", "beside it", "met")
OURS = "asyncdist"


@dataclass(frozen=True)
class Verdict:
    """One line of the table. ``met`` is None where something needed was not measured, or nothing was promised."""

    measure: str
    mode: Mode
    promised: str
    measured: str
    beside: str
    met: bool | None

    def row(self) -> tuple[str, ...]:
        met = "not measured" if self.met is None else "yes" if self.met else "NO"
        if not self.promised:
            met = ""
        return (self.measure, self.mode, self.promised, self.measured, self.beside, met)


def verdict(
    cell: Cell, measure: str, promised: str, met: bool | None, measured: str | None = None, candidate: str = OURS
) -> Verdict:
    """Return the verdict on ``candidate``'s cell; wrong results never meet a promise."""
    own = cell.measurements[candidate]
    if not own.runs_s:
        failure = own.failure or "not measured"
        broken = None if failure.startswith("not ") else False  # absent is one thing, an error another
        return Verdict(measure, cell.mode, promised, failure, beside(cell, candidate), broken)
    text = measured or format_time(own.p50_s())
    if own.wrong:
        text, met = f"{text}, {own.wrong} WRONG", False
    return Verdict(measure, cell.mode, promised, text, beside(cell, candidate), met)


def beside(cell: Cell, candidate: str = OURS) -> str:
    """Return the figures of all others."""
    parts = []
    for name, measurement in cell.measurements.items():
        if name == candidate or not measurement.runs_s:
            continue
        gigabytes = gigabytes_per_second(cell, measurement)
        operations = operations_per_second(cell, measurement)
        if gigabytes is not None and cell.case.operation in ("one_way", "window"):
            text = f"{gigabytes:.2f} GB/s"
        elif operations is not None and cell.case.combine != "span" and cell.case.operation not in BURSTS:
            text = f"{operations / 1e3:.0f}k op/s"
        else:
            text = format_time(measurement.p50_s())
        parts.append(f"{name} {text}")
    return ", ".join(parts)


def all_hold(*conditions: bool | None) -> bool | None:
    """False where one fails, None where one is unknown, else True."""
    if False in conditions:
        return False
    return None if None in conditions else True


def at_most(value: float | None, limit: float) -> bool | None:
    """Whether a value keeps a limit; None where it is unknown."""
    return None if value is None else value <= limit


def p50_of(cell: Cell, candidate: str = OURS) -> float | None:
    """Return the candidate's p50 in seconds, None where it was not measured."""
    own = cell.measurements.get(candidate)
    return own.p50_s() if own is not None and own.runs_s else None


def with_ratios(cell: Cell, names: Sequence[str]) -> str | None:
    """Return asyncdist's time and its ratios to ``names``, None where it was not measured."""
    p50_s = p50_of(cell)
    ratios = [(name, cell.ratio(OURS, name)) for name in names]
    text = ", ".join(f"{ratio:.2f}x {name}" for name, ratio in ratios if ratio is not None)
    if p50_s is None:
        return None
    return f"{format_time(p50_s)} ({text})" if text else format_time(p50_s)


def times_faster(cell: Cell, name: str, candidate: str = OURS) -> float | None:
    """Return how many times faster the candidate is than ``name``: the median over the rounds."""
    return cell.ratio(name, candidate)


def at_least(value: float | None, limit: float) -> bool | None:
    """Whether a value reaches a limit; None where it is unknown."""
    return None if value is None else value >= limit


def speeds(cell: Cell, names: Sequence[str], candidate: str = OURS) -> str | None:
    """Return the candidate's time and how many times faster than ``names`` it is."""
    p50_s = p50_of(cell, candidate)
    if p50_s is None:
        return None
    faster = [(name, times_faster(cell, name, candidate)) for name in names]
    text = ", ".join(f"{value:.2f}x as fast as {name}" for name, value in faster if value is not None)
    return f"{format_time(p50_s)} ({text})" if text else format_time(p50_s)


def document(
    title: str,
    command: str,
    about: str,
    verdicts: Sequence[Verdict],
    cells: Sequence[Cell],
    machine: dict[str, str],
    pictures: Sequence[Path] = (),
) -> str:
    """Return the report as Markdown."""
    facts = {**machine, "load after": f"{os.getloadavg()[0]:.2f}"}
    listed = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    drawn = "".join(f"\n![{path.stem}]({path.name})\n" for path in pictures)
    missing = sorted({line for cell in cells for line in _missing(cell)})
    absent = "\n".join(f"- {line}" for line in missing)
    return f"""# {title}

Taken by `{command}`. How each figure is measured is written in `bench/__init__.py` and in the subjects' files: an
untimed barrier, then one operation; a sample is the slowest rank's time; runs alternate with the neighbors' and the
ratios are medians over the rounds; every result is verified. {about}

{markdown_table(HEADER, [verdict.row() for verdict in verdicts])}
{drawn}
## Machine and versions

{listed}

## Not measured

{absent or "Nothing was left out."}

## Everything measured

{LEGEND}

{markdown(cells)}
"""


def _missing(cell: Cell) -> list[str]:
    return [
        f"{measurement.candidate}, {cell.case.operation}: {' '.join(measurement.failure.split())[:200]}"
        for measurement in cell.measurements.values()
        if measurement.failure is not None
    ]


def write_document(text: str, path: Path) -> None:
    """Write the report where the documentation keeps it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
