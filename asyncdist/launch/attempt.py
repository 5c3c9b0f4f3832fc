"""One attempt: start the node's workers, watch them, and end them all when one fails."""

from __future__ import annotations

import asyncio
import enum
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from asyncdist.concurrency.process import is_stopped, session_of
from asyncdist.launch.failure import is_consequence
from asyncdist.launch.worker import Exit, Worker


class Stage(enum.Enum):
    """What the attempt is waiting for."""

    RUNNING = "every worker to end"
    GRACE = "the others to raise and end by themselves"
    TERMINATING = "the others to obey SIGTERM"
    INTERRUPTED = "every worker to obey the signal passed on"
    KILLING = "the kernel"


_NEXT: Final = {
    Stage.GRACE: (Stage.TERMINATING, signal.SIGTERM),
    Stage.TERMINATING: (Stage.KILLING, signal.SIGKILL),
    Stage.INTERRUPTED: (Stage.KILLING, signal.SIGKILL),
}


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt went on this node.

    `failure` is the worker that failed first, and not because another worker had failed. `tail` are its last lines.
    """

    failure: Exit | None
    tail: list[bytes]
    all_succeeded: bool


class Attempt:
    """The workers of one node, from start to the last one's end.

    `start` makes the workers one by one. `run` returns when none is left, and leaves no process and no descriptor,
    also when it is cancelled (then the workers are killed). `on_failure(exit)` is called once, synchronously, at this
    node's first failure, so that other nodes can be told at once; `on_escalation(signal, ranks)` when these ranks have
    taken too long to end, and are sent that.
    """

    def __init__(
        self,
        start: Sequence[Callable[[], Worker]],
        *,
        grace_s: float,
        shutdown_timeout_s: float,
        on_failure: Callable[[Exit], None] = lambda exit: None,
        on_escalation: Callable[[signal.Signals, Sequence[int]], None] = lambda signum, ranks: None,
    ) -> None:
        self._start = start
        self._grace_s = grace_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._on_failure = on_failure
        self._on_escalation = on_escalation
        self._loop = asyncio.get_running_loop()
        self._workers: list[Worker] = []
        self._stage = Stage.RUNNING
        self._deadline_s: float | None = None
        self._changed = asyncio.Event()
        self._failures: list[Exit] = []  # of their own accord, in the order they were seen
        self._interrupted = False
        self._hurry = False
        self._stopped_by_others = False

    @property
    def stage(self) -> Stage:
        """What is being waited for now."""
        return self._stage

    def interrupt(self, signum: int) -> None:
        """Pass a signal that ends jobs on to the workers; a second SIGINT kills them."""
        if self._interrupted and signum == signal.SIGINT:
            self._hurry = True
            self._enter(Stage.KILLING, None)
            self._signal_all(signal.SIGKILL)
            return
        self._interrupted = True
        if self._stage is not Stage.KILLING:
            self._enter(Stage.INTERRUPTED, self._shutdown_timeout_s)
        self._signal_all(signum)

    @property
    def pids(self) -> list[int]:
        """Of the workers that have not ended; each is the leader of a session."""
        return [worker.pid for worker in self._workers if worker.exit is None]

    @property
    def running_ranks(self) -> list[int]:
        """The ranks of the workers that have not ended."""
        return [worker.rank for worker in self._workers if worker.exit is None]

    def stopped_ranks(self, processes: Iterable[int]) -> list[int]:
        """The ranks of the workers that are stopped, by a signal or by a debugger, or have started one of `processes`
        that is."""
        sessions = {session_of(pid) for pid in (*self.pids, *processes) if is_stopped(pid)}
        return [worker.rank for worker in self._workers if worker.exit is None and worker.pid in sessions]

    def pass_on(self, signum: int) -> list[int]:
        """Pass on a signal that ends nothing (SIGUSR1, SIGUSR2) to the workers that handle it; return their ranks."""
        return [worker.rank for worker in self._workers if worker.pass_on(signum)]

    def stop(self, *, at_once: bool = False) -> None:
        """Another node failed: the workers get their grace, then SIGTERM, then SIGKILL.

        With `at_once` SIGTERM comes first, for workers that have no reason to end by themselves.
        """
        if self._stage is Stage.RUNNING:
            self._stopped_by_others = True
            self._enter(Stage.TERMINATING if at_once else Stage.GRACE, self._grace_s)
            if at_once:
                self._signal_all(signal.SIGTERM)

    async def run(self) -> AttemptResult:
        """Start the workers and wait for all of them."""
        try:
            for start in self._start:
                if self._stage is not Stage.RUNNING:
                    break
                worker = start()
                worker.on_exit = self._on_exit
                self._workers.append(worker)
                await asyncio.sleep(0)  # starting hundreds takes a while: look after the first ones meanwhile
            await self._until_all_ended()
        except BaseException:
            self._hurry = True
            raise
        finally:
            await self._reap_all()
        return self._result()

    def _on_exit(self, exit: Exit) -> None:
        if exit.returncode != 0 and self._stage in (Stage.RUNNING, Stage.GRACE):
            self._failures.append(exit)
        if self._failures and self._stage is Stage.RUNNING:
            self._enter(Stage.GRACE, self._grace_s)
            self._on_failure(exit)
        self._changed.set()

    async def _until_all_ended(self) -> None:
        while any(worker.exit is None for worker in self._workers):
            self._changed.clear()
            try:
                async with asyncio.timeout_at(self._deadline_s):
                    await self._changed.wait()
            except TimeoutError:
                self._escalate()

    def _escalate(self) -> None:
        if self._deadline_s is None or self._loop.time() < self._deadline_s:
            return
        stage, signum = _NEXT[self._stage]
        self._enter(stage, self._grace_s if stage is Stage.TERMINATING else None)
        self._on_escalation(signum, self.running_ranks)
        self._signal_all(signum)

    def _enter(self, stage: Stage, timeout_s: float | None) -> None:
        self._stage = stage
        self._deadline_s = None if timeout_s is None else self._loop.time() + timeout_s
        self._changed.set()

    def _signal_all(self, signum: int) -> None:
        for worker in self._workers:
            worker.signal(signum)

    async def _reap_all(self) -> None:
        """Free every worker, whatever happens to one of them; a cancellation only skips the rest of the output."""
        reaping = [asyncio.create_task(worker.reap(drain=not self._hurry)) for worker in self._workers]
        cancelled = False
        while pending := [task for task in reaping if not task.done()]:
            try:
                await asyncio.wait(pending)
            except asyncio.CancelledError:
                cancelled = True
                for task in reaping:
                    task.cancel()
        for task in reaping:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if cancelled:
            raise asyncio.CancelledError

    def _result(self) -> AttemptResult:
        failed = {exit.rank for exit in self._failures}
        tails = {
            worker.rank: worker.stderr.tail or worker.stdout.tail for worker in self._workers if worker.rank in failed
        }
        # A worker that unwinds slowly ends after those that its failure brought down.
        causes = [exit for exit in self._failures if not is_consequence(tails[exit.rank])]
        failure = next(iter(causes or self._failures), None)
        if self._stopped_by_others and not causes:
            failure = None
        all_succeeded = len(self._workers) == len(self._start) and all(
            worker.exit is not None and worker.exit.returncode == 0 for worker in self._workers
        )
        tail = [] if failure is None else tails[failure.rank]
        return AttemptResult(failure, tail, all_succeeded)
