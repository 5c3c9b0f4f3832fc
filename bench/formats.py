"""The output formats of the suites people know, so that figures can be compared line by line.

* ``osu``: OSU micro-benchmarks. One table a collective and candidate: size, average, minimum, maximum latency in us; a
  ping-pong is latency, a window or one-way transfer bandwidth in MB/s (1e6).
* ``nccl``: nccl-tests. Size, count, type, operation, root, then time (us), algbw and busbw (GB/s, 1e9) and the number
  of wrong results, out of place and in place. Each collective is measured as its users call it, so one of the two is
  filled and the other says N/A.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from bench.model import Cell, Measurement
from bench.operations import ITEM_BYTES, OPERATIONS

IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce"})
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})
BANDWIDTH = frozenset({"one_way", "window"})
NOT_MEASURED = f"{'N/A':>9} {'N/A':>8} {'N/A':>8} {'N/A':>6}"


def _tables(cells: Sequence[Cell]) -> Iterator[tuple[str, str, list[tuple[Cell, Measurement]]]]:
    """Yield (operation, heading, lines) for each operation, candidate, number of ranks and mode."""
    found: dict[tuple[str, str], list[tuple[Cell, Measurement]]] = {}
    for cell in cells:
        for name, measurement in cell.measurements.items():
            if measurement.runs_s:
                key = (cell.case.operation, f"{name}, {cell.ranks} ranks, {cell.mode}")
                found.setdefault(key, []).append((cell, measurement))
    for (operation, heading), lines in found.items():
        yield operation, heading, lines


def osu(cells: Sequence[Cell]) -> str:
    """Return the cells as OSU's programs print theirs."""
    parts = []
    for operation, heading, lines in _tables(cells):
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


def nccl(cells: Sequence[Cell]) -> str:
    """Return the collectives as nccl-tests prints them (times are medians)."""
    parts = []
    for operation, heading, lines in _tables(cells):
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
