"""`asyncdist run`: a launcher of one node, from its start to its exit code.

`NodeAgent` is what is the same for jobs of a fixed number of nodes (`fixed`) and elastic ones (`elastic`).
"""

from __future__ import annotations

import asyncio
import datetime
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from asyncdist.errors import LaunchError
from asyncdist.launch.attempt import Attempt, AttemptResult, Stage
from asyncdist.launch.config import ENDING, Endpoint, LaunchConfig
from asyncdist.launch.failure import Failure
from asyncdist.launch.logs import Logs
from asyncdist.launch.losses import Losses
from asyncdist.launch.orphan_killer import OrphanKiller
from asyncdist.launch.rendezvous.job_store import StorePlace, find_or_host
from asyncdist.launch.worker import Exit, NodePlace, Roster, Worker, line_prefix, own_device, worker_environment
from asyncdist.launch.writers import OutputWriter

if TYPE_CHECKING:
    from asyncdist.launch.metrics import NodeMetrics

_OUTPUT_CLOSE_TIMEOUT_S: Final = 2.0
"""After an interruption: how long a blocked terminal may hold up the exit. Otherwise output is waited for."""


_SHOWN_RANKS: Final = 8
"""More ranks than this are counted, and not named: a long line is not read to its end."""

_MAX_DUMPS: Final = 64
"""More dumps than this are left to `asyncdist why`: to read one takes some 10 ms."""

_PROMPT_S: Final = 1.0
"""Workers that obey a signal have ended within this; the launcher tells of the others."""

