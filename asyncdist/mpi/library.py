"""MPI itself, by mpi4py: its start, the threads that may call it, and its end.

`MPI_Finalize` waits for all ranks, and some MPIs wait in it for operations that will never end. MPI cannot cancel those
that an abort has left behind, and may still use their arrays, so they are kept here. A process that has left any behind
gives `MPI_Finalize` at most `FINALIZE_LIMIT_S` at its exit.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import threading
from time import perf_counter
from typing import Any, Final, Protocol

from asyncdist.concurrency import trace as events
from asyncdist.errors import DistBackendError

__all__ = ["FINALIZE_LIMIT_S", "is_over", "leave_behind", "load", "open_meshes", "threads_allowed"]

LAST_LOOK_S: Final = 0.1
"""How long operations that nobody waits for have to end before MPI_Finalize."""
FINALIZE_LIMIT_S: Final = 10
"""How long MPI_Finalize may take where operations never ended: the other ranks hear of the failure at the same time,
and have as long to save what they want to save."""


class Ends(Protocol):
    """What has to be told that the process ends."""

    def hang_up(self) -> None:
        """Tell the other ranks, and leave nothing for MPI to do."""


open_meshes: set[Ends] = set()
"""Of worlds that were not closed yet."""
_left: list[tuple[str, list[Any], object]] = []
_caller: object = None
"""The thread that uses MPI, or the place of a loop that several threads run in turn."""
_pid = 0


def load() -> Any:
    """Return the module `mpi4py.MPI`, initialized. Raises DistBackendError where this thread cannot use MPI."""
    global _caller, _pid
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise DistBackendError(f"mpi4py does not find its MPI: {error}") from error
    if MPI.Is_finalized():
        raise DistBackendError("MPI is finalized: it cannot be used again in this process")
    started = not MPI.Is_initialized()
    if started:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if not _pid:
        _pid = os.getpid()
        atexit.register(_end, MPI, started)
    level, place = MPI.Query_thread(), getattr(asyncio._get_running_loop(), "place", None)
    here: object = threading.get_ident() if place is None else place
    if level < MPI.THREAD_SERIALIZED and (place is not None or not MPI.Is_thread_main()):
        raise DistBackendError(
            "MPI may be called from the main thread only, as it was initialized so (MPI_THREAD_FUNNELED): run the "
            "event loop there, not in the communication thread, or initialize MPI with MPI_THREAD_MULTIPLE"
        )
    if level < MPI.THREAD_MULTIPLE and _caller not in (None, here):
        raise DistBackendError(
            "MPI is used in another thread already, and was initialized for one (MPI_THREAD_SERIALIZED): use it in one "
            "event loop, or initialize it with MPI_THREAD_MULTIPLE"
        )
    _caller = here
    return MPI


def threads_allowed(mpi: Any) -> bool:
    """Whether a second thread may call MPI."""
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def leave_behind(what: str, requests: list[Any], owner: object = None) -> None:
    """Keep requests that nobody waits for any more, and whose `owner` has their arrays: they cannot be cancelled."""
    _left.append((what, requests, owner))


def _unended(mpi: Any) -> list[str]:
    """What of that has not ended, after a last look: the other ranks may have met it meanwhile."""
    until_s = perf_counter() + LAST_LOOK_S
    while True:
        left = [what for what, requests, _ in _left if not is_over(mpi, requests)]
        if not left or perf_counter() > until_s:
            return left


def is_over(mpi: Any, requests: list[Any]) -> bool:
    """Whether all have ended, well or not."""
    try:
        return bool(mpi.Request.Testall(requests))
    except mpi.Exception:
        return True


def _end(mpi: Any, started: bool) -> None:
    """Leave MPI as the process ends. mpi4py finalizes MPI later, unless it was `started` here."""
    if mpi.Is_finalized() or os.getpid() != _pid:
        return
    for mesh in list(open_meshes):
        mesh.hang_up()
    if unended := _unended(mpi):
        events.warn(
            "rank %d of MPI leaves operations that never ended (%s): if MPI_Finalize takes longer than %d s, SIGALRM "
            "ends this process, and with it the job",
            *(mpi.COMM_WORLD.Get_rank(), ", ".join(dict.fromkeys(unended)), FINALIZE_LIMIT_S),
        )
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(FINALIZE_LIMIT_S)
        mpi.Finalize()
        signal.alarm(0)
    elif started:
        mpi.Finalize()
