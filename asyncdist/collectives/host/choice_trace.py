"""What ASYNCDIST_DEBUG=TRACE:tune says: the candidates for each shape that is planned, with their predictions."""

from __future__ import annotations

from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.shared.inline import in_records
from asyncdist.concurrency import trace as events
from asyncdist.plan.problem import Problem
from asyncdist.plan.records import NO_LANE, LaneMemory
from asyncdist.plan.selection.selector import candidates
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.plan.steps import Plan

__all__ = ["trace_choice"]


def trace_choice(call: Call, plan: Plan, tuning: Tuning, *, ordered: bool, memory: LaneMemory = NO_LANE) -> None:
    """Emit `tune.candidate` for each algorithm, the best first, and `tune.chosen`; nothing unless they are traced.

    What was chosen is not the best where an override or the call itself names an algorithm.
    """
    if not events.tracing("tune"):
        return
    shape = {"collective": call.collective, "world": plan.world, "bytes": call.nbytes}
    problem = Problem.of(call.collective, plan.world, call.counts, call.root, tuning.ranks_per_host)
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
