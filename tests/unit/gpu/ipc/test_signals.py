"""Records between ranks, and what a channel makes of those it does not expect."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_paths_kit import PathRank, run_ranks, values

from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.collectives.arguments import call as calls
from asyncdist.errors import PeerLostError, RemoteProtocolError
from asyncdist.gpu.ipc import scratch as ipc_scratch
from asyncdist.gpu.ipc.channel import MAX_EARLY
from asyncdist.gpu.ipc.operation import READ, TOLD, Record, Signals
from asyncdist.gpu.ipc.path import CudaIpcPath
from asyncdist.testing import run_world
from asyncdist.testing.fake_cuda import FakeRuntime


def around(group: Any) -> Any:
    """What Signals ask of their surroundings."""
    return SimpleNamespace(mesh=group.world.mesh, group_id=group.group_id, ranks=group.ranks, rank=group.rank)


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_scratch, "LARGE_BYTES", 1 << 12)


def test_records_come_in_order_and_a_loss_is_told_once() -> None:
    async def main(group: Any, world: Any) -> None:
        heard: list[tuple[int, Record]] = []
        lost: list[tuple[int, BaseException]] = []
        signals = Signals(
            around(group),
            7,
            lambda *entry: heard.append(entry),
            lambda *entry: lost.append(entry),
        )
        sent = [Record(3, 1, number, 2, 0xFFFF_FFFF, 2**40) for number in range(100)]
        for record in sent[:50]:
            signals.tell(range(3), record)  # before the others listen
        signals.open()
        for record in sent[50:]:
            signals.tell(range(3), record)
        while len(heard) < 200:  # noqa: ASYNC110 - of what callbacks do there is no event
            await asyncio.sleep(0.001)
        for other in {0, 1, 2} - {group.rank}:
            assert [record for member, record in heard if member == other] == sent
        if group.rank == 2:
            await asyncio.sleep(0.01)
            world.kill(2)
            return
        while not lost:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        signals.tell((2,), sent[0])
        signals.hush(1 - group.rank)
        await asyncio.sleep(0.01)
        assert [(member, type(error)) for member, error in lost] == [(2, PeerLostError)]

    run_world(3, main, pass_world=True)


def test_who_is_not_listened_to_any_more_is_told_all_the_same() -> None:
    """As it must hear that its memory is closed, though it said so first."""

    async def main(group: Any, world: Any) -> None:
        heard: list[int] = []
        signals = Signals(
            around(group),
            0,
            lambda member, record: heard.append(record.kind),
            lambda member, error: pytest.fail("nobody is lost"),
        )
        signals.open()
        if group.rank == 0:
            signals.hush(1)
        signals.tell((1 - group.rank,), Record(5))
        await group.barrier()
        assert heard == ([] if group.rank == 0 else [5])
        signals.hush(1 - group.rank)

    run_world(2, main, pass_world=True)


@pytest.mark.parametrize("more", [0, 1])
def test_signals_about_operations_to_come_are_bounded(more: int) -> None:
    runtime = FakeRuntime()

    async def main(rank: PathRank) -> None:
        await rank.run(calls.all_reduce(rank.array(values(rank.rank, 5)), ReduceOp.SUM))
        channel = rank.path._tags[0].channel
        record = Record(TOLD, 0, 1000, 0, 1)
        for _ in range(MAX_EARLY):
            channel._hear(1 - rank.rank, record)
        if more:
            with pytest.raises(RemoteProtocolError):
                channel._hear(1 - rank.rank, record)
        await rank.run(calls.all_reduce(rank.array(np.ones(5)), ReduceOp.SUM))

    run_ranks(2, CudaIpcPath, main, runtime)
    runtime.close()


def test_a_signal_of_no_kind_is_no_protocol() -> None:
    runtime = FakeRuntime()

    async def main(rank: PathRank) -> None:
        await rank.run(calls.all_reduce(rank.array(values(rank.rank, 5)), ReduceOp.SUM))
        channel = rank.path._tags[0].channel
        with pytest.raises(RemoteProtocolError, match="kind 9"):
            channel._hear(1 - rank.rank, Record(9))
        channel._hear(1 - rank.rank, Record(TOLD, 2, 0, 5, 1))  # of an operation that is over

    run_ranks(2, CudaIpcPath, main, runtime)
    runtime.close()


def test_a_chunk_does_not_overtake_the_one_before_it_in_its_slot() -> None:
    """Two slots take turns. The second one comes free first, and again: the first is still the older chunk's."""
    runtime = FakeRuntime()

    async def main(rank: PathRank) -> None:
        await rank.run(calls.all_reduce(rank.array(values(rank.rank, 5)), ReduceOp.SUM))
        if rank.rank == 0:
            number = rank.skip()  # it reads nothing: what it says is said for it below
        else:
            channel = rank.path._tags[0].channel
            told: list[int] = []
            tell = channel.tell

            def spy(members: Any, record: Record) -> None:
                told.append(record.chunk)
                tell(members, record)

            channel.tell = spy
            rank.start(calls.gather_uneven(rank.array(values(1, 1 << 12)), None, 0, 1, 2))
            number = channel._last
            fingerprint = channel._operations[number].fingerprint
            for read, expected in ((None, [0, 1]), (1, [0, 1, 3]), (0, [0, 1, 3, 2]), (2, [0, 1, 3, 2, 4])):
                if read is not None:
                    channel._hear(0, Record(READ, 2, number, read, fingerprint))
                while rank.completions.pending:  # noqa: ASYNC110 - of what callbacks do there is no event
                    await asyncio.sleep(0)
                assert told == expected
        rank.path.drop(0, number)
        await rank.run(calls.all_reduce(rank.array(np.ones(5)), ReduceOp.SUM))

    run_ranks(2, CudaIpcPath, main, runtime)
    runtime.close()