PASSING: Final = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that mean something to the workers only (checkpoint now, preemption is near), unless they end the job."""


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


def _agent_class(config: LaunchConfig) -> type[NodeAgent]:
    """Imported when it is used, so that a launcher starts quickly."""
    if config.min_nodes is None:
        from asyncdist.launch.fixed import FixedAgent

        return FixedAgent
    from asyncdist.launch.elastic import ElasticAgent

    return ElasticAgent


class NodeAgent:
    """State of one launcher. `run` may be called once; each kind of job has a `_take_part` of its own."""

    def __init__(
        self, config: LaunchConfig, stdout: OutputWriter, stderr: OutputWriter, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._config = config
        self._stderr = stderr
        self._environ = environ
        self._host = socket.gethostname()
        self.logs = Logs(config.logs, stdout, stderr, self.say)
        self._attempt: Attempt | None = None
        self._interrupted_by: int | None = None
        self._main: asyncio.Task[int] | None = None
        self._reported: Failure | None = None
        self._own: AttemptResult | None = None
        self._worker_environ: Mapping[str, str] = {}
        self._began_s = 0.0
        self._killer: OrphanKiller | None = None  # while this node takes part
        self._losses: Losses | None = None  # likewise, if there are other nodes
        self._metrics: NodeMetrics | None = None
        self._words: set[asyncio.Task[None]] = set()  # that are on their way to other nodes
        self._prepare()

    def _prepare(self) -> None:
        """Set what a kind of job needs beyond this."""

    async def _take_part(self, place: StorePlace, stack: AsyncExitStack) -> int:
        """See this node through the job whose store is at `place`; return the exit code."""
        raise NotImplementedError

    def _on_first_ending_signal(self, signum: int) -> None:
        """A signal ends this node's part in the job; the workers are told next."""

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the job."""
        return self._interrupted_by is not None

    async def run(self) -> int:
        """See `run` of the module agent."""
        self._main = asyncio.create_task(self._run())
        with handle_signals(self._on_ending_signal, self._on_passing_signal, self._config.ending_signals):
            try:
                return await self._main
            except asyncio.CancelledError:
                if self._interrupted_by is None:
                    raise
                return 128 + self._interrupted_by

    def say(self, text: str) -> None:
        """Print one line of the launcher's own on stderr, with the local time of day."""
        now = datetime.datetime.now().isoformat(" ", "milliseconds").partition(" ")[2]
        self._stderr.write(f"{now} asyncdist run: {text}\n".encode(errors="backslashreplace"))

    async def _run(self) -> int:
        self.logs.check()
        if self._config.virtual_local_rank:
            own_device(self._config.nproc_per_node - 1, self._environ)  # before other nodes count on this one
        async with AsyncExitStack() as stack:
            if self._config.metrics is not None:
                await self._serve_metrics(self._config.metrics, stack)
            place = await find_or_host(self._config, self.say)
            if place.hosted is not None:
                stack.push_async_callback(asyncio.to_thread, place.hosted.close)
            return await self._take_part(place, stack)

    async def _serve_metrics(self, endpoint: Endpoint, stack: AsyncExitStack) -> None:
        from asyncdist.launch.metrics import NodeMetrics, documents_of, serve_metrics

        def ask() -> Coroutine[Any, Any, list[dict[str, Any]]]:
            return documents_of(() if self._attempt is None else self._attempt.pids, self._environ)

        self._metrics = NodeMetrics(ask)
        address = await stack.enter_async_context(serve_metrics(self._metrics, endpoint))
        self.say(f"metrics at http://{address}/metrics")

    def _begin(self, stack: AsyncExitStack) -> None:
        """Get what this node needs for as long as it takes part."""
        self._killer = stack.enter_context(closing(OrphanKiller()))
        if self._config.nnodes > 1:
            self._losses = stack.enter_context(closing(Losses()))

    def _tell_ranks(self, roster: Roster, node: int, host: str, why: str) -> None:
        """Tell the ranks of this node that those of `node` are lost, or all others if it is this one."""
        assert self._losses is not None
        first = sum(roster.nprocs[:node])
        ranks = [(first, first + roster.nprocs[node])]
        if node == roster.node_rank:
            ranks = [(0, first), (first + roster.nproc, roster.world_size)]
            self._losses.tell(ranks, f"this host ({host}, node {node}) {why}")
        else:
            self._losses.tell(ranks, f"its host ({host}, node {node}) is gone: {why}")

    def _announce(self, place: StorePlace, roster: Roster, what: str) -> None:
        """Say which part of what this node has."""
        first, last = roster.first_rank, roster.first_rank + roster.nproc - 1
        ranks = f"ranks {first}-{last}" if last > first else f"rank {first}"
        self.say(
            f"{what} node {roster.node_rank} of {len(roster.nprocs)}, {ranks} of {roster.world_size}, "
            f"store {'hosted' if place.hosted else 'found'} at {place.endpoint}"
        )

    def _open_logs(self, roster: Roster) -> None:
        """Say what holds for all of this launcher's workers, and make the run's folder."""
        if self._config.nproc_per_node > 1 and "OMP_NUM_THREADS" not in self._environ:
            self.say("OMP_NUM_THREADS=1 for each worker, as several share this node; set it yourself to choose")
        self.logs.open(roster.run_id, roster.node_rank, self._config.nnodes, self._config.nproc_per_node)

    def _node_place(self, place: StorePlace, roster: Roster, restarts: int | None = None) -> NodePlace:
        return NodePlace(
            roster,
            place.endpoint,
            self._config.endpoint or place.endpoint,
            place.run_token,
            tls=place.tls is not None,
            role=self._config.role,
            virtual_local_rank=self._config.virtual_local_rank,
            interface=self._config.interface,
            restarts=restarts,
            first_local_rank=self._config.first_local_rank,
            local_world_size=self._config.local_world_size,
            losses=None if self._losses is None else self._losses.address,
        )

    def _new_attempt(self, number: int, place: NodePlace, on_failure: Callable[[Exit], None]) -> Attempt:
        """The workers of this node, not started yet; `number` counts attempts, or rounds."""
        self.logs.start_attempt(number)
        self._began_s = time.time()
        if self._metrics is not None:
            first = place.roster.first_rank
            self._metrics.begin(range(first, first + place.roster.nproc))
        if self._losses is not None:
            self._losses.forget()
        return Attempt(
            [partial(self._start_worker, rank, number, place) for rank in range(place.roster.nproc)],
            grace_s=self._config.grace_s,
            shutdown_timeout_s=self._config.shutdown_timeout_s,
            on_failure=on_failure,
            on_escalation=self._on_escalation,
        )

    def _start_worker(self, local_rank: int, attempt: int, place: NodePlace) -> Worker:
        assert self._killer is not None
        rank = place.roster.first_rank + local_rank
        command = list(self._config.command)
        if self._config.local_rank_at is not None:
            command.insert(self._config.local_rank_at, f"--local_rank={place.first_local_rank + local_rank}")
        environment = worker_environment(place, local_rank, attempt, self._config.max_restarts, self._environ)
        if self._config.dump_dir is not None:
            environment["ASYNCDIST_DUMP_DIR"] = self._config.dump_dir
        self._worker_environ = environment
        if self._metrics is not None:
            environment["ASYNCDIST_METRICS"] = "1"
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
                killer=self._killer,
            )
        except OSError as error:  # no more processes, descriptors or memory
            raise LaunchError(f"cannot start local rank {local_rank} of {place.roster.nproc}: {error}") from error

    def _on_escalation(self, signum: signal.Signals, ranks: Sequence[int]) -> None:
        self.say(f"{_shown(ranks)} still running: {signum.name}")

    def _as_failure(self, exit: Exit, place: NodePlace) -> Failure:
        files = ", ".join(self.logs.files(exit.rank - place.roster.first_rank))
        return Failure(place.roster.node_rank, exit.rank, self._host, exit.pid, exit.exitcode, str(exit), files)

    def _tell(self, word: Coroutine[Any, Any, None]) -> None:
        """Let others know, while this node goes on; words are bounded in time, and raise nothing."""
        self._words.add(asyncio.create_task(word))

    async def _told(self) -> None:
        """Wait until all words have been said."""
        await asyncio.gather(*self._words)
        self._words.clear()

    def _exit_code(self, result: AttemptResult) -> int:
        if self._interrupted_by is not None:
            # Workers that all ended with 0 after the signal have done what a clean stop asks for.
            return 0 if result.all_succeeded else 128 + self._interrupted_by
        if self._reported is not None:
            return self._reported.exitcode
        return 0 if result.all_succeeded else 1

    def _report(self) -> None:
        """Say which rank failed first, and repeat its last lines if the rank is one of this node."""
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
        if said := _verdict(self._worker_environ, self._began_s):
            self.say(said)

    def _on_ending_signal(self, signum: int) -> None:
        first = self._interrupted_by is None
        if first:
            self._interrupted_by = signum
            self._on_first_ending_signal(signum)
            outcome = "no worker is running" if self._attempt is None else "passed on to the workers"
            self.say(f"{signal.Signals(signum).name}: {outcome}")
            asyncio.get_running_loop().call_later(_PROMPT_S, self._say_who_is_awaited)
        if self._attempt is not None:
            self._attempt.interrupt(signum)
        if self._main is not None and (self._attempt is None or (not first and signum == signal.SIGINT)):
            self._main.cancel()

    def _say_who_is_awaited(self) -> None:
        """After a signal that ends the job: say which workers the launcher waits for, and how to kill them."""
        if self._attempt is not None and self._attempt.stage is Stage.INTERRUPTED:
            ranks = self._attempt.running_ranks
            left_s = self._config.shutdown_timeout_s - _PROMPT_S
            self.say(f"{_shown(ranks)} still running: waiting for up to {left_s:g} s; Ctrl-C (SIGINT) kills at once")

    def _on_passing_signal(self, signum: int) -> None:
        if self._attempt is not None:
            ranks = self._attempt.pass_on(signum)
            outcome = f"passed on to {_named(ranks)}" if ranks else "no worker handles it, so none got it"
            self.say(f"{signal.Signals(signum).name}: {outcome}")


