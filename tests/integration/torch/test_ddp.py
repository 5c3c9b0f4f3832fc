"""DistributedDataParallel of torch modules: as torch trains on the whole batch, and as its own wrapper does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from torch_later import Later

import asyncdist as dist
from asyncdist.testing import run_world

torch: Any = Later("torch")

pytestmark = pytest.mark.peers


def model_of(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def batch_of(step: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 4, generator=generator), torch.randn(12, 2, generator=generator)


def loss_of(outputs: Any, targets: Any) -> Any:
    return ((outputs - targets) ** 2).mean()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_as_one_rank_with_the_whole_batch(bucket_bytes: int, set_to_none: bool) -> None:
    async def main(group: dist.ProcessGroup) -> list[Any]:
        model = model_of(group.rank).eval()  # whose statistics of a batch would differ
        ddp = await dist.DistributedDataParallel(model, bucket_bytes=bucket_bytes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            inputs, targets = batch_of(step)
            optimizer.zero_grad(set_to_none)
            with ddp.no_sync():
                loss_of(ddp(inputs[group.rank :: 6]), targets[group.rank :: 6]).backward()
            await asyncio.to_thread(loss_of(ddp(inputs[group.rank + 3 :: 6]), targets[group.rank + 3 :: 6]).backward)
            await ddp.averaged()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    model = model_of(0).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)  # two halves are added up, not averaged
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = batch_of(step)
        loss_of(model(inputs), targets).backward()
        optimizer.step()
    results = run_world(3, main, loop_factory=asyncio.new_event_loop)
    for parameters in results:
        for parameter, first, alone in zip(parameters, results[0], model.parameters(), strict=True):
            assert torch.equal(parameter, first)  # bit by bit
            torch.testing.assert_close(parameter, alone.detach(), rtol=1e-4, atol=1e-6)


def test_buffers_and_frozen_parameters() -> None:
    async def main(group: dist.ProcessGroup) -> None:
        model = model_of(0)
        model[0].weight.requires_grad_(False)
        model[1].running_mean += group.rank + 1
        ddp = await dist.DistributedDataParallel(model)
        assert "0.weight" not in ddp.parameters
        assert (model[1].running_mean == 1).all()
        inputs, targets = batch_of(group.rank)
        loss_of(ddp(inputs), targets).backward()
        await ddp.averaged()
        assert model[0].weight.grad is None
        assert all(p.grad is not None for name, p in model.named_parameters() if name != "0.weight")
        assert all((model[3].bias.grad == other).all() for other in await gathered(group, model[3].bias.grad))

    run_world(2, main, loop_factory=asyncio.new_event_loop)


async def gathered(group: dist.ProcessGroup, tensor: Any) -> list[Any]:
    every = [torch.empty_like(tensor) for _ in range(group.size)]
    await group.all_gather(every, tensor, tag=1)
    return every


def test_bfloat16() -> None:
    async def main(group: dist.ProcessGroup) -> Any:
        model = torch.nn.Linear(2, 1, bias=False).to(torch.bfloat16)
        ddp = await dist.DistributedDataParallel(model)
        ddp(torch.full((1, 2), float(group.rank + 1), dtype=torch.bfloat16)).sum().backward()
        await ddp.averaged()
        return model.weight.grad.tolist()

    pytest.importorskip("ml_dtypes")
    assert run_world(2, main, loop_factory=asyncio.new_event_loop) == [[[1.5, 1.5]]] * 2
