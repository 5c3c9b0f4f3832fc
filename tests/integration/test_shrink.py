"""Processes that are killed, and those that are left: one group again, within a second on an idle machine."""

from __future__ import annotations

import signal

import pytest
from jobs import finish, start_ranks
from shrink_soak import trial

AWAITED = """
async def main():
    group = await dist.init_process_group(progress={progress!r})
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            await dist.barrier()
    except (dist.PeerLostError, dist.GroupAbortedError):
        smaller = await group.shrink(timeout=30)
    ranks = [None] * smaller.size
    await dist.all_gather_object(ranks, dist.get_rank(), group=smaller)
    print((await anext(group.membership())).rank, ranks)
dist.run(main())
"""
BLOCKING = """
import asyncdist.blocking as dist
group = dist.init_process_group()
if group.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        dist.barrier()
except (dist.PeerLostError, dist.GroupAbortedError):
    smaller = group.shrink(timeout=30)
ranks = [None] * smaller.size
dist.all_gather_object(ranks, dist.get_rank(), group=smaller)
print(next(iter(group.membership())).rank, ranks)
"""


@pytest.mark.parametrize("deaths", [1, 2])
def test_those_that_are_left_go_on(deaths: int) -> None:
    assert trial(deaths, deaths, size=4)[1] == []


@pytest.mark.parametrize(
    "code", [AWAITED.format(progress="thread"), BLOCKING], ids=["in the communication thread", "blocking"]
)
def test_other_forms_of_a_group_shrink(code: str) -> None:
    one, dead, other = finish(start_ranks("import signal\n" + code, 3))
    assert dead.returncode == -signal.SIGKILL
    for rank in (one, other):
        assert rank.stdout == "1 [0, 2]\n", rank.stderr
