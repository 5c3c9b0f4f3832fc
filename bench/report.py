"""Prints cells as a table, as Markdown, as JSON, as the suites that people know print theirs, and as pictures.

* `osu_tables`: OSU micro-benchmarks. One table a collective and candidate: size, average, minimum, maximum latency in
  us; a ping-pong is latency, a window or one-way transfer bandwidth in MB/s (1e6).
* `nccl_tables`: nccl-tests. Size, count, type, operation, root, then time (us), algbw and busbw (GB/s, 1e9) and the
  number of wrong results, out of place and in place. Each collective is measured as its users call it, so one of the
  two is filled and the other says N/A.
* `draw`: log-log pictures of time against size, one PNG an operation; needs matplotlib (extra ``plot``).
"""

from __future__ import annotations

import importlib
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.driver import MESSAGES
from bench.model import LARGE_BYTES, Cell, Measurement, format_bytes, percentile
from bench.operations import COLLECTIVES, ITEM_BYTES, OPERATIONS

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


IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce"})

ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})

REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})

BANDWIDTH = frozenset({"one_way", "window"})

NOT_MEASURED = f"{'N/A':>9} {'N/A':>8} {'N/A':>8} {'N/A':>6}"


WIDTH_INCHES: Final = 5.5

HEIGHT_INCHES: Final = 4.5

DOTS_PER_INCH: Final = 110

MARKS: Final = "osD^v<>P*X"


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
        text = f"server {measurement.extra.get('server_peak_bytes', 0) / (1 << 20):.0f} MiB"
        return f"{text}, {requests}" if (requests := requests_per_rank(measurement)) else text
    operations = operations_per_second(cell, measurement)
    if operations is None:
        return ""
    return f"{operations / 1e3:.0f}k op/s" if operations >= THOUSANDS else f"{operations:.0f} op/s"


def requests_per_rank(measurement: Measurement) -> str:
    """Return how many requests a rank of a rendezvous made, empty where nobody has counted."""
    extra = measurement.extra
    if "rank_requests" not in extra:
        return ""
    return f"{extra['rank_requests']:.0f} requests a rank ({extra['decider_requests']:.0f})"


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


def _by_operation(cells: Sequence[Cell]) -> Iterator[tuple[str, str, list[tuple[Cell, Measurement]]]]:
    """Yield (operation, heading, lines) for each operation, candidate, number of ranks and mode."""
    found: dict[tuple[str, str], list[tuple[Cell, Measurement]]] = {}
    for cell in cells:
        for name, measurement in cell.measurements.items():
            if measurement.runs_s:
                key = (cell.case.operation, f"{name}, {cell.ranks} ranks, {cell.mode}")
                found.setdefault(key, []).append((cell, measurement))
    for (operation, heading), lines in found.items():
        yield operation, heading, lines


def osu_tables(cells: Sequence[Cell]) -> str:
    """Return the cells as OSU's programs print theirs."""
    parts = []
    for operation, heading, lines in _by_operation(cells):
        bandwidth = operation in BANDWIDTH
        column = "Bandwidth (MB/s)" if bandwidth else "Avg Latency(us)"
        more = "" if bandwidth else f"{'Min Latency(us)':>18}{'Max Latency(us)':>18}{'Iterations':>12}"
        parts += [f"# {operation}: {heading}", f"{'# Size':<12}{column:>18}{more}"]
        for cell, measurement in lines:
            samples_us = [sample_s * 1e6 for sample_s in measurement.samples_s]
            mean_us = statistics.mean(samples_us)
            if bandwidth:
                megabytes = cell.case.nbytes * cell.case.operations / mean_us
                parts.append(f"{cell.case.nbytes:<12}{megabytes:>18.2f}")
            else:
                ends = f"{min(samples_us):>18.2f}{max(samples_us):>18.2f}{len(samples_us):>12}"
                parts.append(f"{cell.case.nbytes:<12}{mean_us:>18.2f}{ends}")
        parts.append("")
    return "\n".join(parts)


