"""`asyncdist doctor --network` where a firewall, an interface or a slow cable is what is wrong."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

from host_kit import PATIENCE_S, STORE_PORT, Namespaces

NODES = ["node0", "node1", "node2"]
CHECK = ["-m", "asyncdist", "doctor", "--network", "--join"]
PORTS = "ASYNCDIST_PORT_RANGE=20000-20009"


def start_job(hosts: Namespaces, *program: str, variables: str = PORTS) -> None:
    """Start one rank on each node, with what only ranks have in their environment."""
    hosts.start_store()
    for number, name in enumerate(NODES):
        options = ["--nnodes", "3", "--node-rank", str(number), "--no-python", "env", variables, sys.executable]
        hosts.launch(name, *options, *program, ranks=1, COLUMNS="200")


def test_a_firewall_that_closes_one_direction_is_found_before_a_job(namespaces: Namespaces) -> None:
    hosts = namespaces
    hosts.close_ports("node1", "node0", "20000:20009")
    start_job(hosts, *CHECK)
    assert hosts.ended("node0") == 1
    said = hosts.output("node0")
    one, other = map(hosts.address, NODES[:2])
    assert re.search(
        rf"Rank 0 \(\S+ {one}\) cannot reach rank 1 \(\S+ {other}\) at tcp {other}:200\d\d: nothing answers, .*"
        r"Rank 1 reaches rank 0, so only one direction is closed\. Let TCP ports 20000-20009 through to rank 1's host",
        said,
    ), said
    assert "5 of 6 pairs of ranks that were tried reach each other" in said


def asked(
    hosts: Namespaces, enough: Callable[[list[str], dict[str, Any]], bool], *options: str
) -> tuple[list[str], dict[str, Any]]:
    """The sentences about a running job, and all else that is known of its network, asked from the store's host.

    A busy machine may have ranks that have not joined yet, or answer too late: they are asked again.
    """
    where = ["--store", f"{hosts.address('store')}:{STORE_PORT}", "--namespace", "job.0", "--timeout", "60"]
    until_s = time.monotonic() + PATIENCE_S
    while True:
        said = hosts.say("store", "doctor", "--network", "--json", *where, *options)
        network: dict[str, Any] = json.loads(said)[0]["network"] if said else {"problems": []}
        sentences = [problem["sentence"] for problem in network["problems"]]
        if enough(sentences, network):
            return sentences, network
        assert time.monotonic() < until_s, network


def test_a_job_that_hangs_in_its_start_is_asked_from_another_host(namespaces: Namespaces) -> None:
    """Neither of two nodes lets the other in; the store's host reaches all."""
    hosts = namespaces
    hosts.close_ports("node1", "node2", "20000:20009")
    hosts.close_ports("node2", "node1", "20000:20009")
    start_job(hosts, "programs/steps.py", "1", "0")
    said, _ = asked(hosts, lambda said, _: len([one for one in said if "cannot reach" in one]) == len(said) == 2)
    assert re.match(rf"Rank 1 .* cannot reach rank 2 .* at tcp {hosts.address('node2')}:200", said[0])
    assert re.match(rf"Rank 2 .* cannot reach rank 1 .* at tcp {hosts.address('node1')}:200", said[1])
    assert "only one direction" not in "".join(said)


def test_a_slow_cable_is_found_while_a_job_runs(namespaces: Namespaces) -> None:
    hosts = namespaces
    hosts.limit("node2", 0, 20)
    start_job(hosts, "programs/steps.py", "100000", "0.5")
    (said,), network = asked(
        hosts, lambda said, network: len(said) == 1 and len(network.get("speeds", ())) == 6, "--bandwidth"
    )
    speeds = {(one["from"], one["to"]): one["bytes_per_s"] for one in network["speeds"]}
    assert speeds[0, 2] < 20e6 / 8
    addresses = [hosts.address(name) for name in NODES]
    assert re.search(rf"{addresses[0]} to \S+ {addresses[2]} ", said)
    assert not re.search(rf"{addresses[0]} to \S+ {addresses[1]} ", said)


def test_an_interface_that_is_down_is_told_from_one_that_might_do(namespaces_on_three_networks: Namespaces) -> None:
    hosts = namespaces_on_three_networks
    hosts.address("node0")
    hosts.take_down("node0", 1)
    interfaces = "ASYNCDIST_SOCKET_IFNAME=eth1"
    hosts.start_store()
    for number, name in enumerate(NODES[:2]):
        variables = interfaces if number else "ASYNCDIST_SOCKET_IFNAME=eth0"
        options = ["--nnodes", "2", "--node-rank", str(number), "--no-python", "env", variables, sys.executable]
        hosts.launch(name, *options, *CHECK, ranks=1, COLUMNS="200")
    assert hosts.ended("node0") == 1
    said = hosts.output("node0")
    assert f"{hosts.address('node1', 1)}) at tcp {hosts.address('node1', 1)}:" in said
    assert "no route leads to that network" in said
    assert f"by ASYNCDIST_SOCKET_IFNAME: it has eth0 ({hosts.address('node1', 0)}) and eth2 " in said
