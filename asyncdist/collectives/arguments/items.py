"""ItemCall: a collective of items, whose sizes only their owners know: uneven arrays, and objects.

Each function checks the arguments of one collective for one rank, as those of `call` do, and raises as they
do. Objects are encoded here, at the call; arrays are only borrowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Final, NamedTuple

import numpy as np

from asyncdist.arrays.host import Array, Flat, decode_meta, describe, encode_meta, host_array, human_bytes
from asyncdist.arrays.objects import OBJECT_META, decode, encode
from asyncdist.collectives.arguments.call import NO_BLOCKS, Call, given_at_root
from asyncdist.errors import RemoteProtocolError


class Item(NamedTuple):
    """Something whole: its bytes, and what they are."""

    meta: bytes
    octets: memoryview


Finish = Callable[[Sequence[Item]], Any]

_GUESSED_BYTES: Final = 8 << 10
"""What an item is taken to weigh when its algorithm is chosen: most objects and uneven arrays are small, and for larger
ones no choice made for small ones costs more than a factor of log2(p)."""

_ITEM: Final = np.dtype((np.void, _GUESSED_BYTES))
"""An item as the selector sees it."""


class Terms(NamedTuple):
    """This rank's group rank, all members' global ranks, and what this rank accepts from them."""

    rank: int
    ranks: tuple[int, ...]
    allow_pickle: bool
    item_bytes: int
    """Bytes of one item, at most."""
    total_bytes: int
    """Bytes of all items that come here in one operation, those to be passed on included, at most."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def check(self) -> None:
        """Raise TypeError for limits that are no numbers, ValueError for negative ones."""
        limits: dict[str, Any] = {"max_bytes": self.item_bytes, "max_total_bytes": self.total_bytes}
        for name, value in limits.items():
            if not isinstance(value, Real):
                raise TypeError(f"{name} must be a number of bytes, not {type(value).__name__}")
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")


_NOTHING: Final = Terms(0, (0,), False, 0, 0)


@dataclass(slots=True)
class ItemCall(Call):
    """A collective of items: `contributed` are this rank's, in rank order if there are several.

    `finish` makes the result of the items that have come, in rank order, this rank's among them (copied if
    `copies_own`). It raises RemoteProtocolError for bytes that it cannot use.
    """

    contributed: Sequence[Item] = ()
    terms: Terms = _NOTHING
    finish: Finish = len
    copies_own: bool = False

    def __post_init__(self) -> None:
        Call.__post_init__(self)
        self.nbytes = sum(item.octets.nbytes for item in self.contributed)  # of this rank's


def all_gather_array(array: object, terms: Terms) -> ItemCall:
    """Any array; the result is the list of everybody's."""
    finish = partial(_arrays_of, terms.ranks)
    return _call("all_gather", "arrays", _borrowed(array), 0, terms, finish, copies_own=True)


def gather_array(array: object, root: int, terms: Terms) -> ItemCall:
    """Any array; the result is the list of everybody's on the root, None elsewhere."""
    finish: Finish = partial(_arrays_of, terms.ranks) if terms.rank == root else _nothing
    return _call("gather", "arrays", _borrowed(array), root, terms, finish, copies_own=True)


def broadcast_array(array: object, root: int, terms: Terms) -> ItemCall:
    """The root's array, None on the other ranks; the result is the array, on the root the one given."""
    if terms.rank != root:
        if array is not None:
            raise ValueError("array must be None on ranks other than the source: theirs is made for them")
        return _call("broadcast", "arrays", (), root, terms, partial(_first_array, terms.ranks[root]))
    if array is None:
        raise ValueError("array must be given on the source rank")
    return _call("broadcast", "arrays", _borrowed(array), root, terms, lambda _items: array)


def scatter_array(arrays: object, root: int, terms: Terms) -> ItemCall:
    """The root's list of one array per rank, None on the other ranks; the result is this rank's array."""
    items: list[Item] = []
    if terms.rank == root:
        if arrays is None:
            raise ValueError("arrays must be given on the source rank")
        for index, array in enumerate(_list_of(arrays, "arrays", terms.size)):
            items += _borrowed(array, f"arrays[{index}]")
    elif arrays is not None:
        raise ValueError("arrays must be None on ranks other than the source")
    return _call("scatter", "arrays", items, root, terms, partial(_first_array, terms.ranks[root]), copies_own=True)


def all_gather_object(object_list: object, value: object, terms: Terms) -> ItemCall:
    """`object_list` holds one place per rank; the result is that list, filled."""
    target = _places(object_list, "object_list", terms.size)
    return _call("all_gather", "objects", [_encode_object(value, terms)], 0, terms, partial(_fill, target, terms))


def gather_object(value: object, object_gather_list: object, root: int, terms: Terms) -> ItemCall:
    """`object_gather_list` only on the root, with one place per rank; the result is that list, filled."""
    finish: Finish = _nothing
    if given_at_root(object_gather_list, "object_gather_list", "destination", here=terms.rank == root):
        finish = partial(_fill, _places(object_gather_list, "object_gather_list", terms.size), terms)
    return _call("gather", "objects", [_encode_object(value, terms)], root, terms, finish)


