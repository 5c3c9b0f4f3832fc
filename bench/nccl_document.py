"""docs/benchmarks/gpu.md: what was measured, on what, by which command, beside what was promised."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from asyncdist.arrays import human_bytes
from bench.gpu import Gpu
from bench.nccl_alone import Alone

__all__ = ["Figures", "document", "nccl_table", "versions"]

OVERHEAD_S: Final = 30e-6
STALL_S: Final = 1e-3
TORCH_SHARE: Final = 0.95
TORCH_BYTES: Final = 64 << 20
STAGED_FACTOR: Final = 5.0
IPC_BYTES: Final = 256 << 20


@dataclass
class Figures:
    """Everything that was measured."""

    alone: Alone
    paths: dict[str, dict[int, float]] = field(default_factory=dict)
    """Seconds by size of all_reduce with two ranks on one device, by path."""

    problems: dict[str, str] = field(default_factory=dict)
    """Why a path has no figures."""

    copy_bytes_per_s: float = 0.0
    facts: tuple[str, ...] = ()


def versions(gpu: Gpu) -> dict[str, str]:
    """What it ran on."""
    found = {
        "device": _device_name(gpu),
        "runtime": gpu.runtime.name,
        "NCCL": gpu.provider.nccl.name if gpu.provider.nccl else gpu.provider.nccl_reason,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }
    for package in ("asyncdist", "torch", "numpy", "uvloop"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


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


def document(figures: Figures, about: Mapping[str, str], command: str) -> str:
    """The whole page."""
    parts = ["# On a GPU", "", f"Measured with `{command}`; written by it.", ""]
    parts += ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in about.items()), ""]
    parts += ["## What was promised", "", "| measure | at least | measured | |", "| --- | --- | --- | --- |"]
    parts += [f"| {name} | {promise} | {value} | {verdict} |" for name, promise, value, verdict in _verdicts(figures)]
    parts += ["", "## One rank: all_reduce, microseconds (median)", ""]
    names = list(next(iter(figures.alone.seconds.values()), {}))
    parts += ["| size | " + " | ".join(names) + " |", "| --- |" + " ---: |" * len(names)]
    for nbytes, by_name in figures.alone.seconds.items():
        cells = " | ".join(f"{by_name[name] * 1e6:.1f}" if name in by_name else "-" for name in names)
        parts.append(f"| {human_bytes(nbytes)} | {cells} |")
    parts += ["", "`bare` is cupy's own NCCL call followed by an event that is waited for.", ""]
    parts += [f"Not measured: {name} ({why})." for name, why in figures.alone.missing.items()]
    parts += ["", "## Two ranks on one device: all_reduce", ""]
    for name, seconds in figures.paths.items():
        parts += [f"Path {name}:", "", "```", nccl_table(seconds, 2), "```", ""]
    parts += [f"No figures of path {name}: {why}." for name, why in figures.problems.items()]
    parts += ["", *(f"- {fact}" for fact in figures.facts)]
    return "\n".join(parts).rstrip() + "\n"


def _verdicts(figures: Figures) -> list[tuple[str, str, str, str]]:
    alone = figures.alone
    rows = [
        _row(
            "`await all_reduce` over the bare call and event, one rank, p50",
            f"<= {OVERHEAD_S * 1e6:.0f} us",
            f"{alone.overhead_s * 1e6:.1f} us" if _has(alone, "bare") else "",
            alone.overhead_s <= OVERHEAD_S,
        ),
        _row(
            "lateness of a 1 ms callback while awaiting, p99",
            f"<= {STALL_S * 1e3:.0f} ms",
            f"{alone.stall_s * 1e3:.2f} ms",
            alone.stall_s <= STALL_S,
        ),
    ]
    beside = alone.seconds.get(TORCH_BYTES, {})
    share = beside["torch"] / beside["asyncdist"] if "torch" in beside else 0.0
    rows.append(
        _row(
            "beside torch.distributed's NCCL, 64 MiB, one rank",
            f">= {TORCH_SHARE}x",
            f"{share:.2f}x" if share else "",
            share >= TORCH_SHARE,
        )
    )
    ipc = figures.paths.get("ipc", {}).get(IPC_BYTES)
    staged = figures.paths.get("staged", {}).get(IPC_BYTES)
    factor = staged / ipc if ipc and staged else 0.0
    rows.append(
        _row(
            "CUDA IPC beside staged, 256 MiB, 2 ranks on one device",
            f">= {STAGED_FACTOR:.0f}x",
            f"{factor:.1f}x" if factor else "",
            factor >= STAGED_FACTOR,
        )
    )
    if ipc and figures.copy_bytes_per_s:
        share = IPC_BYTES / ipc / figures.copy_bytes_per_s
        text = f"{share:.0%} of {figures.copy_bytes_per_s / 1e9:.0f} GB/s"
        rows.append(("CUDA IPC 256 MiB, algorithm bandwidth of a device copy's", "reported", text, ""))
    return rows


def _row(name: str, promise: str, value: str, kept: bool) -> tuple[str, str, str, str]:
    return name, promise, value or "not measured", ("kept" if kept else "missed") if value else "open"


def _has(alone: Alone, name: str) -> bool:
    return any(name in by_name for by_name in alone.seconds.values())


def _device_name(gpu: Gpu) -> str:
    if gpu.fake:
        return "fake"
    from cupy.cuda import runtime

    return str(runtime.getDeviceProperties(gpu.device)["name"].decode())
