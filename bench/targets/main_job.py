"""The main job's promises: messages and all_reduce over TCP, the store, rendezvous of up to 2,000."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench import rendezvous, store, subjects
from bench.model import Cell, Mode, Profile
from bench.report import format_time, gigabytes_per_second, operations_per_second, requests_per_rank
from bench.runner import Progress, run_subject
from bench.targets.verdict import Verdict, all_hold, at_most, p50_of, verdict, with_ratios

ALL_REDUCE_LIMITS_S = {(4, 2): 60e-6, (4, 4): 135e-6, (65536, 2): 65e-6, (65536, 4): 270e-6}
FLOOR_TIMES = 1.5
FLOOR_THROUGHPUT = 0.85
STORE_GET_TIMES = 0.65
STORE_CHECK_TIMES = 1.15
STORE_OPERATIONS_PER_S = 150e3
RENDEZVOUS_LIMITS_S = {1000: 3.0, 2000: 10.0}
RANK_REQUESTS = 12
SERVER_LIMIT_BYTES = 200 << 20


def measure(profile: Profile, modes: Sequence[Mode] | None, progress: Progress) -> list[Cell]:
    """Measure every cell the promises speak of."""
    cells: list[Cell] = []
    for subject in (subjects.P2P_PROMISED, subjects.ALL_REDUCE_PROMISED, store.SUBJECT, rendezvous.SUBJECT):
        cells += run_subject(subject, profile, modes=modes if subject.modes is None else None, progress=progress)
    return cells


def judge(cells: Sequence[Cell]) -> list[Verdict]:
    """Return a verdict for every cell that has a promise."""
    judges: dict[str, Callable[[Cell], Verdict]] = {
        "ping_pong": _ping_pong,
        "one_way": _one_way,
        "all_reduce": _all_reduce,
        "get": _store_get,
        "check": _store_check,
        "burst": _store_throughput,
        "tasks": _store_throughput,
        "clients": _store_throughput,
        "rendezvous": _rendezvous,
    }
    return [judges[cell.case.operation](cell) for cell in cells if cell.case.operation in judges]


def _ping_pong(cell: Cell) -> Verdict:
    met = all_hold(
        at_most(cell.ratio("asyncdist", "gloo"), 1.0), at_most(cell.ratio("asyncdist", "floor"), FLOOR_TIMES)
    )
    measured = with_ratios(cell, ("gloo", "floor"))
    return verdict(cell, "TCP half round trip, 4 B", f"<= 1x gloo, <= {FLOOR_TIMES}x floor", met, measured)


def _one_way(cell: Cell) -> Verdict:
    met = all_hold(
        at_most(cell.ratio("asyncdist", "gloo"), 1.0), at_most(cell.ratio("asyncdist", "floor"), 1 / FLOOR_THROUGHPUT)
    )
    own = cell.measurements["asyncdist"]
    measured = None
    if own.runs_s:
        rates = [(name, cell.ratio(name, "asyncdist")) for name in ("gloo", "floor")]
        text = ", ".join(f"{rate:.2f}x {name}" for name, rate in rates if rate is not None)
        measured = f"{gigabytes_per_second(cell, own) or 0:.2f} GB/s ({text})"
    promised = f">= 1x gloo's GB/s, >= {FLOOR_THROUGHPUT}x floor's"
    return verdict(cell, f"TCP {cell.case.label}", promised, met, measured)


def _all_reduce(cell: Cell) -> Verdict:
    limit_s = ALL_REDUCE_LIMITS_S[cell.case.nbytes, cell.ranks]
    faster = at_most(cell.ratio("asyncdist", "gloo"), 1.0)
    promised = "faster than gloo"
    met = faster
    if cell.mode == "pinned":
        promised = f"<= {limit_s * 1e6:.0f} us, {promised}"
        met = all_hold(faster, at_most(p50_of(cell), limit_s))
    measured = with_ratios(cell, ("gloo", "floor"))
    return verdict(cell, f"TCP {cell.case.label}, {cell.ranks} ranks", promised, met, measured)


def _store_ratio(cell: Cell, measure: str, limit: float) -> Verdict:
    met = at_most(cell.ratio("asyncdist", "torch"), limit)
    return verdict(cell, measure, f"<= {limit}x torch TCPStore", met, with_ratios(cell, ("torch",)))


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
    return verdict(cell, f"store {cell.case.label}", promised, met, measured)


def _rendezvous(cell: Cell) -> Verdict:
    p50_s = p50_of(cell)
    own = cell.measurements["asyncdist"]
    limit_s = RENDEZVOUS_LIMITS_S.get(cell.case.operations, max(RENDEZVOUS_LIMITS_S.values()))
    peak = own.extra.get("server_peak_bytes", 0)
    met = measured = None
    if p50_s is not None:
        met = p50_s < limit_s and 0 < peak < SERVER_LIMIT_BYTES and own.extra.get("rank_requests") == RANK_REQUESTS
        measured = f"{format_time(p50_s)}, daemon {peak / (1 << 20):.0f} MiB, {requests_per_rank(own)}"
    promised = f"< {limit_s:.0f} s, daemon < 200 MiB, {RANK_REQUESTS} requests a rank"
    return verdict(cell, f"{cell.case.label}, {cell.ranks} processes", promised, met, measured)
