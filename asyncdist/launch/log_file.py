"""Files that hold workers' output: written by the launcher beside the terminal, or by the worker itself.

A file that cannot be written to (a full disk, a quota, a share that has gone) must not hurt the job: what does not fit
is dropped, the first error is told once, and once there is room again a line in the file says how much is missing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from asyncdist.launch.writer_thread import WriterThread

__all__ = ["MAX_TAIL_BYTES", "FilteredLog", "LogFile"]

MAX_TAIL_BYTES: Final = 80 * 1024
"""Read from a file's end for the report of a failure: its last lines, as many and as long as the report repeats."""

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC

OnError = Callable[[Path, OSError], object]


class LogFile:
    """A new file. Owns its descriptor, which a worker may be given as well; `thread` writes what `write` is given.

    Raises OSError if the file cannot be made; an existing one is never touched. `on_error` is called on the event loop
    with the path and the first error of writing.
    """

    def __init__(self, path: Path, thread: WriterThread | None, on_error: OnError) -> None:
        self.path = path
        self.thread = thread
        # For appending, so that whoever cuts the file short while it is written (logrotate) gets no hole in it.
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
        """Who writes the file."""
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
