"""What a rank has done in all, though the recorder forgets."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from group_kit import Group

import asyncdist as dist
from asyncdist.inspect import counts
from asyncdist.inspect.counts import SECONDS, CountingRing, count_if_wanted, numbers
from asyncdist.inspect.dumps import document
from asyncdist.inspect.recorder import RECORDER
from asyncdist.testing import SimulatedWorld, run_world


@pytest.fixture(autouse=True)
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(RECORDER, "entries", deque(maxlen=4))
    monkeypatch.setattr(RECORDER, "_resize", lambda: None)
    count_if_wanted({"ASYNCDIST_METRICS": "1"})
    yield
    counts._let_go.clear()


def of(found: dict[str, Any], operation: str) -> dict[str, Any]:
    (one,) = [each for each in found["operations"] if each["operation"] == operation]
    assert isinstance(one, dict)
    return one


def test_what_the_ring_has_forgotten_is_counted() -> None:
    async def main(group: Group) -> list[dict[str, Any] | None]:
        told = []
        for _ in range(10):
            await group.all_reduce(np.ones(300, np.float32))
            told.append(numbers(group.rank))
        if group.rank:
            await group.send(np.ones(4), 0)
        else:
            await group.recv_array(1)
        return [*told, document(group.rank, "asked")["counts"]]

    for rank, told in enumerate(run_world(2, main)):
        totals = [sum(of(each, "all_reduce")["within"]) for each in told if each]
        assert totals == [*range(1, 11), 10]
        last = told[-1]
        assert last is not None
        reduced = of(last, "all_reduce")
        assert (reduced["size"], reduced["bytes"], reduced["failed"]) == ("64KiB", 12_000, 0)
        assert len(reduced["within"]) == len(SECONDS) + 1
        assert 0 <= reduced["seconds"] < 10
        assert last["peers"] == [{"rank": 1 - rank, "sent": 32 * rank, "received": 32 * (1 - rank)}]


def test_failures_and_lost_ranks_are_counted() -> None:
    async def main(group: Group, world: SimulatedWorld) -> dict[str, Any] | None:
        part = await dist.new_group()
        await part.barrier()
        if group.rank == 1:
            world.kill(1)
            await asyncio.sleep(1)
        with pytest.raises(dist.PeerLostError):
            await group.all_reduce(np.ones(1))
        return numbers(group.rank)

    found = run_world(2, main, pass_world=True)[0]
    assert found is not None
    assert found["lost"] == [1]
    assert of(found, "all_reduce").items() >= {"failed": 1, "bytes": 0}.items()


def test_nothing_is_counted_unless_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = deque(maxlen=4)
    monkeypatch.setattr(RECORDER, "entries", plain)
    for unwanted in {}, {"ASYNCDIST_METRICS": "0"}:
        count_if_wanted(unwanted)
        assert RECORDER.entries is plain
    assert numbers(0) is None


def test_a_ring_of_another_size_counts_what_it_has_no_room_for() -> None:
    async def main(group: Group) -> None:
        for _ in range(3):
            await group.barrier()
        RECORDER.entries = CountingRing(RECORDER.entries, 1)

    run_world(1, main)
    found = numbers(0)
    assert found is not None
    assert sum(of(found, "barrier")["within"]) == 3


def test_a_fork_while_another_thread_counts_leaves_the_child_able_to_count() -> None:
    held, done = threading.Event(), threading.Event()

    def count() -> None:
        with counts._lock:
            held.set()
            done.wait(0.2)

    thread = threading.Thread(target=count)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        os._exit(0 if counts._lock.acquire(timeout=1) else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
