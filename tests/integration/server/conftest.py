"""Daemons in processes of their own, for the tests of the daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from daemon_kit import Daemon


@pytest.fixture
def start() -> Iterator[Callable[..., Daemon]]:
    """Start daemons with these arguments; none outlives its test."""
    daemons: list[Daemon] = []

    def start_one(*arguments: str, env: dict[str, str] | None = None, descriptors: int | None = None) -> Daemon:
        daemons.append(Daemon(*arguments, env=env, descriptors=descriptors))
        return daemons[-1]

    yield start_one
    for daemon in daemons:
        if daemon.process.poll() is None:
            daemon.process.kill()
        daemon.process.communicate()
