"""torch.distributed's object collectives, natively awaitable; what can be sent is said at `operations.objects`.

Ranks are global ranks (`group_src`, `group_dst` take group ranks instead). `device` and `use_batch` are accepted for
torch's sake and not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.api.ranks import peer_of, required_peer, root_of
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.group.default_group import Group, resolve
from asyncdist.group.methods.objects import DEFAULT_MAX_TOTAL_BYTES
from asyncdist.group.methods.point_to_point import DEFAULT_MAX_BYTES
from asyncdist.work import Work

__all__ = [
    "all_gather_array",
    "all_gather_object",
    "broadcast_array",
    "broadcast_object_list",
    "gather_array",
    "gather_object",
    "recv_object_list",
    "scatter_array",
    "scatter_object_list",
    "send_object_list",
]


def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: Group = None,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[list[Any]]:
    """Fill `object_list` with everybody's `obj`; see `ProcessGroup.all_gather_object`."""
    return resolve(group).all_gather_object(object_list, obj, max_bytes=max_bytes, tag=tag, timeout=timeout)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    *,
    group_dst: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[list[Any] | None]:
    """Fill `object_gather_list` on rank `dst` (the group's first); see `ProcessGroup.gather_object`."""
    found = resolve(group)
    root = root_of(found, "gather_object", tag, dst, group_dst, "dst", default=0)
    return found.gather_object(obj, object_gather_list, root, max_bytes=max_bytes, tag=tag, timeout=timeout)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    *,
    group_src: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[list[Any]]:
    """Fill `object_list` with that of rank `src` (the group's first); see `ProcessGroup.broadcast_object_list`."""
    del device  # objects travel through host memory
    found = resolve(group)
    root = root_of(found, "broadcast_object_list", tag, src, group_src, "src", default=0)
    return found.broadcast_object_list(object_list, root, max_bytes=max_bytes, tag=tag, timeout=timeout)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    *,
    group_src: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[list[Any]]:
    """Give rank r the r-th object of rank `src` (the group's first); see `ProcessGroup.scatter_object_list`."""
    found = resolve(group)
    root = root_of(found, "scatter_object_list", tag, src, group_src, "src", default=0)
    return found.scatter_object_list(
        scatter_object_output_list, scatter_object_input_list, root, max_bytes=max_bytes, tag=tag, timeout=timeout
    )


def send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: Group = None,
    device: Any = None,
    *,
    group_dst: int | None = None,
    use_batch: bool = False,
    tag: int = 0,
    timeout: Timeout = None,
) -> Work[None]:
    """Send the objects of a list to rank `dst`, as one message; see `ProcessGroup.send_object_list`."""
    del device, use_batch  # objects travel through host memory, and there is one message only
    found = resolve(group)
    return found.pairs.send_objects(object_list, required_peer(found, dst, group_dst, "dst"), tag, timeout)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    *,
    group_src: int | None = None,
    use_batch: bool = False,
    max_bytes: int = DEFAULT_MAX_BYTES,
    tag: int = 0,
    timeout: Timeout = None,
) -> Work[int]:
    """Fill `object_list` with as many objects from rank `src`, or from any; the result is the source's global rank.

    See `ProcessGroup.recv_object_list`.
    """
    del device, use_batch  # as in `send_object_list`
    found = resolve(group)
    source = peer_of(found, src, group_src, "src")
    return found.pairs.receive_objects(object_list, source, tag, max_bytes, timeout)


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
