"""What arrays and objects of unknown size have in common: how much of them is accepted."""

from __future__ import annotations

from numbers import Real
from typing import Any, Final

from asyncdist.collectives.arguments.items import Terms
from asyncdist.group.methods.issuer import Issuer
from asyncdist.group.methods.point_to_point import DEFAULT_MAX_BYTES
from asyncdist.world.world import World

__all__ = ["DEFAULT_MAX_TOTAL_BYTES", "ItemIssuer"]

DEFAULT_MAX_TOTAL_BYTES: Final = 8 * DEFAULT_MAX_BYTES
"""Most that all items coming to a rank in one operation may add up to unless told otherwise: 8 GiB, so that many peers
together cannot make us allocate much more than one."""


class ItemIssuer(Issuer):
    """A group as its operations on items see it."""

    ranks: tuple[int, ...]
    world: World

    def _terms(self, max_bytes: Any, max_total_bytes: Any = DEFAULT_MAX_TOTAL_BYTES) -> Terms:
        """What is accepted; a larger `max_bytes` than the default total raises that."""
        total_bytes = max_total_bytes
        if total_bytes == DEFAULT_MAX_TOTAL_BYTES and isinstance(max_bytes, Real):  # else it is refused in its place
            total_bytes = max(total_bytes, max_bytes)
        return Terms(self.rank, self.ranks, self.world.allow_pickle, max_bytes, total_bytes)
