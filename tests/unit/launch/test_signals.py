"""Names of signals, and whose they are while a job runs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from asyncdist.launch.agent import handle_signals
from asyncdist.launch.config import ENDING, parse_signals


def test_names() -> None:
    assert parse_signals("SIGTERM, SIGUSR1,SIGTERM") == (signal.SIGTERM, signal.SIGUSR1)
    assert parse_signals(",".join(each.name for each in ENDING)) == ENDING


@pytest.mark.parametrize("text", ["", "TERM", "SIGTERM,", "15", "SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV", "sigterm"])
def test_names_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="not a signal that can be handled"):
        parse_signals(text)


async def test_a_signal_ends_the_job_or_is_passed_on() -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)}
    handled: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    def put(what: str) -> Callable[[int], None]:
        return lambda signum: handled.put_nowait((what, signum))

    with handle_signals(put("ended"), put("passed on"), (signal.SIGUSR1,)):
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
        for each, what in ((signal.SIGUSR1, "ended"), (signal.SIGUSR2, "passed on")):
            os.kill(os.getpid(), each)
            async with asyncio.timeout(60):
                assert await handled.get() == (what, each)
    assert {each: signal.getsignal(each) for each in before} == before
