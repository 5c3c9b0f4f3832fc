"""The health check of the image, run outside of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_kit import DEADLINE_S, Daemon, environment

PORT = "29501"


def health_check(http_port: int, **variables: str) -> int:
    """The exit status of the image's health check on that port."""
    text = (Path(__file__).parents[3] / "server" / "Dockerfile").read_text().replace("\\\n", "")
    command = json.loads(text.partition("HEALTHCHECK")[2].partition("CMD")[2].splitlines()[0])
    assert command[0] == "python3"
    arguments = [each.replace(PORT, str(http_port)) for each in command[1:]]
    return subprocess.run(
        [sys.executable, *arguments], env=environment(**variables), stderr=subprocess.DEVNULL, timeout=DEADLINE_S
    ).returncode


@pytest.mark.parametrize("variables", [{}, {"http_proxy": "http://127.0.0.1:9"}])
def test_it_asks_the_daemon_and_no_proxy(start: Callable[..., Daemon], variables: dict[str, str]) -> None:
    daemon = start("--http-port", "0")
    assert daemon.http_port is not None
    assert health_check(daemon.http_port, **variables) == 0
    daemon.end()
    assert health_check(daemon.http_port, **variables) != 0
