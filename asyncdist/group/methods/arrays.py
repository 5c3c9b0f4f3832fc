"""Collectives of whole arrays whose shapes and dtypes only their owners know; these travel with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.collectives.arguments import items as call_items
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.group.methods.items import DEFAULT_MAX_TOTAL_BYTES, ItemIssuer
from asyncdist.group.methods.point_to_point import DEFAULT_MAX_BYTES
from asyncdist.work import Work

__all__ = ["Arrays"]


class Arrays(ItemIssuer):
    """all_gather_array, gather_array, broadcast_array and scatter_array.

    Arrays may differ between ranks in shape and dtype; nothing is exchanged beforehand. Results are new numpy arrays.
    Where one is larger than `max_bytes` (1 GiB unless given), or all that come to a rank than `max_total_bytes` (8
    GiB), that rank raises CollectiveMismatchError, which names the sender, and the group is aborted.
    """

    def all_gather_array(
        self,
        array: Any,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_total_bytes: int = DEFAULT_MAX_TOTAL_BYTES,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[list[Any]]:
        """Gather everybody's `array` on every rank. The result is the list of them, in rank order."""
        terms = self._terms(max_bytes, max_total_bytes)
        return self._collective("all_gather_array", tag, timeout, call_items.all_gather_array, array, terms)

    def gather_array(
        self,
        array: Any,
        root: int = 0,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_total_bytes: int = DEFAULT_MAX_TOTAL_BYTES,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[list[Any] | None]:
        """Gather everybody's `array` on the root. The result is the list of them, in rank order; None elsewhere."""
        root, terms = self._root("gather_array", root, tag), self._terms(max_bytes, max_total_bytes)
        return self._collective("gather_array", tag, timeout, call_items.gather_array, array, root, terms)

    def broadcast_array(
        self,
        array: Any = None,
        root: int = 0,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[Any]:
        """Give everybody the root's `array` (None on the other ranks). The result is it, on the root the one given.

        The array travels in one piece; `broadcast` moves large ones of known shape in chunks, which is faster.
        """
        root, terms = self._root("broadcast_array", root, tag), self._terms(max_bytes)
        return self._collective("broadcast_array", tag, timeout, call_items.broadcast_array, array, root, terms)

    def scatter_array(
        self,
        arrays: Sequence[Any] | None = None,
        root: int = 0,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_total_bytes: int = DEFAULT_MAX_TOTAL_BYTES,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[Any]:
        """Give rank r the r-th of the root's `arrays` (None on the other ranks). The result is this rank's array."""
        root, terms = self._root("scatter_array", root, tag), self._terms(max_bytes, max_total_bytes)
        return self._collective("scatter_array", tag, timeout, call_items.scatter_array, arrays, root, terms)
