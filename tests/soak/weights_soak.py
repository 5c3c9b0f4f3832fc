"""A fleet of servers that come, go and are killed while trainers commit weights, and are killed as well.

    python tests/soak/weights_soak.py --minutes 5 --servers 16 --seed 1

Each server is a process that looks again and again at what it serves: that all of it is of one version, by a sum that
the trainer put beside it. Half of them share memory, the others are told to use TCP. Every second a trainer commits a
version of which a tenth has changed. The program fails if a server ever serves parts of two versions, if one that
joins while others serve is not ready after 2 s (`--ready`), or if no version is committed for 10 s. It prints what the
trainers have sent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from asyncdist import TCPStore, run, weights
from asyncdist.weights.members import members_of, view_of
from asyncdist.weights.state import read

sys.path.insert(0, str(Path(__file__).parents[1] / "kits"))

import forked

NAME = "policy"
ELEMENTS = 384 << 10  # of 8 bytes, in each of two arrays
SILENCE_S = 10.0


def model(version: int) -> dict[str, np.ndarray[Any, Any]]:
    """The weights of a version, of which a tenth differ from those of the version before, and their sum."""
    arrays = {}
    for name in ("first", "second"):
        array = np.random.default_rng(len(name)).integers(0, 1 << 40, ELEMENTS, np.int64)
        part = ELEMENTS // 10
        for changed in range(max(0, version - 9), version + 1):
            array[changed % 10 * part : (changed % 10 + 1) * part] += changed
        arrays[name] = array
    return {**arrays, "check": np.array([version, sum(int(array.sum()) for array in arrays.values())])}


def whole(arrays: dict[str, Any]) -> int:
    """The version that these arrays are of. Raises AssertionError unless they are of one."""
    version, total = (int(value) for value in arrays["check"])
    assert sum(int(arrays[name].sum()) for name in ("first", "second")) == total, f"parts of two versions, at {version}"
    return version


def say(**facts: Any) -> None:
    """Tell the program that started this process."""
    print(json.dumps(facts), flush=True)


async def serve(port: int, label: str) -> None:
    """Subscribe, and look at what is served, until killed, or until the standard input ends."""
    arrays: dict[str, Any] = {}
    async with (
        TCPStore("127.0.0.1", port) as store,
        weights.subscribe(NAME, into=arrays, store=store, label=label) as subscription,
    ):
        joined_s = time.monotonic() if await weights.ready(NAME, store=store) else 0.0  # else there is nothing yet
        work = (_take_all(subscription, joined_s), _look(arrays), _stdin_ends())
        tasks = [asyncio.create_task(one) for one in work]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _take_all(subscription: weights.Subscription, joined_s: float) -> None:
    async for version in subscription:
        if joined_s:
            say(ready_s=time.monotonic() - joined_s, version=version.number)
            joined_s = 0.0


async def _look(arrays: dict[str, Any]) -> None:
    while True:
        if arrays:
            await asyncio.to_thread(whole, dict(arrays))
        await asyncio.sleep(random.uniform(0, 0.1))


async def _stdin_ends() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


async def train(port: int, every_s: float) -> None:
    """Commit a version again and again, until killed."""
    async with TCPStore("127.0.0.1", port) as store, weights.publish(NAME, store=store) as publisher:
        version = max([0, publisher.version or 0])
        while True:
            version += 1
            began_s = time.monotonic()
            try:
                await publisher.commit(version, await asyncio.to_thread(model, version))
                took_s = time.monotonic() - began_s
                say(committed=version, took_s=took_s, bytes_given=publisher.bytes_given)
            except weights.WeightsError as error:
                say(failed=version, why=str(error))
            await asyncio.sleep(max(0.0, began_s + every_s - time.monotonic()))


class Fleet:
    """The processes, and what they have said."""

    def __init__(self, port: int, ready_s: float) -> None:
        self.port = port
        self.limit_s = ready_s
        self.ready: list[float] = []
        self.commits: list[float] = []
        self.failed = 0
        self.bytes_given: dict[int, int] = {}
        self.committed = 0
        self.committed_at_s = time.monotonic()
        self.problems: list[str] = []
        self.ending: set[int] = set()
        self._readers: set[asyncio.Task[None]] = set()

    async def start(self, *arguments: str, **environ: str) -> subprocess.Popen[bytes]:
        """Start one of this program's other processes."""
        process: subprocess.Popen[bytes] = forked.Popen(
            [sys.executable, "-m", "weights_soak", "--port", str(self.port), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ},
        )
        reader = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stdout
        )
        task = asyncio.create_task(self._read(process, reader, pipe, arguments))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        return process

    async def _read(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        pipe: asyncio.ReadTransport,
        arguments: tuple[str, ...],
    ) -> None:
        errors = b""
        async for line in reader:
            if line.startswith(b"{"):
                self._hear(process.pid, json.loads(line))
            else:
                errors += line
        pipe.close()
        assert process.stdin is not None
        process.stdin.close()
        code = await asyncio.to_thread(process.wait)
        if process.pid not in self.ending or code not in (0, -9):
            self.problems.append(f"{' '.join(arguments)} ended with {code}: {errors[-3000:].decode()}")

    def _hear(self, pid: int, facts: dict[str, Any]) -> None:
        if "ready_s" in facts:
            self.ready.append(facts["ready_s"])
            if facts["ready_s"] > self.limit_s:
                self.problems.append(f"ready {facts['ready_s']:.2f} s after it had joined")
        elif "committed" in facts:
            self.committed, self.committed_at_s = facts["committed"], time.monotonic()
            self.commits.append(facts["took_s"])
            self.bytes_given[pid] = facts["bytes_given"]
        else:
            self.failed += 1
            self.problems.append(f"version {facts['failed']}: {facts['why']}")

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """End it at once."""
        self.ending.add(process.pid)
        process.kill()

    def leave(self, process: subprocess.Popen[bytes]) -> None:
        """Have it end in order, as a server does that is told to."""
        self.ending.add(process.pid)
        assert process.stdin is not None
        process.stdin.close()

    async def end(self) -> None:
        """Wait for the last words."""
        await asyncio.gather(*self._readers)


