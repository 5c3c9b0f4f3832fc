"""P2POp for ordinary threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncdist.api import point_to_point
from asyncdist.blocking.group import ProcessGroup
from asyncdist.blocking.lifting import asked, original

__all__ = ["P2POp"]


class P2POp(point_to_point.P2POp):
    """One send or receive of a batch: `op` is `asyncdist.blocking.isend` or `irecv`; see `asyncdist.P2POp`."""

    __slots__ = ()

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Any,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        begin = asked(super().__init__)
        begin(original(op), tensor, peer, group, tag, group_peer)  # type: ignore[arg-type] # replaced on the way
