"""Where one stream of a worker goes, and the stream itself: through a pipe and the launcher, or straight to a file."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from typing import IO, TypeAlias

from asyncdist.launch.log_file import FilteredLog, LogFile
from asyncdist.launch.output import LinePrefixer, OutputWriter, StreamPump

__all__ = ["Destination", "RedirectedStream", "Stream"]


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
