"""A store daemon in a process of its own that can be killed, stopped, continued and started again on its port."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from types import TracebackType
from typing import Self

from jobs import free_port

from asyncdist_server.journal.journal_thread import FAILPOINT_VARIABLE

READY_S = 60.0
"""A machine that runs other tests as well may need seconds to start an interpreter."""


class DaemonProcess:
    """The daemon at a fixed port of 127.0.0.1, whichever process it is at the moment."""

    def __init__(self, *arguments: str, program: tuple[str, ...] = ("-m", "asyncdist_server")) -> None:
        self.port = free_port()
        self.kills = 0
        self.started_at = 0.0
        self.ready_at = 0.0
        self.outages: list[tuple[float, float]] = []
        """From when to when nothing was answered."""
        self.doomed = False
        """Whether it will die by itself, at a failpoint."""
        self._arguments = (*program, "--port", str(self.port), *arguments)
        self._process: asyncio.subprocess.Process | None = None
        self._errors, path = tempfile.mkstemp()
        os.unlink(path)
        self._down_since = 0.0

    @property
    def pid(self) -> int:
        """The process that it is at the moment."""
        assert self._process is not None
        return self._process.pid

    async def spawn(self, failpoint: str = "") -> None:
        """Start a process, perhaps one that dies at a failpoint, without waiting until it is ready."""
        self.doomed = bool(failpoint)
        self.started_at = time.monotonic()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCDIST_")}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self._arguments,
            env={**clean, FAILPOINT_VARIABLE: failpoint} if failpoint else clean,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._errors,
        )

    async def ready(self) -> None:
        """Wait until the process serves."""
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(READY_S):
            line = await self._process.stdout.readline()
        if b" ready on " not in line:
            raise RuntimeError(f"the daemon did not start: {line!r}\n{self.said()}")
        self.ready_at = time.monotonic()
        if self._down_since:
            self.outages.append((self._down_since, self.ready_at))

    async def start(self) -> None:
        """Start a process and wait until it serves."""
        await self.spawn()
        await self.ready()

    async def kill(self) -> None:
        """Kill the process as `kill -9` does, and wait until it is gone."""
        assert self._process is not None
        if self._process.returncode is not None and not self.doomed:
            raise RuntimeError(f"the daemon ended by itself with {self._process.returncode}\n{self.said()}")
        self.kills += 1
        if not self._down_since or self.ready_at > self._down_since:
            self._down_since = time.monotonic()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()

    async def ended(self) -> None:
        """Wait until a doomed process has died."""
        assert self._process is not None
        async with asyncio.timeout(READY_S):
            await self._process.wait()

    def stop(self) -> None:
        """Stop the process as a debugger or an overloaded host does."""
        assert self._process is not None
        self._down_since = time.monotonic()
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let a stopped process continue."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self.ready_at = time.monotonic()
        self.outages.append((self._down_since, self.ready_at))

    def said(self) -> str:
        """The end of what all processes wrote to standard error."""
        size = os.fstat(self._errors).st_size
        return os.pread(self._errors, 4000, max(0, size - 4000)).decode(errors="replace")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(signal.SIGTERM if kind is None else signal.SIGKILL)
            await self._process.communicate()
        os.close(self._errors)
