"""Hosts that vanish without a word, and ranks that only seem to: two network namespaces with a cable between them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT_S = 2.0
LATE_S = 20.0
"""A busy machine; without the limit it would be 15 minutes with data under way."""

ADDRESSES = ("10.213.0.1", "10.213.0.2")
NOBODY = "02:00:00:00:00:99"

RANK = """
import asyncio, sys, time
import numpy as np
import asyncdist as dist

busy = sys.argv[1] == "busy"

async def main():
    group = await dist.init_process_group(timeout=60)
    x = np.ones(4 << 20, np.uint8)
    await group.barrier()
    print("ready", flush=True)
    try:
        while busy:
            await group.all_reduce(x, dist.ReduceOp.MAX)
        await group.recv(x, 1 - group.rank)
    except dist.DistError as error:
        print("lost", getattr(error, "rank", None), error, flush=True)
        group.abort()

dist.run(main())
"""

STOPPED = """
import asyncio, os, signal, sys
import numpy as np
import asyncdist as dist

async def main():
    async with dist.init_process_group(timeout=60) as group:
        x = np.full(16 << 20, group.rank, np.uint8)
        await group.barrier()
        print("ready", os.getpid(), flush=True)
        if group.rank == 0:
            await asyncio.to_thread(sys.stdin.readline)
            await group.send(x, 1)
            print("sent", flush=True)
        else:
            await group.recv(x, 0)
            print("received", int(x.sum()), flush=True)

dist.run(main())
"""


def ip(*arguments: str) -> None:
    """Run ip."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


class Hosts:
    """Two of them, 0 and 1."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = [f"adist{os.getpid()}-{number}" for number in (0, 1)]
        cable = f"ad{os.getpid()}"
        self._ends = list(zip(self._names, (f"{cable}a", f"{cable}b"), reversed(ADDRESSES), strict=True))
        self._processes: list[subprocess.Popen[str]] = []

    def build(self) -> None:
        """Namespaces and a cable."""
        for name in self._names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        (first, one, _), (second, other, _) = self._ends
        ip("link", "add", one, "netns", first, "type", "veth", "peer", "name", other, "netns", second)
        for (name, device, _), address in zip(self._ends, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")

    def cut_off(self) -> None:
        """From now on what each sends goes to a card that is not there: it reaches nobody, and nobody says so."""
        for name, device, other in self._ends:
            ip("-n", name, "neighbor", "replace", other, "lladdr", NOBODY, "dev", device, "nud", "permanent")

    def start(self, script: str, *arguments: str) -> list[subprocess.Popen[str]]:
        """Run a rank on each."""
        file = self._folder / "rank.py"
        file.write_text(script)
        common = {
            **os.environ,
            "WORLD_SIZE": "2",
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": "29411",
            "ASYNCDIST_TOKEN": "the-token-of-silent-hosts-which-is-long-enough",
            "ASYNCDIST_KEEPALIVE_S": str(LIMIT_S),
        }
        for rank, name in enumerate(self._names):
            command = ["ip", "netns", "exec", name, sys.executable, str(file), *arguments]
            self._processes.append(
                subprocess.Popen(
                    command,
                    env={**common, "RANK": str(rank)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        return self._processes

    def remove(self) -> None:
        """End everything."""
        for process in self._processes:
            process.kill()
            process.communicate()
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=30)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts, removed at the end."""
    if sys.platform != "linux" or os.geteuid() or shutil.which("ip") is None:
        pytest.skip("needs root and ip, to make network namespaces")
    made = Hosts(tmp_path)
    try:
        try:
            made.build()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr}")
        yield made
    finally:
        made.remove()


def line_of(process: subprocess.Popen[str], word: str) -> str:
    """The first line that begins with a word."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith(word):
            return line
    raise AssertionError(f"no line began with {word!r}: {''.join(seen)}")


@pytest.mark.slow("waits for keep-alives")
@pytest.mark.parametrize("what", ["busy", "idle"])
def test_a_host_that_is_cut_off_is_named_on_both_sides(hosts: Hosts, what: str) -> None:
    ranks = hosts.start(RANK, what)
    for process in ranks:
        line_of(process, "ready")
    hosts.cut_off()
    began_s = time.monotonic()
    for rank, process in enumerate(ranks):
        words = line_of(process, "lost").split()
        assert words[1] == str(1 - rank), words
    assert time.monotonic() - began_s < LATE_S


@pytest.mark.slow("waits for longer than keep-alives")
def test_a_rank_that_is_stopped_is_not_lost(hosts: Hosts) -> None:
    """Its kernel answers for it, although a large message is on its way and finds no room."""
    ranks = hosts.start(STOPPED)
    pids = [int(line_of(process, "ready").split()[1]) for process in ranks]
    os.kill(pids[1], signal.SIGSTOP)
    try:
        assert ranks[0].stdin is not None
        ranks[0].stdin.write("go\n")
        ranks[0].stdin.flush()
        time.sleep(2.5 * LIMIT_S)  # what is tested is that nothing happens
    finally:
        os.kill(pids[1], signal.SIGCONT)
    assert line_of(ranks[0], "sent")
    assert line_of(ranks[1], "received").split() == ["received", "0"]
