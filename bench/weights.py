"""New weights for servers of one host while they answer, beside gloo's broadcast and files on tmpfs, in one run.

    python -m bench.weights --mib 1024 --servers 3 --gloo /path/to/a/python/with/torch

The trainer and the servers are processes. An update begins with arrays in the trainer's own memory, and ends when every
server has the new ones: for gloo when a barrier behind the broadcast has ended, for files when each server has mapped
the file that took the place of the last (`mmap`, nothing is read). All three alternate; all weights change each time.

Each server has a request for the sum of the next MiB of its weights every millisecond, by itself. What is told is how
long that takes from when it was due, before and during updates; and for how long of that the loop's thread itself was
busy, which other processes of a loaded host do not change.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import click
import numpy as np

from asyncdist import TCPStore, run, weights

PROMISED = 3.0
"""Times as fast as gloo's broadcast."""
PROMISED_P99 = 2.0
"""Of a request during an update, times as long as before."""
ASK_S = 1e-3
ASKED = 1 << 18
QUIET_S = 1.0

GLOO = """
import sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
rank, size, port, mib = map(int, sys.argv[1:])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
x = torch.full((mib << 18,), 0.0)
print("ready", flush=True)
for line in sys.stdin:
    if not rank:
        x.fill_(float(line))
    dist.barrier()
    began = time.perf_counter()
    dist.broadcast(x, 0)
    dist.barrier()
    assert x[-1] == float(line)
    print(time.perf_counter() - began, flush=True)
"""


def start(*arguments: str, python: str = sys.executable) -> subprocess.Popen[str]:
    """One process, asked by lines."""
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [python, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environ
    )


def told(stream: IO[str] | None) -> str:
    """The next line."""
    assert stream is not None
    line = stream.readline()
    assert line, "a process has ended"
    return line.strip()


def ask(processes: list[subprocess.Popen[str]], line: object) -> list[str]:
    """Tell all, and hear all."""
    for process in processes:
        assert process.stdin is not None
        print(line, file=process.stdin, flush=True)
    return [told(process.stdout) for process in processes]


async def serve(port: int, label: str) -> None:
    """A server: subscribes, and tells of its requests at the end of its input, in seconds: due, late, the loop busy."""
    arrays: dict[str, Any] = {}
    requests: list[tuple[float, float, float]] = []

    async def answer() -> None:
        due_s = time.perf_counter()
        while True:
            due_s = max(due_s + ASK_S, time.perf_counter())
            before_s = time.thread_time()
            await asyncio.sleep(due_s - time.perf_counter())
            busy_s = time.thread_time() - before_s
            if arrays:
                array = arrays[f"x{len(requests) % len(arrays)}"]
                first = len(requests) // len(arrays) * ASKED % array.size
                array[first : first + ASKED].sum()
            requests.append((due_s, time.perf_counter() - due_s, busy_s))

    async with (
        TCPStore("127.0.0.1", port) as store,
        weights.subscribe("bench", into=arrays, store=store, label=label) as subscription,
    ):
        answering = asyncio.create_task(answer())
        following = asyncio.create_task(follow(subscription))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in (answering, following):
            task.cancel()
    print(json.dumps(requests), flush=True)


async def follow(subscription: weights.Subscription) -> None:
    """Take every version; the arrays change by themselves."""
    async for _version in subscription:
        pass


async def measure(mib: int, servers: int, rounds: int, gloo: str, folder: str) -> bool:
    """Run all of it; whether the promises are kept."""
    arrays = {f"x{number}": np.zeros(mib << 14, np.float32) for number in range(16)}
    times: dict[str, list[float]] = {"asyncdist": [], "gloo": [], "tmpfs": []}
    began: list[float] = []
    async with TCPStore("127.0.0.1", 0, is_master=True) as store:
        ours = [start("-m", "bench.weights", "--serve", f"{store.port}:s{n}") for n in range(servers)]
        port = str(store.port + 1)
        size = str(servers + 1)
        theirs = [start("-c", GLOO, str(n), size, port, str(mib), python=gloo) for n in range(servers + 1) if gloo]
        for process in [*ours, *theirs]:
            told(process.stdout)
        async with weights.publish("bench", store=store) as publisher:
            for number in range(rounds + 2):
                for array in arrays.values():
                    array.fill(number)
                await asyncio.sleep(QUIET_S)
                began.append(time.perf_counter())
                await publisher.commit(number, arrays)
                await weights.wait_ready("bench", number, count=servers, store=store)
                times["asyncdist"].append(time.perf_counter() - began[-1])
                if number >= 2:  # the memory of versions is new until then
                    times["tmpfs"].append(by_file(Path(folder, "weights"), arrays, servers))
                    if theirs:
                        times["gloo"].append(max(map(float, ask(theirs, number))))
        asked = np.array([row for process in ours for row in json.loads(process.communicate()[0])])
        for process in theirs:
            process.communicate()
    del times["asyncdist"][:2], began[:2]
    return report(mib, servers, times, asked, np.array(began))


def by_file(path: Path, arrays: dict[str, np.ndarray[Any, Any]], servers: int) -> float:
    """Seconds to write a new file, and for as many maps of it as there are servers."""
    began = time.perf_counter()
    new = path.with_suffix(".new")
    with new.open("wb", buffering=0) as file:
        for array in arrays.values():
            file.write(array.data)
    new.rename(path)
    with path.open("rb") as file:
        maps = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for _ in range(servers)]
    took = time.perf_counter() - began
    for one in maps:
        one.close()
    path.unlink()
    return took


def report(
    mib: int, servers: int, times: dict[str, list[float]], asked: np.ndarray[Any, Any], began: np.ndarray[Any, Any]
) -> bool:
    """Print it; whether the promises are kept."""
    kept = True
    for name, took in times.items():
        if took:
            ratio = statistics.median(other / own for other, own in zip(took, times["asyncdist"], strict=True))
            median = statistics.median(took)
            click.echo(f"{name}: {mib} MiB to {servers} servers in {median:.3f} s, {ratio:.2f} times as long as ours")
            kept &= name != "gloo" or ratio >= PROMISED
    since = asked[:, :1] - began
    during = ((since >= 0) & (since < np.array(times["asyncdist"]))).any(1)
    before = ((since < 0) & (since >= -QUIET_S)).any(1) & ~during
    (late, busy), (late_during, busy_during) = (
        np.percentile(asked[when, 1:], 99, axis=0) * 1e3 for when in (before, during)
    )
    longest = asked[during, 2].max() * 1e3
    click.echo(
        f"p99 of requests: {late:.2f} ms before, {late_during:.2f} ms during updates: {late_during / late:.2f} times"
    )
    click.echo(
        f"p99 of the loop's own work before a request: {busy:.2f} ms before, {busy_during:.2f} ms during updates, "
        f"{longest:.2f} ms at most"
    )
    return kept and bool(late_during / late <= PROMISED_P99)


@click.command()
@click.option("--mib", default=1024, show_default=True)
@click.option("--servers", default=3, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--gloo", default="", help="A Python that has torch; without one there is no such neighbor.")
@click.option("--folder", default="/dev/shm", show_default=True, help="A folder on tmpfs.")
@click.option("--serve", "server", default="", hidden=True)
def command(mib: int, servers: int, rounds: int, gloo: str, folder: str, server: str) -> None:
    """Measure, and exit with 1 if a promise is not kept."""
    if server:
        port, _, label = server.partition(":")
        run(serve(int(port), label))
        return
    raise SystemExit(not run(measure(mib, servers, rounds, gloo, folder)))


if __name__ == "__main__":
    command()
