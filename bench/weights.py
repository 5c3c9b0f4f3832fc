"""New weights for servers of one host while they answer, beside gloo's broadcast and files on tmpfs, in one run.

    python -m bench.weights --mib 1024 --servers 3 --gloo /path/to/a/python/with/torch

The trainer and the servers are processes. An update begins with arrays in the trainer's own memory, and ends when every
server has the new ones: for gloo when a barrier behind the broadcast has ended, for files when each server has mapped
the file that took the place of the last (`mmap`, nothing is read). All three alternate; all weights change each time.
Then, with each of the first two and with nothing, each server is asked for a small sum over its weights every
millisecond, by itself: what is told is how long that takes from when it was due, before and during updates.
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
    """A server: subscribes, and answers each line with the lateness of its requests since the last, in seconds."""
    arrays: dict[str, Any] = {}
    late: list[float] = []

    async def answer() -> None:
        due_s = time.perf_counter()
        while True:
            due_s += ASK_S
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if arrays:
                sum(float(array[:1024].sum()) for array in arrays.values())
            late.append(time.perf_counter() - due_s)
            due_s = max(due_s, time.perf_counter() - ASK_S)

    async with (
        TCPStore("127.0.0.1", port) as store,
        weights.subscribe("bench", into=arrays, store=store, label=label) as subscription,
    ):
        answering = asyncio.create_task(answer())
        following = asyncio.create_task(follow(subscription))
        print("ready", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            lines, late = late, []
            print(json.dumps(lines), flush=True)
        for task in (answering, following):
            task.cancel()


async def follow(subscription: weights.Subscription) -> None:
    """Take every version; the arrays change by themselves."""
    async for _version in subscription:
        pass


async def measure(mib: int, servers: int, rounds: int, gloo: str, folder: str) -> bool:
    """Run all of it; whether the promises are kept."""
    arrays = {f"x{number}": np.zeros(mib << 14, np.float32) for number in range(16)}
    times: dict[str, list[float]] = {"asyncdist": [], "gloo": [], "tmpfs": []}
    latencies: dict[str, list[float]] = {"before": [], "during": []}
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
                ask(ours, "forget")
                await asyncio.sleep(QUIET_S)
                before = ask(ours, "before")
                began = time.perf_counter()
                await publisher.commit(number, arrays)
                await weights.wait_ready("bench", number, count=servers, store=store)
                took = time.perf_counter() - began
                during = ask(ours, "during")
                if number >= 2:  # the memory of versions is new until then
                    times["asyncdist"].append(took)
                    latencies["before"] += [late for line in before for late in json.loads(line)]
                    latencies["during"] += [late for line in during for late in json.loads(line)]
                    times["tmpfs"].append(by_file(Path(folder, "weights"), arrays, servers))
                    if theirs:
                        times["gloo"].append(max(map(float, ask(theirs, number))))
        for process in [*ours, *theirs]:
            process.communicate()
    return report(mib, servers, times, latencies)


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


def report(mib: int, servers: int, times: dict[str, list[float]], latencies: dict[str, list[float]]) -> bool:
    """Print it; whether the promises are kept."""
    kept = True
    for name, took in times.items():
        if took:
            ratio = statistics.median(other / own for other, own in zip(took, times["asyncdist"], strict=True))
            median = statistics.median(took)
            click.echo(f"{name}: {mib} MiB to {servers} servers in {median:.3f} s, {ratio:.2f} times as long as ours")
            kept &= name != "gloo" or ratio >= PROMISED
    p99 = {when: float(np.percentile(late, 99)) * 1e3 for when, late in latencies.items()}
    ratio = p99["during"] / p99["before"]
    click.echo(
        f"p99 of requests: {p99['before']:.2f} ms before, {p99['during']:.2f} ms during updates: {ratio:.2f} times"
    )
    return kept and ratio <= PROMISED_P99


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
