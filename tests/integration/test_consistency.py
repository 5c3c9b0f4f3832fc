"""Real processes that run different collectives: what each of them is told, and how soon."""

from __future__ import annotations

import re

import pytest
from jobs import Ended, run_ranks

DIFFER = """
LIMIT_S = 10

async def differ(here, there):
    group = await dist.init_process_group(timeout=60, group_name=f"{here}")
    await group.barrier()
    start = time.monotonic()
    try:
        if group.rank == 1:
            await group.broadcast(np.zeros(there, "i8"), 1)
        else:
            await group.all_reduce(np.zeros(here, "f4"))
        # A rank whose part was done is told as well.
        while group._core._aborted is None and time.monotonic() - start < LIMIT_S:
            await asyncio.sleep(0.01)
        await group.barrier()
    except dist.CollectiveError as error:
        print(here, error)
    assert time.monotonic() - start < LIMIT_S
    try:
        await group.close()
    except dist.CollectiveError:
        pass

async def main():
    async with dist.init_process_group(timeout=60) as world:
        for here, there in CASES:
            await differ(here, there)
            await world.barrier()
dist.run(main())
"""
CASES = [(4, 2), (1000, 10), (3_000_000, 1_500_000)]


def run(cases: list[tuple[int, int]], environ: dict[str, str]) -> list[Ended]:
    """Run the cases in worlds of their own, one after the other, on three ranks."""
    return run_ranks(DIFFER.replace("CASES", repr(cases)), 3, environ)


@pytest.mark.parametrize("transport", ["auto", pytest.param("unix", marks=pytest.mark.thorough), "tcp"])
def test_every_rank_is_told_what_both_sides_run(transport: str) -> None:
    for rank in run(CASES, {"ASYNCDIST_TRANSPORT": transport}):
        told = rank.stdout.splitlines()
        for here, there in CASES:
            (text,) = [line for line in told if line.startswith(f"{here} ")]
            assert f"runs all_reduce float32[{here}] SUM (" in text, rank
            assert f"rank 1 runs broadcast int64[{there}] root 1 (" in text, rank


@pytest.mark.parametrize("transport", ["auto", "unix"])
def test_the_full_check_names_the_lines_of_what_no_message_shows(transport: str) -> None:
    # Rank 1 differs from both others. The pair that is found first is named; shared memory names the algorithms, too.
    one, other = (
        r"rank [02] runs all_reduce float32\[0\] SUM( \(\w+\))? at <string>:",
        r"rank 1 runs broadcast int64\[0\] root 1( \(\w+\))? at <string>:",
    )
    for rank in run([(0, 0)], {"ASYNCDIST_CHECK": "full", "ASYNCDIST_TRANSPORT": transport}):
        assert re.search(one, rank.stdout), rank
        assert re.search(other, rank.stdout), rank
