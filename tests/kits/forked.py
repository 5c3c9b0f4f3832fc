"""Python processes that are forked from one that has imported asyncdist: they start in a hundredth of the time.

`forked.Popen` is `subprocess.Popen` for `python -c CODE` and `python -m MODULE`; `forked.run` waits for its end. What
it starts is a child of this process, with an environment, a directory, cores and standard streams of its own, to be
waited for and killed as any. Where a start itself is tested (importing, launching, spawning), or what an interpreter
does as its modules go, start an interpreter, as this does where there is no Linux.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import inspect
import itertools
import json
import linecache
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any, AnyStr, Final

__all__ = ["Popen", "run"]

REQUEST_BYTES: Final = 1 << 17
"""Of arguments and environment, at most."""

READ_AT_START: Final = ("PYTHON", "OMP_", "OPENBLAS_", "MALLOC_", "LD_")
"""Variables that an interpreter and its libraries read as they start: what forks must have been started with them."""

SERVERS: Final = 2
"""That fork by turns: each hashes strings in its own way, and ranks must not rely on the order of a set."""

PIPES: Final = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
PR_SET_CHILD_SUBREAPER: Final = 36


class _Server:
    """A process that has imported asyncdist, and forks."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    def fork(self, request: bytes, streams: Sequence[int]) -> int:
        """Start a process; its pid."""
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # of those below this process, it gets the orphans
        try:
            socket.send_fds(self._control, [request], streams)
            return int(self._control.recv(REQUEST_BYTES))
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        """End the server, and nothing that it has forked."""
        self._control.close()
        self._process.wait()


_lock = threading.Lock()
_turns = itertools.cycle(range(SERVERS))


@functools.cache
def _server(turn: int, at_start: tuple[tuple[str, str], ...]) -> _Server:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(READ_AT_START)}
    return _Server(environ | dict(at_start))


class Popen(subprocess.Popen[AnyStr]):
    """As `subprocess.Popen`; of its options, those for streams, `env`, `cwd` and `start_new_session`."""

    if sys.platform == "linux":

        def _execute_child(self, *arguments: Any) -> None:
            """What `subprocess.Popen` leaves to each system: start the process, and close its ends of the pipes."""
            signature = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
            given = signature.bind(self, *arguments).arguments
            assert given["args"][0] == sys.executable
            assert not any(given[name] for name in ("preexec_fn", "pass_fds", "shell"))
            environ = dict(os.environ if given["env"] is None else given["env"])
            at_start = tuple(item for item in sorted(environ.items()) if item[0].startswith(READ_AT_START))
            folder, cores = os.path.abspath(given["cwd"] or ""), [*os.sched_getaffinity(0)]
            request = [given["args"][1:], environ, folder, cores, given["start_new_session"]]
            theirs = (given["p2cread"], given["c2pwrite"], given["errwrite"])
            streams = [own if fd < 0 else fd for own, fd in enumerate(theirs)]
            try:
                with _lock:
                    self.pid = _server(next(_turns), at_start).fork(json.dumps(request).encode(), streams)
                self._child_created = True
            finally:
                self._close_pipe_fds(*(given[name] for name in PIPES))  # type: ignore[attr-defined]


def run(
    command: Sequence[str], timeout_s: float, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What became of `command`, as `subprocess.run` with captured text; TimeoutExpired after `timeout_s`."""
    with Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _serve(control: socket.socket) -> list[str]:
    """Fork at every request; gives, in what was forked, the arguments after `python`."""
    import encodings.idna  # noqa: F401  # with the first name that is looked up

    import uvloop  # noqa: F401

    import asyncdist  # noqa: F401
    import asyncdist_server.cli  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it is for whoever has started this
    gc.collect()
    gc.freeze()
    while True:
        request, streams, _, _ = socket.recv_fds(control, REQUEST_BYTES, 3)
        if not request:
            os._exit(0)
        between = os.fork()
        if not between:
            between = os.getpid()
            if not os.fork():
                break
            os._exit(0)
        for fd in streams:
            os.close(fd)
        os.waitpid(between, 0)
    while os.getppid() == between:  # for a moment yet
        os.sched_yield()
    arguments: list[str]
    arguments, environ, folder, cores, new_session = json.loads(request)
    try:
        if new_session:
            os.setsid()
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(folder)
        os.sched_setaffinity(0, cores)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    finally:
        control.send(b"%d" % os.getpid())
        control.close()
    return arguments


def _run(option: str, program: str) -> None:
    """Run `-c CODE` or `-m MODULE` as the main module."""
    if option == "-c":
        sys.argv[0], sys.path[0] = option, ""
        sys.modules["__main__"] = ModuleType("__main__")
        if sys.version_info >= (3, 13):  # from then on the interpreter shows the lines of such programs in its messages
            linecache.cache["<string>"] = (len(program), None, program.splitlines(keepends=True), "<string>")
        exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        assert option == "-m"
        sys.path[0] = os.getcwd()
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _end(status: int, imported_before: Collection[str]) -> None:
    """End as an interpreter does, without taking apart what was imported before the fork.

    To take that apart writes to nearly every page that the processes share: nine tenths of a short process's time.
    Whatever the program has made, and nothing else, is let go, so that a `__del__` still speaks.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if len(os.listdir("/proc/self/task")) > 1:
        return  # daemonic threads may still use everything: the interpreter knows how to stop them
    for name in sys.modules.keys() - imported_before - {"__main__"}:
        del sys.modules[name]
    if (program := vars(sys.modules["__main__"])) is not globals():
        program.clear()
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # the interpreter tells of it
    os._exit(status)


def _main() -> None:
    option, program, *sys.argv[1:] = _serve(socket.socket(fileno=int(sys.argv[1])))
    imported_before = {*sys.modules}
    status = 0
    try:
        _run(option, program)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    _end(status & 0xFF, imported_before)
    sys.exit(status)


if __name__ == "__main__":
    _main()
