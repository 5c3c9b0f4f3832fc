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


CONTINUED = """
async def main():
    group = await dist.init_process_group(progress={progress!r})
    x = np.full(300_000, 2 ** group.rank)
    work = dist.all_reduce(x, on_lost="continue")
    await work
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while len(work.result().ranks) == 3:
        x[:] = 2 ** group.rank
        work = dist.all_reduce(x, on_lost="continue")
        await work
    print(work.result().ranks, set(x.tolist()))
dist.run(main())
"""
BLOCKING_CONTINUED = """
import asyncdist.blocking as dist
group = dist.init_process_group()
x = np.full(300_000, 2 ** group.rank)
array, ranks = dist.all_reduce(x, on_lost="continue")
if group.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while len(ranks) == 3:
    x[:] = 2 ** group.rank
    array, ranks = group.all_reduce(x, on_lost="continue")
print(ranks, set(array.tolist()))
"""


@pytest.mark.parametrize("on_lost", ["raise", "continue"])
@pytest.mark.parametrize("deaths", [1, 2])
def test_those_that_are_left_go_on(deaths: int, on_lost: str) -> None:
    assert trial(deaths, deaths, size=4, on_lost=on_lost)[1] == []


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize(
    "code",
    [CONTINUED.format(progress="loop"), CONTINUED.format(progress="thread"), BLOCKING_CONTINUED],
    ids=["awaited", "in the communication thread", "blocking"],
)
def test_an_all_reduce_goes_on(code: str, transport: str) -> None:
    one, dead, other = finish(start_ranks("import signal\n" + code, 3, {"ASYNCDIST_TRANSPORT": transport}))
    assert dead.returncode == -signal.SIGKILL
    for rank in (one, other):
        assert rank.stdout == "(0, 2) {5}\n", rank.stderr


@pytest.mark.parametrize(
    "code", [AWAITED.format(progress="thread"), BLOCKING], ids=["in the communication thread", "blocking"]
)
def test_other_forms_of_a_group_shrink(code: str) -> None:
    one, dead, other = finish(start_ranks("import signal\n" + code, 3))
    assert dead.returncode == -signal.SIGKILL
    for rank in (one, other):
        assert rank.stdout == "1 [0, 2]\n", rank.stderr
