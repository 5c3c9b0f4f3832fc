"""The lanes of groups whose ranks share memory."""

from __future__ import annotations

from group_kit import Group

from asyncdist.collectives.host.backend import HostBackend
from asyncdist.collectives.shared.runner import LaneRunner
from asyncdist.group.core import core_of


def lane_of(group: Group, tag: int = 0) -> LaneRunner | None:
    """What carries the operations of `tag`; None where it is messages."""
    backend = core_of(group)._backend
    assert isinstance(backend, HostBackend)
    return None if backend._lanes is None else backend._lanes.lane(tag)
