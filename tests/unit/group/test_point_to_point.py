"""Point-to-point: order, tags, any source, what does not fit, what is cancelled."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from group_kit import Group

import asyncdist as dist
from asyncdist.testing import SimulatedWorld, run_world


def test_messages_of_all_sizes_and_tags_arrive_in_order() -> None:
    async def main(group: Group) -> None:
        other = 1 - group.rank
        sizes = [0, 1, 16_384, 16_385, 1_000_000]
        sends = [group.isend(np.full(n, n, np.int32), other, tag) for tag in (2, 1) for n in sizes]
        for tag in (1, 2):
            for n in sizes:
                got = np.zeros(max(n, 1), np.int32)
                assert await group.recv(got, other, tag) == other
                assert (got[:n] == n).all()
        for work in sends:
            await work

    for seed in (None, 3):
        run_world(2, main, seed=seed)


def test_self_send_any_source_and_recv_array() -> None:
    async def main(group: Group) -> None:
        await group.isend(np.arange(3), group.rank, 9)
        got = np.zeros(3, int)
        assert await group.recv(got, group.rank, 9) == group.rank
        if group.rank == 0:
            sources = set()
            for _ in range(group.size - 1):
                work = group.recv_array()
                array = await work
                assert array.shape == (2, work.source_rank())
                assert array.dtype == np.float16
                sources.add(work.source_rank())
            assert sources == set(range(1, group.size))
        else:
            await group.isend(np.ones((2, group.rank), np.float16), 0)

    run_world(4, main)


def test_a_receive_that_does_not_fit_is_an_error_and_the_pair_stays_usable() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            for n in (10, 100_000):
                await group.isend(np.zeros(n, np.float32), 1)
                await group.isend(np.zeros(n, np.float32), 1)
                await group.isend(np.zeros(n, np.float32), 1)
            await group.isend(np.arange(3), 1)
            return
        for n in (10, 100_000):
            with pytest.raises(dist.CollectiveMismatchError, match=rf"rank 0 sent float32\[{n}\].*float32\[5\]"):
                await group.recv(np.zeros(5, np.float32), 0)
            with pytest.raises(dist.CollectiveMismatchError, match="float64"):
                await group.recv(np.zeros(n, np.float64), 0)
            with pytest.raises(dist.CollectiveMismatchError, match="max_bytes") as refused:
                await group.recv_array(0, max_bytes=4 * n - 1)
            assert refused.value.peer == 0
        got = np.zeros(3, int)
        await group.recv(got, 0)
        assert got.tolist() == [0, 1, 2]

    run_world(2, main)


def test_a_cancelled_or_expired_recv_loses_no_message() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            await asyncio.sleep(2)
            await group.isend(np.array([1, 2]), 1)
            return
        with pytest.raises(dist.CollectiveTimeoutError, match=r"recv \(rank 0\): did not end within 0.5 s"):
            await group.recv(np.zeros(2, int), 0, timeout=0.5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await group.recv_array(0)
        posted = group.irecv(np.zeros(2, int), 0)
        assert posted.cancel()
        with pytest.raises(dist.ClosedError, match="withdrawn"):
            await posted
        got = np.zeros(2, int)
        await group.recv(got, 0)
        assert got.tolist() == [1, 2]

    run_world(2, main)


def test_an_irecv_outlives_its_waiter() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            await asyncio.sleep(2)
            await group.isend(np.array([5]), 1)
            return
        got = np.zeros(1, int)
        work = group.irecv(got, 0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await work
        assert await work == 0
        assert not work.cancel()
        assert got[0] == 5

    run_world(2, main)


def test_a_rank_that_leaves_fails_only_what_waits_for_it() -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        if group.rank == 0:
            return
        with pytest.raises(dist.PeerLostError, match="has left") as left:
            await group.recv(np.zeros(1), 0)
        assert left.value.rank == 0
        sent = group.isend(np.ones(1), 3 - group.rank)
        await group.recv(np.zeros(1), 3 - group.rank)
        await sent

    run_world(3, main)


def test_a_receive_from_any_source_ends_when_all_others_have_left() -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        if group.rank:
            await asyncio.sleep(group.rank)
            await group.isend(np.full(1, group.rank), 0, 1)
            return
        with pytest.raises(dist.PeerLostError, match="has left") as left:
            await group.recv_array()
        assert left.value.left
        assert asyncio.get_running_loop().time() >= 2
        assert [(await group.recv_array(tag=1))[0] for _ in range(2)] == [1, 2]
        with pytest.raises(dist.PeerLostError, match="nobody can send this any more: rank 1, 2"):
            await group.recv_array(tag=1)

    run_world(3, main)


def test_batch() -> None:
    async def main(group: Group) -> None:
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        got = np.zeros(4)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, np.full(4, group.rank), right), dist.P2POp(dist.irecv, got, left)]
        )
        with pytest.raises(dist.CollectiveMismatchError, match="int64"):
            await works[1]
        await works[0]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, np.full(4, float(group.rank)), right), dist.P2POp(dist.irecv, got, left)]
        )
        assert await works[1] == left
        assert got.tolist() == [left] * 4

    run_world(3, main)


@pytest.mark.parametrize("source", [0, None])
@pytest.mark.parametrize("killed", [False, True])
def test_a_receive_whose_source_leaves_first_is_no_failure_to_raise_at_the_end(
    source: int | None, killed: bool
) -> None:
    """Closing withdraws what nothing matched: who closes last must not be worse off. Of a lost source it is told."""

    async def main(group: Group, world: SimulatedWorld) -> None:
        if group.rank == 0:
            await group.recv(np.zeros(1), 1, tag=1)
            if killed:
                world.kill(0)
            return
        works.append(group.irecv(np.zeros(1), source))
        await group.isend(np.zeros(1), 0, tag=1)
        ended = asyncio.Event()
        works[0].add_done_callback(lambda _work: ended.set())
        await ended.wait()

    works: list[dist.Work[int]] = []
    if killed:
        with pytest.raises(dist.PeerLostError):
            run_world(2, main, pass_world=True)
    else:
        run_world(2, main, pass_world=True)
    error = works[0].exception()
    assert isinstance(error, dist.PeerLostError)
    assert error.left is not killed


def test_a_batch_that_is_refused_leaves_no_receive_behind() -> None:
    """It would take the message that the next attempt is to get."""

    async def main(group: Group) -> None:
        if group.rank == 0:
            await group.recv(np.zeros(1), 1)
            await group.send(np.array([7.0]), 1)
            return
        x, constant = np.zeros(1), np.zeros(1)
        constant.flags.writeable = False
        good = dist.P2POp(dist.irecv, x, 0)
        with pytest.raises(ValueError, match="read-only"):
            dist.batch_isend_irecv([good, dist.P2POp(dist.isend, x, 0, tag=1), dist.P2POp(dist.irecv, constant, 0)])
        await group.send(x, 0)
        y = np.zeros(1)
        assert await group.recv(y, 0) == 0
        assert (x[0], y[0]) == (0.0, 7.0)

    run_world(2, main)
