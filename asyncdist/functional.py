"""Collectives that return new arrays, and gather or scatter along any dimension.

    from asyncdist import functional

    whole = await functional.all_gather(x, gather_dim=1)   # x of all ranks side by side
    mine = await functional.reduce_scatter(y, scatter_dim=-1)

Arguments stay as they are, and must not be changed until the Work is done. Arrays are on the CPU. Every function takes
`group`, `tag` and `timeout`, and fails as its form in place does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncdist.api import collectives
from asyncdist.api.joined_work import JoinedWork
from asyncdist.arrays.host import Array, host_array
from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.group.default_group import Group, resolve
from asyncdist.group.misuse import watch
from asyncdist.group.process_group import ProcessGroup
from asyncdist.work import Work

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "permute", "reduce_scatter"]


def all_reduce(
    x: Any, op: ReduceOpLike = ReduceOp.SUM, group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT
) -> Work[Array]:
    """Return the reduction of all ranks' `x`."""
    return collectives.all_reduce(host_array(x, "x").copy(), op, group, tag=tag, timeout=timeout)


def broadcast(x: Any, src: int = 0, group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT) -> Work[Array]:
    """Return (global) rank `src`'s `x`."""
    return collectives.broadcast(host_array(x, "x").copy(), src, group, tag=tag, timeout=timeout)


def all_gather(
    x: Any, gather_dim: int = 0, group: Group = None, *, tag: int = 0, timeout: Timeout = INHERIT
) -> Work[Array]:
    """Return all ranks' `x` in one array, one after the other along dimension `gather_dim`.

    Raises ValueError for an array without dimensions, and for a dimension that is none.
    """
    found = resolve(group)
    array = host_array(x, "x")
    dim = _dimension(array, gather_dim, "gather_dim")
    gathered = np.empty((found.size, *array.shape), array.dtype)
    work = collectives.all_gather_into_tensor(gathered, array, found, tag=tag, timeout=timeout)
    shape = [*array.shape]
    shape[dim] *= found.size
    return _joined(found, "all_gather", [work], lambda: np.moveaxis(gathered, 0, dim).reshape(shape))


def reduce_scatter(
    x: Any,
    op: ReduceOpLike = ReduceOp.SUM,
    scatter_dim: int = 0,
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Array]:
    """Return this rank's share of the reduction of all ranks' `x`, which is cut along dimension `scatter_dim`.

    Raises ValueError where that dimension cannot be cut into equal parts.
    """
    found = resolve(group)
    array = host_array(x, "x")
    parts = _cut(array, _dimension(array, scatter_dim, "scatter_dim"), found.size)
    return collectives.reduce_scatter_tensor(np.empty_like(parts[0]), parts, op, found, tag=tag, timeout=timeout)


def all_to_all(
    x: Any,
    split_dim: int = 0,
    concat_dim: int = 0,
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Array]:
    """Cut `x` along `split_dim`, one part for each rank, and return the parts for this one, along `concat_dim`.

    Raises ValueError where dimension `split_dim` cannot be cut into equal parts.
    """
    found = resolve(group)
    array = host_array(x, "x")
    parts = _cut(array, _dimension(array, split_dim, "split_dim"), found.size)
    dim = _dimension(array, concat_dim, "concat_dim")
    received = np.empty_like(parts)
    work = collectives.all_to_all_single(received, parts, group=found, tag=tag, timeout=timeout)
    shape = [*parts.shape[1:]]
    shape[dim] *= found.size
    return _joined(found, "all_to_all", [work], lambda: np.moveaxis(received, 0, dim).reshape(shape))


def permute(
    x: Any,
    destinations: Mapping[int, int] | Sequence[int],
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Array]:
    """Send `x` to rank `destinations[rank]`, and return what comes to this rank; zeros where nothing does.

    `destinations` (group ranks, alike on all ranks; a mapping may leave ranks out) has no rank twice. All `x` have the
    same shape and dtype. Raises ValueError for what is no such list.
    """
    found = resolve(group)
    array = host_array(x, "x")
    pairs = dict(destinations if isinstance(destinations, Mapping) else enumerate(destinations))
    ranks = range(found.size)
    if len(set(pairs.values())) != len(pairs) or any(rank not in ranks for pair in pairs.items() for rank in pair):
        raise ValueError(f"destinations must be different ranks of the group's {found.size}, not {destinations!r}")
    sources = {destination: source for source, destination in pairs.items()}
    received = np.zeros_like(array)
    works: list[Work[Any]] = []
    if found.rank in sources:
        works.append(found.irecv(received, sources[found.rank], tag, timeout=timeout))
    if found.rank in pairs:
        works.append(found.isend(array, pairs[found.rank], tag, timeout=timeout))
    return _joined(found, "permute", works, lambda: received)


def _dimension(array: Array, dim: int, name: str) -> int:
    if not -array.ndim <= dim < array.ndim:
        raise ValueError(f"{name}={dim} is no dimension of an array of {array.ndim}")
    return dim % array.ndim


def _cut(array: Array, dim: int, count: int) -> Array:
    """The `count` parts of `array` along a dimension, in a new first one."""
    length = array.shape[dim]
    if length % count:
        raise ValueError(f"dimension {dim} has {length} elements, which {count} ranks cannot share evenly")
    shape = [*array.shape[:dim], count, length // count, *array.shape[dim + 1 :]]
    return np.ascontiguousarray(np.moveaxis(array.reshape(shape), dim, 0))


def _joined(
    group: ProcessGroup, operation: str, works: Sequence[Work[Any]], convert: Callable[[], Array]
) -> Work[Array]:
    joined = _Converted(group, operation, works, convert)
    return watch(joined) if group.watches else joined


class _Converted(JoinedWork):
    """Its result is what `value` returns at the end."""

    __slots__ = ()

    def _finish(self, result: Any) -> None:
        super()._finish(result())