def broadcast_object_list(object_list: object, root: int, terms: Terms) -> ItemCall:
    """A list of the same length on every rank, in place, unchanged on the root; the result is that list."""
    target = _places(object_list, "object_list")
    detail = f"{len(target)} objects"
    if terms.rank == root:
        return _call("broadcast", detail, [_encode_object(target, terms)], root, terms, lambda _items: target)
    finish = partial(_fill_from_one, target, len(target), terms.ranks[root], terms)
    return _call("broadcast", detail, (), root, terms, finish)


def scatter_object_list(output_list: object, input_list: object, root: int, terms: Terms) -> ItemCall:
    """The root gives a list of one object per rank; other ranks' lists are ignored.

    Torch's scripts give lists everywhere. The result is `output_list`, whose first place has this rank's object.
    """
    target = _places(output_list, "scatter_object_output_list")
    if not target:
        raise ValueError("scatter_object_output_list must have at least one place")
    items: list[Item] = []
    if terms.rank == root:
        if input_list is None:
            raise ValueError("scatter_object_input_list must be given on the source rank")
        values = _list_of(input_list, "scatter_object_input_list", terms.size)
        items = [_encode_object(value, terms) for value in values]
    return _call("scatter", "objects", items, root, terms, partial(_fill_first, target, terms.ranks[root], terms))


def _encode_object(value: object, terms: Terms) -> Item:
    """An object as an item. Raises as `objects.encode`, and ValueError for one that is too large."""
    terms.check()
    octets = encode(value, allow_pickle=terms.allow_pickle)
    if octets.nbytes > terms.item_bytes:
        raise ValueError(
            f"the object takes {human_bytes(octets.nbytes)}, above max_bytes={human_bytes(terms.item_bytes)}"
        )
    return Item(OBJECT_META, octets)


def decode_object(octets: memoryview, source: int, allow_pickle: bool) -> Any:
    """An item as an object. Raises RemoteProtocolError that names the global rank it is from."""
    try:
        return decode(octets, allow_pickle=allow_pickle)
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"what rank {source} sent: {error}") from error.__cause__


def _call(
    collective: str,
    detail: str,
    items: Sequence[Item],
    root: int,
    terms: Terms,
    finish: Finish,
    *,
    copies_own: bool = False,
) -> ItemCall:
    terms.check()
    return ItemCall(
        collective=collective,
        dtype=_ITEM,
        counts=1,
        inputs=NO_BLOCKS,
        outputs=NO_BLOCKS,
        result=None,
        root=root,
        detail=detail,
        contributed=items,
        terms=terms,
        finish=finish,
        copies_own=copies_own,
    )


def _borrowed(value: object, name: str = "array") -> list[Item]:
    array = host_array(value, name)
    return [Item(encode_meta(array.dtype, array.shape), Flat(array, writable=False).octets)]


def _list_of(values: object, name: str, size: int) -> Sequence[Any]:
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name} must be a list, not {type(values).__name__}")
    if len(values) != size:
        raise ValueError(f"{name} must hold one entry per rank: {size}, but holds {len(values)}")
    return values


def _places(values: object, name: str, size: int | None = None) -> list[Any]:
    """A list to be filled."""
    if not isinstance(values, list):
        raise TypeError(f"{name} must be a list, not {type(values).__name__}")
    if size is not None:
        _list_of(values, name, size)
    return values


# What becomes of the items that have come: their number and order is the plan's, their content the peers'. Lists are
# filled only when everything in them has been understood.


def _nothing(items: Sequence[Item]) -> None:
    del items


def _arrays_of(ranks: Sequence[int], items: Sequence[Item]) -> list[Array]:
    return [_array(item, rank) for item, rank in zip(items, ranks, strict=True)]


def _first_array(source: int, items: Sequence[Item]) -> Array:
    return _array(items[0], source)


def _array(item: Item, source: int) -> Array:
    dtype, shape = decode_meta(item.meta)
    try:
        return np.frombuffer(item.octets, np.uint8).view(dtype).reshape(shape)
    except (ValueError, OverflowError) as error:  # no elements, but more dimensions or larger ones than numpy has
        raise RemoteProtocolError(f"rank {source} sent {describe(dtype, shape)}, which numpy refuses") from error


def _fill(target: list[Any], terms: Terms, items: Sequence[Item]) -> list[Any]:
    target[:] = [
        decode_object(item.octets, rank, terms.allow_pickle) for item, rank in zip(items, terms.ranks, strict=True)
    ]
    return target


def _fill_from_one(target: list[Any], length: int, source: int, terms: Terms, items: Sequence[Item]) -> list[Any]:
    values = decode_object(items[0].octets, source, terms.allow_pickle)
    if type(values) is not list or len(values) != length:
        raise RemoteProtocolError(f"rank {source} sent something else than a list of {length} objects")
    target[:] = values
    return target


def _fill_first(target: list[Any], source: int, terms: Terms, items: Sequence[Item]) -> list[Any]:
    target[:1] = [decode_object(items[0].octets, source, terms.allow_pickle)]
    return target
