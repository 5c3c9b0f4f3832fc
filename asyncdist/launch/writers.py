"""What writes the output of workers: a thread, so that a slow disk or a stopped terminal never blocks the event loop.

The launcher's own stdout may be a terminal that was stopped or a pipe that is not read, and there is no portable
non-blocking write to it (O_NONBLOCK would change the descriptor for every process that shares it).

A file that cannot be written to (a full disk, a quota, a share that has gone) must not hurt the job: what does not fit
is dropped, the first error is told once, and once there is room again a line in the file says how much is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

HIGH_WATER_BYTES: Final = 4 * 1024 * 1024
"""Output waiting for the thread; above it the producers should stop."""


MAX_TAIL_BYTES: Final = 80 * 1024
"""Read from a file's end for the report of a failure: its last lines, as many and as long as the report repeats."""

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC

Write = Callable[[bytes], object]

OnError = Callable[[Path, OSError], object]


class WriterThread:
    """Calls `write(data)` for everything that was `put`, in order for each `write`, and neighbors joined."""

    def __init__(self, name: str, high_water_bytes: int = HIGH_WATER_BYTES) -> None:
        self._high_water_bytes = high_water_bytes
        self._loop = asyncio.get_running_loop()
        self._condition = threading.Condition()
        self._waiting: dict[Write, list[bytes]] = {}
        self._buffered_bytes = 0
        self._closing = False
        self._finished = asyncio.Event()
        self._when_drained: list[Callable[[], None]] = []
        # A daemon thread: a write that blocks for ever must not keep a launcher alive that was told to go.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, write: Write, data: bytes) -> None:
        """Let the thread call `write(data)`, which must not raise."""
        if not self._closing:
            with self._condition:
                self._waiting.setdefault(write, []).append(data)
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

    def tell_loop(self, callback: Callable[[], object]) -> None:
        """From the thread: run `callback` on the event loop, unless that has gone."""
        with contextlib.suppress(RuntimeError):  # the loop was closed while a write was blocked
            self._loop.call_soon_threadsafe(callback)

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
                while not self._waiting and not self._closing:
                    self._condition.wait()
                if not self._waiting:
                    break
                waiting, self._waiting = self._waiting, {}
            for write, chunks in waiting.items():
                data = b"".join(chunks)
                write(data)
                with self._condition:
                    was_full = self.is_full
                    self._buffered_bytes -= len(data)
                if was_full:
                    self.tell_loop(self._drained)
        self.tell_loop(self._finished.set)

    def _drained(self) -> None:
        if not self.is_full:
            callbacks, self._when_drained = self._when_drained, []
            for callback in callbacks:
                callback()


class OutputWriter(WriterThread):
    """Writes to one file descriptor, in order, from a thread of its own; `write` never blocks.

    When the descriptor fails (closed pipe, vanished terminal) what follows is discarded: the job goes on without a
    reader, as it would with its output in a full log.
    """

    def __init__(self, fd: int, *, high_water_bytes: int = HIGH_WATER_BYTES) -> None:
        self._fd = fd
        self.error: OSError | None = None
        super().__init__(f"asyncdist-output-{fd}", high_water_bytes)

    def write(self, data: bytes) -> None:
        if data:
            self.put(self._write_all, data)

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self.error is None:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                self.error = error


class LogFile:
    """A new file. Owns its descriptor, which a worker may be given as well; `thread` writes what `write` is given.

    Raises OSError if the file cannot be made; an existing one is never touched. `on_error` is called on the event loop
    with the path and the first error of writing.
    """

    def __init__(self, path: Path, thread: WriterThread | None, on_error: OnError) -> None:
        self.path = path
        self.thread = thread
        # For appending, so that a file that is cut short while it is written (logrotate) gets no hole.
        self.fd = os.open(path, _FLAGS, 0o666)
        self._on_error = on_error
        self._told = False
        self._missing_bytes = 0
        self._why = ""

    def write(self, data: bytes) -> None:
        """Queue `data`, which is written as it is."""
        if data and self.thread is not None:
            self.thread.put(self._write, data)

    def tail(self) -> bytes:
        """The last `MAX_TAIL_BYTES` at most, from a whole line on; b"" if the file cannot be read."""
        try:
            size = os.fstat(self.fd).st_size
            data = os.pread(self.fd, MAX_TAIL_BYTES, max(0, size - MAX_TAIL_BYTES))
        except OSError:
            return b""
        return data if size <= MAX_TAIL_BYTES else data[data.find(b"\n") + 1 :]

    def close(self) -> None:
        """Close the descriptor, once everything queued is written."""
        if self.thread is None:
            os.close(self.fd)
        else:
            self.thread.put(self._close, b"")

    def _close(self, nothing: bytes) -> None:
        with contextlib.suppress(OSError):  # some file systems tell a full disk only here
            os.close(self.fd)

    def _write(self, data: bytes) -> None:
        if self._missing_bytes:
            note = f"\n[asyncdist run: {self._missing_bytes} bytes are missing here: {self._why}]\n".encode()
            if self._write_all(note) < len(note):
                self._missing_bytes += len(data)
                return
            self._missing_bytes = 0
        self._missing_bytes += len(data) - self._write_all(data)

    def _write_all(self, data: bytes) -> int:
        """Write what can be written; return how much that was."""
        written = 0
        while written < len(data):
            try:
                written += os.write(self.fd, memoryview(data)[written:])
            except OSError as error:
                self._why = error.strerror or str(error)
                self._tell(error)
                break
        return written

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            if self.thread is not None:
                self.thread.tell_loop(lambda: self._on_error(self.path, error))


class FilteredLog:
    """One file for lines of several workers: those that contain one of some texts."""

    def __init__(self, file: LogFile, needles: Iterable[str]) -> None:
        self._file = file
        self._needles = [needle.encode(errors="surrogateescape") for needle in needles]

    @property
    def thread(self) -> WriterThread | None:
        """The thread that writes the file."""
        return self._file.thread

    def concerns(self, text: bytes) -> bool:
        """Whether any of the lines in `text` may count: most output need not be cut into lines."""
        return any(needle in text for needle in self._needles)

    def write(self, lines: Iterable[bytes], prefix_bytes: int) -> None:
        """Queue those of the lines that count; what is found in their first `prefix_bytes` does not."""
        self._file.write(
            b"".join(line for line in lines if any(line.find(needle, prefix_bytes) >= 0 for needle in self._needles))
        )

    def close(self) -> None:
        """Close the file, once everything queued is written."""
        self._file.close()
