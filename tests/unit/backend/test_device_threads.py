"""Threads for calls that may block: which device is current there."""

from __future__ import annotations

import asyncio

from asyncdist.backend.device_threads import Helpers, in_thread
from asyncdist.testing.fake_cuda import FakeRuntime


async def test_the_device_is_current_in_the_thread() -> None:
    """A fresh thread's is the first one, whichever the caller's is."""
    runtime = FakeRuntime(3)
    loop = asyncio.get_running_loop()
    assert await in_thread(loop, runtime.current_device, on=(runtime, 2)) == 2
    seen: list[int] = []
    helpers = Helpers(loop, (runtime, 1))
    helpers.start(lambda: seen.append(runtime.current_device()))
    await helpers.wait(60)
    assert seen == [1]
    assert runtime.current_device() == 0
    runtime.close()
