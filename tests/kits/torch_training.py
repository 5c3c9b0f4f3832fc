"""What the ranks of a torch job train, shard and save in the tests of backend "asyncdist"; see `torch_cases`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch_cases import CPU, total


def model_of(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())])


def batch_of(step: int, rows: int = 12, width: int = 6) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(step))


def trained_alone(model: nn.Module, size: int, steps: int = 3) -> list[torch.Tensor]:
    """The parameters after steps on whole batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch_of(step)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(model: Any, rank: int, size: int, steps: int = 3, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch_of(step)[rank::size]).square().mean().backward()
        optimizer.step()


def check_alike(model: nn.Module, expected: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    for parameter, other in zip(model.parameters(), expected, strict=True):
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(value.detach(), other, rtol=tolerance, atol=tolerance)


def trains_as_one(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(model_of(6, 8, 2), bucket_cap_mb=1e-4)
    train(ddp, rank, size)
    check_alike(ddp, trained_alone(model_of(6, 8, 2), size))


def trains_with_buffers(rank: int, size: int) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model[1].running_mean += rank
    ddp = DistributedDataParallel(model)
    train(ddp, rank, size)
    means = [torch.zeros(8) for _ in range(size)]
    ddp(batch_of(9))
    dist.broadcast(model[1].running_mean, 0)
    dist.all_gather(means, model[1].running_mean)
    assert all(torch.equal(means[0], each) for each in means)


def skips_synchronization(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(model_of(6, 2))
    with ddp.no_sync():
        ddp(batch_of(0)[rank::size]).square().mean().backward()
    ddp(batch_of(1)[rank::size]).square().mean().backward()
    alone = model_of(6, 2)
    for step in range(2):
        alone(batch_of(step)).square().mean().backward()
    for parameter, other in zip(ddp.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def trains_with_hook(rank: int, size: int, name: str) -> None:
    ddp = DistributedDataParallel(model_of(6, 8, 2))
    if name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        train(ddp, rank, size)
        every = [torch.zeros(8, 6) for _ in range(size)]
        dist.all_gather(every, ddp.module[0].weight)
        assert all(torch.equal(every[0], each) for each in every)
        return
    ddp.register_comm_hook(None, getattr(default_hooks, name))
    train(ddp, rank, size)
    check_alike(ddp, trained_alone(model_of(6, 8, 2), size), 1e-5 if name == "allreduce_hook" else 2e-2)


def trains_what_is_not_always_used(rank: int, size: int) -> None:
    class Choosing(nn.Module):  # type: ignore[misc] # torch is not typed here
        def __init__(self) -> None:
            super().__init__()
            self.ways = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])

        def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
            result: torch.Tensor = self.ways[way](x)
            return result

    ddp = DistributedDataParallel(Choosing(), find_unused_parameters=True)
    ddp(torch.ones(1, 2), rank % 2).sum().backward()
    expected = ((size + 1) // 2 / size, size // 2 / size)
    for way, share in zip(ddp.module.ways, expected, strict=True):
        torch.testing.assert_close(way.weight.grad, torch.full((1, 2), share))
    static = DistributedDataParallel(model_of(6, 2), static_graph=True)
    train(static, rank, size)
    check_alike(static, trained_alone(model_of(6, 2), size))


def trains_sparse_gradients(rank: int, size: int) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Embedding(size + 1, 2, sparse=True))
    with torch.sparse.check_sparse_tensor_invariants(False):
        ddp(torch.tensor([rank, size])).sum().backward()
    gradient = ddp.module.weight.grad
    assert gradient.is_sparse
    torch.testing.assert_close(gradient.to_dense()[:, 0], torch.tensor([1 / size] * size + [1.0]))


def trains_on_uneven_inputs(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(model_of(6, 2))
    with ddp.join():
        for step in range(rank + 1):
            ddp(batch_of(step)).square().mean().backward()


def divides_an_optimizer(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(model_of(6, 8, 2))
    train(ddp, rank, size, optimizer=ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1))
    check_alike(ddp, trained_alone(model_of(6, 8, 2), size))


def averages_models(rank: int, size: int) -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()  # only what has a gradient is averaged
    with torch.no_grad():
        model.weight.fill_(rank + 1.0)
    PeriodicModelAverager(period=1, warmup_steps=0).average_parameters(model.parameters())
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), total(size) / size))


def shards_a_model(rank: int, size: int) -> None:
    model = model_of(6, 8, 2)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    train(model, rank, size)
    check_alike(model, trained_alone(model_of(6, 8, 2), size))


def shards_and_replicates_a_model(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = model_of(6, 8, 2)
    fully_shard(model, mesh=mesh)
    train(model, rank, size)
    check_alike(model, trained_alone(model_of(6, 8, 2), size))


def shards_with_mixed_precision(rank: int, size: int) -> None:
    model = model_of(6, 8, 2)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    train(model, rank, size)
    check_alike(model, trained_alone(model_of(6, 8, 2), size), 2e-2)


def redistributes(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(24.0).view(6, 4)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.full_tensor(), whole)
    assert torch.equal(rows.redistribute(mesh, [Replicate()]).to_local(), whole)
    product = columns @ distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])  # partial sums
    torch.testing.assert_close(product.full_tensor(), whole @ whole.t())
    torch.testing.assert_close(rows.sum().full_tensor(), whole.sum())


def divides_layers(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    alone, divided = model_of(8, 8, 8), model_of(8, 8, 8)
    parallelize_module(divided, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs = batch_of(0, width=8)
    torch.testing.assert_close(divided(inputs), alone(inputs))
    divided(inputs).sum().backward()
    alone(inputs).sum().backward()
    torch.testing.assert_close(divided[0].weight.grad.full_tensor(), alone[0].weight.grad)


def pipelines(rank: int, size: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(size)]
    stage = PipelineStage(layers[rank], rank, size, CPU)
    schedule = ScheduleGPipe(stage, n_microbatches=2)
    inputs = batch_of(0, rows=4, width=4)
    output = schedule.step(inputs) if rank == 0 else schedule.step()
    if rank == size - 1:
        expected = inputs
        for layer in layers:
            expected = layer(expected)
        torch.testing.assert_close(output, expected)
    dist.barrier()


def saves_and_loads(rank: int, size: int, directory: str) -> None:
    model = model_of(6, 8, 2)
    fully_shard(model)
    train(model, rank, size)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=directory)
    other = model_of(6, 8, 2)
    fully_shard(other, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))  # in other shards
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=directory)
    set_model_state_dict(other, state["model"])
    check_alike(other, [parameter.full_tensor() for parameter in model.parameters()], 0)


def saves_in_the_background(rank: int, size: int, directory: str) -> None:
    state = {"value": distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (size,)), [Shard(0)])}
    saved = dcp.async_save(state, checkpoint_id=directory, process_group=dist.new_group())  # which the saving uses
    for _ in range(20):
        dist.all_reduce(torch.ones(1000))
    saved.result()
    dist.barrier()
    assert (Path(directory) / ".metadata").exists()
