"""The written report: verdicts, machine, everything measured, pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bench.model import Cell
from bench.report import LEGEND, markdown, markdown_table
from bench.targets.verdict import HEADER, Verdict


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
