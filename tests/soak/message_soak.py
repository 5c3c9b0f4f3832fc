"""Random messages among three processes, judged against a model: see message_program.

    python tests/soak/message_soak.py --seconds 600 --transport shm    # programs of the seeds from 0 on
    python tests/soak/message_soak.py --seed 17 --programs 1 --repeat 20

A seed fixes what every rank tries, not how the system times it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "kits"))

import click
import forked
import uvloop
from jobs import OURS, complaints, free_port
from message_program import RANKS, Messages, Notes, problems_of

import asyncdist as dist

LIMIT_S = 60.0
"""No program takes nearly as long."""
LARGEST = 16 << 20
TRANSPORTS = ("shm", "unix", "tcp")

AGAIN = "Again: python tests/soak/message_soak.py --transport {} --seed {} --programs 1 --repeat 20"


def run_program(seed: int, transport: str, messages: int = 60) -> tuple[list[Notes], list[str]]:
    """Run a program on processes of its own: what they have noted, and what is wrong."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(OURS)}
    common = {**inherited, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    common |= {"ASYNCDIST_TRANSPORT": transport, "OMP_NUM_THREADS": "1"}
    ranks = [
        forked.Popen(
            [sys.executable, "-m", "message_soak", "--program", str(seed), "--messages", str(messages)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=os.path.dirname(os.path.abspath(__file__)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    deadline_s = time.monotonic() + LIMIT_S
    notes, problems = [], []
    for rank, process in enumerate(ranks):
        try:
            out, err = process.communicate(timeout=max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # it says what it does
            time.sleep(0.5)
            process.kill()
            out, err = process.communicate()
            problems.append(f"rank {rank} is not over after {LIMIT_S:g} s:\n{err[-5000:]}")
            continue
        err = complaints(err)
        if process.returncode or err:
            problems.append(f"rank {rank} ended with {process.returncode}:\n{err[-5000:]}")
        if not process.returncode:
            notes.append(Notes(**json.loads(out)))
    return notes, problems or problems_of(notes)


async def run_rank(seed: int, messages: int) -> Notes:
    """This process's part."""
    group = await dist.init_process_group()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, show, group)
    return await Messages(group, seed, messages, LARGEST).run()


def show(group: Any) -> None:
    """Say on standard error what waits."""
    for task in asyncio.all_tasks():
        task.print_stack()
    for core in group.world.mesh.cores:
        if core is not None:
            print(f"rank {core.rank} and rank {core.peer_rank}: {core.statistics()}, {core.error!r}", file=sys.stderr)
    for work in group.pairs.pending():
        print(f"{work.where}: {work!r}, tag {work._tag}", file=sys.stderr)


@click.command()
@click.option("--seed", default=0, show_default=True, help="The first one.")
@click.option("--programs", default=1_000_000, show_default=True, help="At most so many, of seeds in a row.")
@click.option("--seconds", default=600.0, show_default=True, help="Begin no program after so long.")
@click.option("--repeat", default=1, show_default=True, help="Run each program so many times.")
@click.option("--messages", default=60, show_default=True, help="From each rank to each other.")
@click.option("--transport", type=click.Choice(TRANSPORTS), help="By default all, in turns.")
@click.option("--program", hidden=True, type=int, help="Be a rank of it.")
def main(
    seed: int, programs: int, seconds: float, repeat: int, messages: int, transport: str | None, program: int | None
) -> None:
    """Run random messages on processes of this host, and check that none is lost, doubled or out of order."""
    if program is not None:
        factory = uvloop.new_event_loop if (program + int(os.environ["RANK"])) % 2 else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            print(json.dumps(dataclasses.asdict(runner.run(run_rank(program, messages)))))
        return
    begun_s = time.monotonic()
    counts = {"programs": 0, "acknowledged": 0, "withdrawn": 0, "received": 0, "thrown away": 0, "with problems": 0}
    for number in range(seed, seed + programs):
        by = transport or TRANSPORTS[number % len(TRANSPORTS)]
        for _ in range(repeat):
            notes, problems = run_program(number, by, messages)
            counts["programs"] += 1
            counts["with problems"] += bool(problems)
            for one in notes:
                counts["acknowledged"] += sum(map(len, one.sent.values()))
                counts["withdrawn"] += one.withdrawn
                counts["received"] += sum(map(len, one.got.values()))
                counts["thrown away"] += sum(one.thrown.values())
            if problems:
                click.echo("\n".join([f"seed {number}, {by}", *problems, AGAIN.format(by, number)]))
        if time.monotonic() > begun_s + seconds:
            break
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    click.echo(f"{transport or 'all transports'}, from seed {seed}, in {time.monotonic() - begun_s:.0f} s: {told}")
    sys.exit(bool(counts["with problems"]))


if __name__ == "__main__":
    main()
