"""What the ranks of a torch job do in the tests of backend "asyncdist": each function runs on all ranks of a world."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager

import asyncdist.torch
from asyncdist.errors import DistError

CPU = torch.device("cpu")


def total(size: int) -> int:
    """The sum of what ranks have that count from 1."""
    return size * (size + 1) // 2


def error_of(call: Callable[[], object], kind: type[Exception] = DistError) -> str:
    """What `call` raises. AssertionError where it raises nothing."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("it should have failed")


# Collectives.


def reduces_every_dtype(rank: int, size: int) -> None:
    for name in ("uint8", "int8", "int16", "uint16", "int32", "int64", "uint32", "uint64", "float16", "bfloat16"):
        tensor = torch.full((5,), rank + 1).to(getattr(torch, name))
        address = tensor.data_ptr()
        dist.all_reduce(tensor)
        assert tensor.tolist() == [total(size)] * 5, name
        assert tensor.data_ptr() == address
    flag = torch.tensor([rank == 0, False])
    dist.all_reduce(flag)
    assert flag.tolist() == [True, False]
    numbers = torch.full((2,), complex(rank, 1))
    dist.all_reduce(numbers)
    assert numbers.tolist() == [complex(total(size) - size, size)] * 2


def moves_what_cannot_be_reduced(rank: int, size: int) -> None:
    tensor = torch.full((4,), rank + 1.0).to(torch.float8_e4m3fn)
    dist.broadcast(tensor, 1)
    assert tensor.float().tolist() == [2.0] * 4
    every = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(every, tensor)
    assert all(each.float().tolist() == [2.0] * 4 for each in every)


def reduces_by_every_operation(rank: int, size: int) -> None:
    expected = {"SUM": total(size), "PRODUCT": 24 if size == 4 else 6, "MIN": 1, "MAX": size, "BAND": 0, "BOR": 7}
    for name, value in expected.items():
        tensor = torch.tensor([rank + 1])
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
        assert tensor.item() == value or name in ("BAND", "BOR"), name
    mean = torch.tensor([float(rank + 1)])
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert mean.item() == total(size) / size
    scaled = torch.tensor([float(rank + 1)])
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    assert scaled.item() == total(size) / 2


def leaves_neighbors_of_views_alone(rank: int, size: int) -> None:
    base = torch.zeros(6)
    view = base[::2]
    view += rank + 1
    dist.all_reduce(view)
    assert base.tolist() == [total(size), 0] * 3
    square = torch.arange(6.0).view(2, 3) if rank == 0 else torch.zeros(2, 3)
    dist.broadcast(square.t(), 0)
    assert square.flatten().tolist() == list(range(6))


def leaves_what_reduce_did_not_ask_for(rank: int, size: int) -> None:
    tensor = torch.tensor([rank + 1])
    dist.reduce(tensor, size - 1)
    assert tensor.item() == (total(size) if rank == size - 1 else rank + 1)


def reduces_a_parameter(rank: int, size: int) -> None:
    weight = nn.Parameter(torch.ones(2))
    dist.all_reduce(weight)
    assert weight.tolist() == [size] * 2
    assert weight.requires_grad
    assert weight.is_leaf


def adds_sparse_tensors_up(rank: int, size: int) -> None:
    with torch.sparse.check_sparse_tensor_invariants(False):
        tensor = torch.sparse_coo_tensor([[rank, size]], [[1.0, 2.0], [3.0, 4.0]], (size + 2, 2))
        dist.all_reduce(tensor)
        expected = [[1.0, 2.0]] * size + [[3.0 * size, 4.0 * size], [0.0, 0.0]]
        assert tensor.to_dense().tolist() == expected
        nothing = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (3,))
        dist.all_reduce(nothing)
        assert nothing.to_dense().tolist() == [0.0] * 3


