"""Runs the store daemon and its clients on simulated networks, one seed after the other; `make sim` does.

python tests/sim/simulate_store.py --seeds 2000
python tests/sim/simulate_store.py --first 1234 --seeds 1 --trace     # everything that happens in one of them
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kits"))

import click
from sim_store import run_store_scenario
from sim_store_scenario import store_scenario
from sim_store_totals import Totals, run_seeds

BLOCK = 20
"""Seeds that one worker runs before it reports."""
ENOUGH = 200
"""From so many seeds on, everything must have happened."""


@click.command()
@click.option("--first", default=0, show_default=True, help="The first seed.")
@click.option("--seeds", default=200, show_default=True, help="How many seeds.")
@click.option("--mode", type=click.Choice(["memory", "durable"]), default="memory", show_default=True)
@click.option("--jobs", default=1, show_default=True, help="Processes that run side by side.")
@click.option("--trace", is_flag=True, help="Print all that happens in the first seed.")
def main(first: int, seeds: int, mode: str, jobs: int, trace: bool) -> None:
    """Run seeds and print what happened in them; exits with 1 if a promise was broken."""
    if trace:
        show_trace(first, mode)
    totals = Totals()
    began = time.perf_counter()
    starts = range(first, first + seeds, BLOCK)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
        blocks = [pool.submit(run_seeds, range(start, min(start + BLOCK, first + seeds)), mode) for start in starts]
        for done in concurrent.futures.as_completed(blocks):
            part = done.result()
            totals.merge(part)
            for failure in part.failures:
                click.echo(failure)
    click.echo(f"{mode}: {totals.report()}")
    click.echo(f"{time.perf_counter() - began:.0f} s, {jobs} processes")
    untested = totals.untested(mode) if seeds >= ENOUGH else []
    if untested:
        click.echo(f"never happened: {', '.join(untested)}")
    sys.exit(bool(totals.failures or untested))


def show_trace(seed: int, mode: str) -> None:
    """Run one seed and print its trace, however it ends."""
    lines: list[str] = []
    try:
        outcome = run_store_scenario(store_scenario(seed, mode), keep_trace=lines)
    except AssertionError as error:
        click.echo("\n".join(lines))
        raise SystemExit(str(error)) from None
    click.echo("\n".join(lines))
    click.echo(f"trace hash {outcome.trace_hash}")


if __name__ == "__main__":
    main()
