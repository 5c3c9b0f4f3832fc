"""The `aio` backend: collectives on host arrays, as plans over the mesh."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, Final, Protocol, TypeAlias

from asyncdist.arrays import reduction
from asyncdist.arrays.reduce_op import CustomOp, PremulSum, ReduceOp
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.arguments.items import ItemCall
from asyncdist.collectives.arguments.stream import StreamCall
from asyncdist.collectives.backend import CollectiveWork, GroupBackend, OnEnd, WorkKey
from asyncdist.collectives.executor.buffers import ScratchPool
from asyncdist.collectives.executor.runner import Resources
from asyncdist.collectives.host.item_operation import ItemOperation
from asyncdist.collectives.host.operation import Operation, Recipe
from asyncdist.collectives.host.stream_operation import StreamOperation
from asyncdist.collectives.shared.agreement import RESERVED, WITHOUT_LANE, Lanes
from asyncdist.collectives.shared.inline import InlineOperation
from asyncdist.collectives.shared.layout import MAX_LANE_RANKS
from asyncdist.collectives.shared.recipes import in_records, inline_of
from asyncdist.concurrency import trace as events
from asyncdist.errors import DistStoreError
from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.builder import one_by_one
from asyncdist.plan.problem import Problem
from asyncdist.plan.records import NO_LANE, LaneMemory
from asyncdist.plan.selection.selector import candidates, plan_for, plan_id, usable
from asyncdist.plan.selection.tuning import DEFAULT_TUNING, Tuning
from asyncdist.plan.steps import Plan
from asyncdist.transport.base_mesh import BaseMesh
from asyncdist.transport.protocol.frame import key_prefix
from asyncdist.transport.protocol.peer import PeerCore

__all__ = ["HostBackend"]

RECIPES_KEPT: Final = 256
"""Compiled plans kept per group: more than the shapes a training step uses, few enough to stay below some megabytes."""


OnDifferent: TypeAlias = Callable[[int, int, int], None]
"""on_different(tag, sequence, rank): global rank `rank` runs something else there, where all may have ended here."""


class Running(Protocol):
    """An operation under way."""

    def stop(self) -> None:
        """Read and write no array any more, and report nothing."""

    def waiting_for(self) -> tuple[int, ...]:
        """Group ranks it has not heard from."""


class Beginning(Running, Protocol):
    """One that is made and then started."""

    def begin(self) -> None:
        """Start; called once the backend knows it."""


_OPERATIONS: Final[dict[type[Call], Callable[..., Beginning]]] = {
    Call: Operation,
    ItemCall: ItemOperation,
    StreamCall: StreamOperation,
}
"""What carries out a call of each kind."""


class HostBackend(GroupBackend):
    """Collectives of one group on host arrays."""

    name: ClassVar[str] = "aio"

    def __init__(
        self,
        mesh: BaseMesh,
        group_id: int,
        ranks: tuple[int, ...],
        rank: int,
        *,
        loop: asyncio.AbstractEventLoop,
        pool: ScratchPool,
        tuning: Tuning = DEFAULT_TUNING,
        lanes: bool = False,
        on_different: OnDifferent = lambda tag, sequence, rank: None,
    ) -> None:
        super().__init__(mesh, group_id, ranks, rank)
        self.loop = loop
        self.peers: list[PeerCore | None] = [None] * len(ranks)
        self.resources = Resources(loop, self.peers, pool)
        """Connections by group rank, of the ranks that some program has named."""
        self._mesh = mesh
        self._tuning = tuning
        self._overrides = dict(tuning.overrides)
        self.running: dict[WorkKey, Running] = {}
        """Operations under way, by tag and sequence number."""
        self._recipes: dict[tuple[object, LaneMemory], Recipe] = {}
        self._recipes_by: dict[Tuning, dict[tuple[object, LaneMemory], Recipe]] = {tuning: self._recipes}
        self._lanes = Lanes(self, loop, mesh, on_different) if lanes and 2 <= len(ranks) <= MAX_LANE_RANKS else None

    def start(self, call: Call, work: CollectiveWork, on_end: OnEnd) -> None:
        """Begin `call`, once it is known whether its tag has a lane."""
        place = WITHOUT_LANE
        if self._lanes is not None:
            found = self._lanes.decided.get(work.tag) or self._lanes.admit(call, work, on_end)
            if found is None:
                return
            place = found
        recipe = self._recipes.get((call.recipe_key, place.memory))
        if recipe is None or recipe.met != self._mesh.lookups_failed:
            recipe = self.recipe_for(call, place.memory)
        lane = place.lane
        inline = recipe.inline
        if inline is not None and lane is not None:
            short = InlineOperation(self, lane.inline, inline, call, work, on_end)
            if inline.pieces is None or inline.pieces.fit(short):
                if place.number == work.number:
                    place.number += 1
                else:
                    place.take_place(work.number)
                self.running[work.key] = short
                lane.inline.add(short)
                return
        operation = _OPERATIONS[type(call)](self, call, recipe, work, on_end)
        self.running[work.key] = operation
        if lane is None:
            operation.begin()
            self._mesh.issued(len(self.running))
            return
        place.take_place(work.number)
        if recipe.shared and isinstance(operation, Operation):
            operation.share(lane.add(recipe.fingerprint, recipe.program, operation))
        else:
            lane.add(recipe.fingerprint)
        operation.begin()
        lane.flush()

    def go_on_in_steps(self, short: InlineOperation) -> None:
        """A member has put out items in place of its pieces: go on with the steps of the plan."""
        call, work, runner = short.call, short.work, short.queue.runner()
        recipe = self.recipe_for(call, self.lane_memory(work.tag))
        operation = Operation(self, call, recipe, work, short.on_end)
        self.running[work.key] = operation
        operation.share(runner.add_begun(short, recipe.program, operation))
        operation.begin()

    def recipe_for(self, call: Call, memory: LaneMemory = NO_LANE) -> Recipe:
        """What all calls like this one share; connections to the peers it names have been asked for.

        `memory` is what each rank has for items in the lane of the call's tag.
        """
        recipe = self._recipes.get((call.recipe_key, memory))
        if recipe is None:
            recipe = self._cook(call, memory)
        if recipe.met != self._mesh.lookups_failed:
            self._meet(recipe)
        return recipe

    def algorithm_of(self, recipe_key: tuple[Any, ...]) -> str:
        """The algorithm of a recipe, if it is still kept."""
        recipe = next((recipe for (key, _), recipe in reversed(self._recipes.items()) if key == recipe_key), None)
        return "" if recipe is None else recipe.plan.algorithm

    @property
    def tuning(self) -> Tuning:
        """What algorithms are chosen by."""
        return self._tuning

    def choose_by(self, tuning: Tuning) -> None:
        """Choose algorithms by `tuning` from now on, as all members have to at the same place; for measurements.

        What was planned for another is kept, so that going to and fro plans nothing again.
        """
        self._tuning = tuning
        self._overrides = dict(tuning.overrides)
        self._recipes = self._recipes_by.setdefault(tuning, {})

    def lane_memory(self, tag: int) -> LaneMemory:
        """What each rank has for items in the lane of a tag; nothing where there is none, or not yet."""
        return NO_LANE if self._lanes is None else self._lanes.lane_memory(tag)

    def forget(self, work: CollectiveWork) -> None:
        """An operation has ended well."""
        del self.running[work.key]

    def waiting_for(self, tag: int, sequence: int) -> tuple[int, ...]:
        """Global ranks an operation under way has not heard from."""
        operation = self.running.get((tag, sequence))
        if operation is None and self._lanes is not None and self._lanes.holds(tag, sequence):
            operation = next(filter(None, (self.running.get((tag, number)) for number in RESERVED)), None)
        return () if operation is None else tuple(self.ranks[rank] for rank in operation.waiting_for())

    def drop(self, tag: int, sequence: int) -> None:
        """Forget one operation, or one never to come; its messages, those here already included, are drained."""
        self._mesh.drop_group(key_prefix(self.group_id, tag, sequence))
        if self._lanes is not None:
            self._lanes.drop(tag, sequence)
        operation = self.running.pop((tag, sequence), None)
        if operation is not None:
            operation.stop()

    def close(self) -> None:
        """Touch no shared memory any more."""
        if self._lanes is not None:
            self._lanes.close()

    def settle(self) -> None:
        """See GroupBackend."""
        if self._lanes is not None:
            self._lanes.settle()

    def closing(self) -> None:
        """Have streams go on without their consumers."""
        for operation in list(self.running.values()):
            if isinstance(operation, StreamOperation):
                operation.release()

    def abort(self, error: BaseException) -> None:
        """Forget every operation and refuse later messages."""
        self._mesh.drop_group(key_prefix(self.group_id, 0, 0)[:8])
        operations = list(self.running.values())
        self.running.clear()
        for operation in operations:
            operation.stop()
        self.close()

    def _plan(self, call: Call, memory: LaneMemory) -> Plan:
        world = len(self.ranks)
        if call.algorithm is not None:
            problem = Problem.of(call.collective, world, call.counts, call.root)
            return build(problem, call.algorithm, self.rank, max(1, problem.total))
        ordered = isinstance(call.op, CustomOp) and not call.op.commutative
        algorithm = self._overrides.get(call.collective)
        memory = memory if type(call) is Call else NO_LANE
        if algorithm is not None and not usable(call.collective, algorithm, ordered=ordered, shared=memory.nbytes > 0):
            algorithm = None
        plan = plan_for(
            call.collective,
            self.rank,
            world,
            call.counts,
            call.dtype.itemsize,
            root=call.root,
            algorithm=algorithm,
            tuning=self._tuning,
            ordered=ordered,
            memory=memory,
            in_records=in_records(call),
        )
        trace_choice(call, plan, self._tuning, ordered=ordered, memory=memory)
        return plan

    def _cook(self, call: Call, memory: LaneMemory) -> Recipe:
        """Plan; the oldest recipe makes room."""
        plan = self._plan(call, memory)
        if type(call) is ItemCall:
            plan = one_by_one(plan)
        op = ReduceOp.PREMUL_SUM if isinstance(call.op, PremulSum) else call.op  # factors may differ between ranks
        detail = f"{call.dtype.name} {op!r} {call.detail}"
        fingerprint = plan_id(call.collective, plan.algorithm, plan.world, call.counts, call.root, detail)
        kernel = None if call.op is None else reduction.kernel(call.op, call.dtype)
        if len(self._recipes) >= RECIPES_KEPT:
            del self._recipes[next(iter(self._recipes))]
        recipe = Recipe(plan, fingerprint, kernel, inline_of(call, plan, memory, fingerprint, kernel))
        self._recipes[call.recipe_key, memory] = recipe
        return recipe

    def _meet(self, recipe: Recipe) -> None:
        """Ask for connections to all peers together, so that their addresses are looked up in one request.

        A peer is asked for anew if it was not known where it listens.
        """
        recipe.met = self._mesh.lookups_failed
        if recipe.inline is not None and recipe.inline.pieces is None:
            return
        if recipe.shared and not recipe.program.whole:
            return
        cores = [(rank, self.peers[rank]) for rank in recipe.program.peer_ranks]
        unknown = [rank for rank, core in cores if core is None or isinstance(core.error, DistStoreError)]
        if unknown:
            self._mesh.connect([self.ranks[rank] for rank in unknown])
            for rank in unknown:
                self.peers[rank] = self._mesh.peer(self.ranks[rank])


def trace_choice(call: Call, plan: Plan, tuning: Tuning, *, ordered: bool, memory: LaneMemory = NO_LANE) -> None:
    """Emit `tune.candidate` for each algorithm, the best first, and `tune.chosen`; nothing unless they are traced.

    What was chosen is not the best where an override or the call itself names an algorithm.
    """
    if not events.tracing("tune"):
        return
    shape = {"collective": call.collective, "world": plan.world, "bytes": call.nbytes}
    problem = Problem.of(call.collective, plan.world, call.counts, call.root, tuning.ranks_per_host)
    problem = problem._replace(hosts=tuning.hosts)
    itemsize, records = call.dtype.itemsize, in_records(call)
    for one in candidates(problem, itemsize, tuning, ordered=ordered, memory=memory, in_records=records):
        events.emit(
            "tune",
            "candidate",
            **shape,
            algorithm=one.algorithm,
            predicted_us=round(one.seconds * 1e6, 1),
            gb_per_s=round(call.nbytes / one.seconds / 1e9, 3) if one.seconds else 0.0,
            chunk_bytes=one.chunk_bytes,
            rounds=one.rounds,
            sent_bytes=one.sent_bytes,
        )
    events.emit("tune", "chosen", **shape, algorithm=plan.algorithm, rank=plan.rank, steps=len(plan.steps))
