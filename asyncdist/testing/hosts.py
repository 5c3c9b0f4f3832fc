"""Simulated hosts and processes: callbacks of a process run only while the process may run.

A coroutine that is spawned in a process, and all that it starts, carries the process in its context. Callbacks of a
stopped process wait until the process goes on. Callbacks of a killed process are dropped, as with a real one: no
`finally` runs, and no peer gets a goodbye.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from asyncdist.testing.endpoint import Endpoint
    from asyncdist.testing.network import SimulatedNetwork
    from asyncdist.testing.simulated_socket import SimulatedSocket

T = TypeVar("T")


class SimulatedProcess:
    """One run of a program on a host: its context, its state, and what the kernel closes when the process is killed."""

    def __init__(self, host: SimulatedHost, pid: int) -> None:
        self.host = host
        self.pid = pid
        self.alive = True
        self.paused = False
        self.sockets: dict[SimulatedSocket, None] = {}
        self.endpoints: dict[Endpoint, None] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self.context = contextvars.Context()
        self.context.run(PROCESS.set, self)
        self._deferred: list[asyncio.Handle] = []
        self._paused_at = 0.0
        self._stopped_s = 0.0

    @property
    def stopped_s(self) -> float:
        """Seconds in which the process was paused, in all."""
        return self._stopped_s + (self.host.network.loop.time() - self._paused_at if self.paused else 0.0)

    def may_run(self, handle: asyncio.Handle) -> bool:
        """Return whether `handle` is to run now. The handle of a paused process is kept for later."""
        if self.alive and self.paused:
            self._deferred.append(handle)
            return False
        return self.alive

    def pause(self) -> None:
        """Stop the process as SIGSTOP does: its callbacks wait, its kernel goes on."""
        if not self.paused:
            self.host.network.trace("pause", self.host.name)
            self._paused_at = self.host.network.loop.time()
            self.paused = True

    def resume(self) -> None:
        """Let the process go on. Callbacks that have become due run now."""
        self._stopped_s, self.paused = self.stopped_s, False
        self.host.network.trace("resume", self.host.name)
        deferred, self._deferred = self._deferred, []
        # As after a real stop: the loop looks at its sockets first, then at its timers.
        deferred.sort(key=lambda handle: isinstance(handle, asyncio.TimerHandle))
        for handle in deferred:
            self.host.network.loop.run_again(handle)

    def kill(self) -> None:
        """End the process as SIGKILL does: the kernel closes its sockets, and no callback runs any more."""
        self.end()
        for sock in list(self.sockets):
            sock.close()
        for endpoint in list(self.endpoints):
            endpoint.close()

    def end(self) -> None:
        """Stop running for good, as a killed process does."""
        self.alive = False
        self._deferred.clear()

    def bury(self) -> None:
        """Close the killed process's suspended coroutines, after the simulation has ended."""
        for task in self.tasks:
            if not task.done():
                asyncio.tasks._unregister_task(task)
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                self.context.copy().run(_close, task)
        self.tasks.clear()


def _close(task: asyncio.Task[Any]) -> None:
    coroutine = task.get_coro()
    try:
        if coroutine is not None:
            coroutine.close()
    except BaseException:
        pass  # its cleanup would go on, but a killed process does none


class SimulatedHost:
    """A machine with an address, on which one process at a time runs."""

    def __init__(self, network: SimulatedNetwork, name: str, address: str) -> None:
        self.network = network
        self.name = name
        self.address = address
        self.up = True
        self.refusing = False
        """Whether connections are refused although a process listens, as by a firewall."""
        self.listeners: dict[int, SimulatedSocket] = {}
        self.last_port = 40_000
        self.process = self._new_process()

    def __repr__(self) -> str:
        return f"<SimulatedHost {self.name} {self.address}>"

    def _new_process(self) -> SimulatedProcess:
        self.process = SimulatedProcess(self, self.network.next_pid())
        return self.process

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Run `coroutine` in the host's process and return its task.

        Await it through `network.outcome`: the task of a process that is killed never ends.
        """
        # A context of the task's own, as two tasks cannot be in one at the same time.
        return self.network.loop.create_task(coroutine, name=name, context=self.process.context.copy())

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function` as if the host's process did."""
        return self.process.context.copy().run(function, *arguments)

    def restart(self) -> None:
        """Begin a new process, and kill the one before if it still runs. A vanished host is there again."""
        if self.process.alive:
            self.kill()
        self.up = True
        self._new_process()
        self.network.reachability_changed()

    def kill(self) -> None:
        """Kill the process; the kernel stays and closes its connections."""
        self.network.trace("kill", self.name)
        self.network.dead.append(self.process)
        self.process.kill()
        self.listeners.clear()

    def vanish(self) -> None:
        """Lose power: no peer is told, and no message arrives here until `restart`."""
        self.network.trace("vanish", self.name)
        self.up = False
        self.network.dead.append(self.process)
        self.process.end()
        self.listeners.clear()
        for endpoint in list(self.process.endpoints):
            endpoint.vanish()
        self.network.reachability_changed()


PROCESS: Final[contextvars.ContextVar[SimulatedProcess | None]] = contextvars.ContextVar(
    "simulated process", default=None
)
"""The process that runs now; None for the simulation itself."""


class ProcessHandle(asyncio.Handle):
    """A callback of a process."""

    __slots__ = ()

    def _run(self) -> None:
        process = self._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is None or process.may_run(self):
            super()._run()


class ProcessTimerHandle(ProcessHandle, asyncio.TimerHandle):
    """A timer of a process."""

    __slots__ = ()
