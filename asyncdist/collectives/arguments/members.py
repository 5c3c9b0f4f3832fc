"""Calls on GPU arrays that consist of several: the coalesced and the multi-device forms.

There the members are not packed into one run of elements, as host arrays are: they are carried out together, in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.collectives.arguments.call import NO_BLOCKS, Call

__all__ = ["coalesced", "multi_device"]


def coalesced(members: Sequence[Call], detail: str, result: Any) -> Call:
    """Several calls of one kind on one GPU; `detail` says how they divide the whole."""
    return _together(members, detail, members[0].root, result)


def multi_device(members: Sequence[Call], detail: str, root: int, result: Any) -> Call:
    """A rank's shares, one per GPU, in one collective of all GPUs of all ranks. `root` is a group rank."""
    return _together(members, detail, root, result)


def _together(members: Sequence[Call], detail: str, root: int, result: Any) -> Call:
    first = members[0]
    counts = sum(member.counts if isinstance(member.counts, int) else sum(member.counts) for member in members)
    return Call(
        first.collective,
        first.dtype,
        counts,
        NO_BLOCKS,
        NO_BLOCKS,
        result,
        root,
        first.op,
        detail=detail,
        device=first.device,
        members=members,
    )