def nccl_tables(cells: Sequence[Cell]) -> str:
    """Return the collectives as nccl-tests prints them (times are medians)."""
    parts = []
    for operation, heading, lines in _by_operation(cells):
        if operation not in OPERATIONS:
            continue
        half = f"{'time':>9} {'algbw':>8} {'busbw':>8} {'#wrong':>6}"
        parts += [
            f"# {operation}_perf: {heading}",
            f"# {'':>51}{'out-of-place':>26}{'in-place':>35}",
            f"# {'size':>12} {'count':>12} {'type':>8} {'redop':>6} {'root':>6}   {half}   {half}",
        ]
        rates = []
        for cell, measurement in lines:
            nbytes, p50_s = cell.case.nbytes, measurement.p50_s()
            algbw = nbytes / p50_s / 1e9
            busbw = algbw * OPERATIONS[operation].bus_factor(cell.ranks)
            rates.append(busbw)
            ours = f"{p50_s * 1e6:>9.2f} {algbw:>8.2f} {busbw:>8.2f} {measurement.wrong:>6}"
            pair = (NOT_MEASURED, ours) if operation in IN_PLACE else (ours, NOT_MEASURED)
            reduction, root = "sum" if operation in REDUCING else "none", 0 if operation in ROOTED else -1
            head = f"{nbytes:>14} {nbytes // ITEM_BYTES:>12} {'float':>8} {reduction:>6} {root:>6}"
            parts.append(f"{head}   {pair[0]}   {pair[1]}")
        parts += [f"# Avg bus bandwidth    : {statistics.mean(rates):.4f}", ""]
    return "\n".join(parts)


def missing_matplotlib() -> str | None:
    """Why nothing can be drawn, or None."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        return "plots need matplotlib: pip install 'asyncdist[plot]'"
    return None


def draw(cells: Sequence[Cell], folder: Path, prefix: str) -> list[Path]:
    """Draw one picture for each operation with several sizes, a panel for each number of ranks; return the files.

    Ranks that are not bound to cores are drawn, if there are any.
    """
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    modes = {cell.mode for cell in cells}
    named = COLLECTIVES | MESSAGES
    chosen = [cell for cell in cells if cell.case.operation in named and (cell.mode == "free" or "free" not in modes)]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for operation in dict.fromkeys(cell.case.operation for cell in chosen):
        mine = [cell for cell in chosen if cell.case.operation == operation]
        if len({cell.case.nbytes for cell in mine}) < 2:
            continue
        ranks = sorted({cell.ranks for cell in mine})
        names = list(dict.fromkeys(name for cell in mine for name, m in cell.measurements.items() if m.runs_s))
        figure, panels = pyplot.subplots(
            1, len(ranks), figsize=(WIDTH_INCHES * len(ranks), HEIGHT_INCHES), squeeze=False, sharey=True
        )
        for panel, number in zip(panels[0], ranks, strict=True):
            _panel(panel, [cell for cell in mine if cell.ranks == number], names)
            panel.set_title(f"{operation}, {number} ranks")
        panels[0][0].set_ylabel("seconds, median")
        panels[0][0].legend(fontsize="small")
        figure.tight_layout()
        path = folder / f"{prefix}-{operation.replace('_', '-').replace(' ', '-')}.png"
        figure.savefig(path, dpi=DOTS_PER_INCH)
        pyplot.close(figure)
        written.append(path)
    return written


def _panel(panel: Any, cells: Sequence[Cell], names: Sequence[str]) -> None:
    """Draw one number of ranks; a name looks alike in all panels, and is in the legend even where it was not run."""
    for position, name in enumerate(names):
        points = sorted(
            (cell.case.nbytes, cell.measurements[name].p50_s())
            for cell in cells
            if name in cell.measurements and cell.measurements[name].runs_s
        )
        sizes, times = zip(*points, strict=True) if points else ((), ())
        style = "-" if name.startswith("asyncdist") else "--"
        mark, color = MARKS[position % len(MARKS)], f"C{position % 10}"
        panel.plot(sizes, times, style, marker=mark, color=color, markersize=4, label=name)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    ticks = sorted({cell.case.nbytes for cell in cells})
    panel.set_xticks(ticks, [format_bytes(tick) for tick in ticks], rotation=45, fontsize="small")
    panel.grid(visible=True, which="major", alpha=0.3)
