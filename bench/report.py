"""Print cells as a table, as Markdown, as JSON; the formats of OSU and nccl-tests are in `bench.formats`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.cases import LARGE_BYTES, percentile
from bench.model import Cell, Measurement
from bench.operations import OPERATIONS

COLUMNS = (
    "case",
    "ranks",
    "cores",
    "candidate",
    "min",
    "p50",
    "p99",
    "n",
    "rate",
    "bus",
    "cpu/op",
    "stall",
    "asyncdist /",
    "wrong",
)
THOUSANDS = 10_000
"""Operations a second from which they are printed in thousands."""
LEFT = ("case", "cores", "candidate")
LEGEND = """\
n: samples; rate: message bytes (nccl-tests' algbw, 1e9 a second) or operations a second; bus: nccl-tests' busbw;
cpu/op: processor time of one operation in the rank that used most; stall: the latest that a callback due every
millisecond came, in brackets the processor time of the longest callback where it was taken; asyncdist /: its time
divided by that candidate's, below 1 where asyncdist is faster (the median over the rounds, in brackets the middle half
of them where they are many)."""
MANY_ROUNDS = 10
"""From so many rounds on it is printed how far their ratios lie apart."""


def format_time(seconds: float) -> str:
    """Return a time with a unit that suits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1.0:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds:.2f} s"


def gigabytes_per_second(cell: Cell, measurement: Measurement) -> float | None:
    """Return 1e9 bytes of message a second, None for small messages."""
    if cell.case.nbytes * _messages(cell) < LARGE_BYTES or not measurement.runs_s:
        return None
    return cell.case.nbytes * _messages(cell) / measurement.p50_s() / 1e9


def _messages(cell: Cell) -> int:
    """How often the case's size travels in one sample."""
    return cell.case.operations if cell.case.operation == "window" else 1


def bus_gigabytes_per_second(cell: Cell, measurement: Measurement) -> float | None:
    """Return what a perfect bus had to carry, 1e9 bytes a second; None where that means nothing."""
    operation, gigabytes = OPERATIONS.get(cell.case.operation), gigabytes_per_second(cell, measurement)
    return None if operation is None or gigabytes is None else gigabytes * operation.bus_factor(cell.ranks)


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
    if "connection_bytes" in measurement.extra:
        return f"{measurement.extra['connection_bytes'] / 1024:.1f} KiB each"
    if cell.case.combine == "span":
        return f"server {measurement.extra.get('server_peak_bytes', 0) / (1 << 20):.0f} MiB"
    operations = operations_per_second(cell, measurement)
    if operations is None:
        return ""
    return f"{operations / 1e3:.0f}k op/s" if operations >= THOUSANDS else f"{operations:.0f} op/s"


def format_stall(measurement: Measurement) -> str:
    """Return the longest stall of the loop, with the longest callback's processor time where it was taken."""
    extra = measurement.extra
    if "stall_max_s" not in extra:
        return ""
    text = format_time(extra["stall_max_s"])
    return f"{text} ({format_time(extra['callback_max_s'])})" if "callback_max_s" in extra else text


def format_ratio(ratios: Sequence[float]) -> str:
    """Return the median of the rounds' ratios, with the quartiles where there are enough of them."""
    if not ratios:
        return ""
    text = f"{statistics.median(ratios):.2f}"
    if len(ratios) < MANY_ROUNDS:
        return text
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{text} ({low:.2f}-{high:.2f})"


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
            found.append((*head, "", short_failure(measurement), *[""] * (len(COLUMNS) - len(head) - 2)))
            continue
        bus = bus_gigabytes_per_second(cell, measurement)
        ratios = cell.ratios(own, name) if own is not None and name != own else []
        found.append(
            (
                *head,
                format_time(min(measurement.samples_s)),
                format_time(measurement.p50_s()),
                format_time(measurement.p99_s()),
                str(len(measurement.samples_s)),
                format_rate(cell, measurement),
                "" if bus is None else f"{bus:.2f}",
                format_time(measurement.cpu_s()) if measurement.cpu_s() else "",
                format_stall(measurement),
                format_ratio(ratios),
                str(measurement.wrong) if measurement.failure is None else short_failure(measurement),
            )
        )
    return found


def print_table(title: str, cells: Sequence[Cell], console: Console) -> None:
    """Print one subject's cells; `LEGEND` says what the columns are."""
    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in LEFT else "right", no_wrap=True)
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
                "bus_gigabytes_per_s": bus_gigabytes_per_second(cell, measurement),
                "cpu_s_per_operation": measurement.cpu_s(),
                "cpu_s_per_operation_all_ranks": statistics.median(measurement.cpu_sum_s),
                "operations_per_s": operations_per_second(cell, measurement),
                "asyncdist_ratio": cell.ratio(own, name) if own is not None and own != name else None,
            }
        found["candidates"][name] = entry
    return found
