"""What nobody has received when a group is closed takes up no memory afterwards, and holds up no sender."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from group_kit import Group
from socket_world import socket_world
from waiting import eventually

import asyncdist as dist
from asyncdist.gpu.messages import UNWANTED, Announcement, messages_id
from asyncdist.group.point_to_point import MAX_HELD, _discarded
from asyncdist.messages.work import OVER
from asyncdist.testing import run_world
from asyncdist.transport.protocol.frame import CREDIT_BYTES, POINT_TO_POINT, pack_key
from asyncdist.transport.protocol.operations import Receive, SendOp


@pytest.mark.parametrize("late", [False, True])
def test_unmatched_messages_go_with_their_group(late: bool) -> None:
    """Far more of them than a pair has credit for; `late` ones come when the group is closed already."""

    async def main(group: Group) -> None:
        for _ in range(2 * CREDIT_BYTES // 40_000):
            sub = dist.new_group()
            assert isinstance(sub, Group)
            if group.rank == 0:
                if late:
                    await group.recv(np.zeros(1), 1, 7)
                sub.isend(np.zeros(5000), 1, 3)
                await group.isend(np.zeros(1), 1, 8)
                await sub.close()
            else:
                if late:
                    await sub.close()
                    await group.isend(np.zeros(1), 0, 7)
                await group.recv(np.zeros(1), 0, 8)
                await sub.close()
                core = group.world.mesh.cores[0]
                assert core is not None
                assert core._receiver.windows[POINT_TO_POINT].unexpected_bytes == 0
            await group.barrier()
        assert group.world.mesh.cores[1 - group.rank].statistics()["held"] == 0  # type: ignore[union-attr]

    run_world(2, main, seed=1)


@pytest.mark.parametrize("held", [MAX_HELD - 1, MAX_HELD])
def test_who_reads_no_answers_gets_no_more(held: int) -> None:
    """To announcements of arrays on a GPU, which a closed group throws away."""
    answers: list[SendOp] = []
    core = SimpleNamespace(statistics=lambda: {"held": held})
    mesh: Any = SimpleNamespace(peer=lambda _rank: core, post_send=lambda _rank, op: answers.append(op))
    announced = Announcement(7, "a host", "a GPU", False, np.dtype(np.float32), (3,)).encode()
    for meta in (announced, announced[:-1], b"another message"):
        _discarded(mesh, 1, 0, meta)
    assert [bytes(answer.payload) for answer in answers] == ([UNWANTED] if held < MAX_HELD else [])


async def test_the_sender_of_a_gpu_array_is_answered_also_where_only_it_has_connected() -> None:
    async with socket_world(2) as groups:
        meshes = [group.world.mesh for group in groups]
        announced = Announcement(7, "a host", "a GPU", False, np.dtype(np.float32), (3,)).encode()
        answer = np.zeros(1, np.uint8)
        key = pack_key(messages_id(groups[0].group_id), 0, 7, 0, 0)
        meshes[0].post_receive(1, Receive(key, memoryview(answer), OVER, None))
        meshes[0].post_send(1, SendOp(groups[0].pairs._key(0), memoryview(b""), announced, OVER, None))
        await eventually(lambda: meshes[1].is_connected(0))
        assert meshes[1].cores[0] is None
        groups[1].pairs.drop_unmatched()
        await eventually(lambda: bytes(answer) == UNWANTED)


async def test_a_large_send_that_its_group_never_takes_ends() -> None:
    async with socket_world(2) as groups:
        subs = [group.make_subgroup((0, 1), None, "sub") for group in groups]
        assert subs[0] is not None
        assert subs[1] is not None
        work = subs[0].isend(np.zeros(1_000_000), 1)
        await subs[1].close()
        async with asyncio.timeout(5):
            said = r"isend \(rank 1\): rank 1 has closed the group without receiving the message$"
            with pytest.raises(dist.PeerLostError, match=said) as unwanted:
                await work
            assert unwanted.value.rank == 1
            assert unwanted.value.left
            await subs[0].close()
