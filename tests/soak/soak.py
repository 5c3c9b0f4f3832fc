"""Soak: a million small operations on ranks that are stopped and continued at random; every result is checked.

    python tests/soak/soak.py --operations 1000000 --ranks 4

A lost wake-up, a store seen too early, or an item overwritten too soon shows here as a wrong result, a hang or an error
that names a rank. Needs no privileges.
"""

from __future__ import annotations

import os
import random
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kits"))

import click
from jobs import OURS, free_port

PROGRAM = Path(__file__).parent / "soak_rank.py"
MEAN_PAUSE_S = 0.005
MEAN_RUN_S = 0.02
STUCK_S = 90.0
"""No rank reports anything for so long: something hangs. Pauses are a thousand times shorter."""


@dataclass
class Soaked:
    """What happened."""

    operations: int
    seconds: float
    pauses: int
    paused_s: float
    problem: str = ""

    def __str__(self) -> str:
        text = (
            f"{self.operations} operations in {self.seconds:.1f} s ({self.operations / self.seconds:.0f}/s), "
            f"{self.pauses} pauses of {self.paused_s:.1f} s in all"
        )
        return f"{text}: {self.problem or 'all right'}"


def soak(
    operations: int, ranks: int = 4, seed: int = 1, pause_s: float = MEAN_PAUSE_S, transport: str = "auto"
) -> Soaked:
    """Run `operations` on `ranks` processes, one of which at a time is stopped for about `pause_s` (0: never)."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ASYNCDIST_TRANSPORT": transport}
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(OURS)}
    started_s = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(operations), str(seed)],
            env={**inherited, **where, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    try:
        soaked = _watch(processes, random.Random(seed), pause_s)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        errors = [process.communicate()[1].decode(errors="replace") for process in processes]
    soaked.operations = operations
    soaked.seconds = time.monotonic() - started_s
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed or soaked.problem:
        shown = "\n".join(f"rank {rank}:\n{errors[rank][-4000:]}" for rank in failed)
        soaked.problem = f"{soaked.problem or 'failed'}; ranks {failed} ended badly\n{shown}"
    return soaked


def _watch(processes: Sequence[subprocess.Popen[bytes]], rng: random.Random, pause_s: float) -> Soaked:
    """Pause ranks until all have ended, or one has failed, or none reports anything for long."""
    soaked = Soaked(0, 0.0, 0, 0.0)
    last_news_s = time.monotonic()
    selector = selectors.DefaultSelector()
    for process in processes:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        selector.register(process.stdout, selectors.EVENT_READ, process)
    while any(process.poll() is None for process in processes):
        for key, _ in selector.select(rng.expovariate(1 / MEAN_RUN_S)):
            if os.read(key.fd, 1 << 16):
                last_news_s = time.monotonic()
            else:
                selector.unregister(key.fileobj)
        if any(process.poll() for process in processes):
            soaked.problem = "a rank has failed"
            time.sleep(1.0)  # the others say what they make of it
            break
        if time.monotonic() - last_news_s > STUCK_S:
            soaked.problem = f"nothing has moved for {STUCK_S:g} s"
            break
        victim = rng.choice(processes)
        if pause_s and victim.poll() is None:
            stopped_s = time.monotonic()
            victim.send_signal(signal.SIGSTOP)
            time.sleep(min(rng.expovariate(1 / pause_s), 50 * pause_s))
            victim.send_signal(signal.SIGCONT)
            soaked.pauses += 1
            soaked.paused_s += time.monotonic() - stopped_s
    selector.close()
    return soaked


@click.command()
@click.option("--operations", default=1_000_000, show_default=True)
@click.option("--ranks", default=4, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--pause-ms", default=MEAN_PAUSE_S * 1e3, show_default=True, help="Mean length of a pause; 0 for none.")
@click.option("--transport", default="auto", show_default=True)
def main(operations: int, ranks: int, seed: int, pause_ms: float, transport: str) -> None:
    """Run random operations on ranks that are stopped and continued at random, and check every result."""
    soaked = soak(operations, ranks, seed, pause_ms / 1e3, transport)
    click.echo(str(soaked))
    sys.exit(bool(soaked.problem))


if __name__ == "__main__":
    main()
