"""The system refuses descriptors or memory to ranks, at any time: what needs none goes on, and nothing is left."""

from __future__ import annotations

import asyncio
import errno
import gc
import mmap
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from socket_world import descriptors, socket_world

import asyncdist as dist

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")


EVERY = 7
"""Of the calls every seventh is refused in one case, and the others in six more."""


class System:
    """Refuses calls `first` to `last` - 1, counted from 0, of all that make a descriptor or a mapping."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = self.first = self.last = 0
        take = socket.recv_fds

        def recv_fds(*arguments: Any) -> tuple[bytes, list[int], int, Any]:
            data, fds, flags, address = take(*arguments)
            if fds and self.refuses():  # the kernel drops them, and says so
                for fd in fds:
                    os.close(fd)
                return data, [], flags | socket.MSG_CTRUNC, address
            return data, fds, flags, address

        monkeypatch.setattr(socket, "recv_fds", recv_fds)
        monkeypatch.setattr(os, "memfd_create", self.wrap(os.memfd_create, errno.EMFILE))
        monkeypatch.setattr(os, "eventfd", self.wrap(os.eventfd, errno.EMFILE))
        monkeypatch.setattr(mmap, "mmap", self.wrap(mmap.mmap, errno.ENOMEM))

    def refuses(self) -> bool:
        number = self.calls
        self.calls += 1
        return self.first <= number < self.last

    def wrap(self, call: Callable[..., Any], code: int) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if self.refuses():
                raise OSError(code, os.strerror(code))
            return call(*arguments, **options)

        return wrapped


async def work(group: dist.ProcessGroup) -> None:
    """Rings, two lanes, and arrays that are lent."""
    for count, tag in ((10, 0), (100_000, 0), (10, 5), (1000, 5)):
        x = np.full(count, group.rank + 1.0)
        await group.all_reduce(x, tag=tag)
        assert (x == 3).all()
    lent, got = group.empty(100_000, np.float64), np.zeros(100_000)
    for _ in range(3):
        lent[:] = group.rank
        sent = group.isend(lent, 1 - group.rank)
        await group.recv(got, 1 - group.rank)
        await sent
        assert (got == 1 - group.rank).all()
        await group.broadcast(lent, 0)
        assert (lent == 0).all()


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:asyncdist")


@pytest.mark.slow("makes a world anew for each call that is refused")
@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.thorough) for turn in range(1, EVERY))])
@pytest.mark.parametrize("length", [1, 1000])
async def test_refused_at_any_call(length: int, turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first, calls, held = turn - EVERY, 0, (0, 0)
    while first < calls:
        with monkeypatch.context() as patch:
            system = System(patch)
            if calls:
                system.first, system.last = first, first + length
            async with socket_world(2) as groups:
                await asyncio.gather(*map(work, groups))
        del groups
        gc.collect()
        await asyncio.sleep(0)
        if calls:
            assert (descriptors(), mappings()) == held, f"after {length} calls from the {first}th on were refused"
        else:
            calls, held = system.calls, (descriptors(), mappings())
            assert calls
        first += EVERY
