"""Subject overlap: an all_reduce while the caller's own thread computes.

Two ranks over TCP. Both issue an all_reduce and compute, a unit of about a millisecond at a time, until it is done:
large numpy arrays (the interpreter is free meanwhile), small ones (it is held, and given up often), pure Python (it is
held for the switch interval). `summary` gives the fraction of the idle bandwidth that is left, and how much slower the
computation is beside the transfer than alone. Candidates: `asyncdist.blocking`, `progress="thread"` in a coroutine that
lets its loop run between units, and the same on the loop alone, for comparison.
"""

from __future__ import annotations

import asyncio
import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.candidates import missing_asyncdist
from bench.model import Candidate, Case, Cell, Profile, Rank, RankContext, Record, Subject
from bench.operations import SumPattern

TITLE = "all_reduce beside computation"
LARGE_ELEMENTS = 1 << 19
SMALL_ELEMENTS = 100
SMALL_CALLS = 1000
PYTHON_STEPS = 20_000
ALONE_UNITS = 50
"""Units of computation per sample without a transfer: about 50 ms, as long as the transfer takes."""
PROMISED_FRACTION = 0.4
HEADER = ("candidate", "ranks", "cores", "computation", "of idle bandwidth", "promised", "computation slower by")

_a, _b = np.ones(LARGE_ELEMENTS), np.ones(LARGE_ELEMENTS)
_c, _d = np.ones(SMALL_ELEMENTS), np.ones(SMALL_ELEMENTS)


def large_numpy() -> None:
    """One pass over 4 MiB."""
    np.add(_a, _b, out=_a)


def small_numpy() -> None:
    """A thousand calls on a hundred elements."""
    for _ in range(SMALL_CALLS):
        np.add(_c, _d, out=_c)


def pure_python() -> int:
    """A loop without calls."""
    total = 0
    for number in range(PYTHON_STEPS):
        total += number & 7
    return total


COMPUTATIONS: Mapping[str, Callable[[], object]] = {
    "large numpy": large_numpy,
    "small numpy": small_numpy,
    "pure Python": pure_python,
}
IDLE = "all_reduce idle"


def cases(profile: Profile) -> Sequence[Case]:
    """Return the cells of a profile: the transfer and the computation, each alone and beside the other."""
    nbytes = profile.large_bytes
    samples, warmup = profile.samples(large=True)
    found = [Case("overlap", nbytes, samples, warmup, title=IDLE)]
    for name in COMPUTATIONS:
        found.append(Case("overlap", nbytes, samples, warmup, title=f"all_reduce beside {name}"))
        found.append(Case("overlap", 0, samples, warmup, title=f"{name} alone"))
        found.append(Case("overlap", nbytes, samples, warmup, title=f"{name} beside all_reduce"))
    return found


