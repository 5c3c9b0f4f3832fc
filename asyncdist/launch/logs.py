"""The log files of one launcher: the run's folder, a folder for each attempt and worker, and what is said about them.

    <log dir>/<run id>/attempt_<n>/<local rank>/stdout.log, stderr.log     and error.json, if the script writes it
    <log dir>/<run id>/attempt_<n>/filtered_stdout.log, filtered_stderr.log

A run never writes into another's folder: where the name is taken it gets a number. Each of several nodes has a folder
of its own, for they may share the disk. A log directory that cannot be used is an error before the job starts. What
goes wrong later is said, and the output goes to the terminal instead.
"""

from __future__ import annotations

import enum
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncdist.errors import LaunchError
from asyncdist.launch.streams import Destination
from asyncdist.launch.writers import FilteredLog, LogFile, OutputWriter, WriterThread

__all__ = ["LogSpec", "Logs", "parse_local_ranks", "parse_needles", "parse_streams"]

_STREAMS: Final = re.compile(r"[0-3]", re.ASCII)
_STREAMS_BY_RANK: Final = re.compile(r"\d{1,4}:[0-3](?:,\d{1,4}:[0-3])*", re.ASCII)
_RANKS: Final = re.compile(r"\d{1,4}(?:,\d{1,4})*", re.ASCII)


class Streams(enum.IntFlag):
    """A worker's standard streams, as torchrun numbers them."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


StreamsByRank = Streams | Mapping[int, Streams]


def parse_streams(text: str) -> StreamsByRank:
    """Parse `0` (none) to `3` (both) for all workers, or `0:1,3:2` by local rank, where the others have none.

    Raises ValueError for anything else, and for a local rank that is named twice.
    """
    text = text.strip()
    if _STREAMS.fullmatch(text):
        return Streams(int(text))
    if not _STREAMS_BY_RANK.fullmatch(text):
        raise ValueError(
            f"{text!r} is neither 0 (none), 1 (stdout), 2 (stderr) or 3 (both), nor these by local rank (0:3,1:2)"
        )
    streams: dict[int, Streams] = {}
    for entry in text.split(","):
        rank, _, number = entry.partition(":")
        if int(rank) in streams:
            raise ValueError(f"{text!r} names local rank {int(rank)} twice")
        streams[int(rank)] = Streams(int(number))
    return streams


def parse_local_ranks(text: str) -> frozenset[int] | None:
    """Parse `0,2`; None, all of them, for an empty text. Raises ValueError for anything else."""
    text = text.replace(" ", "")
    if not text:
        return None
    if not _RANKS.fullmatch(text):
        raise ValueError(f"{text!r} is not a list of local ranks (0,2)")
    return frozenset(int(rank) for rank in text.split(","))


def parse_needles(text: str) -> tuple[str, ...]:
    """Parse a list of texts to look for, separated by commas, where `,,` is a comma. Empty ones are left out."""
    pieces = text.replace(",,", "\0").split(",")  # an argument cannot hold a NUL of its own
    return tuple(piece.replace("\0", ",") for piece in pieces if piece)


@dataclass(frozen=True, slots=True)
class LogSpec:
    """Where output goes. The default: to the terminal, and nothing into files.

    `redirects` go to a file only, `tee` to a file and to the terminal. `log_dir` is where a folder is made for each
    run; without one, and with something to put there, it is made where temporary files are. Of the workers that are
    not in `shown_ranks` (None: all) nothing goes to the terminal. Lines of stdout and of stderr that are teed and
    contain one of `stdout_needles` or `stderr_needles` are also collected in one file for all workers.
    """

    log_dir: str | None = None
    redirects: StreamsByRank = Streams.NONE
    tee: StreamsByRank = Streams.NONE
    shown_ranks: frozenset[int] | None = None
    stdout_needles: tuple[str, ...] = ()
    stderr_needles: tuple[str, ...] = ()

    def teed(self, local_rank: int) -> Streams:
        """Streams of a worker that are copied to a file."""
        return _of(self.tee, local_rank)

    def filed(self, local_rank: int) -> Streams:
        """Streams of a worker that go to a file."""
        return _of(self.redirects, local_rank) | self.teed(local_rank)

    def shown(self, local_rank: int) -> Streams:
        """Streams of a worker that go to the terminal."""
        if self.shown_ranks is not None and local_rank not in self.shown_ranks:
            return Streams.NONE
        return (Streams.ALL & ~self.filed(local_rank)) | self.teed(local_rank)

    @property
    def any_filed(self) -> bool:
        """Whether any worker's stream goes to a file."""
        return any(
            streams if isinstance(streams, Streams) else any(streams.values()) for streams in (self.redirects, self.tee)
        )

    @property
    def filters_nothing(self) -> bool:
        """Whether there are texts to look for, and nothing teed to look at."""
        tee = self.tee if isinstance(self.tee, Streams) else any(self.tee.values())
        return bool(self.stdout_needles or self.stderr_needles) and not tee

    def absent_ranks(self, nproc: int) -> list[int]:
        """The local ranks named here that a node with `nproc` workers has not."""
        named = set(self.shown_ranks or ())
        for streams in (self.redirects, self.tee):
            if not isinstance(streams, Streams):
                named |= set(streams)
        return sorted(rank for rank in named if rank >= nproc)


