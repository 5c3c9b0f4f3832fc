"""Kill soak: a rank is killed at a random instant of mixed traffic, or of none, and the survivors are asked.

    python tests/soak/kill_soak.py --kills 200

Each must have heard who was lost, in every operation that depended on it and within a second, must go on with the
others, and leave nothing open: descriptors, tasks, threads, shared memory.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "kits"))

import click
from jobs import OURS, free_port

PROGRAM = Path(__file__).parent / "kill_soak_rank.py"
TRANSPORTS = ("auto", "unix", "tcp")
LIMIT_S = 90.0
NOTICED_S = 1.0
CLOSED_S = 6.0
"""Leaving is bounded by LEAVE_LIMIT_S of asyncdist.world.world; without faults it takes milliseconds."""


def kill(seed: int, transport: str, ranks: int = 3, noticed_s: float = NOTICED_S) -> list[str]:
    """Kill one of `ranks`; what is wrong with the others."""
    rng = random.Random(seed)
    victim = rng.randrange(1, ranks)  # rank 0 hosts the store
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(OURS)}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ASYNCDIST_TRANSPORT": transport}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(victim), str(seed)],
            env={**inherited, **where, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    problems = []
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(rng.choice((0.0, rng.random() * 0.05, rng.random() * 0.4)))
        processes[victim].kill()
        processes[victim].wait()
        killed_s = time.time()
        for process in processes:  # the idle ones call something now
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
        for rank, process in enumerate(processes):
            if rank != victim:
                problems += _ask(rank, process, victim, killed_s + noticed_s)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
    return [f"seed {seed}, {transport}, rank {victim} killed: {problem}" for problem in problems]


def _ask(rank: int, process: subprocess.Popen[str], victim: int, until_s: float) -> list[str]:
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return [f"rank {rank} is stuck"]
    if process.returncode:
        return [f"rank {rank} ended with {process.returncode}:\n{errors[-3000:]}"]
    told: dict[str, Any] = json.loads(output.splitlines()[-1])
    problems = []
    for name, (kind, lost, at_s, text) in told["errors"].items():
        if lost != victim or kind not in ("PeerLostError", "GroupAbortedError"):
            problems.append(f"{name}: {kind} of rank {lost}: {text}")
        elif at_s > until_s and name != "close":
            problems.append(f"{name}: heard {at_s - until_s:.2f} s too late: {text}")
    left = {name: told[name] for name in ("hung", "unhandled", "tasks", "mapped", "open", "threads") if told[name]}
    if told["sockets"] > 0:
        left["sockets"] = told["sockets"]
    if told["closing_s"] > CLOSED_S:
        left["closing_s"] = told["closing_s"]
    if left:
        problems.append(f"left: {left}")
    return [f"rank {rank}: {problem}" for problem in problems]


@click.command()
@click.option("--kills", default=200, show_default=True)
@click.option("--seed", default=0, show_default=True, help="The first one.")
@click.option("--noticed-s", default=NOTICED_S, show_default=True, help="How soon all must know.")
def main(kills: int, seed: int, noticed_s: float) -> None:
    """Kill ranks at random instants, and see what the others make of it."""
    problems: list[str] = []
    for number in range(seed, seed + kills):
        found = kill(number, TRANSPORTS[number % len(TRANSPORTS)], noticed_s=noticed_s)
        for problem in found:
            click.echo(problem)
        problems += found
    click.echo(f"{kills} ranks killed: {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
