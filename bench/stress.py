"""Subject stress: mixed small collectives on 4 ranks while ranks are stopped and continued at random.

Every rank draws the same sequence of operations from one seed, keeps up to 64 of them in flight, and checks every
result. Meanwhile the runner stops a rank (SIGSTOP) for a few milliseconds, continues it, and takes another. A wrong
result, an error or a rank that does not answer in time is a failure; there is nothing to compare, only to survive.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from bench.adapters import Asyncdist
from bench.candidates import ONE_THREAD, missing_asyncdist
from bench.model import Candidate, Case, Cell, Measurement, Profile, Rank, RankContext, Record, Subject
from bench.runner import BenchError, Progress, Session

RANKS: Final = 4
IN_FLIGHT: Final = 64
BLOCKS: Final = (1, 2, 3, 7, 16, 33, 64)
"""Elements of one rank's block: at most 256 bytes, so four ranks' make 1 KiB. Few, as in any program that repeats
itself: what is measured is not the planning of new shapes."""
SEED: Final = 20
MEAN_PAUSE_S: Final = 0.004
MEAN_GAP_S: Final = 0.02
TIMEOUT_PER_OPERATION_S: Final = 2e-3
TIMEOUT_BASE_S: Final = 60.0

Check = Callable[[], bool]


class StressRank(Rank):
    """One rank of the run."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._ours = Asyncdist(context)
        self.run = self._ours.run

    async def open(self) -> None:
        await self._ours.open()

    async def close(self) -> None:
        await self._ours.close()

    async def measure(self, case: Case) -> Record:
        """Run ``case.operations`` operations; the sample is the time of them all."""
        mixer, record = Mixer(self._context), Record()
        await self._ours.barrier()
        start_ns = time.perf_counter_ns()
        left = case.operations
        while left > 0:
            pending = [mixer.issue() for _ in range(min(IN_FLIGHT, left))]
            left -= len(pending)
            for work, is_right in pending:
                await work
                record.wrong += not is_right()
        record.add(start_ns, time.perf_counter_ns())
        return record


class Mixer:
    """Issues the next operation of the sequence all ranks share, and says how to check it."""

    def __init__(self, context: RankContext) -> None:
        self._dist: Any = importlib.import_module("asyncdist")
        self._rank, self._size = context.rank, context.world_size
        self._random = random.Random(SEED)
        self._number = 0
        self._kinds = (self._all_reduce, self._broadcast, self._all_gather, self._reduce_scatter, self._all_to_all)
        self._base = np.arange(BLOCKS[-1] * self._size, dtype=np.float32)

    def issue(self) -> tuple[Any, Check]:
        """Start the next operation; return its Work and its check."""
        self._number += 1
        kind = self._random.randrange(len(self._kinds) + 1)
        block = BLOCKS[self._random.randrange(len(BLOCKS))]
        if kind == len(self._kinds):
            return self._dist.barrier(), lambda: True
        return self._kinds[kind](block, self._number % 1000)

    def _ranks_sum(self) -> int:
        return self._size * (self._size - 1) // 2

    def _all_reduce(self, block: int, number: int) -> tuple[Any, Check]:
        base = self._base[:block]
        array = base + np.float32(number + self._rank)
        expected = base * np.float32(self._size) + np.float32(self._size * number + self._ranks_sum())
        return self._dist.all_reduce(array), lambda: np.array_equal(array, expected)

    def _broadcast(self, block: int, number: int) -> tuple[Any, Check]:
        root = number % self._size
        expected = self._base[:block] + np.float32(number)
        array = expected.copy() if root == self._rank else np.zeros(block, np.float32)
        return self._dist.broadcast(array, root), lambda: np.array_equal(array, expected)

    def _all_gather(self, block: int, number: int) -> tuple[Any, Check]:
        base = self._base[:block]
        mine = base + np.float32(number + self._rank)
        array = np.zeros(block * self._size, np.float32)
        expected = np.concatenate([base + np.float32(number + rank) for rank in range(self._size)])
        return self._dist.all_gather_into_tensor(array, mine), lambda: np.array_equal(array, expected)

    def _reduce_scatter(self, block: int, number: int) -> tuple[Any, Check]:
        whole = self._base[: block * self._size]
        array = np.zeros(block, np.float32)
        mine = whole[self._rank * block : (self._rank + 1) * block]
        expected = mine * np.float32(self._size) + np.float32(self._size * number + self._ranks_sum())
        work = self._dist.reduce_scatter_tensor(array, whole + np.float32(number + self._rank))
        return work, lambda: np.array_equal(array, expected)

    def _all_to_all(self, block: int, number: int) -> tuple[Any, Check]:
        whole = self._base[: block * self._size]
        array = np.zeros(block * self._size, np.float32)
        mine = whole[self._rank * block : (self._rank + 1) * block]
        expected = np.concatenate([mine + np.float32(number + rank) for rank in range(self._size)])
        work = self._dist.all_to_all_single(array, whole + np.float32(number + self._rank))
        return work, lambda: np.array_equal(array, expected)


class Pauser:
    """Stops and continues random processes from a thread until told to end; never leaves one stopped."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pauser")
        self.pauses = 0

    def __enter__(self) -> Pauser:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        chance = random.Random(SEED)
        while not self._ended.wait(chance.expovariate(1 / MEAN_GAP_S)):
            pid = chance.choice(self._pids)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                try:
                    self._ended.wait(chance.expovariate(1 / MEAN_PAUSE_S))
                finally:
                    os.kill(pid, signal.SIGCONT)
                self.pauses += 1


CANDIDATE = Candidate(
    "asyncdist",
    "bench.stress:StressRank",
    frozenset({"stress"}),
    missing=missing_asyncdist,
    environment={"ASYNCDIST_TRANSPORT": "auto", **ONE_THREAD},
    own=True,
)


def cases(profile: Profile) -> Sequence[Case]:
    """Return the one cell of a profile."""
    operations = profile.stress_operations
    timeout_s = TIMEOUT_BASE_S + TIMEOUT_PER_OPERATION_S * operations
    title = f"{operations:,} mixed operations, ranks paused"
    return [Case("stress", 0, 1, 0, operations=operations, timeout_s=timeout_s, title=title)]


OWN = frozenset({CANDIDATE.name})
SUBJECT = Subject("stress", "Mixed small operations under random pauses", (RANKS,), cases, (CANDIDATE,), ("free",))


def run_stress(profile: Profile, progress: Progress = lambda _line: None) -> list[Cell]:
    """Make the run once and return its one cell; ``extra["pauses"]`` is how often a rank was stopped."""
    (case,) = SUBJECT.cases(profile)
    measurement = Measurement(CANDIDATE.name, failure=CANDIDATE.missing())
    cell = Cell(SUBJECT.name, case, RANKS, "free", {CANDIDATE.name: measurement}, OWN, frozenset())
    if measurement.failure is not None:
        return [cell]
    progress(f"{SUBJECT.name}: {case.label}")
    try:
        session = Session(CANDIDATE, RANKS)
    except BenchError as error:
        measurement.failure = str(error)
        return [cell]
    try:
        with Pauser(list(session.pids.values())) as pauser:
            session.begin(case)
            run = session.finish(case)
        run.extra["pauses"] = pauser.pauses
        measurement.add(run)
    except (BenchError, OSError) as error:
        measurement.failure = str(error)
    finally:
        session.close()
    return [cell]
