"""Collectives and messages whose sizes only the senders know: Python objects, and arrays of any shape and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, Final

from asyncdist.collectives.arguments import items as call_items
from asyncdist.collectives.arguments.items import Terms
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.group.methods.issuer import Issuer, check_rank
from asyncdist.group.methods.point_to_point import DEFAULT_MAX_BYTES
from asyncdist.work import Work
from asyncdist.world.world import World

DEFAULT_MAX_TOTAL_BYTES: Final = 8 * DEFAULT_MAX_BYTES
"""Most that all items coming to a rank in one operation may add up to unless told otherwise: 8 GiB, so that many peers
together cannot make us allocate much more than one."""


class _Items(Issuer):
    ranks: tuple[int, ...]
    world: World

    def _terms(self, max_bytes: Any, max_total_bytes: Any = DEFAULT_MAX_TOTAL_BYTES) -> Terms:
        """What is accepted; a larger `max_bytes` than the default total raises that."""
        total_bytes = max_total_bytes
        if total_bytes == DEFAULT_MAX_TOTAL_BYTES and isinstance(max_bytes, Real):  # else it is refused in its place
            total_bytes = max(total_bytes, max_bytes)
        return Terms(self.rank, self.ranks, self.world.allow_pickle, max_bytes, total_bytes)


class Objects(_Items):
    """torch.distributed's object collectives, in place in lists.

    None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset and numpy arrays and scalars arrive
    as they were sent, arrays as writable copies; everything else raises TypeError at the call, naming its type and
    place, unless every rank gave `allow_pickle=True` to `init_process_group`. Objects are encoded at the call, so they
    may change afterwards. Lists are written when the operation has ended well, and until then must not be changed.

    Objects encoded beyond `max_bytes` (1 GiB unless given) raise ValueError at the call; where a rank accepts less,
    CollectiveMismatchError there, and the group is aborted if it was a collective. Bytes that are no object, or pickled
    objects without that agreement, raise RemoteProtocolError that names the sender, on that rank alone.
    """

    def all_gather_object(
        self,
        object_list: list[Any],
        obj: Any,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[list[Any]]:
        """Fill `object_list` (one place per rank) with everybody's `obj`. The result is `object_list`."""
        terms = self._terms(max_bytes)
        return self._collective(
            "all_gather_object", tag, timeout, call_items.all_gather_object, object_list, obj, terms
        )

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        root: int = 0,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[list[Any] | None]:
        """Fill the root's `object_gather_list` (one place per rank; None elsewhere) with everybody's `obj`."""
        root, terms = self._root("gather_object", root, tag), self._terms(max_bytes)
        return self._collective(
            "gather_object", tag, timeout, call_items.gather_object, obj, object_gather_list, root, terms
        )

    def broadcast_object_list(
        self,
        object_list: list[Any],
        root: int = 0,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[list[Any]]:
        """Fill everybody's `object_list`, equally long on all ranks, with the root's. The result is `object_list`."""
        root, terms = self._root("broadcast_object_list", root, tag), self._terms(max_bytes)
        return self._collective(
            "broadcast_object_list", tag, timeout, call_items.broadcast_object_list, object_list, root, terms
        )

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: Sequence[Any] | None = None,
        root: int = 0,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> Work[list[Any]]:
        """Put the r-th object of the root's input list (elsewhere unused) in the first place of rank r's output list.

        The result is the output list, of which the other places stay as they are.
        """
        root, terms = self._root("scatter_object_list", root, tag), self._terms(max_bytes)
        return self._collective(
            "scatter_object_list",
            tag,
            timeout,
            call_items.scatter_object_list,
            scatter_object_output_list,
            scatter_object_input_list,
            root,
            terms,
        )

    def send_object_list(
        self, object_list: Sequence[Any], dst: int, tag: int = 0, *, timeout: Timeout = None
    ) -> Work[None]:
        """Send the objects of a list to rank `dst`, as one message; otherwise as `send`."""
        peer = self.ranks[check_rank(dst, self.size, "dst")]
        return self.pairs.send_objects(object_list, peer, tag, timeout)

    def recv_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        tag: int = 0,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        timeout: Timeout = None,
    ) -> Work[int]:
        """Fill `object_list` with as many objects from rank `src` (None: from any). The result is the source's rank.

        A message of arrays, too large, or of another number of objects raises CollectiveMismatchError and is dropped;
        the pair stays usable. Withdrawn like `recv`.
        """
        source = None if src is None else self.ranks[check_rank(src, self.size, "src")]
        number = self.pairs.group_rank
        return self.pairs.receive_objects(object_list, source, tag, max_bytes, timeout, number=number)


class Arrays(_Items):
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
