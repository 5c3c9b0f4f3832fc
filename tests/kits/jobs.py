"""Ranks as real processes, for integration tests."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import forked

PRELUDE = """
import asyncio, os, signal, sys, time
import numpy as np
import asyncdist as dist
"""
OURS = ("ASYNCDIST_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GLOO_", "TORCHELASTIC_")


NOTICES = ("ranks are here; waiting", "keeps the store for up to")
"""What ranks say where all is well: for whom they wait, and for whom they stay."""


def complaints(said: str) -> str:
    """What a rank has said, less its notices."""
    return "\n".join(line for line in said.splitlines() if not any(notice in line for notice in NOTICES))


@dataclass
class Ended:
    """A rank that has ended."""

    rank: int
    returncode: int
    stdout: str
    stderr: str


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago; the system gives it to nobody who does not ask for it."""
    first_given = 32_768
    with contextlib.suppress(OSError):
        first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, max(first_given, 12_000))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def start_rank(
    code: str, rank: int, world_size: int, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start one rank that runs `code` (with asyncio, np, dist and others imported)."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return forked.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        env={
            **inherited,
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "error",
            **(environ or {}),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_ranks(code: str, world_size: int, environ: Mapping[str, str] | None = None) -> list[subprocess.Popen[str]]:
    """Start all ranks, meeting at a free port unless `environ` says where."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [start_rank(code, rank, world_size, {**where, **(environ or {})}) for rank in range(world_size)]


def finish(ranks: Sequence[subprocess.Popen[str]], timeout_s: float = 60.0) -> list[Ended]:
    """Wait for all ranks; kill them when the time is over."""
    deadline_s = time.monotonic() + timeout_s
    ended = []
    try:
        for rank, process in enumerate(ranks):
            stdout, stderr = process.communicate(timeout=max(0.1, deadline_s - time.monotonic()))
            ended.append(Ended(rank, process.returncode, stdout, stderr))
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return ended


def run_ranks(
    code: str, world_size: int, environ: Mapping[str, str] | None = None, timeout_s: float = 60.0
) -> list[Ended]:
    """Run a job whose ranks must all succeed."""
    ended = finish(start_ranks(code, world_size, environ), timeout_s)
    for rank in ended:
        assert rank.returncode == 0, f"rank {rank.rank} exited with {rank.returncode}:\n{rank.stderr}"
    return ended


@contextlib.contextmanager
def daemon(*options: str) -> Iterator[str]:
    """A store daemon of its own process; gives host:port."""
    process = forked.Popen(
        [sys.executable, "-m", "asyncdist_server", "--port", "0", *options], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        yield next(word for word in ready.split() if ":" in word and word[-1].isdigit())
    finally:
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0
