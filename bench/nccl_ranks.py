"""Several ranks, each a process, on one device: the time of all_reduce by path, and torch's in the same processes.

``python -m bench.nccl_ranks`` is one rank; `measure_ranks` starts them, never for longer than it is told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

import asyncdist as dist
from bench.gpu import Gpu, open_gpu
from bench.runner import unused_port

__all__ = ["SHARING", "measure_ranks", "reason_in"]

SHARING: Final[dict[str, dict[str, str]]] = {
    "NCCL_MULTI_RANK_GPU_ENABLE=1": {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8"},
    "distinct NCCL_HOSTID": {"NCCL_HOSTID": "asyncdist-{rank}"},
}
"""Ways to let NCCL take two ranks on one device; `{rank}` becomes the rank. The second makes it see two hosts."""

WARM_UP: Final = 2

FEWEST: Final = 3
"""Samples, however slow."""

SIZE_S: Final = 2.5
"""How long one size is measured: ranks on one device take turns of milliseconds there, and some paths wait for many."""

ENOUGH: Final = 0.6
"""Of its time, after which a rank begins no other size: the next may take longer than all before."""

REASON_CHARACTERS: Final = 300

Once = Callable[[], Awaitable[None]]


def measure_ranks(
    size: int, sizes: Sequence[int], samples: int, environ: Mapping[str, str], limit_s: float, *, torch: bool = False
) -> tuple[dict[int, dict[str, float]], str]:
    """Median seconds of the slowest rank by size in bytes and library, and why there are none of other sizes, if so.

    With `torch`, torch.distributed's NCCL takes turns with asyncdist.
    """
    ports = [unused_port() for _ in range(2)]
    task = [list(sizes), samples, limit_s, ports[1] if torch else 0]
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        said: list[IO[str]] = []
        try:
            for rank in range(size):
                output = (Path(folder) / f"{rank}").open("w+")
                said.append(output)
                processes.append(_start(rank, size, ports[0], task, environ, output))
            problem = _wait(processes, limit_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = []
        for file in said:
            file.seek(0)
            texts.append(file.read())
            file.close()
    found = [_figures(text) for text in texts]
    everywhere = {
        nbytes: {name: max(one[nbytes][name] for one in found) for name in found[0][nbytes]}
        for nbytes in found[0]
        if all(nbytes in of for of in found)
    }
    failed = next((rank for rank, process in enumerate(processes) if process.returncode > 0), None)
    if failed is not None:
        problem = reason_in(texts[failed]) or f"exit code {processes[failed].returncode}"
    return everywhere, problem


def _start(
    rank: int, size: int, port: int, task: list[Any], environ: Mapping[str, str], output: IO[str]
) -> subprocess.Popen[str]:
    own = {name: value.format(rank=rank) for name, value in environ.items()}
    ours = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    quiet = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"}
    return subprocess.Popen(
        [sys.executable, "-m", "bench.nccl_ranks", json.dumps(task)],
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


def _figures(text: str) -> dict[int, dict[str, float]]:
    """What a rank has measured, among whatever libraries say."""
    found = {}
    for line in text.splitlines():
        if line.startswith("[") and line.endswith("]"):
            try:
                nbytes, by_name = json.loads(line)
            except ValueError:
                continue
            found[int(nbytes)] = {str(name): float(seconds) for name, seconds in by_name.items()}
    return found


def reason_in(text: str) -> str:
    """Why a rank failed, of all that it said: NCCL's own warning, if there is one, and the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    warnings = [line.partition("NCCL WARN ")[2] for line in lines if "NCCL WARN " in line]
    return "; ".join([*warnings[:1], *lines[-1:]])[:REASON_CHARACTERS]


async def _rank(sizes: Sequence[int], samples: int, limit_s: float, torch_port: int) -> None:
    with open_gpu() as gpu:
        async with dist.init_process_group(timeout=limit_s / 2) as group:
            if torch_port:
                _join_torch(gpu, group, torch_port)
            begun_s = time.monotonic()
            for nbytes in sizes:
                if await _longest(time.monotonic() - begun_s) > ENOUGH * limit_s:
                    break
                x = gpu.full(max(1, nbytes // 4), 1)
                candidates = {"asyncdist": _ours(x)}
                if torch_port:
                    candidates["torch"] = _torch(max(1, nbytes // 4))
                print(json.dumps([nbytes, await _medians(group, candidates, samples, x)]), flush=True)
    if torch_port:
        os._exit(0)  # all is said, and what torch does at the end of a process may take its time


async def _medians(group: Any, candidates: Mapping[str, Once], samples: int, x: Any) -> dict[str, float]:
    """Candidates take turns; `x` is what asyncdist adds up."""
    times: dict[str, list[float]] = {name: [] for name in candidates}

    async def turn() -> None:
        for name, once in candidates.items():
            await dist.barrier()
            start = time.perf_counter()
            await once()
            times[name].append(time.perf_counter() - start)

    for _ in range(WARM_UP):
        await turn()
    slowest_s = await _longest(sum(taken[-1] for taken in times.values()))
    count = min(samples, max(FEWEST, int(SIZE_S / slowest_s)))  # on all ranks the same
    for taken in times.values():
        taken.clear()
    for _ in range(count):
        await turn()
    assert x[:1].get()[0] == float(group.size) ** (count + WARM_UP), "wrong result"
    return {name: sorted(taken)[len(taken) // 2] for name, taken in times.items()}


async def _longest(seconds: float) -> float:
    """Of all ranks'."""
    longest = np.array([seconds])
    await dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest[0])


def _ours(x: Any) -> Once:
    async def once() -> None:
        await dist.all_reduce(x)

    return once


def _join_torch(gpu: Gpu, group: Any, port: int) -> None:
    if gpu.fake:  # known without the seconds that it takes to load torch
        raise RuntimeError("torch sees no device")
    import torch
    import torch.distributed as torch_dist

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no device")
    torch_dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=group.rank, world_size=group.size)


def _torch(count: int) -> Once:
    import torch
    import torch.distributed as torch_dist

    tensor = torch.zeros(count, device="cuda")

    async def once() -> None:
        torch_dist.all_reduce(tensor, async_op=True).wait()
        torch.cuda.synchronize()

    return once


if __name__ == "__main__":
    dist.run(_rank(*json.loads(sys.argv[1])))
