"""Real processes that run different collectives: what each of them is told, and how soon."""

from __future__ import annotations

import pytest
from jobs import run_ranks

DIFFER = """
async def main():
    group = await dist.init_process_group(timeout=60)
    await group.barrier()
    start = time.monotonic()
    try:
        if group.rank == 1:
            await group.broadcast(np.zeros({there}, "i8"), 1)
        else:
            await group.all_reduce(np.zeros({here}, "f4"))
        await asyncio.sleep(2)
        await group.barrier()
    except dist.CollectiveError as error:
        print(error)
    assert time.monotonic() - start < {limit_s}
    try:
        await group.close()
    except dist.CollectiveError:
        pass
dist.run(main())
"""


@pytest.mark.parametrize(("here", "there"), [(4, 2), (1000, 10), (3_000_000, 1_500_000)])
@pytest.mark.parametrize("transport", ["auto", "unix", "tcp"])
def test_every_rank_is_told_what_both_sides_run(here: int, there: int, transport: str) -> None:
    code = DIFFER.format(here=here, there=there, limit_s=10)
    for rank in run_ranks(code, 3, {"ASYNCDIST_TRANSPORT": transport}):
        assert f"runs all_reduce float32[{here}] SUM (" in rank.stdout, rank
        assert f"rank 1 runs broadcast int64[{there}] root 1 (" in rank.stdout, rank


@pytest.mark.parametrize("transport", ["auto", "unix"])
def test_the_full_check_names_the_lines_of_what_no_message_shows(transport: str) -> None:
    code = DIFFER.format(here=0, there=0, limit_s=10)
    for rank in run_ranks(code, 3, {"ASYNCDIST_CHECK": "full", "ASYNCDIST_TRANSPORT": transport}):
        assert "rank 0 runs all_reduce float32[0] SUM at <string>:" in rank.stdout, rank
        assert "rank 1 runs broadcast int64[0] root 1 at <string>:" in rank.stdout, rank
