"""Issuer: what the operations need of their group.

Every operation is issued at once, in call order, and returns a `Work`. Roots and peers are group ranks. Wrong arguments
raise TypeError or ValueError at the call, before a byte moves.

All collectives take `tag` (operations of one tag must be issued in the same order on all ranks; tasks that issue
concurrently use different tags) and `timeout` (seconds, a timedelta or None; by default the group's). When it expires
the group is aborted on every rank, naming the ranks that were missing. Cancelling a waiter ends only its waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncdist.collectives.arguments import call
from asyncdist.concurrency.deadline import Timeout
from asyncdist.concurrency.integers import as_int
from asyncdist.group.point_to_point import Pairs, check_tag
from asyncdist.work import Work

__all__ = ["Issuer", "check_rank", "rank_number"]


class Issuer:
    """A group as its operations see it."""

    rank: int
    size: int
    pairs: Pairs

    def _collective(
        self, operation: str, tag: int, timeout: Timeout, prepare: Callable[..., call.Call], *arguments: Any
    ) -> Work[Any]:
        raise NotImplementedError

    def refuse(self, operation: str, tag: int, error: Exception) -> None:
        """A collective's arguments are wrong: it takes its place in the order, and the others are told."""
        raise NotImplementedError

    def _root(self, operation: str, root: int, tag: int) -> int:
        try:
            return check_rank(root, self.size, "root")
        except (TypeError, ValueError) as error:
            self.refuse(operation, check_tag(tag), error)
            raise


def check_rank(rank: int, size: int, name: str) -> int:
    """Return `rank` as an int. Raises TypeError for anything but a whole number, ValueError outside the group."""
    rank = rank_number(rank, name)
    if not 0 <= rank < size:
        raise ValueError(f"{name}={rank} is not in this group: its ranks are 0 to {size - 1}")
    return rank


def rank_number(rank: int, name: str) -> int:
    """Return `rank` as an int, whatever group it is in. Raises TypeError for anything but a whole number."""
    return rank if type(rank) is int else as_int(rank, f"{name} must be a rank (an int)")
