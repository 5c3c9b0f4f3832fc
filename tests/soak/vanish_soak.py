"""Vanish soak: hosts are cut off during all_reduce, as if their cable was pulled; how long it takes until all say so.

    python tests/soak/vanish_soak.py --trials 20

Hosts are network namespaces (root, iproute2). Each trial is a job of 3 hosts x 2 ranks under `asyncdist run` with its
default settings. One host after the other is cut off, the one that hosts the launchers' store among them; in every
second trial a launcher hosts the job's store too. All ranks must have raised an error that names the host: the ranks of
the host that is cut off, that it reaches no other one.

Beside that ranks that answer to nothing must raise no alarm: 20 ranks on 2 hosts compute in pure Python for 30 s, all
hold the interpreter's lock for 10 s, all are stopped for 10 s.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kits"))

import click
from host_kit import Hosts, Namespaces

NODES = ["node0", "node1", "node2"]
RANKS = 2
BUSY = 20
"""Ranks that are kept from their loops at the same time, each a trial."""
LIMIT_S = 60.0
PROGRAM = "../soak/vanish_rank.py"
HEARD = re.compile(r"^\[rank (\d+)\] heard ([\d.]+) (.*)$", re.MULTILINE)


def start(hosts: Hosts, nodes: list[str], ranks: int, hosted: bool, *program: str) -> None:
    """Start a job on `nodes` whose store the launcher of node 0 hosts, or a daemon."""
    place = ["--rdzv-endpoint", f"{hosts.address('node0')}:29400"] if hosted else []
    environ = {"ASYNCDIST_STORE": ""} if hosted else {}
    if not hosted:
        hosts.start_store()
    for number, name in enumerate(nodes):
        options = ["--nnodes", str(len(nodes)), "--node-rank", str(number), *place]
        hosts.launch(name, *options, PROGRAM, *program, ranks=ranks, **environ)
    for number, name in enumerate(nodes):
        for rank in range(number * ranks, (number + 1) * ranks):
            hosts.until_said(name, rf"^\[rank {rank}\] began$")


def cut_off(number: int, folder: Path) -> tuple[list[float], float, list[str]]:
    """Seconds until each rank has said it, and until the last launcher has ended; and what was wrong."""
    hosts = Namespaces(folder)
    victim = number % len(NODES)
    wrong: list[str] = []
    try:
        start(hosts, NODES, RANKS, number % 2 == 1, "reduce")
        time.sleep(0.5 + 0.37 * (number % 7))
        hosts.cut(NODES[victim])
        cut_s = time.time()
        for name in NODES:
            hosts.ended(name, within_s=LIMIT_S)
        ended_s = time.time() - cut_s
        heard: dict[int, float] = {}
        for at, name in enumerate(NODES):
            expected = f"node {victim}) " + ("reaches no other node" if at == victim else "is gone: ")
            found = HEARD.findall(hosts.output(name))
            heard |= {int(rank): float(when_s) - cut_s for rank, when_s, _ in found}
            wrong += [f"{name}: rank {rank}: {text}" for rank, _, text in found if expected not in text]
            says = f"node {victim} \\(host .*\\): " + ("this host reaches no other node" if at == victim else "")
            if not re.search(says, hosts.output(name)):
                wrong.append(f"the launcher of {name} does not name node {victim}")
        wrong += [f"rank {rank} heard nothing" for rank in range(len(NODES) * RANKS) if rank not in heard]
        if wrong:
            click.echo(hosts.report())
        return list(heard.values()), ended_s, wrong
    finally:
        hosts.close()


def false_alarms(how: str, seconds: float, folder: Path) -> list[str]:
    """What ranks have heard of losses although all of them live."""
    hosts, nodes = Namespaces(folder), NODES[:2]
    try:
        start(hosts, nodes, BUSY // 2, False, how, str(seconds))
        codes = [hosts.ended(name, within_s=LIMIT_S + 10 * seconds) for name in nodes]
        outputs = "".join(map(hosts.output, nodes))
        wrong = [f"rank {rank}: {text}" for rank, _, text in HEARD.findall(outputs)]
        if codes != [0, 0] or len(re.findall(r"^\[rank \d+\] went on$", outputs, re.MULTILINE)) != BUSY:
            wrong.append(f"{how}: the launchers ended with {codes}")
        if wrong:
            click.echo(hosts.report())
        return wrong
    finally:
        hosts.close()


@click.command()
@click.option("--trials", default=20)
@click.option("--first", default=0, help="number of the first trial")
@click.option("--alarms/--no-alarms", default=True, help="look for false alarms as well")
def main(trials: int, first: int, alarms: bool) -> None:
    """Cut hosts off, and keep ranks busy."""
    if os.geteuid():
        click.echo("vanish soak: skipped, as only root makes network namespaces")
        return
    times_s: list[float] = []
    ends_s: list[float] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="vanish-") as folder:
        for number in range(first, first + trials):
            place = Path(folder, str(number))
            place.mkdir()
            took_s, ended_s, wrong = cut_off(number, place)
            times_s += took_s
            ends_s.append(ended_s)
            problems += [f"trial {number}: {each}" for each in wrong]
            click.echo(f"trial {number}: ranks {', '.join(f'{each:.2f}' for each in took_s)} s, end {ended_s:.1f} s")
        if times_s:
            times_s.sort()
            half, late = times_s[len(times_s) // 2], times_s[int(0.99 * (len(times_s) - 1))]
            click.echo(
                f"{trials} hosts cut off: {len(times_s)} ranks have named them, p50 {half:.2f} s, p99 {late:.2f} s, "
                f"max {times_s[-1]:.2f} s; the last launcher has ended after {max(ends_s):.1f} s"
            )
        for how, seconds in (("compute", 30.0), ("hold", 10.0), ("stop", 10.0)) if alarms else ():
            place = Path(folder, how)
            place.mkdir()
            wrong = false_alarms(how, seconds, place)
            problems += wrong
            click.echo(f"{BUSY} ranks {how} for {seconds:g} s: {len(wrong)} false alarms")
    for line in problems:
        click.echo(line)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
