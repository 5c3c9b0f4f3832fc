"""What every test gets: both event loops, and a failure for whatever it leaves behind."""

from __future__ import annotations

import asyncio
import atexit
import gc
import marshal
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from typing import Any

import fewer_cases
import message_states
import pytest
import pytest_asyncio
import slow_cases
import uvloop

try:
    from hypothesis import settings
except ImportError:  # machines for tests/gpu need not have it
    pass
else:
    # a machine that does other things too may be late by any time
    settings.register_profile("tests", deadline=None, max_examples=fewer_cases.examples(33))
    settings.load_profile("tests")

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
"""What the tests start inherits it: numpy's library makes a thread per core and lets it spin, a fifth of a start."""

os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="asyncdist-tests-")
"""Where stores on loopback keep their user's token: not where the user's own stores do."""
atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)

message_states.watch_states()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    """A shell's background job ignores it, and so would all that the tests start and interrupt."""

HANGS = 5 / 6
"""Of the time after which faulthandler ends the process: then an asynchronous test is cancelled, and fails alone."""

MARSHALLED = "marshalled"
"""The key of a report that a worker has written."""

GARBAGE = 20_000
"""Objects made and not freed between two collections."""


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every asynchronous test on asyncio and on uvloop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.hookimpl(trylast=True)  # once the folders have marked theirs
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what others of the same test stand for, where that is asked for."""
    if which := os.environ.get(fewer_cases.VARIABLE):
        left_out = fewer_cases.left_out(items, rest=which == fewer_cases.REST)
        config.hook.pytest_deselected(items=left_out)
        gone = {*left_out}
        items[:] = [item for item in items if item not in gone]
    slow_cases.remember(items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the slow cases took, and name those that do not say why."""
    reports = (one for some in terminalreporter.stats.values() for one in some if isinstance(one, pytest.TestReport))
    for line in slow_cases.Durations(reports).lines():
        terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, object]:
    """Write a report of a worker as one value, as execnet would write each of its fifty in Python."""
    return {MARSHALLED: marshal.dumps((yield))}


@pytest.hookimpl(tryfirst=True)
def pytest_report_from_serializable(config: pytest.Config, data: dict[str, Any]) -> object:
    """Read what the other hook has written."""
    if (written := data.get(MARSHALLED)) is None:
        return None
    return config.hook.pytest_report_from_serializable(config=config, data=marshal.loads(written))


def pytest_collection() -> None:
    """Ten thousand tests are a heap that is not worth searching for garbage, neither while it grows nor ever after."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what was collected to itself: the collections of every test took a third of the suite's time.

    Most of what tests make goes without any collection: to look for cycles in it every 700 objects takes time, too.
    """
    gc.enable()
    gc.freeze()
    gc.set_threshold(GARBAGE)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> None:
    """Watch the loop of an asynchronous test; most tests have none, and need none to be made."""
    if pytest_asyncio.is_async_test(request.node):
        request.getfixturevalue("watched_loop")


@pytest.fixture
async def watched_loop(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fail an asynchronous test on unhandled loop exceptions, on tasks that outlive it, and when it hangs."""
    loop = asyncio.get_running_loop()
    unhandled: list[dict[str, object]] = []
    loop.set_exception_handler(lambda _loop, context: unhandled.append(context))
    before = asyncio.all_tasks()

    def give_up() -> None:
        for task in asyncio.all_tasks() - before:
            task.print_stack()
            task.cancel(f"the test hangs: it has taken {limit_s:g} s")

    limit_s = HANGS * float(request.config.getini("faulthandler_timeout") or 0)
    timer = loop.call_later(limit_s, give_up) if limit_s else None
    yield
    if timer is not None:
        timer.cancel()
    await asyncio.sleep(0)
    leaked = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not unhandled, f"unhandled in the event loop: {unhandled}"
    assert not leaked, f"tasks left behind: {leaked}"
