"""Jobs of a fixed number of nodes: what users see when all is well, and when hosts, networks or the store fail."""

from __future__ import annotations

import re
import time

import pytest
from host_kit import KILLED, Hosts

NODES = ["node0", "node1", "node2"]
SUMMED_MIB = 16
ENDLESS = ["programs/steps.py", "100000", "0.1"]


def start_job(hosts: Hosts, *program: str, nodes: list[str] = NODES, **environ: str) -> None:
    """Start a launcher on each node; the node's number is its rank."""
    for number, name in enumerate(nodes):
        hosts.launch(name, "--nnodes", str(len(nodes)), "--node-rank", str(number), *program, **environ)


def assert_all_end_well(hosts: Hosts, nodes: list[str] = NODES) -> None:
    assert [hosts.ended(name) for name in nodes] == [0] * len(nodes)
    assert f"all sums of {2 * len(nodes)} ranks are right" in hosts.output(nodes[0])


def step_of(hosts: Hosts) -> int:
    """The last step that the job has said."""
    return int(re.findall(r"step (\d+)$", hosts.output("node0"), re.MULTILINE)[-1])


def test_every_collective_is_right_over_nodes_that_find_their_ranks(hosts: Hosts) -> None:
    hosts.start_store()
    for name in NODES:
        hosts.launch(name, "--nnodes", "3", "programs/every_collective.py", "3")
    assert [hosts.ended(name) for name in NODES] == [0, 0, 0]
    outputs = [hosts.output(name) for name in NODES]
    assert sorted(re.findall(r"node (\d) of 3, ranks", "".join(outputs))) == ["0", "1", "2"]
    assert len(re.findall(r"\[rank 0\] (?:1[4-9]|[2-9]\d) collectives are right on 6 ranks", "".join(outputs))) == 1


def test_every_collective_is_right_on_nodes_of_different_size(namespaces: Hosts) -> None:
    """The long all_reduce goes by slices of the smaller node; the nodes' cables tell."""
    namespaces.start_store()
    for number, (name, ranks) in enumerate({"node0": 3, "node1": 1, "node2": 2}.items()):
        command = ["--nnodes", "3", "--node-rank", str(number), "programs/every_collective.py", "2", str(SUMMED_MIB)]
        namespaces.launch(name, *command, ranks=ranks)
    assert [namespaces.ended(name) for name in NODES] == [0, 0, 0]
    assert "collectives are right on 6 ranks" in namespaces.output("node0")
    for name in NODES:
        ((before, after),) = re.findall(r"bytes received (\d+), (\d+)$", namespaces.output(name), re.MULTILINE)
        assert int(after) - int(before) < 1.1 * (4 / 3) * (SUMMED_MIB << 20)


def test_the_demo_trains_on_three_nodes(hosts: Hosts) -> None:
    hosts.start_store()
    start_job(hosts, f"{hosts.examples}/train_digits.py", "--compare")
    assert [hosts.ended(name, within_s=200) for name in NODES] == [0, 0, 0]
    assert "weights bit-identical" in hosts.output("node0")


def test_a_node_that_is_killed_is_named(hosts: Hosts) -> None:
    hosts.start_store()
    start_job(hosts, *ENDLESS)
    hosts.until_said("node0", "step 5$")
    hosts.kill("node1")
    for name in ("node0", "node2"):
        hosts.until_said(name, r"^\[rank \d\] asyncdist.errors.\w+Error: .* lost rank [23]: ", within_s=15)
        assert hosts.ended(name) == 1
    assert hosts.ended("node1") in KILLED


@pytest.mark.parametrize(("away", "back"), [("pause", "resume"), ("cut", "mend")])
def test_a_node_that_is_away_for_a_moment_goes_on(hosts: Hosts, away: str, back: str) -> None:
    hosts.start_store()
    start_job(hosts, "programs/steps.py", "100", "0.05")
    hosts.until_said("node0", "step 5$")
    getattr(hosts, away)("node1")
    before = step_of(hosts)
    time.sleep(1)
    assert step_of(hosts) <= before + 1
    getattr(hosts, back)("node1")
    assert_all_end_well(hosts)


def test_a_node_that_is_stopped_for_long_is_given_up_and_learns_it(namespaces: Hosts) -> None:
    namespaces.start_store()
    start_job(namespaces, *ENDLESS)
    namespaces.until_said("node0", "step 5$")
    namespaces.pause("node1")
    for name in ("node0", "node2"):
        assert namespaces.ended(name) == 1
        assert re.search(r"node 1 \(host .*\): no sign of life for 3 s$", namespaces.output(name), re.MULTILINE)
    namespaces.resume("node1")
    assert namespaces.ended("node1") == 1


