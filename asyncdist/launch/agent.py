"""The launcher of one node: finds or hosts the store, joins the other nodes, runs attempts, reports the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Final

from asyncdist.errors import DistError, LaunchError
from asyncdist.launch.attempt import Attempt, AttemptResult
from asyncdist.launch.config import LaunchConfig
from asyncdist.launch.environment import NodePlace, line_prefix, own_device, worker_environment
from asyncdist.launch.hosting import StorePlace, find_or_host, open_store
from asyncdist.launch.logs import Logs
from asyncdist.launch.meeting import Roster
from asyncdist.launch.nodes import Failure, Nodes
from asyncdist.launch.output import OutputWriter
from asyncdist.launch.signals import handle_signals
from asyncdist.launch.warden import Warden
from asyncdist.launch.worker import Exit, Worker

if TYPE_CHECKING:
    from asyncdist.store.base import Store

__all__ = ["Agent", "run"]

_OUTPUT_CLOSE_TIMEOUT_S: Final = 2.0
"""After an interruption: how long a blocked terminal may hold up the exit. Otherwise output is waited for."""

_END_MARGIN_S: Final = 10.0
"""Beyond the grace periods: what other nodes get to say that a failed attempt is over there too."""


async def run(config: LaunchConfig, *, stdout_fd: int = 1, stderr_fd: int = 2) -> int:
    """Launch this node's workers and see the job to its end; return the exit code for the launcher.

    0 if every worker of every node ended with 0; the first failure's exit code (128 + n for signal n); 128 + n if
    signal n ended the job. Raises LaunchError if the job could not be started. Cancellation kills the workers.
    """
    stdout = OutputWriter(stdout_fd)
    stderr = OutputWriter(stderr_fd)
    agent = _agent_class(config)(config, stdout, stderr)
    finished = False
    try:
        exitcode = await agent.run()
        finished = not agent.interrupted
        return exitcode
    finally:
        timeout_s = None if finished else _OUTPUT_CLOSE_TIMEOUT_S
        await agent.logs.close(timeout_s)
        await stdout.close(timeout_s)
        await stderr.close(timeout_s)


def _agent_class(config: LaunchConfig) -> type[Agent]:
    if config.min_nodes is None:
        return Agent
    from asyncdist.launch.elastic import ElasticAgent

    return ElasticAgent


class Agent:
    """State of one launcher. `run` may be called once."""

    def __init__(
        self,
        config: LaunchConfig,
        stdout: OutputWriter,
        stderr: OutputWriter,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._config = config
        self._stdout = stdout
        self._stderr = stderr
        self._environ = environ
        self._host = socket.gethostname()
        self.logs = Logs(config.logs, stdout, stderr, self.say)
        self._attempt: Attempt | None = None
        self._interrupted_by: int | None = None
        self._main: asyncio.Task[int] | None = None
        self._reported: Failure | None = None
        self._own: AttemptResult | None = None
        self._ending = asyncio.Event()  # a failure somewhere, or a signal: from now on every wait is bounded

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the job."""
        return self._interrupted_by is not None

    async def run(self) -> int:
        """See `run` of this module."""
        self._main = asyncio.create_task(self._run())
        with handle_signals(self._on_ending_signal, self._on_passing_signal, self._config.ending_signals):
            try:
                return await self._main
            except asyncio.CancelledError:
                if self._interrupted_by is None:
                    raise
                return 128 + self._interrupted_by

    def say(self, text: str) -> None:
        """Print one line of the launcher's own on stderr."""
        self._stderr.write(f"asyncdist run: {text}\n".encode(errors="backslashreplace"))

    async def _run(self) -> int:
        self.logs.check()
        if self._config.virtual_local_rank:
            own_device(self._config.nproc_per_node - 1, self._environ)  # before other nodes count on this one
        async with AsyncExitStack() as stack:
            place = await find_or_host(self._config)
            if place.hosted is not None:
                stack.push_async_callback(asyncio.to_thread, place.hosted.close)
            nodes, roster = await self._join(place, stack)
            self._announce(place, roster)
            self.logs.open(roster.run_id, roster.node_rank, self._config.nnodes, self._config.nproc_per_node)
            warden = stack.enter_context(contextlib.closing(Warden()))
            node_place = self._node_place(place, roster)
            for number in range(self._config.max_restarts + 1):
                result = await self._run_attempt(number, node_place, nodes, warden)
                exitcode = self._exit_code(result)
                if exitcode == 0 or self.interrupted:
                    break
                self._report()
                if number < self._config.max_restarts:
                    self.say(f"restarting all workers (attempt {number + 1} of {self._config.max_restarts})")
            return exitcode

    async def _join(self, place: StorePlace, stack: AsyncExitStack) -> tuple[Nodes | None, Roster]:
        config = self._config
        if config.nnodes == 1 and (place.hosted is not None or config.job_id is None):
            # Nobody to meet, and a name that the store has not seen before.
            return None, Roster(0, (config.nproc_per_node,), config.job_id or os.urandom(4).hex())
        store: Store = await open_store(place, config.join_timeout_s)
        nodes = Nodes(store, config.job_id, config.nnodes)
        stack.push_async_callback(nodes.leave, hosting=place.hosted is not None, outlived=config.store is not None)
        return nodes, await nodes.join(config.node_rank, config.nproc_per_node, self._host, config.join_timeout_s)

    def _announce(self, place: StorePlace, roster: Roster) -> None:
        config = self._config
        first, last = roster.first_rank, roster.first_rank + config.nproc_per_node - 1
        ranks = f"ranks {first}-{last}" if last > first else f"rank {first}"
        self.say(
            f"job {roster.run_id}, node {roster.node_rank} of {config.nnodes}, {ranks} of "
            f"{roster.world_size}, store {'hosted' if place.hosted else 'found'} at {place.endpoint}"
        )
        self._say_threads()

    def _say_threads(self) -> None:
        if self._config.nproc_per_node > 1 and "OMP_NUM_THREADS" not in self._environ:
            self.say("OMP_NUM_THREADS=1 for each worker, as several share this node; set it yourself to choose")

    def _node_place(self, place: StorePlace, roster: Roster) -> NodePlace:
        return NodePlace(
            node_rank=roster.node_rank,
            nnodes=self._config.nnodes,
            first_rank=roster.first_rank,
            nproc=self._config.nproc_per_node,
            world_size=roster.world_size,
            run_id=roster.run_id,
            store=place.endpoint,
            master=self._config.endpoint or place.endpoint,
            token=place.token,
            tls=place.tls is not None,
            role=self._config.role,
            virtual_local_rank=self._config.virtual_local_rank,
            interface=self._config.interface,
        )

    async def _run_attempt(self, number: int, place: NodePlace, nodes: Nodes | None, warden: Warden) -> AttemptResult:
        self._reported, self._own = None, None
        self.logs.start_attempt(number)
        self._ending.clear()
        reports: list[asyncio.Task[None]] = []

        def on_failure(exit: Exit) -> None:
            self._reported = self._as_failure(exit, place)
            self._ending.set()
            if nodes is not None:
                reports.append(asyncio.create_task(nodes.report_failure(number, self._reported)))

        self._attempt = Attempt(
            [partial(self._start_worker, rank, number, place, warden) for rank in range(place.nproc)],
            grace_s=self._config.grace_s,
            shutdown_timeout_s=self._config.shutdown_timeout_s,
            on_failure=on_failure,
        )
        try:
            if nodes is None:
                self._own = await self._attempt.run()
                if self._own.failure is not None:
                    self._reported = self._as_failure(self._own.failure, place)
            else:
                async with nodes.watching(number, self._on_others_failure):
                    self._own = await self._attempt.run()
                    await self._end_together(nodes, number, place, self._own)
            return self._own
        finally:
            self._attempt = None
            await asyncio.gather(*reports)

    def _as_failure(self, exit: Exit, place: NodePlace) -> Failure:
        files = ", ".join(self.logs.files(exit.rank - place.first_rank))
        return Failure(place.node_rank, exit.rank, self._host, exit.pid, exit.exitcode, str(exit), files)

    def _on_others_failure(self, failure: Failure) -> None:
        self._reported = failure  # the store's word on which failure was first wins over our own
        self._ending.set()
        if self._attempt is not None:
            self._attempt.stop()

    async def _end_together(self, nodes: Nodes, number: int, place: NodePlace, result: AttemptResult) -> None:
        """Wait until every node's attempt is over, because the store must outlive all of them."""
        if self._interrupted_by is not None and not result.all_succeeded:
            name = signal.Signals(self._interrupted_by).name
            failure = Failure(place.node_rank, -1, self._host, 0, 128 + self._interrupted_by, f"ended by {name}")
            await nodes.report_failure(number, failure)
        outcome = "ok" if result.all_succeeded else "failed"
        over = asyncio.create_task(nodes.end(number, outcome))
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait((over, ending), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((over,), timeout=2 * self._config.grace_s + _END_MARGIN_S)
        finally:
            over.cancel()
            ending.cancel()
            ended, _ = await asyncio.gather(over, ending, return_exceptions=True)
        if isinstance(ended, DistError) and self._reported is None:
            self._on_others_failure(nodes.store_lost(ended))

    def _start_worker(self, local_rank: int, attempt: int, place: NodePlace, warden: Warden) -> Worker:
        rank = place.first_rank + local_rank
        command = list(self._config.command)
        if self._config.pass_local_rank:
            command.append(f"--local_rank={local_rank}")
        environment = worker_environment(place, local_rank, attempt, self._config.max_restarts, self._environ)
        stdout, stderr = self.logs.destinations(local_rank)
        if (folder := self.logs.folder(local_rank)) is not None:
            environment["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
        try:
            return Worker(
                rank,
                command,
                environment,
                prefix=line_prefix(rank, local_rank, place.role, self._environ),
                stdout=stdout,
                stderr=stderr,
                warden=warden,
            )
        except OSError as error:  # no more processes, descriptors or memory
            raise LaunchError(f"cannot start local rank {local_rank} of {place.nproc}: {error}") from error

    def _exit_code(self, result: AttemptResult) -> int:
        if self._interrupted_by is not None:
            # Workers that all ended with 0 after the signal have done what a clean stop asks for.
            return 0 if result.all_succeeded else 128 + self._interrupted_by
        if self._reported is not None:
            return self._reported.exitcode
        return 0 if result.all_succeeded else 1

    def _report(self) -> None:
        """Say who failed first, and repeat its last lines if it is ours."""
        failure = self._reported
        if failure is None:
            return
        if failure.rank < 0:
            self.say(f"node {failure.node} (host {failure.host}): {failure.description}")
            return
        own = self._own.failure if self._own is not None else None
        tail = self._own.tail if self._own is not None and own is not None and own.rank == failure.rank else []
        self.say(
            f"rank {failure.rank} failed first: {failure.description} (host {failure.host}, pid {failure.pid})"
            + (", its last lines were:" if tail else "")
        )
        for line in tail:
            self._stderr.write(f"[rank {failure.rank}] ".encode() + line + b"\n")
        if failure.files:
            self.say(f"files of rank {failure.rank} on host {failure.host}: {failure.files}")

    def _on_ending_signal(self, signum: int) -> None:
        first = self._interrupted_by is None
        if first:
            self._interrupted_by = signum
            self._ending.set()
            outcome = "no worker is running" if self._attempt is None else "passed on to the workers"
            self.say(f"{signal.Signals(signum).name}: {outcome}")
        if self._attempt is not None:
            self._attempt.interrupt(signum)
        if self._main is not None and (self._attempt is None or (not first and signum == signal.SIGINT)):
            self._main.cancel()

    def _on_passing_signal(self, signum: int) -> None:
        if self._attempt is not None:
            self._attempt.pass_on(signum)
