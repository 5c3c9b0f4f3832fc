"""The order in which an attempt ends its workers, with workers that only pretend."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any, cast

import pytest

from asyncdist.launch.attempt import Attempt, AttemptResult, Stage
from asyncdist.launch.worker import Exit, Worker


class _Tail:
    def __init__(self, *lines: bytes) -> None:
        self.tail = list(lines)


class FakeWorker:
    """Ends when told by `end`, or by a signal in `obeys`."""

    def __init__(self, rank: int, obeys: tuple[int, ...] = (signal.SIGKILL,)) -> None:
        self.rank = rank
        self.exit: Exit | None = None
        self.on_exit: Callable[[Exit], None] = lambda exit: None
        self.obeys = obeys
        self.log: list[str] = []
        self.stdout, self.stderr = _Tail(b"out %d" % rank), _Tail(b"err %d" % rank)

    def end(self, returncode: int) -> None:
        if self.exit is None:
            self.exit = Exit(self.rank, 1000 + self.rank, returncode)
            self.on_exit(self.exit)

    def signal(self, signum: int) -> None:
        if self.exit is None:
            self.log.append(signal.Signals(signum).name)
            if signum in self.obeys:
                asyncio.get_running_loop().call_soon(self.end, -signum)

    async def reap(self, *, drain: bool = True) -> None:
        self.log.append("reap" if drain else "reap in a hurry")


def attempt_of(workers: list[FakeWorker], grace_s: float = 0.01, **options: Any) -> Attempt:
    start = [lambda worker=worker: cast(Worker, worker) for worker in workers]
    return Attempt(start, grace_s=grace_s, **{"shutdown_timeout_s": 60.0, **options})


async def started(attempt: Attempt, workers: list[FakeWorker]) -> asyncio.Task[AttemptResult]:
    task = asyncio.create_task(attempt.run())
    for _ in range(len(workers) + 2):
        await asyncio.sleep(0)
    return task


async def finished(task: asyncio.Task[AttemptResult]) -> AttemptResult:
    async with asyncio.timeout(60):
        return await task


async def test_success_needs_all() -> None:
    workers = [FakeWorker(0), FakeWorker(1)]
    task = await started(attempt_of(workers), workers)
    workers[0].end(0)
    await asyncio.sleep(0)
    assert not task.done()
    workers[1].end(0)
    result = await finished(task)
    assert result.all_succeeded
    assert result.failure is None
    assert [worker.log for worker in workers] == [["reap"], ["reap"]]


async def test_a_failure_is_told_once_and_leads_from_grace_to_sigterm_to_sigkill() -> None:
    workers = [FakeWorker(0), FakeWorker(1), FakeWorker(2, obeys=(signal.SIGTERM,)), FakeWorker(3)]
    told: list[Exit] = []
    sent: list[tuple[int, list[int]]] = []
    attempt = attempt_of(workers, on_failure=told.append, on_escalation=lambda *word: sent.append(word))
    task = await started(attempt, workers)
    workers[1].end(7)
    assert attempt.stage is Stage.GRACE
    workers[3].end(8)  # raised because of the first
    result = await finished(task)
    assert told == [Exit(1, 1001, 7)]
    assert result.failure == told[0]
    assert result.tail == [b"err 1"]
    assert workers[0].log == ["SIGTERM", "SIGKILL", "reap"]
    assert workers[2].log == ["SIGTERM", "reap"]
    assert workers[3].log == ["reap"]
    assert sent == [(signal.SIGTERM, [0, 2]), (signal.SIGKILL, [0])]


@pytest.mark.parametrize("error", [b"PeerLostError: rank 0 lost rank 1", b"GroupAbortedError"])
async def test_the_cause_is_named_even_if_it_ends_after_what_it_brought_down(error: bytes) -> None:
    workers = [FakeWorker(0), FakeWorker(1), FakeWorker(2)]
    workers[0].stderr = _Tail(b"ValueError: an old one", b"  | asyncdist.errors." + error, b"  +-----", b"bye")
    workers[1].stderr = _Tail(b"asyncdist.errors.PeerLostError: x", b"Traceback:", b"ValueError: mine")
    told: list[Exit] = []
    task = await started(attempt_of(workers, grace_s=60, on_failure=told.append), workers)
    workers[0].end(1)
    workers[1].end(2)
    workers[2].end(3)
    result = await finished(task)
    assert [exit.rank for exit in told] == [0]
    assert result.failure == Exit(1, 1001, 2)
    assert result.tail == workers[1].stderr.tail


async def test_where_all_speak_of_others_the_first_is_named() -> None:
    workers = [FakeWorker(0), FakeWorker(1)]
    for worker in workers:
        worker.stderr = _Tail(b"asyncdist.errors.PeerLostError: x")
    task = await started(attempt_of(workers, grace_s=60), workers)
    workers[1].end(1)
    workers[0].end(1)
    assert (await finished(task)).failure == Exit(1, 1001, 1)


async def test_a_stop_at_once_begins_with_sigterm() -> None:
    workers = [FakeWorker(0, obeys=(signal.SIGTERM,)), FakeWorker(1)]
    attempt = attempt_of(workers)
    task = await started(attempt, workers)
    attempt.stop(at_once=True)
    attempt.stop()
    result = await finished(task)
    assert result.failure is None
    assert not result.all_succeeded
    assert [worker.log for worker in workers] == [["SIGTERM", "reap"], ["SIGTERM", "SIGKILL", "reap"]]


async def test_nobody_is_signalled_within_the_grace() -> None:
    workers = [FakeWorker(0), FakeWorker(1)]
    task = await started(attempt_of(workers, grace_s=60), workers)
    workers[1].end(-9)
    workers[0].end(1)
    result = await finished(task)
    assert result.failure == Exit(1, 1001, -9)
    assert workers[0].log == ["reap"]


async def test_failures_of_another_node_end_the_workers_and_are_not_ours() -> None:
    workers = [FakeWorker(0)]
    attempt = attempt_of(workers)
    task = await started(attempt, workers)
    attempt.stop()
    result = await finished(task)
    assert result.failure is None
    assert not result.all_succeeded
    assert workers[0].log == ["SIGTERM", "SIGKILL", "reap"]


async def test_a_signal_is_passed_on_and_what_follows_is_no_failure() -> None:
    workers = [FakeWorker(0, obeys=(signal.SIGTERM,)), FakeWorker(1)]
    attempt = attempt_of(workers, shutdown_timeout_s=0.01)
    task = await started(attempt, workers)
    attempt.interrupt(signal.SIGTERM)
    result = await finished(task)
    assert result.failure is None
    assert workers[0].log == ["SIGTERM", "reap"]
    assert workers[1].log == ["SIGTERM", "SIGKILL", "reap"]


async def test_the_second_interrupt_kills_at_once() -> None:
    workers = [FakeWorker(0)]
    attempt = attempt_of(workers)
    task = await started(attempt, workers)
    attempt.interrupt(signal.SIGTERM)
    attempt.interrupt(signal.SIGTERM)
    attempt.interrupt(signal.SIGINT)
    await finished(task)
    assert workers[0].log == ["SIGTERM", "SIGTERM", "SIGKILL", "reap in a hurry"]


async def test_an_interrupted_attempt_starts_no_more_workers() -> None:
    workers = [FakeWorker(0), FakeWorker(1)]
    attempt = attempt_of(workers)
    attempt.interrupt(signal.SIGINT)
    result = await finished(asyncio.create_task(attempt.run()))
    assert not result.all_succeeded
    assert [worker.log for worker in workers] == [[], []]


@pytest.mark.parametrize("turns", range(5))
async def test_cancellation_reaps_every_worker_started(turns: int) -> None:
    workers = [FakeWorker(0), FakeWorker(1)]
    task = asyncio.create_task(attempt_of(workers).run())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finished(task)
    assert workers[0].log == ([] if turns == 0 else ["reap in a hurry"])


async def test_a_worker_that_cannot_start_ends_those_that_did() -> None:
    first = FakeWorker(0)

    def refuse() -> Worker:
        raise OSError("no more processes")

    attempt = Attempt([lambda: cast(Worker, first), refuse], grace_s=0.01, shutdown_timeout_s=1)
    with pytest.raises(OSError, match="no more processes"):
        await finished(asyncio.create_task(attempt.run()))
    assert first.log == ["reap in a hurry"]
