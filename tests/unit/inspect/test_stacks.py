"""What a dump says of tasks and threads: where they are, and what they wait for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from group_kit import Group

from asyncdist.inspect import dumps, stacks
from asyncdist.testing import run_world


async def plain(group: Group) -> None:
    await group.recv(np.empty(1), 1)


async def waited(group: Group) -> None:
    await group.irecv(np.empty(1), 1).wait(100)


async def shielded(group: Group) -> None:
    await asyncio.shield(asyncio.wait_for(plain(group), 100))


async def through_a_generator(group: Group) -> None:
    async def items() -> AsyncIterator[int]:
        await plain(group)
        yield 1

    async for _ in items():
        pass


async def joined(group: Group) -> None:
    await asyncio.wait([group.irecv(np.empty(1), 1), group.irecv(np.empty(1), 1)])


async def started(program: Callable[[Group], Coroutine[Any, Any, None]], group: Group) -> dict[str, Any]:
    task = asyncio.create_task(program(group), name=f"it {group.rank}")
    await asyncio.sleep(1)
    found = dumps.document(group.rank, "asked")
    task.cancel()
    await asyncio.wait([task])
    return found


def found_in(document: dict[str, Any], name: str = "it 0") -> dict[str, Any]:
    (place,) = [place for key, place in document["awaits"].items() if key.startswith(f"{name} (")]
    return place  # type: ignore[no-any-return]


@pytest.mark.parametrize("program", [plain, waited, through_a_generator, joined])
def test_operations_name_the_task_that_waits(program: Callable[[Group], Coroutine[Any, Any, None]]) -> None:
    document = run_world(2, lambda group: started(program, group))[0]
    place = found_in(document)
    assert place["waits"] == "operation"
    under_way = [entry for entry in document["entries"] if entry["kind"] == "message" and "ended" not in entry]
    assert under_way
    for entry in under_way:
        assert [name.partition(" (")[0] for name in entry["waiters"]] == ["it 0"]
        file, _, line = entry["awaited_at"].rpartition(":")
        assert file == __file__
        assert int(line) > 0
    assert place["function"] == (plain if program is through_a_generator else program).__qualname__


def test_tasks_name_the_tasks_they_wait_for() -> None:
    async def gathers(group: Group) -> None:
        await asyncio.gather(*(asyncio.create_task(plain(group), name=f"part {number}") for number in range(3)))

    async def groups(group: Group) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(plain(group), name="part")
            tasks.create_task(plain(group), name="another")

    async def first_of(group: Group) -> None:
        parts = [asyncio.create_task(plain(group), name=f"part {number}") for number in range(2)]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    for program, count, any_of in ((gathers, 3, False), (groups, 2, False), (first_of, 2, True), (shielded, 1, False)):
        place = found_in(run_world(2, lambda group, program=program: started(program, group))[0])  # type: ignore[misc]
        assert (place["waits"], len(place["tasks"]), place["any"]) == ("tasks", count, any_of), program


def test_timers_locks_and_unknown_futures_are_told_apart() -> None:
    async def sleeps(group: Group) -> None:
        await asyncio.sleep(100)

    async def takes(group: Group) -> None:
        await asyncio.Queue[int]().get()

    async def asks(group: Group) -> None:
        await asyncio.get_running_loop().create_future()

    for program, kind, call in (
        (sleeps, "timer", "asyncio.sleep"),
        (takes, "local", "asyncio.Queue[int]().get"),
        (asks, "other", "asyncio.get_running_loop().create_future"),
    ):
        place = found_in(run_world(1, lambda group, program=program: started(program, group))[0])  # type: ignore[misc]
        assert place["waits"] == kind
        assert place["call"] == (call if "(" not in call else "")  # never an argument


def test_a_thread_is_found_at_the_line_of_the_program() -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=lambda: go_on.wait(100), name="waits")
    sleeper = threading.Thread(target=lambda: time.sleep(0.5), name="sleeps")
    for one in thread, sleeper:
        one.start()
    for _ in range(10_000):
        _, places = stacks.threads({})
        calls = {name.partition(" ")[0]: place["call"] for name, place in places.items()}
        if calls.get("waits") and calls.get("sleeps"):
            break
    go_on.set()
    for one in thread, sleeper:
        one.join()
    assert (calls["waits"], calls["sleeps"]) == ("go_on.wait", "time.sleep")
    assert all(
        place["site"].startswith(f"{__file__}:") for name, place in places.items() if name[:5] in ("waits", "sleep")
    )