def _of(streams: StreamsByRank, local_rank: int) -> Streams:
    return streams if isinstance(streams, Streams) else streams.get(local_rank, Streams.NONE)


MAX_NAME_CHARACTERS: Final = 100
"""Of a run's id in the name of its folder: file systems take 255 bytes, and a number may follow."""

MAX_SAME_NAMES: Final = 10_000
"""Folders of runs of one name; so many are a mistake, and each start tries all of them."""

_NAMES: Final = {Streams.OUT: "stdout", Streams.ERR: "stderr"}


def run_folder_name(run_id: str, node_rank: int, nnodes: int) -> str:
    """The name of a run's folder: its id without what is special in a path, and the node where there are several."""
    name = re.sub(r"[^\w.-]", "_", run_id, flags=re.ASCII)[:MAX_NAME_CHARACTERS].lstrip(".") or "run"
    return name if nnodes == 1 else f"{name}_node{node_rank}"


class Logs:
    """What `spec` asks for, on one node. `say` prints a line of the launcher's own."""

    def __init__(self, spec: LogSpec, stdout: OutputWriter, stderr: OutputWriter, say: Callable[[str], None]) -> None:
        self._spec = spec
        self._terminals = {Streams.OUT: stdout, Streams.ERR: stderr}
        self._say = say
        self._thread: WriterThread | None = None
        self._run: Path | None = None
        self._attempt: Path | None = None
        self._filtered: dict[Streams, FilteredLog] = {}
        self._failed = False

    def check(self) -> None:
        """Make the log directory. Raises LaunchError if that cannot be done, or nothing can be put there."""
        if self._spec.log_dir is None or self._discards:
            return
        path = Path(self._spec.log_dir)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise LaunchError(f"the log directory {path} is not a directory") from None
        except OSError as error:
            raise LaunchError(f"cannot make the log directory {path}: {error.strerror}") from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise LaunchError(f"cannot write to the log directory {path}")

    def open(self, run_id: str, node_rank: int, nnodes: int, nproc: int) -> None:
        """Make the run's folder, if there is anything to put there, and say where it is."""
        spec = self._spec
        if absent := spec.absent_ranks(nproc):
            self._say(f"local ranks {absent} have log options but no worker on this node, which has {nproc}")
        if spec.filters_nothing:
            self._say("the filters of lines look at teed output, and there is none: --tee 3 says what is")
        if self._discards or (spec.log_dir is None and not spec.any_filed):
            return
        try:
            root = tempfile.mkdtemp(prefix="asyncdist_") if spec.log_dir is None else spec.log_dir
            self._run = _new_folder(Path(root).absolute(), run_folder_name(run_id, node_rank, nnodes))
        except OSError as error:
            self._failed_to("make a folder for logs", error)
            return
        self._say(f"logs in {self._run}")
        if not spec.any_filed:
            self._say("no output goes there: --redirects 3 or --tee 3 say what does")

    def start_attempt(self, number: int) -> None:
        """From now on workers are those of this attempt."""
        self.end_attempt()
        if self._run is None:
            return
        folder = self._run / f"attempt_{number}"
        try:
            folder.mkdir()
        except OSError as error:
            self._failed_to(f"make {folder}", error)
            return
        self._attempt = folder
        for stream, needles in ((Streams.OUT, self._spec.stdout_needles), (Streams.ERR, self._spec.stderr_needles)):
            if needles:
                file = self._new_file(folder / f"filtered_{_NAMES[stream]}.log", self._the_thread())
                if file is not None:
                    self._filtered[stream] = FilteredLog(file, needles)

    def end_attempt(self) -> None:
        """The attempt's workers have ended."""
        for filtered in self._filtered.values():
            filtered.close()
        self._filtered = {}
        self._attempt = None

    def destinations(self, local_rank: int) -> tuple[Destination, Destination]:
        """Where a worker's stdout and stderr go, in the attempt that was started last."""
        folder = self.folder(local_rank)
        if folder is not None:
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                self._failed_to(f"make {folder}", error)
                folder = None
        return self._destination(Streams.OUT, local_rank, folder), self._destination(Streams.ERR, local_rank, folder)

    def folder(self, local_rank: int) -> Path | None:
        """The worker's folder in this attempt; None if it has none."""
        return None if self._attempt is None else self._attempt / str(local_rank)

    def files(self, local_rank: int) -> list[str]:
        """What there is to read about a worker of this attempt."""
        folder = self.folder(local_rank)
        names = ("stderr.log", "stdout.log", "error.json")
        return [] if folder is None else [str(folder / name) for name in names if (folder / name).exists()]

    async def close(self, timeout_s: float | None) -> None:
        """Wait until all is written, at most `timeout_s`."""
        self.end_attempt()
        if self._thread is not None:
            await self._thread.close(timeout_s)

    @property
    def _discards(self) -> bool:
        """/dev/null as a log directory means no files, as with torchrun: everything is shown."""
        return self._spec.log_dir == os.devnull

    def _destination(self, stream: Streams, local_rank: int, folder: Path | None) -> Destination:
        spec = self._spec
        shown = stream in spec.shown(local_rank)
        file = None
        if folder is not None and stream in spec.filed(local_rank):
            thread = self._the_thread() if shown else None
            file = self._new_file(folder / f"{_NAMES[stream]}.log", thread)
        if file is None and (spec.shown_ranks is None or local_rank in spec.shown_ranks):
            shown = True  # also what was to go to a file that could not be made
        filtered = self._filtered.get(stream) if shown and stream in spec.teed(local_rank) else None
        return Destination(self._terminals[stream] if shown else None, file, filtered)

    def _new_file(self, path: Path, thread: WriterThread | None) -> LogFile | None:
        try:
            return LogFile(path, thread, self._on_error)
        except OSError as error:
            self._failed_to(f"make {path}", error)
            return None

    def _the_thread(self) -> WriterThread:
        if self._thread is None:
            self._thread = WriterThread("asyncdist-logs")
        return self._thread

    def _on_error(self, path: Path, error: OSError) -> None:
        self._once(f"cannot write {path}: {error.strerror}; what does not fit is missing there, the job goes on")

    def _failed_to(self, what: str, error: OSError) -> None:
        self._once(f"cannot {what}: {error.strerror}; what was to go there goes to the terminal")

    def _once(self, text: str) -> None:
        """A full disk has something to say about every file."""
        if not self._failed:
            self._failed = True
            self._say(text)


def _new_folder(root: Path, name: str) -> Path:
    """Make a folder of that name for this user alone, with a number where the name is taken."""
    for number in range(1, MAX_SAME_NAMES + 1):
        folder = root / (name if number == 1 else f"{name}_{number}")
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(0, f"{MAX_SAME_NAMES} runs are called {name}", str(root))
