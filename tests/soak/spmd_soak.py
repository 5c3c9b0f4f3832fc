"""Random SPMD programs: every result compared with numpy's, ranks killed, stopped or leaving at random instants.

    python tests/soak/spmd_soak.py --seconds 600                      # programs of the seeds from 0 on
    python tests/soak/spmd_soak.py --seed 17 --programs 1             # the program of that seed

A seed fixes what every rank does and what goes wrong when, not what the system does meanwhile: `--repeat` runs the same
again. docs/random-programs.md says what is checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "kits"))

import click
import forked
from jobs import OURS, complaints, free_port
from spmd_program import FAULTS, Program, program

LATE_S = 1.0
"""How much later than promised a rank may hear of something."""
LIMIT_S = 120.0
"""No program takes nearly as long."""
OTHERS_S = 3.0
"""When one has failed, so long the others may say what they make of it."""
KINDS = ("out", "err")
MEAN_PAUSE_S = 0.01
MAX_PAUSE_S = 0.3
MEAN_RUN_S = 0.02

AGAIN = "Again: python tests/soak/spmd_soak.py --seed {} --programs 1 --repeat 20"

Ranks = Sequence["subprocess.Popen[str]"]


def run_program(made: Program, late_s: float = LATE_S) -> str:
    """Run a program on processes of its own; what is wrong."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(OURS)}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(made.size)}
    common = {**inherited, **where, **made.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    if made.pauses or (made.fault is not None and made.fault.kind == "stop"):
        late_s += MAX_PAUSE_S + 2.0  # whoever is stopped is late
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as logs:
        streams = [
            [logs.enter_context(open(_path(Path(folder), rank, kind), "w")) for kind in KINDS]
            for rank in range(made.size)
        ]
        ranks = [
            forked.Popen(
                [sys.executable, "-m", "spmd_rank", str(made.seed), str(late_s), folder],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=Path(__file__).parent,
                stdout=streams[rank][0],
                stderr=streams[rank][1],
                text=True,
            )
            for rank in range(made.size)
        ]
        try:
            problem, struck_s = _watch(made, ranks, Path(folder))
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        said = [_said(Path(folder), rank) for rank in range(made.size)]
        errors = [complaints(_said(Path(folder), rank, "err")) for rank in range(made.size)]
    killed = made.fault.rank if made.fault is not None and made.fault.kind == "kill" and struck_s else -1
    problems = [problem] * bool(problem)
    for rank, process in enumerate(ranks):
        if (process.returncode and rank != killed) or errors[rank]:
            problems.append(f"rank {rank} ended with {process.returncode}: {errors[rank][-3000:]}")
    if not problems:
        problems = _late(made, said, struck_s, late_s)
    return "\n".join(problems)


def _watch(made: Program, ranks: Ranks, folder: Path) -> tuple[str, float]:
    """See to what befalls ranks until all have ended; what is wrong, and when one was killed."""
    dice = random.Random(f"pauses {made.seed}")
    fault, struck_s = made.fault, 0.0
    begun_s, ready_s = time.monotonic(), 0.0
    while any(process.poll() is None for process in ranks):
        now_s = time.monotonic()
        if not ready_s and all(_said(folder, rank).startswith("ready") for rank in range(made.size)):
            ready_s = now_s
        if fault is not None and ready_s and not struck_s and now_s > ready_s + fault.after_s:
            if fault.kind == "kill" and ranks[fault.rank].poll() is None:
                ranks[fault.rank].kill()
                ranks[fault.rank].wait()
                struck_s = time.time()
            elif fault.kind == "stop":
                struck_s = time.time()
                _pause(ranks[fault.rank], fault.for_s)
        expected = ranks[fault.rank] if fault is not None and fault.kind == "kill" and struck_s else None
        if any(process.poll() for process in ranks if process is not expected):
            _ask_all(ranks, OTHERS_S)
            return "a rank has failed", struck_s
        if now_s > begun_s + LIMIT_S:
            _ask_all(ranks, OTHERS_S)
            return f"not over after {LIMIT_S:g} s", struck_s
        if made.pauses and ready_s:
            time.sleep(min(dice.expovariate(1 / MEAN_RUN_S), 0.1))
            _pause(dice.choice(ranks), min(dice.expovariate(1 / MEAN_PAUSE_S), MAX_PAUSE_S))
        else:
            time.sleep(0.002)
    return "", struck_s


def _path(folder: Path, rank: int, kind: str) -> Path:
    return folder / f"{rank}.{kind}"


def _said(folder: Path, rank: int, kind: str = "out") -> str:
    return _path(folder, rank, kind).read_text(errors="replace")


def _pause(process: subprocess.Popen[str], seconds: float) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)


def _ask_all(ranks: Ranks, seconds: float) -> None:
    """Give them time to end; ask those that do not what they are doing."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s and any(process.poll() is None for process in ranks):
        time.sleep(0.05)
    for process in ranks:
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)


def _late(made: Program, outputs: Sequence[str], struck_s: float, late_s: float) -> list[str]:
    """Who has heard too late of what befell a rank, all having ended well."""
    fault = made.fault
    if fault is None or fault.kind == "stop":
        return []
    told: dict[int, dict[str, Any]] = {
        rank: json.loads(text.splitlines()[-1])
        for rank, text in enumerate(outputs)
        if rank != fault.rank or fault.kind != "kill" or not struck_s
    }
    struck_s = struck_s or told[fault.rank]["struck_s"]
    return [
        f"rank {rank} heard {at_s - struck_s:.2f} s after the fault: {where}"
        for rank, said in told.items()
        if rank != fault.rank
        for where, at_s in said["heard"]
        if at_s > struck_s + late_s
    ]


@click.command()
@click.option("--seed", default=0, show_default=True, help="The first one.")
@click.option("--programs", default=1_000_000, show_default=True, help="At most so many, of seeds in a row.")
@click.option("--seconds", default=600.0, show_default=True, help="Begin no program after so long.")
@click.option("--repeat", default=1, show_default=True, help="Run each program so many times.")
@click.option("--late-s", default=LATE_S, show_default=True, help="How much later than promised a rank may hear.")
@click.option("--fault", type=click.Choice(sorted({*FAULTS})), help="Only programs in which this befalls a rank.")
@click.option("--show", is_flag=True, help="Print programs instead of running them.")
def main(seed: int, programs: int, seconds: float, repeat: int, late_s: float, fault: str | None, show: bool) -> None:
    """Run random SPMD programs on processes of this host, and check every result."""
    begun_s = time.monotonic()
    ran = bad = 0
    for number in range(seed, seed + programs):
        made = program(number)
        if fault is not None and (made.fault is None or made.fault.kind != fault):
            continue
        if show:
            click.echo(str(made))
            continue
        for _ in range(repeat):
            problem = run_program(made, late_s)
            ran += 1
            bad += bool(problem)
            if problem:
                click.echo(f"{made}\n{problem}\n{AGAIN.format(number)}")
        if time.monotonic() > begun_s + seconds:
            break
    if not show:
        click.echo(f"{ran} programs, from seed {seed}, in {time.monotonic() - begun_s:.0f} s: {bad} with problems")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
