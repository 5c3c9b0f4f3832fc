"""What is measured on a GPU, and docs/benchmarks/gpu.md, which shows the figures beside what was promised.

Figures are records that are written down one by one, so that a crash loses none of those before. A record is a JSON
object with a `kind`:

| kind | says |
| --- | --- |
| `about` | `values`: on what it ran |
| `beside` | seconds of one rank's all_reduce of `nbytes`, by library, which took turns; `name` is the neighbor |
| `missing` | `why` there is nothing of neighbor `name` |
| `stall` | lateness of the loop while awaiting, and `idle_s` while nothing was under way |
| `copy` | `bytes_per_s` of a copy within the device |
| `path` | `seconds` of two ranks' all_reduce of `nbytes` on path `name` |
| `together` | as `beside`, of two ranks through NCCL; `name` is the way to let it take them |
| `problem` | `why` path `name` has no figures, or not all |
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import asyncdist
from asyncdist.arrays.host import human_bytes
from bench.gpu import Gpu
from bench.machine import package_version, provenance

if TYPE_CHECKING:
    from bench.gpu_proof import Outcome

__all__ = [
    "IPC_BYTES",
    "TORCH_BYTES",
    "Figures",
    "Note",
    "Row",
    "document",
    "nccl_table",
    "notes_to",
    "rows",
    "versions",
]

TORCH_BYTES: Final = 64 << 20
"""The size that is compared with torch."""

IPC_BYTES: Final = 256 << 20
"""The size at which the paths of ranks on one device are compared."""

Note: TypeAlias = Callable[..., None]
"""`note(kind, **fields)` writes a record down."""


OVERHEAD_S: Final = 30e-6

STALL_S: Final = 1e-3

TORCH_SHARE: Final = 0.95

STAGED_FACTOR: Final = 5.0


@dataclass
class Figures:
    """All records together."""

    about: dict[str, str] = field(default_factory=dict)
    beside: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    stall_s: float | None = None
    idle_s: float = 0.0
    copy_bytes_per_s: float = 0.0
    paths: dict[str, dict[int, float]] = field(default_factory=dict)
    together: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    facts: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def take(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if kind == "about":
            self.about.update(record["values"])
        elif kind == "beside":
            self.beside.setdefault(record["name"], {})[record["nbytes"]] = dict(record["seconds"])
        elif kind == "missing":
            self.missing[record["name"]] = record["why"]
        elif kind == "stall":
            self.stall_s, self.idle_s = record["seconds"], record["idle_s"]
        elif kind == "copy":
            self.copy_bytes_per_s = record["bytes_per_s"]
        elif kind == "path":
            self.paths.setdefault(record["name"], {})[record["nbytes"]] = record["seconds"]
        elif kind == "together":
            self.together.setdefault(record["name"], {})[record["nbytes"]] = dict(record["seconds"])
        elif kind == "problem":
            self.problems[record["name"]] = record["why"]
        else:
            raise ValueError(f"no such record: {kind}")

    @classmethod
    def read(cls, file: Path) -> Figures:
        """Those written so far; a record cut off in the middle, by a crash, is left out."""
        figures = cls()
        for line in file.read_text().splitlines() if file.exists() else ():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            figures.take(record)
        return figures


def notes_to(file: Path) -> Note:
    """Write records into `file`, behind those that are there."""

    def note(kind: str, **fields: Any) -> None:
        with file.open("a") as opened:  # closed each time: whatever happens next, it is there
            opened.write(json.dumps({"kind": kind, **fields}) + "\n")

    return note


class Row(NamedTuple):
    """A promise: `verdict` is kept, missed or open, empty for what is only reported."""

    name: str
    promise: str
    value: str
    verdict: str


def versions(gpu: Gpu) -> dict[str, str]:
    """What it ran on."""
    found = provenance() | {
        "asyncdist": asyncdist.__version__,
        "device": _device_name(gpu),
        "runtime": gpu.runtime.name,
        "NCCL": gpu.provider.nccl.name if gpu.provider.nccl else gpu.provider.nccl_reason,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }
    return found | {package: package_version(package) for package in ("torch", "numpy", "uvloop")}


def nccl_table(seconds: Mapping[int, float], ranks: int) -> str:
    """As nccl-tests prints all_reduce: in place, median times; all results were verified or are one rank's own."""
    lines = [
        "#       size         count      type   redop    root     time   algbw   busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)",
    ]
    for nbytes, taken in sorted(seconds.items()):
        algbw = nbytes / taken / 1e9
        busbw = algbw * 2 * (ranks - 1) / ranks
        what = f"{nbytes:>12} {nbytes // 4:>13} {'float':>9} {'sum':>7} {-1:>7}"
        lines.append(f"{what} {taken * 1e6:>8.2f} {algbw:>7.2f} {busbw:>7.2f} {0:>6}")
    return "\n".join(lines)


