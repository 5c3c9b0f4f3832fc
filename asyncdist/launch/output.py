"""Workers' output: whole lines with the rank in front, never blocking the launcher.

    worker pipe -> StreamPump (reads when readable) -> LinePrefixer -> OutputWriter (one thread per descriptor)

The launcher's own stdout may be a terminal that was stopped or a pipe nobody reads, and there is no portable
non-blocking write to it (O_NONBLOCK would change the descriptor for everyone who shares it). So a thread does the
writing, and while it is behind, the pumps stop reading: then the pipes fill and the workers wait, as they would
without a launcher, but the loop keeps watching them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["MAX_LINE_BYTES", "TAIL_LINES", "LinePrefixer", "OutputWriter", "StreamPump"]

MAX_LINE_BYTES: Final = 1024 * 1024
"""A line may grow this long before it is cut: longer ones are binary data or a runaway, and memory is bounded."""

TAIL_LINES: Final = 20
"""Lines repeated for the first failure: a traceback with some context."""

MAX_TAIL_LINE_BYTES: Final = 4096
"""Of each repeated line, so that the tails of thousands of workers stay small."""

PARTIAL_LINE_S: Final = 1.0
"""An unfinished line (a prompt, a progress message) is shown after this long without news."""

READ_BYTES: Final = 64 * 1024
"""Per callback: a Linux pipe's capacity, and short enough that one flooding worker only takes its turn."""

HIGH_WATER_BYTES: Final = 4 * 1024 * 1024
"""Output waiting for the writer thread; above it the pumps stop reading."""

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")


class LinePrefixer:
    """Cuts a byte stream into lines and puts `prefix` before each. Knows nothing of encodings.

    A carriage return alone also ends a line, and is kept, so that progress bars stay on their line of a terminal.
    """

    def __init__(self, prefix: bytes, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._prefix = prefix
        self._max_line_bytes = max_line_bytes
        self._pending = b""
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)

    @property
    def has_partial(self) -> bool:
        """Whether an unfinished line is held."""
        return bool(self._pending)

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they came; return the complete lines, prefixed."""
        data = self._pending + data
        # A "\r" at the very end may be the first half of "\r\n": keep it until the next byte is known.
        searchable = len(data) - 1 if data.endswith(b"\r") else len(data)
        end = max(data.rfind(b"\n", 0, searchable), data.rfind(b"\r", 0, searchable)) + 1
        self._pending = data[end:]
        output = [self._prefixed(line) for line in _LINE.findall(data, 0, end)]
        while len(self._pending) > self._max_line_bytes:
            output.append(self._prefixed(self._pending[: self._max_line_bytes] + b"\n"))
            self._pending = self._pending[self._max_line_bytes :]
        return b"".join(output)

    def flush(self) -> bytes:
        """Return the unfinished line, finished; b"" if there is none."""
        line, self._pending = self._pending, b""
        return self._prefixed(line if line.endswith(b"\r") else line + b"\n") if line else b""

    def _prefixed(self, line: bytes) -> bytes:
        self.tail.append(line[:MAX_TAIL_LINE_BYTES].rstrip(b"\r\n"))
        return self._prefix + line


class OutputWriter:
    """Writes to one file descriptor, in order, from a thread of its own; `write` never blocks.

    When the descriptor fails (closed pipe, vanished terminal) what follows is discarded: the job goes on without a
    reader, as it would with its output in a full log.
    """

    def __init__(self, fd: int, *, high_water_bytes: int = HIGH_WATER_BYTES) -> None:
        self._fd = fd
        self._high_water_bytes = high_water_bytes
        self._loop = asyncio.get_running_loop()
        self._condition = threading.Condition()
        self._chunks: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._closing = False
        self._finished = asyncio.Event()
        self._when_drained: list[Callable[[], None]] = []
        self.error: OSError | None = None
        # A daemon thread: a write that blocks for ever must not keep a launcher alive that was told to go.
        self._thread = threading.Thread(target=self._run, name=f"asyncdist-output-{fd}", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Queue `data`."""
        if data and not self._closing:
            with self._condition:
                self._chunks.append(data)
                self._buffered_bytes += len(data)
                self._condition.notify()

    @property
    def is_full(self) -> bool:
        """Whether producers should wait for `when_drained`."""
        return self._buffered_bytes > self._high_water_bytes

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call back once, on the loop, when there is room again."""
        with self._condition:  # else the thread could drain between the question and the entry
            if self.is_full:
                self._when_drained.append(callback)
                return
        self._loop.call_soon(callback)

    async def close(self, timeout_s: float | None = None) -> bool:
        """Wait until everything queued is written, at most `timeout_s`; return whether it was."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._finished.wait()
        if self._finished.is_set():
            self._thread.join()
        return self._finished.is_set()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._chunks and not self._closing:
                    self._condition.wait()
                if not self._chunks:
                    break
                data = b"".join(self._chunks)
                self._chunks.clear()
            self._write_all(data)
            with self._condition:
                was_full = self.is_full
                self._buffered_bytes -= len(data)
            if was_full:
                self._tell_loop(self._drained)
        self._tell_loop(self._finished.set)

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self.error is None:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                self.error = error

    def _tell_loop(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed while a write was blocked
            self._loop.call_soon_threadsafe(callback)

    def _drained(self) -> None:
        if not self.is_full:
            callbacks, self._when_drained = self._when_drained, []
            for callback in callbacks:
                callback()


class StreamPump:
    """Moves one worker's stdout or stderr to a writer until end of file. Owns `fd`."""

    def __init__(self, fd: int, prefix: bytes, writer: OutputWriter) -> None:
        self._fd = fd
        self._writer = writer
        self._lines = LinePrefixer(prefix)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._eof = asyncio.Event()
        self._bytes_read = 0
        self._paused = False
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._readable)

    @property
    def tail(self) -> list[bytes]:
        """The last lines, without prefix or line end."""
        return list(self._lines.tail)

    async def drain(self, idle_s: float) -> None:
        """Wait for end of file; give up once nothing came for `idle_s` (a descendant may hold the pipe open)."""
        while not self._eof.is_set():
            before = self._bytes_read
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(idle_s):
                    await self._eof.wait()
            if self._bytes_read == before and not self._paused:
                return

    def close(self) -> None:
        """Hand over what is held and close the descriptor. Idempotent."""
        if self._fd < 0:
            return
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1
        self._flush_partial()
        self._eof.set()

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        self._bytes_read += len(data)
        self._writer.write(self._lines.feed(data))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines.has_partial:
            self._timer = self._loop.call_later(PARTIAL_LINE_S, self._flush_partial)
        if self._writer.is_full:
            self._paused = True
            self._loop.remove_reader(self._fd)
            self._writer.when_drained(self._resume)

    def _resume(self) -> None:
        self._paused = False
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._readable)

    def _flush_partial(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._writer.write(self._lines.flush())
