"""The line of the log on a slow operation says at which line the rank is that it waits for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hang_programs
import numpy as np
import pytest
from group_kit import outcome
from jobs import start_ranks
from socket_world import socket_world

import asyncdist as dist
from asyncdist.group import deadlines
from asyncdist.world import world as module
from asyncdist.world.rendezvous import Rendezvous

PROGRAM = Path(hang_programs.__file__)


def first_line(name: str, environ: dict[str, str], operation: str = "all_reduce") -> str:
    """What rank 0 logs on its slow operation in that program."""
    run = f"sys.argv = ['', {name!r}]\nimport runpy; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    ranks = start_ranks(run, 3, {"ASYNCDIST_SLOW_S": "0.7", **environ})
    try:
        assert ranks[0].stderr is not None
        return next(line for line in ranks[0].stderr if "waits for" in line and operation in line)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.slow("three processes, and an operation that waits for half a second")
@pytest.mark.parametrize(
    ("name", "environ", "found"),
    [
        ("sleeps", {}, "for rank 1 (nothing came from there: it sleeps in time.sleep at {line} (sleeps))"),
        ("never_calls", {}, "for rank 2 (not called there: it sleeps in asyncio.sleep at {line} (never_calls))"),
        ("sleeps", {"ASYNCDIST_INSPECT": "off"}, "for rank 1 (nothing came from there); called at {program}"),
    ],
    ids=["its loop is blocked", "its loop turns", "nobody answers"],
)
def test_a_slow_operation_names_the_line_of_the_rank_it_waits_for(
    name: str, environ: dict[str, str], found: str
) -> None:
    lines = PROGRAM.read_text().splitlines()
    (culprit,) = (number for number, line in enumerate(lines, 1) if f"# {name}: culprit" in line)
    assert found.format(line=f"{PROGRAM.name}:{culprit}", program=PROGRAM) in first_line(name, environ)


@pytest.mark.slow("three processes, and a message that waits for a second")
def test_a_slow_message_names_the_line_of_the_other_rank() -> None:
    lines = PROGRAM.read_text().splitlines()
    (sends,) = (number for number, line in enumerate(lines, 1) if "# sends_that_cross: rank" in line)
    said = first_line("sends_that_cross", {}, "send (rank 1)")
    waits = f"for rank 1: it waits in send of 32 MiB to rank 0 at {PROGRAM.name}:{sends}\n"
    assert said.endswith(f"waits for at least 0.7 s {waits}")


@pytest.mark.parametrize("away", ["it raises", "it is silent"])
async def test_where_the_store_is_away_the_line_comes_without_it(
    away: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def infos(self: Rendezvous, ranks: Sequence[int]) -> Any:
        if away == "it raises":
            raise dist.DistStoreError("it is away")
        await asyncio.sleep(60)

    monkeypatch.setattr(Rendezvous, "infos", infos)
    monkeypatch.setattr(module, "DOING_S", 0.1)
    monkeypatch.setattr(deadlines, "ASK_S", 0.1)
    monkeypatch.setenv("ASYNCDIST_SLOW_S", "0.1")
    async with socket_world(2) as groups:
        work = groups[0].all_reduce(np.ones(1))
        for _ in range(500):
            if said(caplog):
                break
            await asyncio.sleep(0.01)
        await groups[1].all_reduce(np.ones(1))
        await work
    (line,) = said(caplog)
    assert re.search(r"all_reduce #0: waits for 0 s for rank 1 \((not called|nothing came from) there\)$", line)


@pytest.mark.parametrize("end", ["abort", "close"])
async def test_nothing_is_left_of_a_question_when_the_group_ends(
    end: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = asyncio.Event()

    async def infos(self: Rendezvous, ranks: Sequence[int]) -> Any:
        asked.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(Rendezvous, "infos", infos)
    monkeypatch.setattr(deadlines, "ASK_S", 0.1)
    monkeypatch.setenv("ASYNCDIST_SLOW_S", "0.1")
    async with socket_world(2) as groups:
        before = asyncio.all_tasks()
        work = groups[0].all_reduce(np.ones(1))
        await asked.wait()
        if end == "abort":
            groups[0].abort("enough")
            assert isinstance(await outcome(work), dist.GroupAbortedError)
        else:
            await groups[1].all_reduce(np.ones(1))
            await asyncio.gather(work, *(group.close() for group in groups))
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() - before if "asks" in task.get_name()]
    assert len(said(caplog)) == 1


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "waits for" in record.message]
