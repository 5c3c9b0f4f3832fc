"""Weights across hosts: a version goes over a host's cable once, however many servers it has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from host_kit import STORE_PORT, TOKEN, Namespaces

MIB = 1 << 20


def test_a_version_comes_to_a_host_once(tmp_path: Path) -> None:
    try:
        hosts = Namespaces(tmp_path)
    except (RuntimeError, FileNotFoundError):
        pytest.skip("needs root, and network namespaces")
    try:
        hosts.start_store()
        environ = {"ASYNCDIST_STORE": f"{hosts.address('store')}:{STORE_PORT}", "ASYNCDIST_TOKEN": TOKEN}
        program = [sys.executable, "programs/weights_fleet.py"]
        for host in ("one", "two"):
            hosts.address(host)
            hosts.start_command(host, [*program, "serve", "3"], environ)
        hosts.address("trainer")
        hosts.start_command("trainer", [*program, "train", "6"], environ)
        received = []
        for version in (1, 2):
            hosts.until_said("trainer", f"version {version}: ")
            received.append([hosts.received_bytes(host, 0) for host in ("one", "two")])
        assert [hosts.ended(host) for host in ("trainer", "one", "two")] == [0, 0, 0], hosts.report()
        for first, second in zip(*received, strict=True):
            assert 16 * MIB < first < 18 * MIB
            assert MIB < second - first < 3 * MIB
        for host in ("one", "two"):
            assert hosts.output(host).count("serves 2") == 3, hosts.report()
    finally:
        print(hosts.report())
        hosts.close()
