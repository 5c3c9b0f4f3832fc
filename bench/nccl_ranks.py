"""Several ranks, each a process, on one device: the time of all_reduce by path.

``python -m bench.nccl_ranks`` is one rank; `measure_ranks` starts them, never for longer than it is told.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

import asyncdist as dist
from bench.gpu import Gpu, open_gpu

__all__ = ["SHARING", "measure_ranks"]

SHARING: Final[dict[str, dict[str, str]]] = {
    "NCCL_MULTI_RANK_GPU_ENABLE=1": {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8"},
    "distinct NCCL_HOSTID": {"NCCL_HOSTID": "asyncdist-{rank}"},
}
"""Ways to let NCCL take two ranks on one device; `{rank}` becomes the rank. The second makes it see two hosts."""

WARM_UP: Final = 2

FEWEST: Final = 3
"""Samples, however slow."""

SIZE_S: Final = 4.0
"""How long one size is measured: ranks on one device take turns of milliseconds there, and some paths wait for many."""

REASON_CHARACTERS: Final = 300


def measure_ranks(
    size: int, sizes: Sequence[int], samples: int, environ: Mapping[str, str], limit_s: float
) -> tuple[dict[int, float], str]:
    """Median seconds of the slowest rank by size in bytes, and why there are none of other sizes, if so."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        said: list[IO[str]] = []
        try:
            for rank in range(size):
                output = (Path(folder) / f"{rank}").open("w+")
                said.append(output)
                processes.append(_start(rank, size, port, (sizes, samples, limit_s), environ, output))
            problem = _wait(processes, limit_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = []
        for output in said:
            output.seek(0)
            texts.append(output.read())
            output.close()
    found = [_figures(text) for text in texts]
    everywhere = {nbytes: max(one[nbytes] for one in found) for nbytes in found[0] if all(nbytes in of for of in found)}
    failed = next((rank for rank, process in enumerate(processes) if process.returncode > 0), None)
    if failed is not None:
        problem = _reason(texts[failed]) or f"exit code {processes[failed].returncode}"
    return everywhere, problem


def _start(
    rank: int, size: int, port: int, task: tuple[Sequence[int], int, float], environ: Mapping[str, str], output: IO[str]
) -> subprocess.Popen[str]:
    own = {name: value.format(rank=rank) for name, value in environ.items()}
    ours = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    quiet = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"}
    return subprocess.Popen(
        [sys.executable, "-m", "bench.nccl_ranks", json.dumps([list(task[0]), task[1], task[2]])],
        env={**os.environ, **quiet, **{name: str(value) for name, value in ours.items()}, **own},
        cwd=Path(__file__).parent.parent,
        stdout=output,
        stderr=output,
        text=True,
    )


def _wait(processes: Sequence[subprocess.Popen[str]], limit_s: float) -> str:
    """Until all have ended, one has failed, or time is over."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        codes = [process.poll() for process in processes]
        if any(code for code in codes):
            for process in processes:
                try:
                    process.wait(2.0)  # that one's failure is the others' too, in their words
                except subprocess.TimeoutExpired:
                    break
            dead = [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
            return dead[0]
        if all(code is not None for code in codes):
            return ""
        time.sleep(0.05)
    return f"not through after {limit_s:.0f} s"


def _figures(text: str) -> dict[int, float]:
    """What a rank has measured, among whatever libraries say."""
    found = {}
    for line in text.splitlines():
        if line.startswith("[") and line.endswith("]"):
            try:
                nbytes, seconds = json.loads(line)
            except ValueError:
                continue
            found[int(nbytes)] = float(seconds)
    return found


def _reason(text: str) -> str:
    """NCCL's own warning, if there is one, and the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    warnings = [line.partition("NCCL WARN ")[2] for line in lines if "NCCL WARN " in line]
    return "; ".join([*warnings[:1], *lines[-1:]])[:REASON_CHARACTERS]


async def _rank(sizes: Sequence[int], samples: int, limit_s: float) -> None:
    with open_gpu() as gpu:
        async with dist.init_process_group(timeout=limit_s / 2) as group:
            for nbytes in sizes:
                print(json.dumps([nbytes, await _median(gpu, group, nbytes, samples)]), flush=True)


async def _median(gpu: Gpu, group: Any, nbytes: int, samples: int) -> float:
    x = gpu.full(max(1, nbytes // 4), 1)
    times: list[float] = []

    async def once() -> None:
        await dist.barrier()
        start = time.perf_counter()
        await dist.all_reduce(x)
        times.append(time.perf_counter() - start)

    for _ in range(WARM_UP):
        await once()
    slowest = np.array([times[-1]])
    await dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all ranks take as many
    count = min(samples, max(FEWEST, int(SIZE_S / float(slowest[0]))))
    times.clear()
    for _ in range(count):
        await once()
    assert x[:1].get()[0] == float(group.size) ** (count + WARM_UP), "wrong result"
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    _sizes, _samples, _limit_s = json.loads(sys.argv[1])
    dist.run(_rank(_sizes, _samples, _limit_s))
