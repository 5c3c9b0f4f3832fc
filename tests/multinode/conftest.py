"""Scenarios on several hosts. `make multinode` runs them; a run of all tests leaves them out.

Each scenario runs on network namespaces and on containers. Containers need the images that run.sh builds.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from host_kit import IMAGE, PREFIX, Containers, Hosts, Namespaces

collect_ignore_glob = ["test_*.py"]
"""Files that are named on the command line are collected all the same."""

KINDS = ["namespaces", "containers"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow for the interpreters that it starts, and needs root."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.multinode)
            item.add_marker(pytest.mark.slow("starts a launcher and its ranks on several hosts"))


@cache
def images_are_there() -> bool:
    """Whether an engine answers that has the images."""
    command = ["docker", "image", "inspect", IMAGE]
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        return False


@cache
def namespaces_can_be_made() -> bool:
    """Whether this is root, and not in a container that may not do it."""
    name = f"{PREFIX}-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    except FileNotFoundError:
        return False
    return made


def need_images() -> None:
    if not images_are_there():
        pytest.skip("needs the images that tests/multinode/run.sh builds")


@pytest.fixture
def images() -> None:
    """The images of docker-compose.yml."""
    need_images()


@contextmanager
def made(kind: str, folder: Path, networks: int) -> Iterator[Hosts]:
    """Hosts that are removed afterwards; pytest shows what they have written if the test fails."""
    if kind == "containers":
        need_images()
    elif not namespaces_can_be_made():
        pytest.skip("needs iproute2, and the right to make network namespaces")
    hosts = (Namespaces if kind == "namespaces" else Containers)(folder, networks)
    try:
        yield hosts
    finally:
        try:
            print(hosts.report())
        finally:
            hosts.close()


@pytest.fixture(params=KINDS)
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hosts]:
    """Hosts of each kind on one network."""
    with made(request.param, tmp_path, 1) as found:
        yield found


@pytest.fixture(params=KINDS)
def hosts_on_two_networks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hosts]:
    """Hosts of each kind on two networks."""
    with made(request.param, tmp_path, 2) as found:
        yield found


@pytest.fixture
def namespaces(tmp_path: Path) -> Iterator[Hosts]:
    """Hosts of the kind that takes less time, for scenarios that take long."""
    with made("namespaces", tmp_path, 1) as found:
        yield found


@pytest.fixture
def namespaces_on_three_networks(tmp_path: Path) -> Iterator[Namespaces]:
    """Hosts with an interface for the launchers, and two for the ranks."""
    with made("namespaces", tmp_path, 3) as found:
        assert isinstance(found, Namespaces)
        yield found
