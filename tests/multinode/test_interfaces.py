"""Ranks that use several network interfaces: how much they carry together, and what is when one of them fails."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable

import pytest
from host_kit import Hosts, Namespaces

NODES = ["node0", "node1"]
MEGABITS = 60
"""So slow that a busy machine keeps up."""


def start_job(hosts: Namespaces, interfaces: str, steps: int, mebibytes: int, *where: str, **environ: str) -> None:
    """Start one rank on each node, which sum vectors of so many MiB; the launchers and the store use `eth0`.

    `environ` is for the launchers, as is `where`: options that have one of them host the store.
    """
    if where:
        environ["ASYNCDIST_STORE"] = ""
    else:
        hosts.start_store()
    ranks = ["env", f"ASYNCDIST_SOCKET_IFNAME={interfaces}", sys.executable, "programs/steps.py"]
    for number, name in enumerate(NODES):
        for network in (1, 2):
            hosts.limit(name, network, MEGABITS)
        options = ["--nnodes", "2", "--node-rank", str(number), *where, "--no-python"]
        hosts.launch(name, *options, *ranks, str(steps), "0", str(mebibytes << 17), ranks=1, **environ)


def assert_all_end_well(hosts: Hosts) -> None:
    assert [hosts.ended(name) for name in NODES] == [0, 0]
    assert "all sums of 2 ranks are right" in hosts.output("node0")


def test_two_interfaces_carry_nearly_twice_as_much(namespaces_on_three_networks: Namespaces) -> None:
    hosts = namespaces_on_three_networks
    start_job(hosts, "eth1,eth2", 4, 16)
    hosts.until_said("node0", "step 1$")
    began_s = time.monotonic()
    hosts.until_said("node0", "step 4$")
    took_s = time.monotonic() - began_s
    assert_all_end_well(hosts)
    one_interface_s = 3 * (16 << 20) * 8 / (MEGABITS * 1e6)
    assert took_s < 0.75 * one_interface_s  # 0.5 at best; other processes may have the cores
    shares = [hosts.received_bytes("node1", network) for network in (1, 2)]
    assert max(shares) < 1.2 * min(shares)


@pytest.mark.parametrize(("fail", "network"), [(Namespaces.take_down, 1), (Namespaces.drop, 2)], ids=["down", "drops"])
def test_when_one_interface_fails_the_other_goes_on(
    namespaces_on_three_networks: Namespaces, fail: Callable[[Namespaces, str, int], None], network: int
) -> None:
    hosts = namespaces_on_three_networks
    start_job(hosts, "eth1,eth2", 6, 4)
    hosts.until_said("node0", "step 2$")
    fail(hosts, "node1", network)
    assert_all_end_well(hosts)


@pytest.mark.parametrize(("fail", "name"), [(Namespaces.take_down, "node1"), (Namespaces.drop, "node0")])
def test_launchers_that_use_several_interfaces_go_on_with_one(
    namespaces_on_three_networks: Namespaces, fail: Callable[[Namespaces, str, int], None], name: str
) -> None:
    """After 3 s of silence they would give each other up."""
    hosts = namespaces_on_three_networks
    start_job(hosts, "eth1,eth2", 12, 4, ASYNCDIST_SOCKET_IFNAME="eth1,eth2")
    hosts.until_said("node0", "step 2$")
    fail(hosts, name, 1)
    began_s = time.monotonic()
    assert_all_end_well(hosts)
    assert time.monotonic() - began_s > 4


@pytest.mark.parametrize(("fail", "name"), [(Namespaces.take_down, "node1"), (Namespaces.drop, "node0")])
def test_a_store_that_a_launcher_hosts_has_an_address_of_each_network(
    namespaces_on_three_networks: Namespaces, fail: Callable[[Namespaces, str, int], None], name: str
) -> None:
    hosts = namespaces_on_three_networks
    addresses = f"{hosts.address('node0', 1)},{hosts.address('node0', 2)}"
    start_job(hosts, "eth1,eth2", 12, 4, "--rdzv-endpoint", f"{addresses}:29400")
    hosts.until_said("node0", "step 2$")
    fail(hosts, name, 1)
    began_s = time.monotonic()
    assert_all_end_well(hosts)
    assert time.monotonic() - began_s > 4


def test_an_interface_that_is_back_is_used_again(namespaces_on_three_networks: Namespaces) -> None:
    hosts = namespaces_on_three_networks
    start_job(hosts, "eth1,eth2", 30, 4)
    hosts.until_said("node0", "step 2$")
    hosts.cut("node1", 2)
    hosts.until_said("node0", "step 6$")
    hosts.mend("node1", 2)
    before = hosts.received_bytes("node1", 2)
    assert_all_end_well(hosts)
    assert hosts.received_bytes("node1", 2) > before + (4 << 20)


def test_ranks_that_name_other_numbers_of_interfaces_say_so(namespaces_on_three_networks: Namespaces) -> None:
    hosts = namespaces_on_three_networks
    hosts.start_store()
    for number, name in enumerate(NODES):
        interfaces = f"ASYNCDIST_SOCKET_IFNAME={('eth1,eth2', 'eth1')[number]}"
        options = ["--nnodes", "2", "--node-rank", str(number), "--no-python"]
        hosts.launch(name, *options, "env", interfaces, sys.executable, "programs/steps.py", "1", "0", ranks=1)
    assert [hosts.ended(name) for name in NODES] == [1, 1]
    said = hosts.output("node0") + hosts.output("node1")
    assert re.search(r"rank 0 \(.*\) has 2 network interfaces and 2 connections", said)
    assert re.search(r"rank 1 \(.*\) has 1 network interface and 1 connection", said)