async def soak(options: argparse.Namespace) -> int:
    """Run the fleet; the number of problems."""
    chance = random.Random(options.seed)
    async with TCPStore("127.0.0.1", 0, is_master=True) as store:
        fleet = Fleet(store.port, options.ready)
        trainer = await fleet.start("--train", "--every", str(options.every))
        servers: list[subprocess.Popen[bytes]] = []
        numbers = iter(range(1 << 30))
        joins = kills = leaves = trainers = 0

        async def join() -> None:
            number = next(numbers)
            transport = "tcp" if number % 2 else "auto"
            servers.append(await fleet.start("--serve", f"s{number}", ASYNCDIST_TRANSPORT=transport))

        for _ in range(options.servers // 2):
            await join()
        until_s = time.monotonic() + 60 * options.minutes
        while time.monotonic() < until_s and not fleet.problems:
            await asyncio.sleep(chance.uniform(0, 2 * options.pause))
            fate = chance.random()
            if len(servers) < 2 or (fate < 0.5 and len(servers) < options.servers):
                joins += 1
                await join()
            elif fate < 0.75:
                kills += 1
                fleet.kill(servers.pop(chance.randrange(len(servers))))
            elif fate < 0.95:
                leaves += 1
                fleet.leave(servers.pop(chance.randrange(len(servers))))
            else:
                trainers += 1
                fleet.kill(trainer)
                trainer = await fleet.start("--train", "--every", str(options.every))
            if time.monotonic() - fleet.committed_at_s > SILENCE_S:
                members = await members_of(view_of(store, NAME))
                text = f"nothing was committed for {SILENCE_S:g} s, since version {fleet.committed}: {members}"
                fleet.problems.append(f"{text}, {await read(view_of(store, NAME))}")
        for process in [*servers, trainer]:
            fleet.kill(process)
        await fleet.end()
    given = sum(fleet.bytes_given.values())
    print(
        f"{len(fleet.commits)} commits up to version {fleet.committed}, {max(fleet.commits, default=0):.2f} s at most; "
        f"{joins} joins, {leaves} leaves, {kills} kills, {trainers} trainers killed; ready after "
        f"{max(fleet.ready, default=0):.2f} s at most ({len(fleet.ready)} servers); trainers sent {given >> 20} MiB, "
        f"{given / max(1, len(fleet.commits)) / (1 << 20):.2f} MiB a commit"
    )
    for problem in fleet.problems:
        print("PROBLEM:", problem)
    return len(fleet.problems)


def main(arguments: list[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--servers", type=int, default=16, help="at most (default 16)")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between commits (default 1)")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two events, on average (default 0.5)")
    parser.add_argument("--ready", type=float, default=2.0, help="seconds until a server must be ready (default 2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    with contextlib.suppress(KeyboardInterrupt):
        if options.serve:
            run(serve(options.port, options.serve))
            return 0
        if options.train:
            run(train(options.port, options.every))
            return 0
        return run(soak(options))
    return 1


if __name__ == "__main__":
    sys.exit(main())