def gathers(rank: int, size: int) -> None:
    every = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(every, torch.full((2,), float(rank)))
    assert [each.tolist() for each in every] == [[r, r] for r in range(size)]
    uneven = [torch.zeros(r + 1) for r in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert [each.tolist() for each in uneven] == [[r] * (r + 1) for r in range(size)]
    for shape in ((2 * size,), (size, 2)):
        output = torch.zeros(shape)
        dist.all_gather_single(output, torch.full((2,), float(rank)))
        assert output.flatten().tolist() == [float(r) for r in range(size) for _ in range(2)]
    places = [torch.zeros(1) for _ in range(size)] if rank == 1 else None
    dist.gather(torch.tensor([float(rank)]), places, 1)
    assert places is None or [each.item() for each in places] == list(range(size))


def scatters(rank: int, size: int) -> None:
    output = torch.zeros(2)
    parts = [torch.full((2,), float(r)) for r in range(size)] if rank == 0 else None
    dist.scatter(output, parts, 0)
    assert output.tolist() == [rank] * 2
    dist.reduce_scatter(output, [torch.full((2,), float(r)) for r in range(size)])
    assert output.tolist() == [rank * size] * 2
    dist.reduce_scatter_single(output, torch.arange(2.0 * size))
    assert output.tolist() == [2 * rank * size, (2 * rank + 1) * size]


def exchanges_with_all(rank: int, size: int) -> None:
    outputs = [torch.zeros(r + 1) for r in range(size)]
    dist.all_to_all(outputs, [torch.full((rank + 1,), float(rank)) for _ in range(size)])
    assert [each.tolist() for each in outputs] == [[r] * (r + 1) for r in range(size)]
    output = torch.zeros(sum(range(1, size + 1)))
    mine = torch.full((size * (rank + 1),), float(rank))
    dist.all_to_all_single(output, mine, list(range(1, size + 1)), [rank + 1] * size)
    assert output.tolist() == [float(r) for r in range(size) for _ in range(r + 1)]
    even = torch.zeros(size)
    dist.all_to_all_single(even, torch.full((size,), float(rank)))
    assert even.tolist() == list(range(size))


def gathers_several_lists(rank: int, size: int) -> None:
    inputs = [torch.full((n + 1,), float(rank)) for n in range(3)]
    outputs = [[torch.zeros(n + 1) for n in range(3)] for _ in range(size)]
    dist.all_gather_coalesced(outputs, inputs)
    assert [[each[0].item() for each in of] for of in outputs] == [[r] * 3 for r in range(size)]
    tensors = [torch.ones(2), torch.ones(3)]
    dist.all_reduce_coalesced(tensors)
    assert [each.tolist() for each in tensors] == [[size] * 2, [size] * 3]


def waits_once_for_several(rank: int, size: int) -> None:
    tensors = [torch.full((n + 1,), rank + 1.0) for n in range(4)]
    with _coalescing_manager(async_ops=True) as many:
        for tensor in tensors:
            dist.all_reduce(tensor)
    many.wait()
    with _coalescing_manager(device=CPU, async_ops=True) as many:
        for tensor in tensors:
            dist.broadcast(tensor, 0)
    many.wait()
    outputs = [torch.zeros(size * (n + 1)) for n in range(2)]
    with _coalescing_manager():
        for n, output in enumerate(outputs):
            dist.all_gather_single(output, torch.full((n + 1,), float(rank)))
    assert all(set(tensor.tolist()) == {total(size)} for tensor in tensors)
    assert outputs[1].tolist() == [float(r) for r in range(size) for _ in range(2)]


def gathers_objects(rank: int, size: int) -> None:
    value = {"rank": rank, "nested": [timedelta(seconds=rank), {rank}]}
    every: list[Any] = [None] * size
    dist.all_gather_object(every, value)
    assert [each["rank"] for each in every] == list(range(size))
    several: list[Any] = [value, None] if rank == 1 else [None, 3]
    dist.broadcast_object_list(several, 1)
    assert several[0]["nested"][1] == {1}
    assert several[1] is None
    places: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(value, places, 0)
    assert places is None or places == every
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, every if rank == 0 else None, 0)
    assert mine == [value]
    if rank == 0:
        dist.send_object_list(every, 1)
    elif rank == 1:
        received: list[Any] = [None] * size
        dist.recv_object_list(received, 0)
        assert received == every


# Messages.


def matches_tags(rank: int, size: int) -> None:
    if rank == 0:
        works = [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (7, 3)]
        for work in works:
            work.wait()
    elif rank == 1:
        for tag in (3, 7):
            tensor = torch.zeros(1)
            assert dist.recv(tensor, 0, tag=tag) == 0
            assert tensor.item() == tag


def receives_from_anybody(rank: int, size: int) -> None:
    if rank:
        dist.send(torch.tensor([float(rank)]), 0)
        return
    sources = set()
    for _ in range(size - 1):
        tensor = torch.zeros(1)
        source = dist.recv(tensor)
        assert tensor.item() == source
        sources.add(source)
    assert sources == set(range(1, size))


