"""The promised figures: what was promised, what was measured just now, met or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import all_reduce, p2p, rendezvous, store
from bench.report import format_time, gigabytes_per_second, markdown, markdown_table, operations_per_second
from bench.runner import ROOT, Cell, Mode, Profile
from bench.schedule import Progress, run_subject

COMMAND = "python -m bench --targets --write"
DOCUMENT = ROOT / "docs" / "benchmarks" / "main-job.md"
HEADER = ("measure", "cores", "promised", "measured", "beside it", "met")
ALL_REDUCE_LIMITS_S = {(4, 2): 60e-6, (4, 4): 135e-6, (65536, 2): 65e-6, (65536, 4): 270e-6}
FLOOR_TIMES = 1.5
FLOOR_THROUGHPUT = 0.85
STORE_GET_TIMES = 0.65
STORE_CHECK_TIMES = 1.15
STORE_OPERATIONS_PER_S = 150e3
RENDEZVOUS_LIMIT_S = 3.0
SERVER_LIMIT_BYTES = 200 << 20


@dataclass(frozen=True)
class Verdict:
    """One line of the table. ``met`` is None where something needed was not measured."""

    measure: str
    mode: Mode
    promised: str
    measured: str
    beside: str
    met: bool | None

    def row(self) -> tuple[str, ...]:
        """Return the printed row (`HEADER`)."""
        met = "not measured" if self.met is None else "yes" if self.met else "NO"
        return (self.measure, self.mode, self.promised, self.measured, self.beside, met)


def measure(profile: Profile, modes: Sequence[Mode] | None, progress: Progress) -> list[Cell]:
    """Measure every cell the promises speak of."""
    cells: list[Cell] = []
    for subject in (p2p.SUBJECT, all_reduce.PROMISED, store.SUBJECT, rendezvous.SUBJECT):
        cells += run_subject(subject, profile, modes=modes if subject.modes is None else None, progress=progress)
    return cells


def judge(cells: Sequence[Cell]) -> list[Verdict]:
    """Return a verdict for every cell somebody promised something about."""
    judges: dict[str, Callable[[Cell], Verdict]] = {
        "ping_pong": _ping_pong,
        "one_way": _one_way,
        "all_reduce": _all_reduce,
        "get": _store_get,
        "check": _store_check,
        "burst": _store_throughput,
        "tasks": _store_throughput,
        "rendezvous": _rendezvous,
    }
    return [judges[cell.case.operation](cell) for cell in cells if cell.case.operation in judges]


def _verdict(cell: Cell, measure: str, promised: str, met: bool | None, measured: str | None = None) -> Verdict:
    own = cell.measurements["asyncdist"]
    if not own.runs_s:
        return Verdict(measure, cell.mode, promised, own.failure or "not measured", _beside(cell), None)
    text = measured or format_time(own.p50_s())
    if own.wrong:
        text, met = f"{text}, {own.wrong} WRONG", False
    return Verdict(measure, cell.mode, promised, text, _beside(cell), met)


def _beside(cell: Cell) -> str:
    parts = []
    for name, measurement in cell.measurements.items():
        if name == "asyncdist" or not measurement.runs_s:
            continue
        gigabytes = gigabytes_per_second(cell, measurement)
        operations = operations_per_second(cell, measurement)
        if gigabytes is not None:
            text = f"{gigabytes:.2f} GB/s"
        elif operations is not None and cell.case.combine != "span":
            text = f"{operations / 1e3:.0f}k op/s"
        else:
            text = format_time(measurement.p50_s())
        parts.append(f"{name} {text}")
    return ", ".join(parts)


def _all_hold(*conditions: bool | None) -> bool | None:
    """False where one fails, None where one is unknown, else True."""
    if False in conditions:
        return False
    return None if None in conditions else True


def _at_most(value: float | None, limit: float) -> bool | None:
    return None if value is None else value <= limit


def _with_ratios(cell: Cell, names: Sequence[str]) -> str | None:
    """Return asyncdist's time and its ratios to ``names``, None where asyncdist was not measured."""
    p50_s = _p50_s(cell)
    ratios = [(name, cell.ratio("asyncdist", name)) for name in names]
    text = ", ".join(f"{ratio:.2f}x {name}" for name, ratio in ratios if ratio is not None)
    if p50_s is None:
        return None
    return f"{format_time(p50_s)} ({text})" if text else format_time(p50_s)


def _p50_s(cell: Cell) -> float | None:
    own = cell.measurements["asyncdist"]
    return own.p50_s() if own.runs_s else None


