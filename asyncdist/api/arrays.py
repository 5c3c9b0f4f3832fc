"""Collectives of whole arrays whose shapes and dtypes only their owners know, on `group` or the default group.

Ranks are global ranks (`group_src`, `group_dst` take group ranks instead).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.api.resolve import Group, resolve, root_of
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.group.methods.items import DEFAULT_MAX_TOTAL_BYTES
from asyncdist.group.methods.point_to_point import DEFAULT_MAX_BYTES
from asyncdist.work import Work

__all__ = ["all_gather_array", "broadcast_array", "gather_array", "scatter_array"]


def all_gather_array(
    array: Any,
    group: Group = None,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    max_total_bytes: int = DEFAULT_MAX_TOTAL_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[list[Any]]:
    """Gather everybody's `array`, of any shape and dtype, in a list; see `ProcessGroup.all_gather_array`."""
    return resolve(group).all_gather_array(
        array, max_bytes=max_bytes, max_total_bytes=max_total_bytes, tag=tag, timeout=timeout
    )


def gather_array(
    array: Any,
    dst: int | None = None,
    group: Group = None,
    *,
    group_dst: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    max_total_bytes: int = DEFAULT_MAX_TOTAL_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[list[Any] | None]:
    """Gather everybody's `array` in a list on rank `dst` (the group's first); see `ProcessGroup.gather_array`."""
    found = resolve(group)
    root = root_of(found, "gather_array", tag, dst, group_dst, "dst", default=0)
    return found.gather_array(
        array, root, max_bytes=max_bytes, max_total_bytes=max_total_bytes, tag=tag, timeout=timeout
    )


def broadcast_array(
    array: Any = None,
    src: int | None = None,
    group: Group = None,
    *,
    group_src: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Give everybody the `array` of rank `src` (the group's first); see `ProcessGroup.broadcast_array`."""
    found = resolve(group)
    root = root_of(found, "broadcast_array", tag, src, group_src, "src", default=0)
    return found.broadcast_array(array, root, max_bytes=max_bytes, tag=tag, timeout=timeout)


def scatter_array(
    arrays: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    *,
    group_src: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    max_total_bytes: int = DEFAULT_MAX_TOTAL_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Give rank r the r-th of the arrays of rank `src` (the group's first); see `ProcessGroup.scatter_array`."""
    found = resolve(group)
    root = root_of(found, "scatter_array", tag, src, group_src, "src", default=0)
    return found.scatter_array(
        arrays, root, max_bytes=max_bytes, max_total_bytes=max_total_bytes, tag=tag, timeout=timeout
    )
