"""Child processes that cannot outlive the benchmark, which cores they run on, and how much memory they use.

A child has its own process group, a parent-death signal and a bounded stop.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

PR_SET_PDEATHSIG = 1
STOP_TIMEOUT_S = 5.0
"""How long a child may take to leave after SIGTERM before it is killed."""
ERROR_TAIL_BYTES = 2000
"""How much of a dead child's output an error message repeats."""
FILE_LIMIT = 65536

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux; elsewhere the runner's cleanup must do)."""
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def pin_to_core(index: int) -> None:
    """Bind this process to core ``index`` mod the number of cores it may use."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[index % len(cores)]})


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one (bounded): a thousand clients need as many descriptors."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    soft = FILE_LIMIT if hard == resource.RLIM_INFINITY else min(hard, FILE_LIMIT)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Child:
    """One child process, its output kept in an unnamed file for error messages.

    ``core`` pins the child before it starts. ``stdout`` is a pipe when ``ready_line`` is asked for: then `read_line`
    returns what the child prints first.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        core: int | None = None,
        ready_line: bool = False,
    ) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()

        def prepare() -> None:
            die_with_parent()
            raise_file_limit()
            if core is not None:
                pin_to_core(core)

        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if ready_line else self._log,
            stderr=self._log,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            preexec_fn=prepare,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def read_line(self) -> str:
        """Return the next line of the child's standard output (empty when it ended)."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode(errors="replace").strip()

    def output_tail(self) -> str:
        """Return the last bytes the child printed, for an error message."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - ERROR_TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the child: wait while it leaves by itself, then SIGTERM, then SIGKILL to its whole group."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is not None:
                break
            self._signal_group(sign)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                continue
        self._signal_group(signal.SIGKILL)  # whatever the child left behind in its own group
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the child to leave by itself; True when it did."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _signal_group(self, sign: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, sign)
        except (ProcessLookupError, PermissionError):
            return


RESET_PEAK: Final = "5"
"""What /proc/self/clear_refs takes for: let VmHWM start again from what is resident now."""
_SEGMENT = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) .*/memfd:asyncdist")


def status_bytes(field: str, pid: int | None = None) -> int:
    """Return ``VmHWM`` (peak) or ``VmRSS`` (present resident memory) of a process, this one by default, in bytes.

    0 where the system does not say.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid or os.getpid()}/status").read_text(encoding="ascii").splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


class PeakMemory:
    """How much more memory than now was ever resident from here on."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text(RESET_PEAK, encoding="ascii")
        self._begin_bytes = status_bytes("VmHWM")

    def growth_bytes(self) -> int:
        """Return the growth since this object was made."""
        return status_bytes("VmHWM") - self._begin_bytes


def own_segment_bytes() -> int:
    """Return the bytes of shared segments this process may write: those it made itself."""
    total = 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            match = _SEGMENT.match(line)
            if match and "w" in match[3]:
                total += int(match[2], 16) - int(match[1], 16)
    return total


def pin_threads(cores: set[int], pid: int | None = None) -> None:
    """Bind every thread of a process (this one by default) to ``cores``."""
    if not hasattr(os, "sched_setaffinity"):
        return
    for thread in os.listdir(f"/proc/{pid or os.getpid()}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)
