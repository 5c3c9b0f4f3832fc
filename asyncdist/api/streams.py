"""Collectives whose chunks are used as they come, on `group` or the default group; see `ChunkStream`.

Ranks are global ranks (`group_src` takes a group rank instead).
"""

from __future__ import annotations

from typing import Any

from asyncdist.api.resolve import Group, resolve, root_of
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.group.methods.streams import DEFAULT_CHUNK_BYTES, ChunkStream

__all__ = ["all_gather_stream", "broadcast_stream"]


def broadcast_stream(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    group_src: int | None = None,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> ChunkStream:
    """Copy rank `src`'s `tensor` into everybody's, chunk by chunk; see `ProcessGroup.broadcast_stream`."""
    found = resolve(group)
    root = root_of(found, "broadcast_stream", tag, src, group_src, "src")
    return found.broadcast_stream(tensor, root, chunk_bytes=chunk_bytes, tag=tag, timeout=timeout, in_global_ranks=True)


def all_gather_stream(
    output: Any,
    input: Any,
    group: Group = None,
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> ChunkStream:
    """Gather everybody's `input` in `output`, chunk by chunk; see `ProcessGroup.all_gather_stream`."""
    return resolve(group).all_gather_stream(
        output, input, chunk_bytes=chunk_bytes, tag=tag, timeout=timeout, in_global_ranks=True
    )
