"""Works that nobody asks about: a warning with the line of the call, where somebody looks for mistakes."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from group_kit import Group, outcome

import asyncdist as dist
from asyncdist.group.misuse import watches
from asyncdist.testing import run_world


def warned(main: Callable[[Group], Awaitable[Any]], *, debug: bool = True) -> list[str]:
    """What is warned of while two ranks run `main` with a group of theirs."""

    async def rank(group: Group) -> None:
        asyncio.get_running_loop().set_debug(debug)
        sub = dist.new_group([0, 1])
        assert isinstance(sub, Group)
        await main(sub)
        await asyncio.sleep(1)
        await sub.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_world(2, rank)
        gc.collect()
    assert all(one.category is RuntimeWarning and one.filename == __file__ for one in caught), caught
    return [str(one.message) for one in caught]


FORGOTTEN: dict[str, Callable[[Group], Any]] = {
    "all_reduce #0": lambda g: g.all_reduce(np.ones(3)),
    "broadcast #0": lambda g: g.broadcast(np.ones(3), 0),
    "all_gather_object #0": lambda g: g.all_gather_object([None] * 2, g.rank),
    "average_gradients": lambda g: dist.average_gradients([np.ones(3), np.ones(2, "f4")], g),
    "exscan #0": lambda g: g.exscan(np.ones(3)),
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_forgotten_await_is_told_with_the_line_of_the_call(name: str) -> None:
    async def main(group: Group) -> None:
        FORGOTTEN[name](group)

    line = FORGOTTEN[name].__code__.co_firstlineno
    expected = [
        f"group default/1, rank {rank}, {name}, issued at test_unretrieved.py:{line}, was never awaited"
        for rank in range(2)
    ]
    assert sorted(warned(main)) == expected


def test_so_is_that_of_a_message() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            group.isend(np.ones(3), 1)
        else:
            group.irecv(np.ones(3), 0)

    found = sorted(warned(main))
    assert len(found) == 2
    assert all("was never awaited" in text for text in found)


ASKED: dict[str, Callable[[dist.Work[Any]], Any]] = {
    "await": lambda work: work,
    "wait": lambda work: work.wait(),
    "gather": lambda work: asyncio.gather(work),
    "shield": lambda work: asyncio.shield(asyncio.ensure_future(work)),
    "done": lambda work: asyncio.sleep(1, work.done()),
    "is_completed": lambda work: asyncio.sleep(1, work.is_completed()),
    "is_success": lambda work: asyncio.sleep(1, work.is_success()),
    "add_done_callback": lambda work: asyncio.sleep(1, work.add_done_callback(lambda _: None)),
}


@pytest.mark.parametrize("way", ASKED)
def test_who_asks_is_not_warned(way: str) -> None:
    async def main(group: Group) -> None:
        await ASKED[way](group.all_reduce(np.ones(3)))
        later = group.all_reduce(np.ones(3))
        await asyncio.sleep(1)
        assert later.exception() is None
        assert later.result()[0] == 2
        first, second = group.all_reduce(np.ones(3)), group.barrier()
        await asyncio.wait([asyncio.ensure_future(first), asyncio.ensure_future(second)])

    assert warned(main) == []


@pytest.mark.parametrize("asked", [False, True])
def test_one_that_has_failed_is_told_unless_the_same_was_raised(asked: bool) -> None:
    async def main(group: Group) -> None:
        works = [group.all_reduce(np.ones(3 + group.rank)) for _ in range(2)]
        if asked:
            assert isinstance(await outcome(works[0]), dist.DistError)
        else:
            await asyncio.sleep(2)
        works.clear()
        assert isinstance(await outcome(group.close()), dist.DistError) != asked

    assert len(warned(main)) == (0 if asked else 4)


def test_nothing_is_watched_where_nobody_looks_for_mistakes() -> None:
    async def main(group: Group) -> None:
        assert type(group.all_reduce(np.ones(3))).__mro__[1] is dist.Work

    assert warned(main, debug=False) == []


@pytest.mark.parametrize(("options", "full"), [({}, False), ({"check": "on"}, False), ({"check": "full"}, True)])
def test_the_full_check_watches_too(options: dict[str, str], full: bool) -> None:
    loop = asyncio.new_event_loop()
    loop.set_debug(False)
    assert watches(loop, options) == full
    loop.close()
