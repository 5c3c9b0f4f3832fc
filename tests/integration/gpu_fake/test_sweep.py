"""The whole public API on GPU arrays: the right result, or a TypeError that says why."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_fake_kit import GpuRank, equal, run_gpu

import asyncdist as dist

ARRAYS = {
    "array",
    "arrays",
    "input",
    "inputs",
    "input_list",
    "input_tensor",
    "input_tensor_list",
    "input_tensor_lists",
    "input_tensors",
    "obj",
    "output",
    "outputs",
    "p2p_op_list",
    "parameters",
    "tensor",
    "tensor_list",
    "tensors",
}
"""Parameters that arrays are given in."""


def ones(at: GpuRank, shape: Any = 2) -> Any:
    return at.array(np.ones(shape, np.float32))


async def all_reduce(at: GpuRank) -> bool:
    await dist.all_reduce(x := ones(at))
    return equal(x, [2, 2])


async def broadcast(at: GpuRank) -> bool:
    await dist.broadcast(x := at.array(np.full(2, at.rank)), 1)
    return equal(x, [1, 1])


async def reduce(at: GpuRank) -> bool:
    await dist.reduce(x := ones(at), 1)
    return equal(x, [1 + at.rank] * 2)


async def all_gather(at: GpuRank) -> bool:
    await dist.all_gather(out := [at.zeros(2), at.zeros(2)], ones(at))
    return equal(out[0], [1, 1]) and equal(out[1], [1, 1])


async def all_gather_into_tensor(at: GpuRank) -> bool:
    await dist.all_gather_into_tensor(out := at.zeros(4), ones(at))
    return equal(out, [1] * 4)


async def all_gather_single(at: GpuRank) -> bool:
    await dist.all_gather_single(out := at.zeros((2, 2)), ones(at))
    return equal(out, [[1, 1], [1, 1]])


async def gather(at: GpuRank) -> bool:
    await dist.gather(ones(at), out := [at.zeros(2), at.zeros(2)] if at.rank == 0 else None)
    return out is None or equal(out[1], [1, 1])


async def scatter(at: GpuRank) -> bool:
    await dist.scatter(x := at.zeros(2), [ones(at), ones(at)] if at.rank == 0 else None)
    return equal(x, [1, 1])


async def reduce_scatter(at: GpuRank) -> bool:
    await dist.reduce_scatter(x := at.zeros(2), [ones(at), ones(at)])
    return equal(x, [2, 2])


async def reduce_scatter_tensor(at: GpuRank) -> bool:
    await dist.reduce_scatter_tensor(x := at.zeros(2), ones(at, 4))
    return equal(x, [2, 2])


async def reduce_scatter_single(at: GpuRank) -> bool:
    await dist.reduce_scatter_single(x := at.zeros(2), ones(at, 4))
    return equal(x, [2, 2])


async def all_to_all(at: GpuRank) -> bool:
    await dist.all_to_all(out := [at.zeros(1), at.zeros(1)], [ones(at, 1), ones(at, 1)])
    return equal(out[1], [1])


async def all_to_all_single(at: GpuRank) -> bool:
    await dist.all_to_all_single(out := at.zeros(2), ones(at))
    return equal(out, [1, 1])


async def all_reduce_coalesced(at: GpuRank) -> bool:
    await dist.all_reduce_coalesced(xs := [ones(at), ones(at, 3)])
    return equal(xs[1], [2] * 3)


async def broadcast_coalesced(at: GpuRank) -> bool:
    await dist.broadcast_coalesced(xs := [at.array(np.full(2, at.rank))], 1)
    return equal(xs[0], [1, 1])


async def all_gather_coalesced(at: GpuRank) -> bool:
    await dist.all_gather_coalesced(rows := [[at.zeros(2)], [at.zeros(2)]], [ones(at)])
    return equal(rows[1][0], [1, 1])


async def all_gather_into_tensor_coalesced(at: GpuRank) -> bool:
    await dist.all_gather_into_tensor_coalesced(outs := [at.zeros(4)], [ones(at)])
    return equal(outs[0], [1] * 4)


async def reduce_scatter_tensor_coalesced(at: GpuRank) -> bool:
    await dist.reduce_scatter_tensor_coalesced(outs := [at.zeros(2)], [ones(at, 4)])
    return equal(outs[0], [2, 2])


async def all_reduce_multigpu(at: GpuRank) -> bool:
    await dist.all_reduce_multigpu(xs := [ones(at)])
    return equal(xs[0], [2, 2])


async def broadcast_multigpu(at: GpuRank) -> bool:
    await dist.broadcast_multigpu(xs := [at.array(np.full(2, at.rank))], 1)
    return equal(xs[0], [1, 1])


async def reduce_multigpu(at: GpuRank) -> bool:
    await dist.reduce_multigpu(xs := [ones(at)], 1)
    return equal(xs[0], [1 + at.rank] * 2)


async def all_gather_multigpu(at: GpuRank) -> bool:
    await dist.all_gather_multigpu(rows := [[at.zeros(2), at.zeros(2)]], [ones(at)])
    return equal(rows[0][1], [1, 1])


async def reduce_scatter_multigpu(at: GpuRank) -> bool:
    await dist.reduce_scatter_multigpu(outs := [at.zeros(2)], [[ones(at), ones(at)]])
    return equal(outs[0], [2, 2])


async def scan(at: GpuRank) -> bool:
    await dist.scan(x := ones(at))
    return equal(x, [at.rank + 1] * 2)


async def exscan(at: GpuRank) -> bool:
    await dist.exscan(x := ones(at))
    return equal(x, [1, 1])


async def isend(at: GpuRank) -> bool:
    sent, y = dist.isend(ones(at), 1 - at.rank), at.zeros(2)
    await dist.irecv(y, 1 - at.rank)
    await sent
    return equal(y, [1, 1])


async def send(at: GpuRank) -> bool:
    sent, y = dist.send(ones(at), 1 - at.rank), at.zeros(2)
    await dist.recv(y, 1 - at.rank)
    await sent
    return equal(y, [1, 1])


async def batch_isend_irecv(at: GpuRank) -> bool:
    y, other = at.zeros(2), 1 - at.rank
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, ones(at), other), dist.P2POp(dist.irecv, y, other)]):
        await work
    return equal(y, [1, 1])


MOVES: dict[str, Callable[[GpuRank], Any]] = {
    function.__name__: function
    for function in (
        all_gather,
        all_gather_coalesced,
        all_gather_into_tensor,
        all_gather_into_tensor_coalesced,
        all_gather_multigpu,
        all_gather_single,
        all_reduce,
        all_reduce_coalesced,
        all_reduce_multigpu,
        all_to_all,
        all_to_all_single,
        batch_isend_irecv,
        broadcast,
        broadcast_coalesced,
        broadcast_multigpu,
        exscan,
        gather,
        isend,
        reduce,
        reduce_multigpu,
        reduce_scatter,
        reduce_scatter_multigpu,
        reduce_scatter_single,
        reduce_scatter_tensor,
        reduce_scatter_tensor_coalesced,
        scan,
        scatter,
        send,
    )
}
MOVES["irecv"], MOVES["recv"] = MOVES["isend"], MOVES["send"]

PREFIXES = {"scan", "exscan"}
"""What NCCL has no form for; through the host they work."""

REFUSED: dict[str, Callable[[GpuRank], Any]] = {
    "all_gather_array": lambda at: dist.all_gather_array(ones(at)),
    "gather_array": lambda at: dist.gather_array(ones(at)),
    "broadcast_array": lambda at: dist.broadcast_array(ones(at)),
    "scatter_array": lambda at: dist.scatter_array([ones(at)]),
    "broadcast_stream": lambda at: dist.broadcast_stream(ones(at), 0),
    "all_gather_stream": lambda at: dist.all_gather_stream([at.zeros(2)], ones(at)),
    "all_gather_object": lambda at: dist.all_gather_object([None], ones(at)),
    "gather_object": lambda at: dist.gather_object(ones(at), [None]),
}

HOST_ONLY = {"average_gradients", "broadcast_parameters"}
"""Built on host arrays: they do not take part here."""


def takes_arrays(name: str) -> bool:
    function = getattr(dist, name)
    if not inspect.isfunction(function):
        return False
    return bool(ARRAYS & set(inspect.signature(function).parameters))


def test_every_function_that_takes_arrays_is_known_here() -> None:
    public = {name for name in dist.__all__ if takes_arrays(name)}
    assert not public - set(MOVES) - set(REFUSED) - HOST_ONLY


@pytest.mark.parametrize("backend", ["nccl", "staged"])
@pytest.mark.parametrize("name", MOVES)
def test_what_moves_arrays(name: str, backend: str) -> None:
    async def main(at: GpuRank) -> None:
        if name in PREFIXES and backend == "nccl":
            with pytest.raises(TypeError, match=f"^{name} of arrays on a GPU"):
                await MOVES[name](at)
        else:
            assert await MOVES[name](at)

    run_gpu(2, main, nccl=backend == "nccl")


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_says_so(name: str) -> None:
    async def main(at: GpuRank) -> None:
        with pytest.raises(TypeError, match=r"lives on a GPU|FakeArray"):
            REFUSED[name](at)

    run_gpu(1, main)
