"""monitored_barrier, on `group` or the default group."""

from __future__ import annotations

from typing import Any

from asyncdist.api.resolve import Group, resolve
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.work import Work

__all__ = ["monitored_barrier"]


def monitored_barrier(
    group: Group = None, timeout: Timeout = INHERIT, wait_all_ranks: bool = False, *, tag: int = 0
) -> Work[Any]:
    """A barrier whose expiry names the ranks that did not come; see `ProcessGroup.monitored_barrier`."""
    return resolve(group).monitored_barrier(timeout, wait_all_ranks, tag=tag)
