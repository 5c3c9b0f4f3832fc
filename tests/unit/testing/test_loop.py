"""Virtual time: exact, immediate, deterministic, and aware of deadlock."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asyncdist.testing.loop import DeadlockError, VirtualTimeLoop


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())


def test_time_passes_at_once_and_exactly() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        times = [loop.time()]
        await asyncio.sleep(3600)
        times.append(loop.time())
        try:
            async with asyncio.timeout(0.125):
                await loop.create_future()
        except TimeoutError:
            times.append(loop.time())
        return times

    begun_s = time.monotonic()
    assert run(main) == [0, 3600, 3600.125]
    assert time.monotonic() - begun_s < 60


def test_timers_fire_in_order() -> None:
    async def main() -> list[float]:
        fired: list[float] = []
        loop = asyncio.get_running_loop()
        for delay_s in (3, 1, 2, 1):
            loop.call_later(delay_s, fired.append, delay_s)
        await asyncio.sleep(5)
        return fired

    assert run(main) == [1, 1, 2, 3]


def test_deadlock_is_an_error_that_names_the_tasks() -> None:
    async def main() -> None:
        await asyncio.sleep(10)
        forever = asyncio.get_running_loop().create_future()
        await asyncio.gather(asyncio.create_task(asyncio.sleep(1)), forever)

    async def named() -> None:
        asyncio.current_task().set_name("rank 7")  # type: ignore[union-attr]
        await main()

    with pytest.raises(DeadlockError, match=r"at 11 s.*rank 7: .*main at \S+test_loop\.py:\d+"):
        run(named)


def test_threads_run_inline() -> None:
    async def main() -> tuple[int, bool]:
        failed = False
        try:
            await asyncio.to_thread(int, "x")
        except ValueError:
            failed = True
        return await asyncio.to_thread(int, "7"), failed

    assert run(main) == (7, True)


def test_the_outside_world_is_refused() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        one, other = socket.socketpair()
        with one, other:
            with pytest.raises(RuntimeError, match="virtual time"):
                loop.add_reader(one, print)
            with pytest.raises(RuntimeError, match="virtual time"):
                await loop.sock_connect(one, "x")
        with pytest.raises(RuntimeError, match="virtual time"):
            await asyncio.open_connection("127.0.0.1", 1)

    run(main)
