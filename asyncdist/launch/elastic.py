"""The launcher of one node of an elastic job: meets the others in round after round, as nodes come, go and fail."""

from __future__ import annotations

import signal
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from asyncdist.errors import DistError, LaunchError
from asyncdist.launch.agent import NodeAgent
from asyncdist.launch.attempt import Stage
from asyncdist.launch.failure import Conclusion, End, Failure, is_consequence
from asyncdist.launch.rendezvous.job_store import Outage, StorePlace, open_store, with_run_token
from asyncdist.launch.rendezvous.links import LinkHost, beside
from asyncdist.launch.rendezvous.round import Entry, Plan, Round, Stop, shown
from asyncdist.launch.rendezvous.rounds import JobOverError, Outcome, Rounds
from asyncdist.launch.worker import Exit, NodePlace, Roster

_END_MARGIN_S: Final = 5.0
"""How long the launcher that hosts the store waits for the others to leave, beyond their grace periods."""

_HOST_LEFT: Final = (
    "its launcher hosted the job's store and was ended by {}; a standing daemon (asyncdist-server, ASYNCDIST_STORE) "
    "lets any node leave"
)


class ElasticAgent(NodeAgent):
    """State of one launcher of an elastic job."""

    def _prepare(self) -> None:
        self._round: Round | None = None
        self._plan: Plan | None = None
        self._stop: Stop | None = None
        self._restarts = 0
        self._number = -1  # of the last round
        self._announced = False

    async def _take_part(self, place: StorePlace, stack: AsyncExitStack) -> int:
        outage = Outage(place.endpoint, self._config.store_outage_s, self.say)
        host = LinkHost(place, self._config, self._environ)
        stack.push_async_callback(host.close)
        store = await open_store(place, self._config.join_timeout_s)
        store.on_incarnation_change = outage.on_data_lost
        rounds = Rounds(store, self._config, self.say, outage, host)
        stack.push_async_callback(self._leave, rounds, place)
        place = await with_run_token(place, store, self._config)
        self._begin(stack)
        self.say(f"waiting for {self._config.min_nodes} to {self._config.nnodes} nodes, store at {place.endpoint}")
        while True:
            try:
                exitcode = await self._one_round(rounds, place)
            except JobOverError as error:
                how = f"failed: {error.outcome.text}" if error.outcome.exitcode else "ended well"
                self.say(f"the job {how}, while this node waited to take part")
                return error.outcome.exitcode
            except LaunchError:
                raise
            except DistError as error:
                await rounds.lost(error)
                self.say(f"this node was taken for lost ({error}); joining anew")
                continue
            if exitcode is not None:
                return exitcode

    async def _one_round(self, rounds: Rounds, place: StorePlace) -> int | None:
        """Meet, run the workers, conclude; return the exit code if the job is over for this node."""
        config = self._config
        self._forget_round()
        current = await rounds.meet()
        try:
            async with current.watched(self._on_stop, self._on_lost):
                self._round = current
                entry = Entry(config.nproc_per_node, self._host, self._restarts, self._number)
                self._plan = plan = await current.agree(entry)
                async with current.linked(plan) as together:
                    end = End()
                    if plan is not None and together:
                        end = await self._run_round(plan, current, rounds, place)
                    if self._interrupted_by is not None:
                        assert self._own is not None
                        await self._say_goodbye(current, place)
                        return self._exit_code(self._own)
                    conclusion = await current.conclude(end, self._restarts, config.max_restarts)
        finally:
            self._round = None
            await self._told()
        return await self._follow(conclusion, current, rounds)

    async def _run_round(self, plan: Plan, current: Round, rounds: Rounds, place: StorePlace) -> End:
        self._restarts, self._number = plan.restarts, plan.number
        roster = Roster(current.rank, plan.nprocs, rounds.run_id)
        self._announce(place, roster, f"job {roster.run_id}, round {plan.number}:")
        if not self._announced:
            self._announced = True
            self._open_logs(roster)
        return await self._run_workers(plan, self._node_place(place, roster, plan.restarts), current)

    def _forget_round(self) -> None:
        self._stop = self._reported = self._own = None

    async def _follow(self, conclusion: Conclusion, current: Round, rounds: Rounds) -> int | None:
        if conclusion.kind == "done":
            await rounds.finish(Outcome(0))
            return 0
        if conclusion.kind == "over":
            failure = conclusion.failure
            assert failure is not None
            self._reported = failure
            self._report()
            await rounds.finish(Outcome(failure.exitcode, f"rank {failure.rank}: {failure.description}"))
            return failure.exitcode
        if conclusion.counted:
            self._reported = conclusion.failure
            self._report()
            self._restarts += 1
            self.say(f"restarting all workers (restart {self._restarts} of {self._config.max_restarts})")
        else:
            why = [f"{current.described(rank)}: {kind}" for rank, kind in current.gone.items()]
            reason = ", ".join(why) or (self._stop.text if self._stop is not None else "nodes came or went")
            self.say(f"meeting again with the nodes that are there ({reason})")
        return None

    async def _run_workers(self, plan: Plan, place: NodePlace, current: Round) -> End:
        """Run this node's workers until they have ended, by themselves or because all nodes stop theirs."""
        failed: list[Exit] = []

        def on_failure(exit: Exit) -> None:
            failed.append(exit)
            self._tell(current.stop(Stop("failed", f"rank {exit.rank} failed")))

        self._attempt = attempt = self._new_attempt(plan.number, place, on_failure)
        if self._stop is not None:  # a node went, or came, while this one got here
            attempt.stop(at_once=True)
        try:
            losses = self._losses
            assert losses is not None
            stopped = partial(attempt.stopped_ranks, losses.processes)
            async with beside(current.share_stopped(stopped, losses.tell_stopped)):
                self._own = result = await attempt.run()
        finally:
            self._attempt = None
        if self._interrupted_by is not None:
            return End(left=True)
        completed = result.all_succeeded and attempt.stage in (Stage.RUNNING, Stage.GRACE)
        if not failed or result.failure is None:
            return End(completed)
        return End(False, False, self._as_failure(result.failure, place), is_consequence(result.tail))

    async def _say_goodbye(self, current: Round, place: StorePlace) -> None:
        """A signal ended this node's workers: the others go on without it, if they can."""
        if place.hosted is not None:
            assert self._interrupted_by is not None
            text = _HOST_LEFT.format(signal.Signals(self._interrupted_by).name)
            failure = Failure(current.rank, -1, self._host, 0, 1, text)
            await current.decree(Conclusion("over", False, failure))
        await current.end(End(left=True))

    async def _leave(self, rounds: Rounds, place: StorePlace) -> None:
        if place.hosted is not None and self._interrupted_by is not None:
            await rounds.finish(Outcome(1, "the launcher that hosted the store was ended by a signal"))
        patience_s = 2 * self._config.grace_s + _END_MARGIN_S if self._interrupted_by is not None else _END_MARGIN_S
        await rounds.leave(others_s=0.0 if place.hosted is None else patience_s)

    def _on_lost(self, node: int, why: str) -> None:
        if self._round is not None and self._plan is not None and self._attempt is not None:
            roster = Roster(self._round.rank, self._plan.nprocs, "")
            self._tell_ranks(roster, node, shown(self._round.members[node]).partition(":")[0], why)

    def _on_stop(self, why: Stop) -> None:
        self._stop = why
        if self._attempt is not None:
            if why.kind != "failed":
                self.say(f"{why.text}: stopping the workers")
            self._attempt.stop(at_once=why.kind == "joined")

    def _on_first_ending_signal(self, signum: int) -> None:
        if self._round is not None and self._attempt is not None:
            name = signal.Signals(signum).name
            self._tell(self._round.stop(Stop("left", f"{self._round.described(self._round.rank)} leaves ({name})")))
