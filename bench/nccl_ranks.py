"""Several ranks, each a process, on one device: the time of all_reduce by path.

``python -m bench.nccl_ranks`` is one rank; `measure_ranks` starts them, never for longer than `LIMIT_S`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import asyncdist as dist
from bench.gpu import open_gpu

__all__ = ["SHARING", "measure_ranks"]

LIMIT_S: Final = 120.0
"""Libraries may hang on a shared device; a benchmark may not."""

SHARING: Final[dict[str, dict[str, str]]] = {
    "NCCL_MULTI_RANK_GPU_ENABLE=1": {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8"},
    "distinct NCCL_HOSTID": {"NCCL_HOSTID": "asyncdist-{rank}"},
}
"""Ways to let NCCL take two ranks on one device; `{rank}` becomes the rank. The second makes it see two hosts."""


def measure_ranks(
    size: int, sizes: tuple[int, ...], samples: int, environ: Mapping[str, str]
) -> tuple[dict[int, float], str]:
    """Median seconds of the slowest rank by size in bytes, or why there are none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for rank in range(size):
        own = {name: value.format(rank=rank) for name, value in environ.items()}
        ours = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-m", "bench.nccl_ranks", json.dumps([list(sizes), samples])]
        processes.append(
            subprocess.Popen(
                command,
                env={**os.environ, "NCCL_SOCKET_IFNAME": "lo", **{k: str(v) for k, v in ours.items()}, **own},
                cwd=Path(__file__).parent.parent,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return _collect(processes)


def _collect(processes: list[subprocess.Popen[str]]) -> tuple[dict[int, float], str]:
    deadline = time.monotonic() + LIMIT_S
    said = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            if process.returncode:
                return {}, (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1][:300]
            said.append(json.loads(output.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return {}, "it hangs"
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return {int(nbytes): max(one[nbytes] for one in said) for nbytes in said[0]}, ""


async def _rank(sizes: list[int], samples: int) -> dict[int, float]:
    medians = {}
    with open_gpu() as gpu:
        async with dist.init_process_group(timeout=LIMIT_S / 2) as group:
            for nbytes in sizes:
                count = max(1, nbytes // 4)
                x = gpu.full(count, 1)
                times = []
                for sample in range(samples + 2):
                    await dist.barrier()
                    start = time.perf_counter()
                    await dist.all_reduce(x)
                    if sample >= 2:
                        times.append(time.perf_counter() - start)
                assert x[:1].get()[0] == float(group.size) ** (samples + 2), "wrong result"
                medians[nbytes] = sorted(times)[len(times) // 2]
    return medians


if __name__ == "__main__":
    _sizes, _samples = json.loads(sys.argv[1])
    print(json.dumps(dist.run(_rank(_sizes, _samples))), flush=True)
