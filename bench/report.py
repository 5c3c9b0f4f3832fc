"""Print cells as a table, as Markdown, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.cases import LARGE_BYTES, percentile
from bench.runner import Cell, Measurement

COLUMNS = ("case", "ranks", "cores", "candidate", "min", "p50", "p99", "rate", "asyncdist /", "wrong")


def format_time(seconds: float) -> str:
    """Return a time with a unit that suits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1.0:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds:.2f} s"


def gigabytes_per_second(cell: Cell, measurement: Measurement) -> float | None:
    """Return 1e9 bytes of message a second, None for small messages."""
    if cell.case.nbytes < LARGE_BYTES or not measurement.runs_s:
        return None
    return cell.case.nbytes / measurement.p50_s() / 1e9


def operations_per_second(cell: Cell, measurement: Measurement) -> float | None:
    """Return operations a second of a case whose samples hold many, None for others."""
    if cell.case.operations == 1 or not measurement.runs_s:
        return None
    return cell.case.operations / measurement.p50_s()


def format_rate(cell: Cell, measurement: Measurement) -> str:
    """Return the rate that suits the cell, and the server's peak memory where it is the point."""
    gigabytes = gigabytes_per_second(cell, measurement)
    if gigabytes is not None:
        return f"{gigabytes:.2f} GB/s"
    if cell.case.combine == "span":
        return f"server {measurement.extra.get('server_peak_bytes', 0) / (1 << 20):.0f} MiB"
    operations = operations_per_second(cell, measurement)
    return "" if operations is None else f"{operations / 1e3:.0f}k op/s"


def short_failure(measurement: Measurement) -> str:
    """Return why there is no figure, in the few words a table has room for."""
    failure = measurement.failure or "not measured"
    return failure if failure.startswith("not ") else "failed"


def rows(cell: Cell) -> list[tuple[str, ...]]:
    """Return one printed row for each candidate of a cell (`COLUMNS`)."""
    own = next((name for name in cell.measurements if name in cell.own), None)
    found: list[tuple[str, ...]] = []
    for name, measurement in cell.measurements.items():
        head = (cell.case.label, str(cell.ranks), cell.mode, name)
        if not measurement.runs_s:
            found.append((*head, "", short_failure(measurement), "", "", "", ""))
            continue
        ratio = cell.ratio(own, name) if own is not None and name != own else None
        found.append(
            (
                *head,
                format_time(min(measurement.samples_s)),
                format_time(measurement.p50_s()),
                format_time(measurement.p99_s()),
                format_rate(cell, measurement),
                "" if ratio is None else f"{ratio:.2f}",
                str(measurement.wrong) if measurement.failure is None else short_failure(measurement),
            )
        )
    return found


def print_table(title: str, cells: Sequence[Cell], console: Console) -> None:
    """Print one subject's cells. ``asyncdist /`` is asyncdist's time divided by this candidate's (below 1: faster)."""
    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("case", "cores", "candidate") else "right", no_wrap=True)
    for cell in cells:
        for row in rows(cell):
            table.add_row(*row)
        table.add_section()
    console.print(table)


def markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in body]
    return "\n".join(lines)


def markdown(cells: Sequence[Cell]) -> str:
    """Return the cells as a Markdown table."""
    return markdown_table(COLUMNS, [row for cell in cells for row in rows(cell)])


def to_json(cells: Sequence[Cell], about: dict[str, str]) -> str:
    """Return everything measured, times in seconds, as JSON."""
    return json.dumps({"about": about, "cells": [_cell_json(cell) for cell in cells]}, indent=2)


def _cell_json(cell: Cell) -> dict[str, Any]:
    own = next((name for name in cell.measurements if name in cell.own), None)
    found: dict[str, Any] = {
        "subject": cell.subject,
        "case": cell.case.label,
        "operation": cell.case.operation,
        "nbytes": cell.case.nbytes,
        "ranks": cell.ranks,
        "mode": cell.mode,
        "candidates": {},
    }
    for name, measurement in cell.measurements.items():
        entry: dict[str, Any] = {"failure": measurement.failure, "wrong": measurement.wrong, **measurement.extra}
        if measurement.runs_s:
            entry |= {
                "min_s": min(measurement.samples_s),
                "p50_s": measurement.p50_s(),
                "p99_s": percentile(measurement.samples_s, 0.99),
                "run_medians_s": measurement.medians_s(),
                "samples": len(measurement.samples_s),
                "gigabytes_per_s": gigabytes_per_second(cell, measurement),
                "operations_per_s": operations_per_second(cell, measurement),
                "asyncdist_ratio": cell.ratio(own, name) if own is not None and own != name else None,
            }
        found["candidates"][name] = entry
    return found
