"""A rank that is stopped, as a debugger does it, is said to be so by those that share memory with it."""

from __future__ import annotations

import sys

import pytest
from jobs import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")

STOPPED = """
async def main():
    async with dist.init_process_group() as group:
        mine = np.array([os.getpid()])
        pids = [np.empty_like(mine) for _ in range(3)]
        await group.all_gather(pids, mine)
        await group.barrier()
        if group.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif group.rank == 0:
            try:
                await group.all_reduce(np.ones(3), timeout=0.3)
                raise AssertionError("it ended")
            except dist.CollectiveTimeoutError as error:
                assert error.missing == (1, 2), error
                text = str(error)
                assert "rank 1 (not called there), 2 (no answer: its process is stopped, by SIGSTOP or" in text, text
            finally:
                os.kill(int(pids[2][0]), signal.SIGCONT)
        else:
            await asyncio.sleep(1.2)

dist.run(main())
"""


def test_a_stopped_rank_is_told_from_a_silent_one() -> None:
    run_ranks(STOPPED, 3)
