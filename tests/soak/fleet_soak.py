"""Fleet soak: processes join, leave and are killed at random instants, while all of them sum numbers of their names.

    python tests/soak/fleet_soak.py --processes 16 --seconds 300

After each change, or several at once, it takes the time until every process that is there has summed in a world of
exactly those that are there. A process that was killed must be named by all others, and one that comes under its name
must take its place at once.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "kits"))

import click
import numpy as np

import asyncdist as dist
from asyncdist_server import ThreadedServer
from asyncdist_server.serving.config import ServerConfig

SETTLE_S = 0.2
PAUSE_S = 0.3
"""Between two changes, at most; that long after the one before the fleet is somewhere in its steps."""
LIMIT_S = 30.0
FORK = multiprocessing.get_context("fork")


class Told(NamedTuple):
    """A process has summed in a world of these members, which has formed because of `why`."""

    at_s: float
    members: tuple[str, ...]
    why: str


def run_member(port: int, name: str, most: int, tell: Connection) -> None:
    """Sum until SIGTERM; tell the parent of each world."""
    dist.run(_member(port, name, most, tell))


async def _member(port: int, name: str, most: int, tell: Connection) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    async with (
        dist.TCPStore("127.0.0.1", port) as store,
        await store.join("fleet", 1, most, None, name=name, settle=SETTLE_S) as member,
    ):
        worlds = member.worlds()
        why = ""
        async for world in worlds:
            numbers, stops = sum(map(number_of, member.members)), np.zeros(1, np.int64)
            begun = False
            try:
                while not stops[0]:  # all end their turns after the same step
                    x = np.array([number_of(name), stopping.is_set() or bool(worlds.changing)])
                    await world.all_reduce(x)
                    assert x[0] == numbers, f"{name} has {x[0]} of {member.members}"
                    stops = x[1:]
                    if not begun:
                        begun = True
                        tell.send(Told(time.monotonic(), tuple(member.members), why))
                    await asyncio.sleep(0.002)
            except (dist.PeerLostError, dist.GroupAbortedError):
                pass
            if stopping.is_set():
                return
            while not worlds.changing:  # the reason is on its way  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            why = worlds.changing


def number_of(name: str) -> int:
    """The number in a name, and so a bit of the sum."""
    return 1 << int(name.removeprefix("m"))


class Fleet:
    """The processes, by name, and what was found."""

    def __init__(self, most: int, seed: int) -> None:
        self.most = most
        self.chance = random.Random(seed)
        self.server = ThreadedServer(ServerConfig(port=0))
        self.processes: dict[str, tuple[BaseProcess, Connection]] = {}
        self.times_s: dict[str, list[float]] = defaultdict(list)
        self.problems: list[str] = []
        self.worlds = 0
        self.reasons: Counter[str] = Counter()

    def join(self) -> str:
        """Start a process, as a rule under the name of one that has gone."""
        name = self.chance.choice([f"m{number}" for number in range(self.most) if f"m{number}" not in self.processes])
        receiver, tell = FORK.Pipe(duplex=False)
        process = FORK.Process(target=run_member, args=(self.server.port, name, self.most, tell), daemon=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until it can tell what to do then
        process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        tell.close()
        self.processes[name] = process, receiver
        return f"{name} joined"

    def end(self, signum: signal.Signals) -> str:
        """End one by a signal."""
        name = self.chance.choice(sorted(self.processes))
        process, receiver = self.processes.pop(name)
        assert process.pid is not None
        os.kill(process.pid, signum)
        if signum == signal.SIGTERM:
            process.join(LIMIT_S)
            if process.exitcode:
                self.problems.append(f"{name} ended with {process.exitcode} instead of leaving")
        receiver.close()
        return f"{name} {'was lost' if signum == signal.SIGKILL else 'left'}"

    def change(self) -> tuple[str, str]:
        """Do one thing; returns which, and what others say of it."""
        kinds = ["join"] * (len(self.processes) < self.most) + ["leave", "kill"] * (len(self.processes) > 1)
        kind = self.chance.choice(kinds)
        match kind:
            case "join":
                return kind, self.join()
            case "leave":
                return kind, self.end(signal.SIGTERM)
        return kind, self.end(signal.SIGKILL)

    def settle(self) -> tuple[float, dict[str, list[str]]]:
        """Wait until all that are there have met; returns when, and why worlds formed since, by name."""
        reasons: dict[str, list[str]] = {name: [] for name in self.processes}
        at_s = 0.0
        for name, (process, receiver) in self.processes.items():
            members: tuple[str, ...] = ()
            while set(members) != set(self.processes):
                if not receiver.poll(LIMIT_S) or process.exitcode is not None:
                    self.problems.append(
                        f"{name} ({process.exitcode}) has last met {members} and not {tuple(self.processes)}"
                    )
                    return time.monotonic(), reasons
                told, members, why = receiver.recv()
                reasons[name].append(why)
                self.reasons[why.partition(" ")[2]] += bool(why)
                self.worlds += 1
            at_s = max(at_s, told)
        return at_s, reasons

    def run(self, changes: int, seconds: float) -> None:
        """Make that many changes or go on for that long, whichever ends first."""
        until_s = time.monotonic() + seconds
        for _ in range(self.most):
            self.join()
        self.settle()
        while changes > 0 and time.monotonic() < until_s and not self.problems:
            time.sleep(self.chance.uniform(0, PAUSE_S))
            done = [self.change() for _ in range(self.chance.choice([1, 1, 1, 3]))]
            changes -= len(done)
            began_s = time.monotonic()
            at_s, reasons = self.settle()
            (kind, said), *others = done
            self.times_s["several" if others else kind].append(at_s - began_s)
            if not others:
                self.problems += [
                    f"{name} says {why} and not that {said}"
                    for name, why in reasons.items()
                    if kind == "kill" and not any(said in text for text in why)
                ]

    def close(self) -> None:
        """End all that is left."""
        for process, _ in self.processes.values():
            process.kill()
            process.join()
        self.server.close()


@click.command()
@click.option("--processes", default=16)
@click.option("--seconds", default=300.0)
@click.option("--changes", default=100_000)
@click.option("--seed", default=0)
def main(processes: int, seconds: float, changes: int, seed: int) -> None:
    """Let processes come and go."""
    fleet = Fleet(processes, seed)
    try:
        fleet.run(changes, seconds)
    finally:
        fleet.close()
    for line in fleet.problems:
        click.echo(line)
    for kind, times_s in sorted(fleet.times_s.items()):
        times_s.sort()
        shown = ", ".join(
            f"{name} {1000 * times_s[int(at * (len(times_s) - 1))]:.0f} ms"
            for name, at in (("p50", 0.5), ("p99", 0.99), ("max", 1))
        )
        click.echo(f"{len(times_s)} times {kind}: {shown}")
    click.echo(f"{fleet.worlds} turns, as {dict(fleet.reasons)}; {len(fleet.problems)} problems")
    sys.exit(bool(fleet.problems))


if __name__ == "__main__":
    main()
