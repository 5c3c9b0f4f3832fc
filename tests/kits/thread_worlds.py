"""Worlds on the communication thread, all ranks in one process and one event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import socket_world
from jobs import free_port
from socket_world import LIMIT_S

import asyncdist as dist
from asyncdist.threads.core import ThreadCore


async def run_ranks(size: int, main: Callable[..., Awaitable[Any]], **options: Any) -> list[Any]:
    """Run `main(group)` on `size` ranks whose messages the communication thread carries."""

    async def checked(group: Any) -> Any:
        assert isinstance(group._core, ThreadCore)
        return await main(group)

    return await socket_world.run_ranks(size, checked, progress="thread", **options)


@contextmanager
def another_rank(rank: int, main: Callable[..., Awaitable[Any]]) -> Iterator[str]:
    """Run `main(group)` as `rank` of two, on an event loop in a thread; gives the init method of both."""
    address = f"tcp://127.0.0.1:{free_port()}"
    raised: list[BaseException] = []

    def elsewhere() -> None:
        with asyncio.Runner() as runner:
            try:
                runner.run(run())
            except BaseException as error:
                raised.append(error)

    async def run() -> None:
        async with dist.init_process_group(
            init_method=address, rank=rank, world_size=2, timeout=LIMIT_S, progress="thread"
        ) as group:
            await main(group)

    helper = threading.Thread(target=elsewhere)
    helper.start()
    yield address
    helper.join(LIMIT_S)
    assert not helper.is_alive()
    if raised:
        raise raised[0]


def wait_without_loop(condition: Callable[[], bool]) -> None:
    """Wait, with the caller's event loop standing still, until `condition()`."""
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fail if a communication thread or its switch interval outlives the block."""
    interval_s = sys.getswitchinterval()
    yield
    deadline_s = time.monotonic() + LIMIT_S
    while left := [thread.name for thread in threading.enumerate() if "communication" in thread.name]:
        assert time.monotonic() < deadline_s, left  # one that nobody joined ends by itself
        time.sleep(0.001)
    assert sys.getswitchinterval() == interval_s
