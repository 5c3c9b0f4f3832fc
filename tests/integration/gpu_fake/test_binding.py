"""Groups that are bound to GPUs when they are made, and what names a GPU."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from gpu_fake_kit import GpuRank, equal, run_gpu
from waiting import eventually

import asyncdist as dist
from asyncdist.cuda.provider import chosen_device
from asyncdist.testing.fake_cuda import fake_cuda


class Named:
    """As torch and cupy name devices."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


@pytest.mark.parametrize(
    ("device", "number"),
    [
        (None, None),
        (1, 1),
        ("cuda:2", 2),
        ("cuda", 3),
        (Named(type="cuda", index=1), 1),
        (Named(type="cuda", index=None), 3),
        (Named(id=2), 2),
    ],
)
def test_what_names_a_gpu(device: Any, number: int | None) -> None:
    with fake_cuda(4):
        assert chosen_device(device, {"LOCAL_RANK": "7"}) == number


@pytest.mark.parametrize(
    ("device", "error", "text"),
    [
        (4, ValueError, "there are 4 GPUs"),
        (-1, ValueError, "there are 4 GPUs"),
        ("cpu", ValueError, "write 'cuda'"),
        ("cuda:x", ValueError, "write 'cuda'"),
        (Named(type="cpu", index=0), ValueError, "GPUs only"),
        (1.5, TypeError, "not float"),
        (True, TypeError, "not bool"),
    ],
)
def test_what_names_none(device: Any, error: type[Exception], text: str) -> None:
    with fake_cuda(4), pytest.raises(error, match=re.escape(text)):
        chosen_device(device)


def test_bound_groups_open_their_communicators_before_the_first_operation() -> None:
    async def main(at: GpuRank) -> None:
        group = dist.new_group(device_id=at.device)
        assert at.cuda.nccl is not None
        await eventually(lambda: len(at.cuda.nccl.communicators) == 2)  # type: ignore[union-attr]
        numbers = np.ones(2, np.float32)
        await dist.all_reduce(numbers, group=group)  # takes a place in the order of the tag
        x = at.array(np.ones(2, np.float32))
        await dist.all_reduce(x, group=group)
        assert equal(x, [2, 2])
        assert len(at.cuda.nccl.communicators) == 2
        await group.close()

    run_gpu(2, main)


def test_a_rank_that_is_not_bound_keeps_the_others_waiting_for_nothing() -> None:
    async def main(at: GpuRank) -> None:
        group = dist.new_group(device_id=at.device if at.rank else None)
        x = at.array(np.ones(2, np.float32))
        await dist.all_reduce(np.ones(1), group=group)
        await dist.all_reduce(x, group=group)
        assert equal(x, [3, 3, 3][:2])
        await group.close()
        unused = dist.new_group(device_id=at.device if at.rank else None)
        await unused.close()

    run_gpu(3, main)


def test_other_gpus_than_the_bound_one_are_refused() -> None:
    async def main(at: GpuRank) -> None:
        group = dist.new_group(device_id=1)
        with pytest.raises(ValueError, match="has used cuda:1"):
            dist.all_reduce(at.zeros(2), group=group)
        await group.close()

    run_gpu(1, main, devices=2)


async def test_a_world_can_be_bound() -> None:
    with fake_cuda(1, mode="threads") as cuda:
        async with dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, device_id="cuda:0"):
            x = cuda.runtime.array(np.ones(2))
            await dist.all_reduce(x)
            assert dist.is_nccl_available()
            assert dist.get_backend_config() == "cpu:aio,cuda:nccl"
            assert dist.get_default_backend_for_device("cuda:0") == "nccl"
    with pytest.raises(ValueError, match="device_id=0"):
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, device_id=0)


def test_a_path_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", "teleport")

    async def main(at: GpuRank) -> None:
        with pytest.raises(ValueError, match="ASYNCDIST_CUDA_PATH='teleport': use nccl, ipc, staged"):
            dist.all_reduce(at.zeros(2))

    run_gpu(1, main)
