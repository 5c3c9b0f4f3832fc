"""Issuer: what the operations need of their group.

Every operation is issued at once, in call order, and returns a `Work`. Roots and peers are group ranks. Wrong arguments
raise TypeError or ValueError at the call, before a byte moves.

All collectives take `tag` (operations of one tag must be issued in the same order on all ranks; tasks that issue
concurrently use different tags) and `timeout` (seconds, a timedelta or None; by default the group's). When it expires
the group is aborted on every rank, naming the ranks that were missing. Cancelling a waiter ends only its waiting.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.arrays.reduce_op import ReduceOpLike
from asyncdist.collectives.arguments import call
from asyncdist.collectives.backend import BackendNames
from asyncdist.concurrency.deadline import Timeout
from asyncdist.concurrency.integers import as_int
from asyncdist.group.point_to_point import Pairs, check_tag
from asyncdist.work import Work
from asyncdist.world.world import World

if TYPE_CHECKING:
    from asyncdist.group.methods.streams import ChunkStream


class Core(Protocol):
    """What a group needs of its core: `GroupCore` in its own event loop, `ThreadCore` in the communication thread."""

    face: Any
    world: World
    group_id: int
    ranks: tuple[int, ...]
    size: int
    rank: int
    name: str
    timeout_s: float | None
    is_world: bool
    pairs: Pairs
    watches: bool
    """Whether to warn of Works that nobody asks about."""

    @property
    def backend_names(self) -> BackendNames:
        """What carries out its operations on each kind of array."""

    @property
    def closed(self) -> bool:
        """Whether the group is closed."""

    def where(self, operation: str, sequence: int | None = None) -> str:
        """The beginning of every message."""

    def check_usable(self, operation: str) -> None:
        """Raise unless the group is open and this is its event loop."""

    def issue(
        self, operation: str, tag: int, timeout: Timeout, prepare: Callable[..., call.Call], /, *arguments: Any
    ) -> Work[Any]:
        """See `Issue`."""

    def all_reduce_of_the_left(self, tensor: Any, op: ReduceOpLike, tag: int, timeout: Timeout) -> Work[Any]:
        """See `GroupCore.all_reduce_of_the_left`."""

    def stream(self, operation: str, *arguments: Any) -> ChunkStream:
        """See `ChunkStream.issue`."""

    def refuse(self, operation: str, tag: int, error: Exception) -> None:
        """See `Issuer.refuse`."""

    def shared_array(self, extents: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
        """See `GroupCore.shared_array`."""

    def bind_device(self, device: int | None) -> None:
        """See `ProcessGroup.bind_device`."""

    def subgroup(self, *arguments: Any, **options: Any) -> Core | None:
        """See `GroupCore.subgroup`."""

    async def survivors(self, timeout_s: float | None) -> tuple[int, ...]:
        """See `GroupCore.survivors`."""

    def losses(self) -> AsyncIterator[Any]:
        """See `ProcessGroup.membership`."""

    def abort(self, reason: str = "") -> None:
        """See `ProcessGroup.abort`."""

    def leave_with(self, error: BaseException) -> None:
        """The block of the group ends with `error`: abort the groups whose members do not hear of it otherwise."""

    async def close(self) -> None:
        """See `ProcessGroup.close`."""


class Issuer:
    """A group as its operations see it."""

    rank: int
    size: int
    pairs: Pairs
    _core: Core
    _collective: Callable[..., Work[Any]]

    def refuse(self, operation: str, tag: int, error: Exception) -> None:
        """A collective's arguments are wrong: it takes its place in the order, and the others are told."""
        self._core.refuse(operation, tag, error)

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