def _beside_tables(figures: Figures) -> list[str]:
    """Lines: one rank's all_reduce beside each neighbor, with which it took turns."""
    return _beside(figures.beside)


def _beside(beside: Mapping[str, Mapping[int, Mapping[str, float]]], library: str = "") -> list[str]:
    lines: list[str] = []
    for key, by_size in beside.items():
        neighbor = library or key
        lines += [f"| size | asyncdist | {neighbor} |", "| --- | ---: | ---: |"]
        for nbytes, by_name in sorted(by_size.items()):
            ours, theirs = (f"{by_name[name] * 1e6:.1f}" for name in ("asyncdist", neighbor))
            lines.append(f"| {human_bytes(nbytes)} | {ours} | {theirs} |")
        lines.append("")
    return lines


def document(figures: Figures, command: str) -> str:
    """The whole page."""
    parts = ["# On a GPU", "", f"Measured with `{command}`; written by it.", ""]
    parts += ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in figures.about.items()), ""]
    parts += ["## What was promised", "", "| measure | at least | measured | |", "| --- | --- | --- | --- |"]
    parts += [f"| {row.name} | {row.promise} | {row.value} | {row.verdict} |" for row in rows(figures)]
    parts += ["", "## One rank: all_reduce, microseconds (median)", "", *_beside_tables(figures)]
    parts += ["`bare` is cupy's own NCCL call followed by an event that is waited for.", ""]
    if figures.stall_s is not None:
        idle = f"The loop's lateness with nothing under way is {figures.idle_s * 1e3:.2f} ms (p99)."
        parts += [idle, ""]
    parts += [f"Not measured: {name} ({why})." for name, why in figures.missing.items()]
    parts += ["", "## Two ranks on one device: all_reduce", ""]
    for name, seconds in figures.paths.items():
        parts += [f"Path {name}:", "", "```", nccl_table(seconds, 2), "```", ""]
    for way, by_size in figures.together.items():
        parts += [f"NCCL ({way}), asyncdist and torch in the same processes, microseconds:", ""]
        parts += _beside({way: by_size}, "torch")
    parts += [f"Path {name}: {why}." for name, why in figures.problems.items()]
    parts += ["", *(f"- {fact}" for fact in figures.facts)]
    if figures.outcomes:
        parts += ["", "## What ran", "", "| part | seconds | |", "| --- | ---: | --- |"]
        for outcome in figures.outcomes:
            said = "; ".join(filter(None, (outcome.problem, outcome.counts()))) or "ok"
            parts.append(f"| {outcome.section.name} | {outcome.seconds:.0f} | {said} |")
        reasons = dict.fromkeys(reason for outcome in figures.outcomes for reason in outcome.skipped)
        parts += ["", *(f"Skipped: {reason}." for reason in reasons)]
    return "\n".join(parts).rstrip() + "\n"


def rows(figures: Figures) -> list[Row]:
    """What was promised, and what came of it."""
    return [_tests(figures), *_alone(figures), *_shared(figures)]


