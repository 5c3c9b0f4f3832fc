"""A child that is forked while operations are in flight ends as it likes, and its parent's operations go on."""

from __future__ import annotations

import pytest
from jobs import run_ranks

LEAVES = """
async def main():
    async with dist.init_process_group(timeout=30) as group:
        await group.all_reduce(np.ones(10))
        other = 1 - group.rank
        large, got = np.full(8_000_000, 1.0 + group.rank), np.zeros(8_000_000)
        works = [group.isend(large, other), group.irecv(got, other), group.all_reduce(np.ones(3_000_000))]
        works += [group.all_reduce(np.ones(3), tag=4)]
        waiting = group.irecv(np.zeros(5), None, 99)
        for _ in range({turns}):
            await asyncio.sleep(0)
        sys.stdout.flush()
        child = os.fork()
        if not child:
            try:
                group.abort("not mine")
                sub = dist.new_group()
            except dist.ClosedError:
                sys.exit(7)  # on its way out of `async with`
            sys.exit(8)
        await asyncio.gather(*works)
        assert (got == 1.0 + other).all()
        assert waiting.cancel()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        await group.barrier()
try:
    dist.run(main())
except SystemExit as end:
    os._exit(end.code or 0)
"""


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("turns", [0, 3, 15])
def test_the_child_ends_with_its_own_status(transport: str, turns: int) -> None:
    run_ranks(LEAVES.format(turns=turns), 2, {"ASYNCDIST_TRANSPORT": transport})