class CoroutineRank(Rank):
    """A coroutine that computes; `progress` is an option of the candidate."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._dist: Any = importlib.import_module("asyncdist")
        self._group: Any = None
        self.run = self._dist.run

    def _arguments(self) -> dict[str, Any]:
        context = self._context
        return {
            "init_method": f"tcp://{context.address}",
            "rank": context.rank,
            "world_size": context.world_size,
            **context.options,
        }

    async def open(self) -> None:
        self._group = self._dist.init_process_group(**self._arguments())
        await self._group.__aenter__()

    async def close(self) -> None:
        await self._group.__aexit__(None, None, None)

    async def measure(self, case: Case) -> Record:
        """Run one case; the sample is the transfer's time, or that of one unit of computation."""
        computation = next((COMPUTATIONS[name] for name in COMPUTATIONS if name in case.label), None)
        per_unit = not case.label.startswith("all_reduce")
        record = Record()
        pattern = SumPattern(max(case.nbytes, 4), self._context.rank, self._context.world_size)
        array = pattern.empty()
        for number in range(case.warmup + case.samples):
            pattern.fill(array, number)
            await self._barrier()
            start_ns = time.perf_counter_ns()
            units = await self._reduce(array, computation) if case.nbytes else _alone(computation)
            end_ns = time.perf_counter_ns()
            if case.nbytes:
                record.wrong += not pattern.is_right(array, number)
            if number >= case.warmup:
                record.add(start_ns, start_ns + (end_ns - start_ns) // max(units, 1) if per_unit else end_ns)
        return record

    async def _barrier(self) -> None:
        await self._dist.barrier()

    async def _reduce(self, array: Any, computation: Callable[[], object] | None) -> int:
        """Issue, compute until it is done, and return the units done."""
        work, units = self._dist.all_reduce(array), 0
        while computation is not None and not work.done():
            computation()
            units += 1
            await asyncio.sleep(0)
        await work
        return units


def _alone(computation: Callable[[], object] | None) -> int:
    assert computation is not None
    for _ in range(ALONE_UNITS):
        computation()
    return ALONE_UNITS


class BlockingRank(CoroutineRank):
    """An ordinary thread that computes; the runner's loop in the main thread sleeps meanwhile."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._dist = importlib.import_module("asyncdist.blocking")

    async def open(self) -> None:
        await asyncio.to_thread(lambda: self._dist.init_process_group(**self._arguments()))

    async def close(self) -> None:
        await asyncio.to_thread(self._dist.destroy_process_group)

    async def measure(self, case: Case) -> Record:
        return await asyncio.to_thread(self._measure_here, case)

    def _measure_here(self, case: Case) -> Record:
        """The coroutine of the others never waits here, so that it can be driven without a loop."""
        steps = super().measure(case)
        try:
            steps.send(None)
        except StopIteration as end:
            record: Record = end.value
            return record
        raise AssertionError("a blocking rank has nothing to await")

    async def _barrier(self) -> None:
        self._dist.barrier()

    async def _reduce(self, array: Any, computation: Callable[[], object] | None) -> int:
        work, units = self._dist.all_reduce(array, async_op=True), 0
        while computation is not None and not work.is_completed():
            computation()
            units += 1
        work.wait()
        return units


def _candidate(name: str, entry: str, options: Mapping[str, Any], own: bool = False) -> Candidate:
    return Candidate(
        name,
        f"bench.overlap:{entry}",
        frozenset({"overlap"}),
        missing=missing_asyncdist,
        environment={"ASYNCDIST_TRANSPORT": "tcp", "OMP_NUM_THREADS": "1"},
        options=options,
        own=own,
    )


CANDIDATES = (
    _candidate("blocking", "BlockingRank", {}, own=True),
    _candidate("thread", "CoroutineRank", {"progress": "thread"}, own=True),
    _candidate("loop", "CoroutineRank", {"progress": "loop"}, own=True),
)
SUBJECT = Subject("overlap", TITLE, (2,), cases, CANDIDATES, budgeted=True)


def summary(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """Return one row (`HEADER`) for each candidate, mode and computation that was measured."""
    medians: dict[tuple[str, int, str, str], float] = {}
    for cell in cells:
        for name, measurement in cell.measurements.items():
            if cell.subject == SUBJECT.name and measurement.runs_s:
                medians[name, cell.ranks, cell.mode, cell.case.label] = statistics.median(measurement.medians_s())
    found: list[tuple[str, ...]] = []
    for name, ranks, mode, label in medians:
        computation = label.removeprefix("all_reduce beside ")
        where = (name, ranks, mode)
        needed = [(*where, text) for text in (IDLE, f"{computation} alone", f"{computation} beside all_reduce")]
        if computation == label or not all(key in medians for key in needed):
            continue
        idle_s, alone_s, beside_s = (medians[key] for key in needed)
        fraction = idle_s / medians[*where, label]
        promised = (
            "" if name == "loop" else f">= {PROMISED_FRACTION:g}x: {'yes' if fraction >= PROMISED_FRACTION else 'NO'}"
        )
        found.append((name, str(ranks), mode, computation, f"{fraction:.2f}x", promised, f"{beside_s / alone_s:.2f}x"))
    return found