def passes_round_in_a_batch(rank: int, size: int) -> None:
    received = torch.zeros(3)
    operations = [
        dist.P2POp(dist.isend, torch.full((3,), float(rank)), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.tolist() == [(rank - 1) % size] * 3


def gives_up_a_receive_in_its_time(rank: int, size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    if rank == 0:
        assert "rank 1" in error_of(lambda: dist.recv(torch.zeros(1), 1, group=group))
    dist.barrier()
    dist.all_reduce(torch.ones(1), group=group)  # which goes on
    dist.destroy_process_group(group)


# Works.


def calls_back(rank: int, size: int) -> None:
    work = dist.all_reduce(torch.full((2,), rank + 1.0), async_op=True)
    future = work.get_future().then(lambda ended: ended.value()[0] * 2)
    assert future.wait().tolist() == [2 * total(size)] * 2
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0].tolist() == [total(size)] * 2


def waits_within_a_callback(rank: int, size: int) -> None:
    def again(ended: Any) -> Any:
        dist.barrier()
        return dist.all_reduce(ended.value()[0], async_op=True).get_future().wait()[0]

    future = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(again).then(again_too(size))
    assert future.wait().item() == size**3


def again_too(size: int) -> Callable[[Any], Any]:
    def again(ended: Any) -> Any:
        dist.all_reduce(ended.value())
        return ended.value()

    return again


def waits_in_coroutines(rank: int, size: int) -> None:
    async def main() -> None:
        tensors = [torch.full((2,), float(n)) for n in range(5)]
        await asyncio.gather(*(asyncdist.torch.wait(dist.all_reduce(each, async_op=True)) for each in tensors))
        assert [each[0].item() for each in tensors] == [n * size for n in range(5)]
        dist.all_reduce(tensors[0])  # holds the loop up, as with gloo
        waiter = asyncio.ensure_future(asyncdist.torch.wait(dist.irecv(torch.zeros(1), (rank + 1) % size, tag=99)))
        await asyncio.sleep(0)
        waiter.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiter
        dist.send(torch.ones(1), (rank - 1) % size, tag=99)

    asyncio.run(main())
    dist.barrier()


def waits_for_works_of_gloo(rank: int, size: int) -> None:
    group = dist.new_group(backend="gloo")

    async def main() -> None:
        tensor = torch.ones(1)
        assert await asyncdist.torch.wait(dist.all_reduce(tensor, group=group, async_op=True))
        assert tensor.item() == size

    asyncio.run(main())
    dist.destroy_process_group(group)


def counts_and_names_operations(rank: int, size: int) -> None:
    group = dist.new_group()
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(2, 3), group=group)
        dist.barrier(group)
    names = [event.name for event in profile.function_events if event.name.startswith("asyncdist:")]
    assert names == ["asyncdist:all_reduce", "asyncdist:barrier"]
    assert next(e for e in profile.function_events if e.name == names[0]).input_shapes == [[2, 3]]
    assert group._get_sequence_number_for_group() == 2
    dist.destroy_process_group(group)


def takes_the_short_forms(rank: int, size: int) -> None:
    group = dist.group.WORLD
    tensor = torch.tensor([rank + 1.0])
    group.allreduce(tensor, dist.ReduceOp.MAX).wait()
    assert tensor.item() == size
    group.broadcast(tensor * rank, 0).wait()
    group.allreduce([tensor]).wait()
    places = [torch.zeros(1) for _ in range(size)]
    group.allgather(places, torch.tensor([float(rank)])).wait()
    assert [each.item() for each in places] == list(range(size))
    group.reduce(tensor, 0).wait()
    group.barrier().wait()
    group.barrier(timeout=timedelta(seconds=10)).wait()
    group.monitored_barrier(timedelta(seconds=10))


def works_from_several_threads(rank: int, size: int) -> None:
    groups = [dist.new_group() for _ in range(3)]
    results = [torch.full((1000,), rank + 1.0) for _ in groups]

    def run(number: int) -> None:
        for _ in range(20):
            dist.broadcast(results[number], 0, group=groups[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each[0].item() == 1 for each in results)
    for group in groups:
        dist.destroy_process_group(group)


# Groups.


def makes_groups(rank: int, size: int) -> None:
    reverse = dist.new_group([2, 0], sort_ranks=False)
    if rank in (0, 2):
        assert dist.get_rank(reverse) == (0 if rank == 2 else 1)
        tensor = torch.tensor([float(rank)])
        dist.broadcast(tensor, 2, group=reverse)
        assert tensor.item() == 2
    mine, _ = dist.new_subgroups_by_enumeration([[0, 1], list(range(2, size))])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == (2 if rank < 2 else size - 2)
    local = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
    if local is not None:
        dist.barrier(local)


def splits_a_group(rank: int, size: int) -> None:
    ranks = [0, 1] if rank < 2 else list(range(2, size))
    part = dist.group.WORLD.split_group(ranks, group_name=f"part {ranks}", group_desc="half")
    assert part is not None
    assert (part.size(), part.group_desc) == (len(ranks), "half")
    tensor = torch.ones(1)
    part.allreduce([tensor]).wait()
    assert tensor.item() == len(ranks)
    part.shutdown()


def asks_about_groups(rank: int, size: int) -> None:
    group = dist.group.WORLD
    assert dist.get_backend() == "asyncdist"
    assert group.name() == "asyncdist"
    assert (group.rank(), group.size(), dist.get_world_size()) == (rank, size, size)
    assert group._device_types == [CPU]
    assert group._get_backend(CPU) is group
    assert dist.get_process_group_ranks(group) == list(range(size))


def names_a_backend_for_other_devices(rank: int, size: int) -> None:
    assert "cpu:asyncdist" in error_of(lambda: dist.all_reduce(torch.ones(1, device="meta")), RuntimeError)


def moves_meshes(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    for name, expected in (("rows", rank % 2 + rank % 2 + 2), ("columns", rank // 2 * 4 + 1)):
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=mesh.get_group(name))
        assert tensor.item() == expected, name


def takes_functional_collectives(rank: int, size: int) -> None:
    group = dist.group.WORLD
    own = torch.full((2,), rank + 1.0)
    assert funcol.all_reduce(own, "sum", group).tolist() == [total(size)] * 2
    assert funcol.all_gather_single(own, 0, group).tolist() == [r + 1.0 for r in range(size) for _ in range(2)]
    assert funcol.reduce_scatter_single(torch.ones(size), "sum", 0, group).tolist() == [size]
    assert funcol.broadcast(own, 1, group).tolist() == [2, 2]
    assert funcol.all_to_all_single(torch.full((size,), float(rank)), None, None, group).tolist() == list(range(size))
    pairs = funcol.all_reduce_coalesced([own, own * 2], "sum", group)
    assert [pair.tolist() for pair in pairs] == [[total(size)] * 2, [2 * total(size)] * 2]
    gathered = funcol.all_gather_into_tensor_coalesced([own, own[:1]], group)
    assert [len(each) for each in gathered] == [2 * size, size]
    scattered = funcol.reduce_scatter_tensor_coalesced([torch.ones(size), torch.ones(2 * size)], "sum", [0, 0], group)
    assert [each.tolist() for each in scattered] == [[size], [size] * 2]


def differentiates_through_collectives(rank: int, size: int) -> None:
    own = torch.tensor([rank + 1.0], requires_grad=True)
    differentiable.all_reduce(own).square().sum().backward()
    assert own.grad is not None
    assert own.grad.item() == 2 * total(size) * size
    own.grad = None
    gathered = torch.cat(differentiable.all_gather(own))
    (gathered * torch.arange(1.0, size + 1)).sum().backward()
    assert own.grad.item() == (rank + 1) * size


# What goes wrong, and leaves the group usable.


def refuses_what_is_wrong(rank: int, size: int) -> None:
    for wrong in (
        partial(dist.broadcast, torch.ones(1), size + 5),
        partial(dist.all_gather, [torch.zeros(1)], torch.ones(1)),
        partial(dist.send, torch.ones(1), size + 5),
    ):
        error_of(wrong, Exception)
    dist.barrier()


def fails_a_future(rank: int, size: int) -> None:
    """Ranks whose sizes differ are told, each by its future too; the group of the case ends with that."""
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(rank + 1), group=group, async_op=True)
    assert "all_reduce" in error_of(work.get_future().wait, RuntimeError)
    assert "ranks differ" in error_of(work.wait) or "abort" in error_of(work.wait)
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), DistError)
    dist.destroy_process_group(group)
