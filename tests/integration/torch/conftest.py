"""What the tests with real torch share; without torch they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch_kit import Daemon, Jobs


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One daemon for all tests of a module, which are jobs one after the other."""
    pytest.importorskip("torch", reason="needs torch (extra `peers`)")
    running = Daemon()
    yield running
    log = running.end()
    assert "Traceback" not in log, log
    assert running.process.returncode == 0


@pytest.fixture(scope="session")
def jobs() -> Iterator[Jobs]:
    """What starts torch jobs."""
    pytest.importorskip("torch", reason="needs torch (extra `peers`)")
    forking = Jobs()
    yield forking
    forking.close()
