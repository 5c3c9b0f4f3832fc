"""`asyncdist.spawn`: N processes from one program, as torch.multiprocessing.spawn.

`fn` and `args` reach the children by multiprocessing's own pickle, from this program to its own children; nothing
else is pickled: a child's traceback comes back as text, its result as the objects of `all_gather_object` do.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final, Literal, overload

import asyncdist_server
from asyncdist.arrays import objects
from asyncdist.concurrency.loop import run
from asyncdist.concurrency.trace import warn_of_misspelt
from asyncdist.errors import LaunchError
from asyncdist.launch.config import DEFAULT_GRACE_S, MAX_PROCESSES_PER_NODE, Endpoint, parse_endpoint
from asyncdist.launch.exec_guard import die_with_parent
from asyncdist.launch.failure import is_consequence
from asyncdist.launch.worker import NodePlace, Roster, worker_environment
from asyncdist_server.wire.auth import load_token

MAX_TRACEBACK_BYTES: Final = 32 * 1024
"""Of a child's traceback, from its end."""

_KILL_WAIT_S: Final = 5.0

_RESULT: Final = b"result"
_TRACEBACK: Final = b"traceback"


class SpawnContext:
    """The processes of one `spawn`. `processes` are multiprocessing's, in rank order."""

    def __init__(self, hosted: asyncdist_server.ThreadedServer | None) -> None:
        self.processes: list[BaseProcess] = []
        self.results: list[Any] = []
        """Each rank's return value, in rank order; None for a rank that failed."""
        self._pipes: list[Connection | None] = []  # None: read
        self._tracebacks: list[str] = []
        self._hosted = hosted
        self._failed: int | None = None

    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid or 0 for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait for the processes; return True when all have ended well, False if `timeout` seconds passed first.

        At the first failure the others get `grace_period` seconds (3 by default) to end by themselves, then SIGTERM
        and as long again, then SIGKILL; then LaunchError is raised, with the traceback of the first failure, its rank
        and its exit code (128 + n for signal n). Blocks; call it from a thread where an event loop runs.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while True:
            # Asked before looking: one that ends in between is still in the list, and seen on the next round.
            running = [process for process in self.processes if process.exitcode is None]
            if self._look() is not None or not running:
                break
            remaining_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            awaited: list[Connection | int] = [pipe for pipe in self._pipes if pipe is not None]
            awaited += [process.sentinel for process in running]
            ready = multiprocessing.connection.wait(awaited, remaining_s)
            if not ready:
                return False
            for rank, pipe in enumerate(self._pipes):
                if pipe in ready:
                    self._read(rank)
        if self._failed is None:
            self._release()
            return True
        by_themselves = self._end(DEFAULT_GRACE_S if grace_period is None else grace_period)
        self._release()
        failed = self._first_cause(by_themselves)
        raise _launch_error(failed, self.processes[failed], self._tracebacks[failed])

    def _first_cause(self, ranks: Sequence[int]) -> int:
        """The rank that failed first, but one of `ranks` that says no such thing if that says that another failed."""
        assert self._failed is not None
        consequences = [is_consequence(text.encode().splitlines()) for text in self._tracebacks]
        causes = (rank for rank in ranks if not consequences[rank])
        return next(causes, self._failed) if consequences[self._failed] else self._failed

    def terminate(self) -> None:
        """End all processes now (SIGKILL) and free what belongs to them. Idempotent."""
        self._end(None)
        self._release()

    def __enter__(self) -> SpawnContext:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.terminate()

    def _look(self) -> int | None:
        """The rank that failed first, remembered; of several seen at once one that was killed, as the others react."""
        if self._failed is None:
            failed = [rank for rank, process in enumerate(self.processes) if process.exitcode not in (None, 0)]
            self._failed = min(failed, key=lambda rank: (self.processes[rank].exitcode or 0) > 0, default=None)
        return self._failed

    def _end(self, grace_s: float | None) -> list[int]:
        """End all processes; return the ranks that failed before anything ended them."""
        steps: list[tuple[float, Callable[[BaseProcess], None]]] = []
        if grace_s is not None:
            steps = [(grace_s, lambda process: None), (grace_s, lambda process: process.terminate())]
        failed: list[int] = []
        for wait_s, act in [*steps, (_KILL_WAIT_S, lambda process: process.kill())]:
            for process in self.processes:
                if process.exitcode is None:
                    act(process)
            deadline_s = time.monotonic() + wait_s
            for process in self.processes:
                process.join(max(0.0, deadline_s - time.monotonic()))
            if not failed:  # in the first step nothing is done to them
                failed = [rank for rank, process in enumerate(self.processes) if process.exitcode]
        return failed

    def _read(self, rank: int) -> None:
        """Read what the child has left for us, a result or a traceback, if it has left anything."""
        pipe, self._pipes[rank] = self._pipes[rank], None
        assert pipe is not None
        with pipe, contextlib.suppress(EOFError, OSError):
            if pipe.poll():
                ended_well, data = pipe.recv_bytes() == _RESULT, pipe.recv_bytes()
                if ended_well:
                    self.results[rank] = objects.decode(memoryview(data))
                else:
                    self._tracebacks[rank] = data.decode(errors="replace")

    def _release(self) -> None:
        for rank, pipe in enumerate(self._pipes):
            if pipe is not None:
                self._read(rank)
        if self._hosted is not None:
            self._hosted.close()
            self._hosted = None


