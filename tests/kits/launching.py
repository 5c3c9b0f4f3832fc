"""Running `asyncdist run` in a process of its own, with small scripts as workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked

ONE_AFTER_ANOTHER = """
import runpy, sys

for path in sys.argv[1:]:
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
"""

DEADLINE_S = 120.0
"""A test that waits longer has failed; nothing here takes more than a few seconds, unless others have the cores."""


def write_script(folder: Path, source: str, name: str = "worker.py") -> str:
    """Write a worker script; return its path."""
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return str(path)


def clean_environment(**changes: str) -> dict[str, str]:
    """This process's environment without what a launcher would read from it."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ASYNCDIST_", "TORCHELASTIC_", "MASTER_", "OMP_"))
        and name not in ("RANK", "WORLD_SIZE")
    }
    return environment | changes


WITH_LIMITS = """
import importlib, sys
from asyncdist.cli import main

for limit in sys.argv.pop(1).split():
    name, _, value = limit.partition("=")
    module, _, constant = name.partition(":")
    module = importlib.import_module(module)
    assert hasattr(module, constant), limit
    setattr(module, constant, float(value))
main(prog_name="asyncdist")
"""


def launcher(*arguments: str, limits: str = "", **changes: str) -> subprocess.Popen[bytes]:
    """Start `asyncdist run` with stdout and stderr piped; forked, as to import it takes longer than most jobs here.

    `limits`, as in "asyncdist.some.module:SOME_S=0.5", replaces constants that a test would have to wait for.
    """
    program = ["-c", WITH_LIMITS, limits] if limits else ["-m", "asyncdist"]
    # A test run in a shell's background has SIGINT ignored, and would hand that down; what is forked does not.
    heeding: dict[str, Any] = {} if sys.platform == "linux" else {"preexec_fn": _heed_interrupts}
    return forked.Popen(
        [sys.executable, *program, "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(**changes),
        **heeding,
    )


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def running(*arguments: str, limits: str = "", **changes: str) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher that is killed if the test leaves it running."""
    with launcher(*arguments, limits=limits, **changes) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run `asyncdist run` to its end."""
    with running(*arguments, **changes) as process:
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    return subprocess.CompletedProcess(arguments, process.returncode, stdout.decode(), stderr.decode())


def run_one_after_another(ranks: int, folder: Path, scripts: Sequence[Path]) -> subprocess.CompletedProcess[str]:
    """Run scripts in one start of `ranks` processes, each in a world of its own: importing takes longer than they do.

    `folder` is for a script that runs the others; the traceback of one that fails names its file.
    """
    driver = write_script(folder, ONE_AFTER_ANOTHER, "one_after_another.py")
    return run("--nproc-per-node", str(ranks), driver, *map(str, scripts))


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that another process or thread brings about."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {DEADLINE_S:g} s for {what}"
        time.sleep(0.01)


def pids_in(folder: Path, count: int) -> list[int]:
    """Wait for `count` files that workers named after their pids with suffix .pid; return those pids."""
    until(lambda: len(list(folder.glob("*.pid"))) >= count, f"{count} pid files")
    return [int(path.stem) for path in folder.glob("*.pid")]


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not merely waiting to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


@contextmanager
def daemon(port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A store daemon that can be killed."""
    command = [sys.executable, "-m", "asyncdist_server", f"--port={port}", *options]
    process: subprocess.Popen[Any] = forked.Popen(command, stdout=subprocess.PIPE, env=clean_environment())
    with process:
        try:
            output = process.stdout
            assert output is not None
            until(lambda: b" ready on " in output.readline(), "the daemon")
            yield process
        finally:
            process.kill()
