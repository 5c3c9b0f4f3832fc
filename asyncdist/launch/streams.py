"""A worker's two output streams: through a pipe and the launcher, or straight to a file.

    worker pipe -> StreamPump (reads when readable) -> LinePrefixer -> OutputWriter (one thread per descriptor)
                              |-> LogFile (of one worker), FilteredLog (of all of them): one thread

A pump puts the rank in front of whole lines, and never blocks the launcher. While a writer is behind, the pumps stop
reading: then the pipes fill and the workers wait, as they would without a launcher, but the loop keeps watching them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
from collections import deque
from dataclasses import dataclass
from typing import IO, Final, TypeAlias

from asyncdist.launch.writers import FilteredLog, LogFile, OutputWriter, WriterThread

__all__ = ["Destination", "Stream"]

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

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")


class LinePrefixer:
    """Cuts a byte stream into lines and puts `prefix` before each. Knows nothing of encodings.

    A carriage return alone also ends a line, and is kept, so that progress bars stay on their line of a terminal.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
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
        while len(self._pending) > MAX_LINE_BYTES:
            output.append(self._prefixed(self._pending[:MAX_LINE_BYTES] + b"\n"))
            self._pending = self._pending[MAX_LINE_BYTES:]
        return b"".join(output)

    def flush(self) -> bytes:
        """Return the unfinished line, finished; b"" if there is none."""
        line, self._pending = self._pending, b""
        return self._prefixed(line if line.endswith(b"\r") else line + b"\n") if line else b""

    def _prefixed(self, line: bytes) -> bytes:
        self.tail.append(line[:MAX_TAIL_LINE_BYTES].rstrip(b"\r\n"))
        return self._prefix + line


class StreamPump:
    """Moves one worker's stdout or stderr to a writer until end of file. Owns `fd` and closes `copy` with it.

    `writer` is None where nothing is shown: then only the last lines are kept. `copy` gets the bytes as they came, and
    `filtered` the lines that it is there for.
    """

    def __init__(
        self,
        fd: int,
        prefix: bytes,
        writer: OutputWriter | None,
        copy: LogFile | None = None,
        filtered: FilteredLog | None = None,
    ) -> None:
        self._fd = fd
        self._writer = writer
        self._copy = copy
        self._filtered = filtered
        threads = (writer, copy.thread if copy else None, filtered.thread if filtered else None)
        self._threads: list[WriterThread] = [thread for thread in threads if thread is not None]
        self._lines = LinePrefixer(prefix)
        self._prefix_bytes = len(prefix)
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
        """Hand over what is held and what the pipe holds, and close the descriptor. Idempotent."""
        if self._fd < 0:
            return
        self._loop.remove_reader(self._fd)
        with contextlib.suppress(BlockingIOError):  # once: the whole pipe, and no more from a descendant that writes on
            self._pass_on(os.read(self._fd, READ_BYTES))
        os.close(self._fd)
        self._fd = -1
        self._flush_partial()
        if self._copy is not None:
            self._copy.close()
        self._eof.set()

    def _readable(self) -> None:
        if self._pause_if_full():
            return
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        self._bytes_read += len(data)
        self._pass_on(data)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines.has_partial:
            self._timer = self._loop.call_later(PARTIAL_LINE_S, self._flush_partial)
        self._pause_if_full()

    def _pass_on(self, data: bytes) -> None:
        if self._copy is not None:
            self._copy.write(data)
        self._show(self._lines.feed(data))

    def _show(self, lines: bytes) -> None:
        if self._writer is not None:
            self._writer.write(lines)
        if self._filtered is not None and self._filtered.concerns(lines):
            self._filtered.write(_LINE.findall(lines), self._prefix_bytes)

    def _pause_if_full(self) -> bool:
        full = next((thread for thread in self._threads if thread.is_full), None)
        if full is not None and not self._paused:
            self._paused = True
            self._loop.remove_reader(self._fd)
            full.when_drained(self._resume)
        return full is not None

    def _resume(self) -> None:
        self._paused = False
        if self._fd >= 0 and not self._pause_if_full():
            self._loop.add_reader(self._fd, self._readable)

    def _flush_partial(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._show(self._lines.flush())


@dataclass(frozen=True, slots=True)
class Destination:
    """Of a stream: the terminal, a file, both (tee), or neither. `filtered` gets some of the lines as well.

    A stream for a file alone is the worker's own (`>` of a shell): nothing is lost when the launcher is killed, and the
    launcher has nothing to do with it.
    """

    terminal: OutputWriter | None = None
    file: LogFile | None = None
    filtered: FilteredLog | None = None

    @property
    def is_workers_own(self) -> bool:
        """Whether the worker writes the file."""
        return self.file is not None and self.terminal is None

    def for_child(self) -> int:
        """What subprocess is to make of it: a descriptor, or a pipe."""
        return self.file.fd if self.file is not None and self.is_workers_own else subprocess.PIPE

    def stream(self, pipe: IO[bytes] | None, prefix: bytes) -> Stream:
        """The stream of a worker that was started with `for_child`; takes over the pipe that came of it."""
        if self.file is not None and self.is_workers_own:
            return RedirectedStream(self.file)
        assert pipe is not None
        with pipe:
            fd = os.dup(pipe.fileno())
        return StreamPump(fd, prefix, self.terminal, self.file, self.filtered)

    def close(self) -> None:
        """Close the file of a worker that could not be started."""
        if self.file is not None:
            self.file.close()


class RedirectedStream:
    """A file that the worker writes by itself. Owns `file`, and keeps its last lines when it is closed."""

    def __init__(self, file: LogFile) -> None:
        self._file: LogFile | None = file
        self._tail: list[bytes] = []

    @property
    def tail(self) -> list[bytes]:
        """The last lines, once the stream is closed."""
        return self._tail

    async def drain(self, idle_s: float) -> None:
        """Nothing to do: what was written is in the file."""

    def close(self) -> None:
        """Remember the last lines and close the file. Idempotent."""
        if self._file is not None:
            file, self._file = self._file, None
            lines = LinePrefixer(b"")
            lines.feed(file.tail())
            lines.flush()
            self._tail = list(lines.tail)
            file.close()


Stream: TypeAlias = StreamPump | RedirectedStream
"""A worker's stdout or stderr, seen from the launcher."""