def _verdict(environ: Mapping[str, str], since_s: float) -> str:
    """What `asyncdist why` says of the dumps that this host's workers have written since then, and where they are."""
    if not environ.get("ASYNCDIST_DUMP_DIR", "").strip():
        return ""
    from asyncdist.inspect.dumps import folder_of  # for jobs that have failed only
    from asyncdist.inspect.job import Job
    from asyncdist.inspect.why import Why

    try:
        folder = folder_of(environ)
        if folder is None or sum(1 for _ in folder.glob("rank_*.json")) > _MAX_DUMPS:
            return ""
        written = [one for one in Job.read(folder).documents.values() if one.get("time", 0.0) >= since_s]
        sentence = Why(Job(written)).hang()
        return sentence and f"dumps in {folder} say: {sentence}"
    except Exception:  # what is in files of workers is no reason to end otherwise
        return ""


def _shown(ranks: Sequence[int]) -> str:
    return f"{_named(ranks)} {'is' if len(ranks) == 1 else 'are'}"


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= _SHOWN_RANKS else f"{len(ranks)} ranks"


@contextmanager
def handle_signals(
    on_ending: Callable[[int], None], on_passing: Callable[[int], None], ending: Iterable[signal.Signals] = ENDING
) -> Iterator[None]:
    """Call back on the running loop for each signal, and restore the previous handlers afterwards.

    `ending` are those that end the job; of `PASSING` the others are passed on.

    A signal that was ignored when we came (nohup, a shell's background job) stays ignored. Outside the main thread,
    where Python allows no handlers, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    previous: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
    try:
        callbacks = dict.fromkeys(PASSING, on_passing) | dict.fromkeys(ending, on_ending)
        for signum, callback in callbacks.items():
            handler = signal.getsignal(signum)
            if handler is not signal.SIG_IGN:
                previous[signum] = handler
                loop.add_signal_handler(signum, callback, int(signum))
        yield
    finally:
        for signum, handler in previous.items():
            loop.remove_signal_handler(signum)
            if handler is not None:  # None: it was not installed from Python
                signal.signal(signum, handler)
