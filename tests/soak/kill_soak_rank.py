"""One rank of the kill soak: mixed traffic until a rank is killed, then what the survivors have heard and have left.

    python kill_soak_rank.py VICTIM SEED

Prints `ready`, and at the end one line of JSON. Idle ranks call something once their standard input has ended.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

import asyncdist as dist

SURVIVOR_TAG = 900
IDLE_SHARE = 0.2
STUCK_S = 30.0


def open_files() -> dict[str, str]:
    """Descriptors of this process and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found


def mapped() -> int:
    """Mappings of shared memory."""
    return Path("/proc/self/maps").read_text().count("memfd:asyncdist")


class Traffic:
    """Endless programs; every result is checked."""

    def __init__(self, group: dist.ProcessGroup, victim: int) -> None:
        self.group = group
        self.victim = victim
        self.pairs: dict[tuple[int, int], dist.ProcessGroup] = {}
        for low in range(group.size):
            for high in range(low + 1, group.size):
                made = dist.new_group([low, high])
                if isinstance(made, dist.ProcessGroup):
                    self.pairs[low, high] = made

    def programs(self, rng: random.Random) -> dict[str, Coroutine[Any, Any, None]]:
        """Some of them; the same collectives on all ranks."""
        group = self.group
        collectives: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "small": lambda: self.all_reduce(group, 8, 1),
            "large": lambda: self.all_reduce(group, 200_000, 2),
            "broadcast": self.broadcast,
            "stream": self.stream,
            "arrays": self.arrays,
        }
        chosen = {name: program() for name, program in collectives.items() if rng.random() < 0.6}
        for (low, high), pair in self.pairs.items():
            if self.victim in (low, high):
                chosen[f"pair {low} {high}"] = self.all_reduce(pair, 500, 7)
                peer = low + high - group.rank
                for count in (10, 150_000):
                    chosen[f"messages {low} {high} {count}"] = self.messages(peer, count)
        return chosen

    async def all_reduce(self, group: dist.ProcessGroup, count: int, tag: int) -> None:
        while True:
            data = np.full(count, group.rank)
            await group.all_reduce(data, tag=tag)
            assert (data == group.size * (group.size - 1) // 2).all()

    async def broadcast(self) -> None:
        number = 0
        while True:
            root = number % self.group.size
            data = np.full(300_000, self.group.rank)
            await self.group.broadcast(data, root, tag=3)
            assert (data == root).all()
            number += 1

    async def stream(self) -> None:
        while True:
            data = np.full(400_000, self.group.rank)
            async for chunk in self.group.broadcast_stream(data, self.victim, chunk_bytes=1 << 18, tag=4):
                assert (chunk.data == self.victim).all()

    async def arrays(self) -> None:
        while True:
            gathered = await self.group.all_gather_array(np.arange(self.group.rank + 1), tag=5)
            assert [len(array) for array in gathered] == list(range(1, self.group.size + 1))

    async def messages(self, peer: int, count: int) -> None:
        while True:
            await self.exchange(peer, count, count)

    async def exchange(self, peer: int, count: int, tag: int) -> None:
        """One message each way."""
        got = np.zeros(count)
        sent = self.group.isend(np.full(count, float(self.group.rank)), peer, tag)
        await self.group.recv(got, peer, tag)
        assert (got == peer).all()
        await sent

    async def go_on(self) -> None:
        """Survivors go on with each other, in the world by messages and in groups of their own."""
        for (low, high), pair in self.pairs.items():
            if self.victim not in (low, high):
                for _ in range(5):
                    await self.exchange(low + high - self.group.rank, 40_000, SURVIVOR_TAG)
                    data = np.ones(5000)
                    await pair.all_reduce(data)
                    assert (data == 2).all()


async def heard(errors: dict[str, Any], name: str, program: Coroutine[Any, Any, None]) -> None:
    """Note what ends a program."""
    try:
        await program
    except dist.DistError as error:
        errors[name] = [type(error).__name__, getattr(error, "rank", None), time.time(), str(error)[:200]]


async def call_idly(errors: dict[str, Any], group: dist.ProcessGroup, victim: int) -> None:
    """Nothing was under way when the rank was lost; then calls, one after the other."""
    await asyncio.to_thread(sys.stdin.read)

    async def awaited(work: dist.Work[Any]) -> None:
        await work

    for name, call in (
        ("all_reduce", lambda: group.all_reduce(np.ones(3))),
        ("isend", lambda: group.isend(np.ones(1_000_000), victim)),
        ("recv", lambda: group.recv(np.ones(1), victim)),
    ):
        try:
            await heard(errors, name, awaited(call()))
        except dist.DistError as error:
            errors[name] = [type(error).__name__, getattr(error, "rank", None), time.time(), str(error)[:200]]


async def main(victim: int, seed: int) -> dict[str, Any]:
    """Until the victim is gone; what became of this rank."""
    before = open_files()
    unhandled: list[str] = []
    errors: dict[str, Any] = {}
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unhandled.append(str(context)[:500]))
    group = await dist.init_process_group(timeout=60)
    traffic = Traffic(group, victim)
    await group.barrier()
    rng = random.Random(seed)
    print("ready", flush=True)
    tasks = {}
    if rng.random() < IDLE_SHARE and group.rank != victim:
        await call_idly(errors, group, victim)
    else:
        programs = traffic.programs(rng)
        tasks = {name: asyncio.create_task(heard(errors, name, each)) for name, each in programs.items()}
        await asyncio.wait(tasks.values(), timeout=STUCK_S)
    hung = [name for name, task in tasks.items() if not task.done()]
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    await traffic.go_on()
    began_s = time.monotonic()
    try:
        await group.close()
    except dist.DistError as error:
        errors["close"] = [type(error).__name__, getattr(error, "rank", victim), time.time(), str(error)[:200]]
    closing_s = time.monotonic() - began_s
    del group, traffic
    gc.collect()
    return {
        "errors": errors,
        "hung": hung,
        "closing_s": closing_s,
        "unhandled": unhandled,
        "tasks": len(asyncio.all_tasks()) - 1,
        "mapped": mapped(),
        "open": [what for fd, what in open_files().items() if before.get(fd) != what and "asyncdist" in what],
        "sockets": sum("socket:" in what for what in open_files().values())
        - sum("socket:" in what for what in before.values()),
        "threads": [thread.name for thread in threading.enumerate() if "asyncdist" in thread.name],
    }


if __name__ == "__main__":
    print(json.dumps(dist.run(main(int(sys.argv[1]), int(sys.argv[2])))), flush=True)
