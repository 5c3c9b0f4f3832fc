"""An elastic job: nodes come, are killed and are cut off, and the others go on where the job has saved."""

from __future__ import annotations

import re
import time

from host_kit import KILLED, PATIENCE_S, Hosts

SLOW, QUICK = "0.1", "0"
"""Pauses after each step. Nodes that go on their way are slow, so that the job is not done before they go."""


class Job:
    """An elastic job on two or three hosts, which save in a folder of all."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.round = -1
        self._step = 0
        self._folder = hosts.shared_folder(0o777)
        hosts.start_store()

    def join(self, name: str, pause_s: str, **environ: str) -> None:
        """Start a node."""
        times = "last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=4"
        options = ["--nnodes", "2:3", "--max-restarts", "3", "--rdzv-conf", times]
        program = [f"{self.hosts.examples}/elastic_training.py", f"{self._folder}/checkpoints", "--pause", pause_s]
        self.hosts.launch(name, *options, *program, **environ)

    def await_round(self, ranks: int) -> None:
        """Wait for a round after the last one, with so many ranks, which goes on where the job had saved or later."""
        deadline_s = time.monotonic() + PATIENCE_S
        number, step = -1, 0
        while number <= self.round:
            assert time.monotonic() < deadline_s, f"there is no round of {ranks} ranks after round {self.round}"
            time.sleep(0.1)
            said = "".join(map(self.hosts.output, self.hosts.names))
            found = re.findall(rf"round (\d+): {ranks} ranks go on after step (\d+)$", said, re.MULTILINE)
            number, step = max(((int(one), int(after)) for one, after in found), default=(-1, 0))
        assert step >= self._step, "the job went back"
        self.round, self._step = number, step

    def first_of(self, *names: str) -> str:
        """Which of these nodes has rank 0 in this round."""
        return next(name for name in names if f"round {self.round}: node 0 of" in self.hosts.output(name))

    def weights(self, *names: str) -> list[str]:
        """What the ranks of these nodes have learned, as the job's rank 0 says."""
        return [found for name in names for found in re.findall(r"weights: .*", self.hosts.output(name))]

    def weights_alone(self) -> list[str]:
        """What a job of one node learns that nothing happens to."""
        self.hosts.launch(
            "alone", "--standalone", f"{self.hosts.examples}/elastic_training.py", f"{self._folder}/alone"
        )
        assert self.hosts.ended("alone") == 0
        return self.weights("alone")


def test_nodes_come_are_killed_and_are_cut_off_for_good(hosts: Hosts) -> None:
    job = Job(hosts)
    for name in ("slow0", "slow1"):
        job.join(name, SLOW, ASYNCDIST_STORE_OUTAGE="10")
    job.await_round(4)
    job.join("quick0", QUICK)
    job.await_round(6)

    killed = job.first_of("slow0", "slow1")
    (cut,) = {"slow0", "slow1"} - {killed}
    hosts.kill(killed)
    job.await_round(4)
    job.join("quick1", QUICK)
    job.await_round(6)
    hosts.cut(cut)
    job.await_round(4)

    assert [hosts.ended(name) for name in ("quick0", "quick1", cut)] == [0, 0, 1]
    assert hosts.ended(killed) in KILLED
    assert re.search(r"^Error: .* the store at \S+ has not answered for ", hosts.output(cut), re.MULTILINE)
    assert job.weights("quick0", "quick1") == job.weights_alone()


def test_a_node_that_was_cut_off_comes_back_by_itself(hosts: Hosts) -> None:
    job = Job(hosts)
    for name in ("node0", "node1", "node2"):
        job.join(name, SLOW)
    job.await_round(6)
    hosts.cut("node1")
    job.await_round(4)
    hosts.until_said("node1", "reaches no other node: stopping the workers$")
    hosts.mend("node1")
    job.await_round(6)
    nodes = ["node0", "node1", "node2"]
    assert [hosts.ended(name) for name in nodes] == [0, 0, 0]
    assert job.weights(*nodes) == job.weights_alone()