def _tests(figures: Figures) -> Row:
    of_gpu = [one for one in figures.outcomes if any(word.startswith("tests/gpu") for word in one.section.arguments)]
    begun = [outcome for outcome in of_gpu if outcome.tests]
    passed = sum(outcome.count("PASSED") for outcome in of_gpu)
    skipped = sum(outcome.count("SKIPPED") for outcome in of_gpu)
    others = sum(len(outcome.tests) for outcome in of_gpu) - passed - skipped
    value = f"{passed} passed, {others} not, {skipped} skipped" if begun else ""
    if begun and len(begun) < len(of_gpu):
        value += f"; {len(of_gpu) - len(begun)} of {len(of_gpu)} parts did not run"
    return _row("`tests/gpu`", "all pass", value, bool(passed) and not any(outcome.problem for outcome in of_gpu))


def _alone(figures: Figures) -> list[Row]:
    bare = figures.beside.get("bare", {})
    overhead_s = None
    if bare:
        smallest = bare[min(bare)]
        overhead_s = smallest["asyncdist"] - smallest["bare"]
    return [
        _row(
            "`await all_reduce` over the bare call and event, one rank, p50",
            f"<= {OVERHEAD_S * 1e6:.0f} us",
            "" if overhead_s is None else f"{overhead_s * 1e6:.1f} us",
            overhead_s is not None and overhead_s <= OVERHEAD_S,
        ),
        _row(
            "lateness of a 1 ms callback while awaiting, p99",
            f"<= {STALL_S * 1e3:.0f} ms",
            "" if figures.stall_s is None else f"{figures.stall_s * 1e3:.2f} ms",
            figures.stall_s is not None and figures.stall_s <= STALL_S,
        ),
        *_torch(figures),
    ]


def _torch(figures: Figures) -> list[Row]:
    """What was promised holds where NCCL moves something, which it does not for one rank, if two could be measured."""
    name = f"beside torch.distributed's NCCL, {human_bytes(TORCH_BYTES)}"
    found = [
        (f"{name}, two ranks on one device ({way})", by_size[TORCH_BYTES])
        for way, by_size in figures.together.items()
        if TORCH_BYTES in by_size
    ]
    one = figures.beside.get("torch", {}).get(TORCH_BYTES)
    if one is not None:
        found.append((f"{name}, one rank", one))
    lines = []
    for number, (what, seconds) in enumerate(found):
        share = seconds["torch"] / seconds["asyncdist"]
        judged = _row(what, f">= {TORCH_SHARE}x", f"{share:.2f}x", share >= TORCH_SHARE)
        lines.append(judged if not number else judged._replace(promise="reported", verdict=""))
    return lines or [_row(name, f">= {TORCH_SHARE}x", "", False)]


def _shared(figures: Figures) -> list[Row]:
    size = human_bytes(IPC_BYTES)
    ipc = figures.paths.get("ipc", {}).get(IPC_BYTES)
    staged = figures.paths.get("staged", {}).get(IPC_BYTES)
    factor = staged / ipc if ipc and staged else 0.0
    share = ""
    if ipc and figures.copy_bytes_per_s:
        share = f"{IPC_BYTES / ipc / figures.copy_bytes_per_s:.0%} of {figures.copy_bytes_per_s / 1e9:.0f} GB/s"
    return [
        _row(
            f"CUDA IPC beside staged, {size}, 2 ranks on one device",
            f">= {STAGED_FACTOR:.0f}x",
            f"{factor:.1f}x" if factor else "",
            factor >= STAGED_FACTOR,
        ),
        Row(
            f"CUDA IPC {size}, algorithm bandwidth of a device copy's",
            "reported",
            share or "not measured",
            "" if share else "open",
        ),
    ]


def _row(name: str, promise: str, value: str, kept: bool) -> Row:
    return Row(name, promise, value or "not measured", ("kept" if kept else "missed") if value else "open")


def _device_name(gpu: Gpu) -> str:
    if gpu.fake:
        return "fake"
    from cupy.cuda import runtime

    return str(runtime.getDeviceProperties(gpu.device)["name"].decode())
