"""Giving back what belongs to a GPU, also to one that is broken: what it reports then must not keep the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from asyncdist.cuda.interface import Resource, Runtime, Stream
from asyncdist.errors import DistBackendError

__all__ = ["close_all", "close_behind"]


def close_all(*resources: Resource) -> None:
    """Close all of them. A GPU reports there what has failed before, as CUDA does anywhere."""
    for resource in resources:
        with contextlib.suppress(DistBackendError):
            resource.close()


def close_behind(runtime: Runtime, device: int, streams: Iterable[Stream], used: Iterable[Resource]) -> None:
    """Close `streams`, and what they may still use, once they are through with it. Blocks: for a thread of its own.

    The thread's current device would be the first: CUDA would open a context there as well.
    """
    with contextlib.suppress(DistBackendError):
        runtime.set_device(device)
    for stream in streams:
        with contextlib.suppress(DistBackendError):  # it does nothing any more
            stream.synchronize()
        close_all(stream)
    close_all(*used)