def _ping_pong(cell: Cell) -> Verdict:
    met = _all_hold(
        _at_most(cell.ratio("asyncdist", "gloo"), 1.0), _at_most(cell.ratio("asyncdist", "floor"), FLOOR_TIMES)
    )
    measured = _with_ratios(cell, ("gloo", "floor"))
    return _verdict(cell, "TCP half round trip, 4 B", f"<= 1x gloo, <= {FLOOR_TIMES}x floor", met, measured)


def _one_way(cell: Cell) -> Verdict:
    met = _all_hold(
        _at_most(cell.ratio("asyncdist", "gloo"), 1.0), _at_most(cell.ratio("asyncdist", "floor"), 1 / FLOOR_THROUGHPUT)
    )
    own = cell.measurements["asyncdist"]
    measured = None
    if own.runs_s:
        rates = [(name, cell.ratio(name, "asyncdist")) for name in ("gloo", "floor")]
        text = ", ".join(f"{rate:.2f}x {name}" for name, rate in rates if rate is not None)
        measured = f"{gigabytes_per_second(cell, own) or 0:.2f} GB/s ({text})"
    promised = f">= 1x gloo's GB/s, >= {FLOOR_THROUGHPUT}x floor's"
    return _verdict(cell, f"TCP {cell.case.label}", promised, met, measured)


def _all_reduce(cell: Cell) -> Verdict:
    limit_s = ALL_REDUCE_LIMITS_S[cell.case.nbytes, cell.ranks]
    faster = _at_most(cell.ratio("asyncdist", "gloo"), 1.0)
    promised = "faster than gloo"
    met = faster
    if cell.mode == "pinned":
        promised = f"<= {limit_s * 1e6:.0f} us, {promised}"
        met = _all_hold(faster, _at_most(_p50_s(cell), limit_s))
    measured = _with_ratios(cell, ("gloo", "floor"))
    return _verdict(cell, f"TCP {cell.case.label}, {cell.ranks} ranks", promised, met, measured)


def _store_ratio(cell: Cell, measure: str, limit: float) -> Verdict:
    met = _at_most(cell.ratio("asyncdist", "torch"), limit)
    return _verdict(cell, measure, f"<= {limit}x torch TCPStore", met, _with_ratios(cell, ("torch",)))


def _store_get(cell: Cell) -> Verdict:
    return _store_ratio(cell, "store get 8 B, one at a time", STORE_GET_TIMES)


def _store_check(cell: Cell) -> Verdict:
    return _store_ratio(cell, "store check, one at a time", STORE_CHECK_TIMES)


def _store_throughput(cell: Cell) -> Verdict:
    own = cell.measurements["asyncdist"]
    rate = operations_per_second(cell, own)
    met = None if rate is None else rate >= STORE_OPERATIONS_PER_S
    measured = None if rate is None else f"{rate / 1e3:.0f}k op/s"
    promised = f">= {STORE_OPERATIONS_PER_S / 1e3:.0f}k op/s"
    return _verdict(cell, f"store {cell.case.label}", promised, met, measured)


def _rendezvous(cell: Cell) -> Verdict:
    p50_s = _p50_s(cell)
    peak = cell.measurements["asyncdist"].extra.get("server_peak_bytes", 0)
    met = None if p50_s is None else p50_s < RENDEZVOUS_LIMIT_S and 0 < peak < SERVER_LIMIT_BYTES
    measured = None if p50_s is None else f"{format_time(p50_s)}, daemon {peak / (1 << 20):.0f} MiB"
    return _verdict(cell, f"{cell.case.label}, {cell.ranks} processes", "< 3 s, daemon < 200 MiB", met, measured)


def document(verdicts: Sequence[Verdict], cells: Sequence[Cell], about: dict[str, str]) -> str:
    """Return the report as Markdown."""
    machine = "\n".join(f"- {name}: {value}" for name, value in about.items())
    return f"""# The main job's figures

Taken by `{COMMAND}`. How each figure is measured is written in `bench/__init__.py` and in the subjects' files: an
untimed barrier, then one operation; a sample is the slowest rank's time; runs alternate with the neighbors' and the
ratios are medians over the rounds; every result is verified. "floor" is `bench/floors.py`, the least that an honest
program does on bare sockets. Ratios with "x" are asyncdist divided by the other, of times or of throughput as the
promise says.

{markdown_table(HEADER, [verdict.row() for verdict in verdicts])}

## Machine and versions

{machine}

## Everything measured

The column `asyncdist /` is asyncdist's time divided by that candidate's, so below 1 means that asyncdist is faster.

{markdown(cells)}
"""


def write_document(text: str, path: Path = DOCUMENT) -> None:
    """Write the report where the documentation keeps it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
