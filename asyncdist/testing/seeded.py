"""Makes a program's randomness and wall clock a function of a seed, so that a simulated run can be repeated."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

from asyncdist.testing.hosts import PROCESS

__all__ = ["seeded"]

EPOCH_NS: Final = 1_700_000_000_000_000_000
"""When simulated time begins, as nanoseconds of the wall clock."""


@contextlib.contextmanager
def seeded(seed: int | str, clock_s: Callable[[], float]) -> Iterator[None]:
    """Until the block ends, draw secrets and random numbers from `seed` and tell the time of `clock_s`.

    For one thread at a time: it replaces functions of `secrets`, `time`, `os` and `socket`.
    """
    dice = random.Random(f"secrets {seed}")
    state = random.getstate()
    random.seed(f"random {seed}")
    host_name, pid = socket.gethostname, os.getpid

    def process_pid() -> int:
        process = PROCESS.get()
        return pid() if process is None else process.pid

    def process_host() -> str:
        process = PROCESS.get()
        return host_name() if process is None else process.host.name

    replaced: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (secrets, "token_bytes", lambda count=32: dice.randbytes(count)),
        (secrets, "token_hex", lambda count=32: dice.randbytes(count).hex()),
        (secrets, "randbelow", dice.randrange),
        (time, "time_ns", lambda: EPOCH_NS + round(clock_s() * 1e9)),
        (time, "time", lambda: EPOCH_NS / 1e9 + clock_s()),
        (time, "monotonic", clock_s),
        (time, "perf_counter", clock_s),
        (os, "getpid", process_pid),
        (socket, "gethostname", process_host),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, state)
        for module, name, function in replaced:
            stack.enter_context(mock.patch.object(module, name, function))
        yield
