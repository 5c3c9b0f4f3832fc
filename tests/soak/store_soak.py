"""Soak of the store: clients under load while the daemon is killed, stopped and cut off; every answer is judged.

    python tests/soak/store_soak.py --mode durable --kills 200 --seed 1

Modes: `cuts` (bad connections and SIGSTOP), `memory`, `durable` and `relaxed` (kill -9 and restart on the same port).
docs/proof.md says what is checked.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kits"))

import click
from proof_audit import Findings
from proof_rounds import KILLS_PER_ROUND, MODES, Round, daemon_in, relaxed_round

from asyncdist.concurrency.loop import run


async def soak(mode_name: str, seed: int, kills: int, minutes: float, say: bool = False) -> Findings:
    """Run rounds until there were so many kills (rounds of ten pauses, where nothing is killed), or time is over."""
    mode = MODES[mode_name]
    sums = Findings()
    deadline = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        async with daemon_in(mode, Path(folder) / "data") as daemon:
            number = 0
            while (sums.kills + sums.pauses) < kills and time.monotonic() < deadline:
                number += 1
                name = f"{seed}.{number}"
                count = min(KILLS_PER_ROUND, kills - sums.kills)
                run = (
                    relaxed_round(daemon, name, count)
                    if mode_name == "relaxed"
                    else Round(daemon, mode, name).run(count)
                )
                outages = len(daemon.outages)
                try:
                    findings = await run
                except Exception:
                    away = ", ".join(f"{end - start:.1f}" for start, end in daemon.outages[outages:])
                    click.echo(f"{mode_name} {name}: broken off; the daemon was away for {away} s, and said:")
                    click.echo(daemon.said())
                    raise
                sums.add(findings)
                if say:
                    click.echo(f"{mode_name} {name}: {findings}")
                    for problem in findings.problems:
                        click.echo(problem)
    return sums


@click.command()
@click.option("--mode", "modes", multiple=True, type=click.Choice(sorted(MODES)), default=sorted(MODES))
@click.option("--kills", default=200, show_default=True, help="Kills, or pauses, of each mode.")
@click.option("--seed", default=1, show_default=True)
@click.option("--minutes", default=60.0, show_default=True, help="Longest time for each mode.")
def main(modes: tuple[str, ...], kills: int, seed: int, minutes: float) -> None:
    """Kill, stop and cut off a store daemon under load, and check every answer of it."""
    failed = False
    for mode in modes:
        started_s = time.monotonic()
        sums = run(soak(mode, seed, kills, minutes, say=True))
        click.echo(
            f"{mode}: {sums}, in {time.monotonic() - started_s:.0f} s: {'FAILED' if sums.problems else 'all right'}"
        )
        failed |= bool(sums.problems)
    sys.exit(failed)


if __name__ == "__main__":
    main()
