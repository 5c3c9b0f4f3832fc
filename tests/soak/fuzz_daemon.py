"""The daemon that is fuzzed, in a process of its own, and clients of other jobs that check all it tells them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jobs import free_port
from torch_wire_kit import VALIDATE, blob, number

from asyncdist.store import TCPStore
from asyncdist_server.torch.wire import Query

TOKEN: Final = "token-of-the-fuzzed-daemon-which-is-long-enough"
STUCK_S: Final = 30.0
"""A connection that the daemon neither answers nor closes for so long is a fault."""
PAUSE_S: Final = 0.002
"""What a healthy client rests between two requests."""


@dataclass
class Checked:
    """What the healthy clients saw."""

    answers: int = 0
    """How many were checked, all of them right."""
    slowest_s: float = 0.0


class Daemon:
    """The process under test: native clients and torch's on ports of their own."""

    def __init__(self, process: asyncio.subprocess.Process, errors: Any, torch_ports: list[int]) -> None:
        self.process = process
        self.port = 0
        self.fuzzed_torch_port, self.healthy_torch_port = torch_ports
        self._errors = errors

    def resident_bytes(self) -> int:
        """VmRSS."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return 1024 * int(found[1])

    async def counted_bytes(self) -> int:
        """What it holds for clients, as it counts it."""
        async with TCPStore("127.0.0.1", self.port, token=TOKEN, namespace="healthy") as store:
            counted: int = (await store.status())["memory_bytes"]
            return counted

    def said(self) -> str:
        """The errors it logged."""
        self._errors.seek(0)
        text: str = self._errors.read().decode(errors="replace")
        return text


@contextlib.asynccontextmanager
async def running_daemon() -> AsyncIterator[Daemon]:
    """A daemon, which must end by itself with code 0 and without having logged an error."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCDIST_")}
    torch_ports = [free_port(), free_port()]
    options = ["--port", "0", "--log-level", "error", *(f"--torch-port={port}" for port in torch_ports)]
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "asyncdist_server", *options),
            env={**clean, "ASYNCDIST_TOKEN": TOKEN},
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
        daemon = Daemon(process, errors, torch_ports)
        try:
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
            assert " ready on " in line, daemon.said()
            daemon.port = int(line.split()[-1].rpartition(":")[2])
            yield daemon
            assert process.returncode is None, f"the daemon ended with {process.returncode}:\n{daemon.said()}"
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(STUCK_S):
                code = await process.wait()
            assert code == 0, f"the daemon ended with {code}:\n{daemon.said()}"
            assert daemon.said() == "", daemon.said()
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


async def healthy_native_client(daemon: Daemon, checked: Checked, seed: int) -> None:
    """Two clients of one job, who check all they are told, for ever."""
    rng = random.Random(seed)
    where: dict[str, Any] = {"token": TOKEN, "namespace": "healthy", "timeout": STUCK_S}
    model: dict[str, bytes] = {}
    count = 0

    def lost() -> None:
        raise AssertionError("the daemon lost its data")

    async with (
        TCPStore("127.0.0.1", daemon.port, **where, on_incarnation_change=lost) as one,
        TCPStore("127.0.0.1", daemon.port, **where) as other,
    ):
        while True:
            began = time.monotonic()
            key, value = f"key/{rng.randrange(50)}", rng.randbytes(rng.choice((1, 50, 3000)))
            waiting = asyncio.ensure_future(other.get(f"new/{count}"))
            await one.set(key, value)
            model[key] = value
            asked = rng.choice(list(model))
            count += 1
            assert await other.get(asked) == model[asked]
            assert await one.add("count", 1) == count
            assert await other.compare_set(asked, b"something else", b"x") == model[asked]
            await one.queue_push("queue", value)
            assert await other.queue_pop("queue") == value
            assert not await other.check(["never"])
            await one.set(f"new/{count - 1}", value)
            assert await waiting == value
            assert await one.delete_key(f"new/{count - 1}")
            assert await other.num_keys() == len(model) + 1
            checked.answers += 7
            checked.slowest_s = max(checked.slowest_s, time.monotonic() - began)
            await asyncio.sleep(PAUSE_S)


async def healthy_torch_client(daemon: Daemon, checked: Checked, seed: int) -> None:
    """One client on a port of its own, who checks all it is told, for ever."""
    rng = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.healthy_torch_port)
    try:
        writer.write(VALIDATE)
        count = 0
        while True:
            began = time.monotonic()
            value = rng.randbytes(rng.choice((1, 50, 3000)))
            count += 1
            writer.write(bytes([Query.SET]) + blob(b"/k") + blob(value) + bytes([Query.GET]) + blob(b"/k"))
            writer.write(bytes([Query.ADD]) + blob(b"/n") + number(1))
            writer.write(bytes([Query.CHECK]) + number(2) + blob(b"/k") + blob(b"/never"))
            async with asyncio.timeout(STUCK_S):
                assert await reader.readexactly(8 + len(value)) == blob(value)
                assert await reader.readexactly(8) == number(count)
                assert await reader.readexactly(1) == b"\x01"
            checked.answers += 3
            checked.slowest_s = max(checked.slowest_s, time.monotonic() - began)
            await asyncio.sleep(PAUSE_S)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
