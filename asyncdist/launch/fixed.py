"""The launcher of one node of a job with a fixed number of them: joins the others once, and runs attempts with them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from asyncdist.errors import DistError
from asyncdist.launch.agent import NodeAgent
from asyncdist.launch.attempt import AttemptResult
from asyncdist.launch.failure import Failure
from asyncdist.launch.rendezvous.job_store import Outage, StorePlace, open_store, with_run_token
from asyncdist.launch.rendezvous.links import LinkHost, beside
from asyncdist.launch.rendezvous.nodes import ENDED_WELL, Nodes
from asyncdist.launch.worker import Exit, NodePlace, Roster

if TYPE_CHECKING:
    from asyncdist.store.base import Store

_END_MARGIN_S: Final = 10.0
"""Beyond the grace periods: what other nodes get to say that a failed attempt is over there too."""


class FixedAgent(NodeAgent):
    """State of one launcher of a job that needs all of its nodes."""

    def _prepare(self) -> None:
        self._outage: Outage | None = None
        self._ending = asyncio.Event()  # a failure somewhere, or a signal: from now on every wait is bounded

    async def _take_part(self, place: StorePlace, stack: AsyncExitStack) -> int:
        nodes, roster, place = await self._join(place, stack)
        self._announce(place, roster, f"job {roster.run_id},")
        self._open_logs(roster)
        self._begin(stack)
        node_place = self._node_place(place, roster)
        # Where there are no others, a daemon that has gone is no reason to end: the workers say whether they need it.
        others = nodes if self._config.nnodes > 1 else None
        for number in range(self._config.max_restarts + 1):
            result = await self._run_attempt(number, node_place, others)
            exitcode = self._exit_code(result)
            if exitcode == 0 or self.interrupted:
                break
            self._report()
            if number < self._config.max_restarts:
                self.say(f"restarting all workers (attempt {number + 1} of {self._config.max_restarts})")
        return exitcode

    async def _join(self, place: StorePlace, stack: AsyncExitStack) -> tuple[Nodes | None, Roster, StorePlace]:
        config = self._config
        if config.nnodes == 1 and (place.hosted is not None or config.job_id is None):
            # No other node to meet, and a name that the store has not seen before.
            return None, Roster(0, (config.nproc_per_node,), config.job_id or os.urandom(4).hex()), place
        store: Store = await open_store(place, config.join_timeout_s)
        host = None
        if config.nnodes > 1:
            self.say(f"waiting for {config.nnodes} nodes, store at {place.endpoint}")
        if place.hosted is None:
            self._outage = Outage(place.endpoint, config.store_outage_s, self.say)
            if config.nnodes > 1:
                host = LinkHost(place, config, self._environ)
                stack.push_async_callback(host.close)
        nodes = Nodes(store, config.job_id, config.nnodes, host, lost_after_s=config.lost_after_s)
        stack.push_async_callback(self._leave, nodes, place)
        place = await with_run_token(place, store, config)
        return (
            nodes,
            await nodes.join(config.node_rank, config.nproc_per_node, self._host, config.join_timeout_s),
            place,
        )

    def _watches(self, number: int, nodes: Nodes) -> list[Coroutine[Any, Any, None]]:
        """Look at the workers, and at the job's store, where the launchers can do without it."""
        attempt, losses = self._attempt, self._losses
        assert attempt is not None
        watches = []
        if losses is not None:
            watches = [nodes.share_stopped(partial(attempt.stopped_ranks, losses.processes), losses.tell_stopped)]
        if self._outage is None or nodes.store is nodes.words:
            return watches

        def on_over(why: str) -> None:
            self._tell(nodes.report_failure(number, nodes.own_failure(why)))

        return [*watches, self._outage.watch(nodes.store, on_over)]

    async def _leave(self, nodes: Nodes, place: StorePlace) -> None:
        outlived = self._config.store is not None and (self._outage is None or await self._outage.answers(nodes.store))
        await nodes.leave(hosting=place.hosted is not None, outlived=outlived)

    async def _run_attempt(self, number: int, place: NodePlace, nodes: Nodes | None) -> AttemptResult:
        self._reported, self._own = None, None
        self._ending.clear()

        def on_failure(exit: Exit) -> None:
            self._reported = self._as_failure(exit, place)
            self._ending.set()
            if nodes is not None:
                self._tell(nodes.report_failure(number, self._reported))

        def on_lost(node: int, why: str) -> None:
            assert nodes is not None
            self._tell_ranks(place.roster, node, nodes.hosts[node], why)

        self._attempt = self._new_attempt(number, place, on_failure)
        try:
            if nodes is None:
                self._own = await self._attempt.run()
                if self._own.failure is not None:
                    self._reported = self._as_failure(self._own.failure, place)
            else:
                async with (
                    nodes.watching(number, self._on_others_failure, on_lost),
                    beside(*self._watches(number, nodes)),
                ):
                    self._own = await self._attempt.run()
                    await self._end_together(nodes, number, place, self._own)
            return self._own
        finally:
            self._attempt = None
            await self._told()

    def _on_first_ending_signal(self, signum: int) -> None:
        self._ending.set()

    def _on_others_failure(self, failure: Failure) -> None:
        self._reported = failure  # the store's word on which failure was first wins over our own
        self._ending.set()
        if self._attempt is not None:
            self._attempt.stop()

    async def _end_together(self, nodes: Nodes, number: int, place: NodePlace, result: AttemptResult) -> None:
        """Wait until every node's attempt is over, because the store must outlive all of them."""
        if self._interrupted_by is not None and not result.all_succeeded:
            name = signal.Signals(self._interrupted_by).name
            failure = Failure(place.roster.node_rank, -1, self._host, 0, 128 + self._interrupted_by, f"ended by {name}")
            await nodes.report_failure(number, failure)
        outcome = ENDED_WELL if result.all_succeeded else b"failed"
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
            self._on_others_failure(nodes.unreachable(ended))
