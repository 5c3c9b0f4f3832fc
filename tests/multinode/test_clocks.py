"""Hosts whose clocks are wrong, each in its way: what is estimated of them, and the timeline."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations
from pathlib import Path

from host_kit import Namespaces
from timeline_kit import Timeline

from asyncdist.inspect.job import Job
from asyncdist.inspect.timeline import clocks

AHEAD_S = {"node0": 0.0, "node1": 3600.25, "node2": -7.5}
MEGABITS = 100
"""A message of 256 KiB takes 20 ms: longer than estimates are wrong, even on a busy machine."""


def test_the_timeline_of_hosts_with_wrong_clocks_is_right(namespaces: Namespaces, tmp_path: Path) -> None:
    hosts = namespaces
    hosts.start_store()
    for number, (name, ahead_s) in enumerate(AHEAD_S.items()):
        hosts.own_machine(name, booted_s=1000 * number)
        hosts.limit(name, 0, MEGABITS)
        program = ["programs/wrong_clock.py", str(tmp_path)]
        hosts.launch(name, "--nnodes", "3", "--node-rank", str(number), *program, CLOCK_AHEAD_S=str(ahead_s))
    assert [hosts.ended(name) for name in AHEAD_S] == [0, 0, 0]
    job = Job.read(tmp_path)
    found = clocks(list(job.documents.values()))
    ahead_s = [list(AHEAD_S.values())[rank // 2] for rank in range(6)]
    for one, other in combinations(range(6), 2):
        told_s = found[other].ahead_s - found[one].ahead_s
        assert abs(told_s - (ahead_s[other] - ahead_s[one])) <= found[one].doubt_s(found[other])
    assert 0 < max(clock.bound_s for clock in found.values()) < 1
    output = tmp_path / "job.pftrace"
    command = [sys.executable, "-m", "asyncdist", "trace", str(tmp_path), "-o", str(output)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    arrows = [ends for ends in Timeline(output.read_bytes()).flows.values() if len(ends) == 2]
    assert len(arrows) == 20 * 6
    assert all((sorted(ends)[1][1] - sorted(ends)[0][1]) % 6 == 1 for ends in arrows), "sends come first"
