"""What the tests with real torch share; without torch they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from daemon_kit import Daemon
from torch_kit import Jobs, torch_daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One daemon for all tests of a module, which are jobs one after the other."""
    pytest.importorskip("torch", reason="needs torch (extra `peers`)")
    running = torch_daemon()
    yield running
    _, _, log = running.end()
    assert "Traceback" not in log, log
    assert running.process.returncode == 0


@pytest.fixture(scope="session")
def jobs() -> Iterator[Jobs]:
    """What starts torch jobs."""
    pytest.importorskip("torch", reason="needs torch (extra `peers`)")
    forking = Jobs()
    yield forking
    forking.close()