@overload
def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: Literal[True] = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> list[Any]: ...
@overload
def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    *,
    join: Literal[False],
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext: ...
def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | list[Any]:
    """Run `fn(local_rank, *args)` in `nprocs` processes whose environment makes `init_process_group()` work.

    An `async def` is run by `asyncdist.run` there. The store is hosted by this process (in a thread) until the children
    are joined; with ASYNCDIST_STORE set, that daemon is used. `fn` and `args` must be picklable unless `start_method`
    is "fork"; `fn` must be importable by the children, so a script guards its own start with
    `if __name__ == "__main__"`. `join=True` waits and returns what the ranks returned, in rank order; `join=False`
    returns a `SpawnContext` whose `join` must be called, and which has `results` then. No child outlives this process.
    Results are such as `all_gather_object` takes: arrays, numbers, text, bytes, and lists or dicts of these.

    Raises LaunchError for the first child that fails, or returns something else (see `SpawnContext.join`); ValueError
    and TypeError for wrong arguments. Blocks while it joins: call it in a program's main function, not on an event
    loop.
    """
    if not 1 <= nprocs <= MAX_PROCESSES_PER_NODE:
        raise ValueError(f"nprocs must be between 1 and {MAX_PROCESSES_PER_NODE}, got {nprocs}")
    if not callable(fn):
        raise TypeError(f"fn must be callable, not {type(fn).__name__}")
    if not isinstance(args, tuple | list):
        raise TypeError(f"args must be a tuple of what fn gets after its rank, not {type(args).__name__}")
    multiprocess = multiprocessing.get_context(start_method)
    place, hosted = _place(nprocs)
    context = SpawnContext(hosted)
    # The kernel's death signal follows the parent's *thread*, and under "forkserver" the parent is another process.
    direct = start_method != "forkserver" and threading.current_thread() is threading.main_thread()
    parent_pid = os.getpid() if direct else None
    try:
        for local_rank in range(nprocs):
            environment = _changed(worker_environment(place, local_rank, attempt=0, max_restarts=0))
            reader, writer = multiprocess.Pipe(duplex=False)
            context._pipes.append(reader)
            context._tracebacks.append("")
            context.results.append(None)
            with writer:
                process = multiprocess.Process(  # type: ignore[attr-defined]  # every context has it
                    target=_child,
                    args=(fn, local_rank, args, environment, writer, parent_pid),
                    name=f"rank {local_rank}",
                    daemon=daemon,
                )
                process.start()
            context.processes.append(process)
    except BaseException:
        context.terminate()
        raise
    if not join:
        return context
    with context:
        context.join()
    return context.results


def _place(nprocs: int) -> tuple[NodePlace, asyncdist_server.ThreadedServer | None]:
    """Where the children are, and the store if it is hosted here."""
    warn_of_misspelt(os.environ)
    token = load_token(os.environ)
    run_id = secrets.token_hex(4)
    store_text = os.environ.get("ASYNCDIST_STORE", "")
    hosted: asyncdist_server.ThreadedServer | None = None
    if store_text:
        store = parse_endpoint(store_text)
    else:
        token = secrets.token_urlsafe(32)
        hosted = asyncdist_server.serve_in_thread("127.0.0.1", 0, token=token)
        store = Endpoint("127.0.0.1", hosted.port)
    # Of a daemon the children read for themselves how to reach it.
    return NodePlace(Roster(0, (nprocs,), run_id), store, store, token, tls=hosted is None), hosted


def _changed(environment: dict[str, str]) -> dict[str, str | None]:
    """What differs from this process's environment; None is a name to remove."""
    removed = {name: None for name in os.environ if name not in environment}
    return removed | {name: value for name, value in environment.items() if os.environ.get(name) != value}


def _child(
    fn: Callable[..., object],
    local_rank: int,
    args: tuple[Any, ...],
    environment: dict[str, str | None],
    pipe: Connection,
    parent_pid: int | None,
) -> None:
    """First function of a child: the environment, then `fn`; a traceback goes back as text and the exit code is 1."""
    _end_with_parent(parent_pid)
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        result = fn(local_rank, *args)
        if inspect.iscoroutine(result):
            result = run(result)
        if result is not None:
            _tell(pipe, _RESULT, objects.encode(result))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # the parent had the same Ctrl-C and says so
    except Exception:
        text = traceback.format_exc().encode(errors="backslashreplace")[-MAX_TRACEBACK_BYTES:]
        _tell(pipe, _TRACEBACK, text)
        sys.exit(1)


def _tell(pipe: Connection, kind: bytes, data: bytes | memoryview) -> None:
    with contextlib.suppress(OSError):  # the parent reads no more
        pipe.send_bytes(kind)
        pipe.send_bytes(data)


def _end_with_parent(parent_pid: int | None) -> None:
    """See to it that this process ends when the one that called `spawn` does."""
    if parent_pid is not None and sys.platform == "linux":
        die_with_parent(parent_pid)
        return
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="asyncdist-parent-watch", daemon=True).start()


def _launch_error(rank: int, process: BaseProcess, text: str) -> LaunchError:
    code = process.exitcode or 0
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return LaunchError(f"rank {rank} (pid {process.pid}) was killed by {name}", 128 - code, rank)
    if text:
        return LaunchError(f"rank {rank} (pid {process.pid}) failed:\n\n{text}", code, rank)
    return LaunchError(f"rank {rank} (pid {process.pid}) ended with exit code {code}", code, rank)
