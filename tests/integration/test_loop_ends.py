"""Event loops that end without the groups on them having been closed, are interrupted, or run already."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import warnings
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from socket_world import descriptors, socket_world

import asyncdist as dist
from asyncdist.store import HashStore

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


async def abandon() -> None:
    """Return with operations under way, and nothing closed."""
    store = HashStore()

    async def join(rank: int) -> dist.ProcessGroup:
        return await dist.init_process_group(store=store, rank=rank, world_size=2, timeout=30)

    groups = await asyncio.gather(*(asyncio.create_task(join(rank)) for rank in range(2)))
    await asyncio.gather(*(group.all_reduce(np.ones(10)) for group in groups))
    groups[0].irecv(np.zeros(3), 1)
    groups[0].all_reduce(np.ones(300_000), tag=1)
    groups[0].isend(np.ones(1_000_000), 1)
    kept = groups[0].empty(100_000)
    kept[:] = 1


def left_by(
    main: Callable[[], Coroutine[Any, Any, None]], factory: Callable[[], asyncio.AbstractEventLoop]
) -> tuple[int, int]:
    """Descriptors and mappings of shared memory after `main`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of sockets that were not closed, rightly
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())
        gc.collect()
    return descriptors(), Path("/proc/self/maps").read_text().count("memfd:asyncdist")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc")
@pytest.mark.parametrize("factory", LOOPS)
def test_a_loop_closed_before_its_groups_leaves_nothing_open(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    first = left_by(abandon, factory)
    assert [left_by(abandon, factory) for _ in range(3)] == [first] * 3


@pytest.mark.parametrize("factory", LOOPS)
def test_an_interrupt_within_an_await_closes_the_groups(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    groups: list[dist.ProcessGroup] = []

    async def main() -> None:
        async with socket_world(2) as made:
            groups.extend(made)
            await asyncio.gather(*(group.barrier() for group in made))
            asyncio.get_running_loop().call_later(0.02, os.kill, os.getpid(), signal.SIGINT)
            await made[0].recv(np.zeros(3), 1)

    with pytest.raises(KeyboardInterrupt), asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    assert all(group.closed for group in groups)


async def test_a_second_run_within_the_first_is_refused() -> None:
    async def main() -> None:
        raise AssertionError("never begins")

    with pytest.raises(RuntimeError, match="running event loop"):
        dist.run(main())


def test_a_function_in_place_of_its_coroutine_is_named() -> None:
    with pytest.raises(TypeError, match=r"takes a coroutine, as in run\(main\(\)\), not <function abandon"):
        dist.run(abandon)  # type: ignore[arg-type]


def test_torchs_async_op_is_answered_with_what_to_write() -> None:
    async def main() -> None:
        dist.all_reduce(None, async_op=True)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="unexpected keyword argument 'async_op'") as refused:
        dist.run(main())
    assert "return a Work, as in work = dist.all_reduce(x)" in "".join(refused.value.__notes__)


def test_other_type_errors_are_left_alone() -> None:
    async def main() -> None:
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine") as refused:
        dist.run(main())
    assert not hasattr(refused.value, "__notes__")


def test_what_is_no_store_is_refused_at_the_call() -> None:
    with pytest.raises(TypeError, match="store must be a Store that is open, not int"):
        dist.init_process_group(store=3, rank=0, world_size=1)  # type: ignore[arg-type]


async def test_a_world_that_was_not_awaited_says_so() -> None:
    opening = dist.init_process_group(store=HashStore(), rank=0, world_size=1)
    with pytest.raises(AttributeError, match=r"init_process_group\(\) was not awaited: .* has a 'rank'"):
        opening.rank  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(TypeError, match="entered with `async with`"), opening:  # type: ignore[attr-defined]
        pass
