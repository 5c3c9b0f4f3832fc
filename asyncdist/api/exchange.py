"""all_to_all in torch.distributed's forms, natively awaitable; see `api.collectives` for what all have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.api.resolve import Group, resolve
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.work import Work

__all__ = ["all_to_all", "all_to_all_single"]


def all_to_all(
    output_tensor_list: Sequence[Any],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Fill `output_tensor_list[r]` with what group rank r has for this rank; see `ProcessGroup.all_to_all`."""
    return resolve(group).all_to_all(output_tensor_list, input_tensor_list, tag=tag, timeout=timeout)


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Send rows of `input` to every rank and fill `output` with theirs; see `ProcessGroup.all_to_all_single`."""
    return resolve(group).all_to_all_single(
        output, input, output_split_sizes, input_split_sizes, tag=tag, timeout=timeout
    )