def test_a_host_that_is_cut_off_is_named(hosts: Hosts) -> None:
    hosts.start_store()
    start_job(hosts, *ENDLESS)
    hosts.until_said("node0", "step 5$")
    hosts.cut("node1")
    for name in ("node0", "node2"):
        hosts.until_said(name, r"lost rank [23]: its host \(.*, node 1\) is gone: no sign of life for 3 s", within_s=20)
    hosts.until_said("node1", r"lost rank [0145]: this host \(.*, node 1\) reaches no other node", within_s=20)
    assert [hosts.ended(name) for name in NODES] == [1, 1, 1]
    assert re.search(r"node 1 \(host .*\): this host reaches no other node$", hosts.output("node1"), re.MULTILINE)


def test_a_job_goes_on_while_its_store_restarts_and_the_store_forgets_nothing(hosts: Hosts) -> None:
    hosts.start_store("--durability", "durable")
    start_job(hosts, "programs/steps.py", "200", "0.05")
    hosts.until_said("node0", "step 5$")
    hosts.restart_store()
    assert step_of(hosts) < 200
    assert_all_end_well(hosts)
    start_job(hosts, "programs/steps.py", "1", "0", nodes=["later0", "later1"])
    assert_all_end_well(hosts, ["later0", "later1"])
    assert "job job-1, node 0 of 2" in hosts.output("later0")  # the store has seen the name before it restarted


def test_a_node_that_is_late_is_waited_for(namespaces: Hosts) -> None:
    namespaces.start_store()
    command = ["--nnodes", "3", "programs/steps.py", "3", "0"]
    for name in NODES[:2]:
        namespaces.launch(name, *command)
        namespaces.until_said(name, "waiting for 3 nodes")
    time.sleep(2)
    namespaces.launch("node2", *command)
    assert [namespaces.ended(name) for name in NODES] == [0, 0, 0]
    assert "all sums of 6 ranks are right" in "".join(map(namespaces.output, NODES))


def test_a_node_that_never_comes_is_named(namespaces: Hosts) -> None:
    namespaces.start_store()
    namespaces.launch("node0", "--nnodes", "2", "--join-timeout", "3", *ENDLESS)
    assert namespaces.ended("node0") == 1
    assert "Error: nodes [1] of 2 did not join within 3 s\n" in namespaces.output("node0")


def test_a_wrong_token_is_refused_at_once_and_disturbs_nobody(namespaces: Hosts) -> None:
    namespaces.start_store()
    start_job(namespaces, "programs/steps.py", "20", "0.1")
    namespaces.launch("stranger", "--nnodes", "3", *ENDLESS, ASYNCDIST_TOKEN="not-the-token-that-all-others-have")
    assert namespaces.ended("stranger") == 1
    refused = r"^Error: the store at [\d.]+:29500 refuses this launcher: the tokens of client and server differ"
    assert re.search(refused, namespaces.output("stranger"), re.MULTILINE)
    assert f"connection_refused peer={namespaces.address('stranger')}:" in namespaces.output("store")
    assert_all_end_well(namespaces)


def test_nodes_that_differ_in_their_number_say_both_numbers(namespaces: Hosts) -> None:
    namespaces.start_store()
    for name, nodes in (("node0", "2"), ("node1", "3")):
        namespaces.launch(name, "--nnodes", nodes, "--join-timeout", "10", *ENDLESS)
    assert [namespaces.ended(name) for name in ("node0", "node1")] == [1, 1]
    contradiction = r"^Error: this launcher of job 'job' expects (2 nodes, another one 3|3 nodes, another one 2)$"
    assert re.search(contradiction, namespaces.output("node0") + namespaces.output("node1"), re.MULTILINE)


def test_ranks_use_the_network_that_is_named_and_need_no_other(hosts_on_two_networks: Hosts) -> None:
    hosts, elements, steps = hosts_on_two_networks, 100_000, 60
    hosts.start_store()
    start_job(hosts, "programs/steps.py", str(steps), "0.1", str(elements), ASYNCDIST_SOCKET_IFNAME="eth1")
    hosts.until_said("node0", "step 5$")
    assert hosts.received_bytes("node1", 1) > 5 * 8 * elements
    assert hosts.received_bytes("node1", 0) < 8 * elements
    for name in ("store", "node2"):
        hosts.cut(name)
    assert step_of(hosts) < steps
    assert_all_end_well(hosts)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "apart"])
def test_hosts_of_one_machine_share_memory_where_they_share_a_folder(hosts: Hosts, shared: bool) -> None:
    folder = hosts.shared_folder(0o700)
    hosts.start_store()
    environ = {"ASYNCDIST_SOCKET_DIR": folder} if shared else {}
    start_job(hosts, "programs/steps.py", "3", "0", nodes=["node0", "node1"], ASYNCDIST_DEBUG="INFO", **environ)
    assert_all_end_well(hosts, ["node0", "node1"])
    over = re.findall(r"rank 0: connected to rank [23] over (\w+)", hosts.output("node0"))
    assert over == (["shm", "shm"] if shared else ["tcp", "tcp"])
