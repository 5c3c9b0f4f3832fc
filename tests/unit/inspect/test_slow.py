"""The line of the log on an operation that waits for long."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from group_kit import Group

import asyncdist as dist
from asyncdist.inspect.dumps import SLOW_S, slow_s_from_environ
from asyncdist.inspect.recorder import RECORDER
from asyncdist.testing import run_world


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "waits for" in record.message]


@pytest.fixture(autouse=True)
def _as_in_real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_SLOW_S", str(SLOW_S))
    monkeypatch.setattr(RECORDER, "sites", True)


def test_an_operation_that_waits_says_once_for_whom_and_where_it_was_called(caplog: pytest.LogCaptureFixture) -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        if group.rank == 1:
            await asyncio.sleep(3.5 * SLOW_S)
        works = [group.all_reduce(np.ones(1)), group.barrier()]
        for work in works:
            await work

    run_world(3, main)
    said = lines(caplog)
    assert len(said) == 2  # a rank says it of the oldest only
    for rank, line in zip((0, 2), sorted(said), strict=True):
        assert f"rank {rank}, all_reduce #1: waits for 15 s for rank 1 (not called there); called at " in line
        assert line.endswith(f"test_slow.py:{main.__code__.co_firstlineno + 4}")


def test_what_ends_in_time_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main(group: Group) -> None:
        await asyncio.sleep((SLOW_S - 1) * group.rank)
        await group.barrier()

    run_world(2, main)
    assert not lines(caplog)


def test_sends_say_it_too_and_receives_at_info(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            work = group.irecv(np.empty(1), 1, tag=3)
            await asyncio.sleep(5 * SLOW_S)
            await work
            await group.recv(np.empty(10_000_000), 1, tag=4)
        else:
            work = group.isend(np.empty(10_000_000), 0, tag=4)
            await asyncio.sleep(4 * SLOW_S)
            await group.send(np.empty(1), 0, tag=3)
            await work

    with caplog.at_level("INFO", "asyncdist"):
        run_world(2, main)
    said = {(record.levelname, record.message) for record in caplog.records if "waits for" in record.message}
    assert len(said) == 2
    ((_, received), (_, sent)) = sorted(said)
    assert received.startswith("group default, rank 0, irecv (rank 1): waits for at least 15 s; called at ")
    assert sent.startswith("group default, rank 1, isend (rank 0): waits for at least 15 s; called at ")
    assert [level for level, _ in sorted(said)] == ["INFO", "WARNING"]


def test_the_time_is_read_from_the_environment(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(group: Group) -> None:
        await asyncio.sleep(50 * group.rank)
        await group.barrier()

    monkeypatch.setenv("ASYNCDIST_SLOW_S", "40")
    run_world(2, main)
    assert "waits for 40 s" in lines(caplog)[0]
    caplog.clear()
    monkeypatch.setenv("ASYNCDIST_SLOW_S", "0")
    run_world(2, main)
    assert not lines(caplog)
    with pytest.raises(ValueError, match="ASYNCDIST_SLOW_S='soon' is not a number of seconds"):
        slow_s_from_environ({"ASYNCDIST_SLOW_S": "soon"}, None)


def test_hooks_see_operations_begin_and_end() -> None:
    async def main(group: Group) -> list[tuple[str, str, bool]]:
        seen: list[tuple[str, str, bool]] = []
        remove = group.add_hook(
            lambda work: seen.append(("before", work.operation, work.done())),
            lambda work: seen.append(("after", work.operation, work.duration is not None)),
        )
        await group.all_reduce(np.ones(1))
        await dist.barrier()
        await group.send(np.ones(1), group.rank)
        await group.recv(np.ones(1), group.rank)
        await asyncio.sleep(0)
        remove()
        await dist.all_reduce(np.ones(1))
        return seen

    for seen in run_world(2, main):
        assert [name for when, name, _ in seen if when == "before"] == ["all_reduce", "barrier", "send", "recv"]
        assert sorted(name for when, name, timed in seen if when == "after" and timed) == sorted(
            ["all_reduce", "barrier", "send", "recv"]
        )


def test_a_time_out_that_is_set_counts_from_then_on() -> None:
    async def main(group: Group) -> float:
        group.set_timeout(2)
        start = asyncio.get_running_loop().time()
        if group.rank == 0:
            with pytest.raises(dist.CollectiveTimeoutError):
                await group.barrier()
        else:
            await asyncio.sleep(5)
        return asyncio.get_running_loop().time() - start

    assert 2 <= run_world(2, main)[0] < 4
