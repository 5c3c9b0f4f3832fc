"""torch's CPU tensors are read and written in place, or refused in words."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from torch_later import Later

import asyncdist as dist
from asyncdist.testing import run_world

torch: Any = Later("torch")

pytestmark = pytest.mark.peers


def reduced(make: Any, op: dist.ReduceOp = dist.ReduceOp.SUM) -> Any:
    """Rank 0's tensor after an all_reduce of what `make()` returns on each of two ranks; checks that it is in place."""

    async def main(group: dist.ProcessGroup) -> Any:
        tensor = make()
        address = tensor.data_ptr()
        assert await group.all_reduce(tensor, op) is tensor
        assert tensor.data_ptr() == address
        return tensor

    return run_world(2, main)[0]


@pytest.mark.parametrize(
    "dtype", ["uint8", "int8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64"]
)
def test_every_dtype_that_numpy_shares(dtype: str) -> None:
    found = reduced(lambda: torch.ones(3, dtype=getattr(torch, dtype)))
    assert found.dtype == getattr(torch, dtype)
    assert found.tolist() == [2, 2, 2]


def test_bool_is_an_or() -> None:
    assert reduced(lambda: torch.tensor([True, False])).tolist() == [True, False]


@pytest.mark.parametrize("make", [lambda: torch.ones(2, requires_grad=True), lambda: torch.nn.Parameter(torch.ones(2))])
def test_a_leaf_that_requires_a_gradient_is_written_and_stays_a_leaf(make: Any) -> None:
    found = reduced(make)
    assert found.tolist() == [2, 2]
    assert found.requires_grad
    assert found.is_leaf


def test_a_gradient_is_averaged() -> None:
    def gradient() -> Any:
        weights = torch.ones(2, requires_grad=True)
        (weights * 3).sum().backward()
        return weights.grad

    assert reduced(gradient, dist.ReduceOp.AVG).tolist() == [3, 3]


def test_strided_views_are_written_and_their_neighbors_left_alone() -> None:
    base = [torch.zeros(6) for _ in range(2)]

    async def main(group: dist.ProcessGroup) -> None:
        view = base[group.rank][::2]
        view += 1
        await group.all_reduce(view)
        await group.broadcast(base[group.rank].view(2, 3).t(), 0)

    run_world(2, main)
    assert [each.tolist() for each in base] == [[2, 0, 2, 0, 2, 0]] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lists_of_tensors(dtype: str) -> None:
    async def main(group: dist.ProcessGroup) -> Any:
        kind = getattr(torch, dtype)
        tensors = [torch.ones(2, 3, dtype=kind).t(), torch.ones(4, dtype=kind), torch.ones((), dtype=kind)]
        await group.all_reduce_coalesced(tensors)
        assert [tensor.sum().item() for tensor in tensors] == [12, 8, 2]
        model = torch.nn.Linear(3, 2).to(kind)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(group.rank + 1.0)
        await group.broadcast_coalesced(list(model.parameters()), 1)
        devices = [torch.full((2,), 1.0 + index, dtype=kind) for index in range(2)]
        await group.all_reduce_multigpu(devices)
        return [parameter.mean().item() for parameter in model.parameters()], [one.tolist() for one in devices]

    assert run_world(2, main) == [([2, 2], [[6, 6], [6, 6]])] * 2


def test_messages() -> None:
    async def main(group: dist.ProcessGroup) -> Any:
        if group.rank == 0:
            await group.send(torch.arange(4.0).view(2, 2).t(), 1)
            await group.send(torch.ones(3), 1)
            return None
        received = torch.zeros(2, 2)
        await group.recv(received, 0)
        return received.tolist(), (await group.recv_array(0)).tolist()

    assert run_world(2, main)[1] == ([[0, 2], [1, 3]], [1, 1, 1])


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), TypeError, "conjugate"),
        (lambda: torch.ones(2).to_sparse(), TypeError, "strided"),
        (lambda: torch.ones(2, device="meta"), TypeError, "meta"),
        (lambda: torch.ones(1).expand(3), ValueError, "overlaps itself"),
    ],
)
def test_what_cannot_be_written_in_place_is_refused(make: Any, error: type[Exception], text: str) -> None:
    async def main(group: dist.ProcessGroup) -> None:
        with pytest.raises(error, match=text):
            group.all_reduce(make())

    run_world(1, main)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_narrow_floats_are_reduced_in_place_by_way_of_ml_dtypes(dtype: str) -> None:
    kind = getattr(torch, dtype)
    found = reduced(lambda: torch.full((2, 3), 1.5).to(kind))
    assert found.dtype == kind
    assert found.float().tolist() == [[3.0] * 3] * 2
    assert reduced(lambda: torch.tensor([1.0, 3.0]).to(kind)[::1], dist.ReduceOp.AVG).float().tolist() == [1, 3]
    assert reduced(lambda: torch.ones(4).to(kind)[::2]).float().tolist() == [2, 2]


def test_a_narrow_parameter_and_messages_between_torch_and_numpy() -> None:
    async def main(group: dist.ProcessGroup) -> Any:
        weights = torch.nn.Parameter(torch.full((3,), float(group.rank), dtype=torch.bfloat16))
        await group.broadcast(weights, 1)
        assert weights.tolist() == [1, 1, 1]
        if group.rank == 0:
            await group.send(weights, 1)
            return None
        return str((await group.recv_array(0)).dtype)

    assert run_world(2, main) == [None, "bfloat16"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_without_ml_dtypes_narrow_floats_are_refused(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)

    async def main(group: dist.ProcessGroup) -> None:
        with pytest.raises(TypeError, match=f"torch.{dtype}.*install ml_dtypes.*pass a view as integers"):
            group.all_reduce(torch.ones(2).to(getattr(torch, dtype)))

    run_world(1, main)


def test_the_bits_of_bfloat16_can_be_moved() -> None:
    async def main(group: dist.ProcessGroup) -> Any:
        weights = torch.full((3,), float(group.rank), dtype=torch.bfloat16)
        await group.broadcast(weights.view(torch.int16), 1)
        return weights.tolist()

    assert run_world(2, main) == [[1, 1, 1]] * 2
